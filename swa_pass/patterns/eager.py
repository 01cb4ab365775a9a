"""Attention written out: ``matmul(softmax(matmul(q, k^T) * scale + mask), v)``, with its usual extras.

Read backwards from the last matmul, each step optional unless marked:

    matmul(p, v)                                      required; the site
    dropout(p), to(dtype)
    [..., :-1]                                        drops the column of the sinks
    softmax(s, -1)                                    required
    s - s.amax(-1)                                    changes nothing in a softmax
    cat([s, sinks.reshape(1, H, 1, 1).expand], -1)    sinks: one learned logit per head in the denominator
    s + mask | where(mask, s, large negative)
    s + bias                                         a position bias: `extra`, as fused attention takes none
    tanh(s / cap) * cap                               softcap, before the mask
    s * scale | s / divisor
    matmul(q, k.transpose(2, 3))                      required

Scaling of q alone is part of q. Everything else in between is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..graph import argument, before, example, op_name, shape_of
from ..masks import ADDITIVE_HIDDEN
from .products import factors
from .site import AttentionSite

_TRANSPARENT = {"to", "float", "type_as", "contiguous", "half", "bfloat16"}


class Stop(Exception):
    """The chain holds something this idiom does not know; the message names it."""


def match(node: Node) -> AttentionSite | None:
    return read(node) if len(shape_of(node)) == 4 else None


def read(node: Node) -> AttentionSite | None:
    """`match`, also with grouped heads in a dimension of their own: see `grouped_eager`."""
    product = factors(node)
    if product is None:
        return None
    weights, value = product
    softmax, dropout, drops_column = _softmax_behind(weights)
    if softmax is None or not isinstance(value, Node):
        return None
    found: dict[str, Any] = {"mask": None, "scale": 1.0, "softcap": 0.0, "sinks": None, "problem": "", "extra": ""}
    scores: Any = softmax.args[0]
    try:
        _check_softmax(softmax, scores)
        scores = _read_sinks(scores, drops_column, found)
        scores = _read_scores(scores, found)
    except Stop as stop:
        found["problem"] = str(stop)
        scores = _first_matmul(softmax)
    product = factors(scores)
    if product is None:
        return None
    keys, factor = _times_number(through(product[1]))
    if factor != 1.0:  # the decomposed SDPA scales both sides by the root; what the keys got belongs to the scores
        found["scale"] *= factor
        product = product[0], keys
    query, key = _before_upcast(product[0]), _before_upcast(_untransposed(product[1]))
    if not isinstance(query, Node) or key is None:
        return None
    return AttentionSite(
        node=node, query=query, key=key, value=value, is_causal=False, dropout=dropout, grouped=False, **found
    )


def validate(site: AttentionSite) -> str:
    if site.problem or site.extra:
        return site.problem or site.extra
    if site.dropout != 0.0:
        return f"attention dropout is on (p={site.dropout}); call model.eval()"
    if site.mask is None:
        return "the attention has no mask"
    return ""


def through(node: Any) -> Any:
    while isinstance(node, Node) and op_name(node) in _TRANSPARENT:
        node = node.args[0]
    return node


def _before_upcast(node: Any) -> Any:
    """Half-precision queries and keys may be cast to float32 for their product; the fused attention sums in float32."""
    return before(node, ("to", "float"), _is_upcast)


def _is_upcast(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype or (b.dtype == torch.float32 and a.dtype.is_floating_point)


def softmax_input(node: Node) -> Any:
    """What goes into the softmax of an attention that `match` knows: the scores, masked."""
    product = factors(node)
    softmax, _, _ = _softmax_behind(product[0] if product else None)
    return softmax.args[0] if softmax is not None else None


def _softmax_behind(node: Any) -> tuple[Node | None, float, bool]:
    """The softmax behind dropout, casts and the removal of a sink column."""
    dropout, drops_column = 0.0, False
    while isinstance(node, Node):
        name = op_name(node)
        if name == "softmax":
            return node, dropout, drops_column
        if name == "dropout":
            if argument(node, 2, "training", True):
                dropout = argument(node, 1, "p", 0.5)
        elif _drops_last_column(node):
            drops_column = True
        elif name == "where":
            node = _without_guard(node)
            continue
        elif name not in _TRANSPARENT:
            return None, 0.0, False
        node = node.args[0]
    return None, 0.0, False


def _without_guard(node: Node) -> Any:
    """The softmax in ``where(~any(scores != -inf), 0, softmax(scores))``: a query that sees nothing yields zeros, as it
    does in the fused attention. None for any other ``where``."""
    condition, zeros, softmax = node.args if len(node.args) == 3 else (None, None, None)
    chain = ("not", "any", "not", "eq")
    for name in chain:
        if not isinstance(condition, Node) or op_name(condition) != name:
            return None
        if name == "eq":
            break
        condition = condition.args[0]
    is_softmax = isinstance(softmax, Node) and op_name(softmax) == "softmax"
    if not is_softmax or not isinstance(condition, Node) or condition.args[1] != -float("inf"):
        return None
    if not isinstance(zeros, Node) or op_name(zeros) not in ("full_like", "zeros_like"):
        return None
    is_zero = argument(zeros, 1, "fill_value", 0) == 0
    same = isinstance(softmax, Node) and condition.args[0] is softmax.args[0]
    return softmax if same and is_zero else None


def _drops_last_column(node: Node) -> bool:
    """``weights[..., :-1]``, also as ATen writes it."""
    if op_name(node) == "slice":
        return tuple(node.args[1:]) in ((len(shape_of(node)) - 1, 0, -1), (-1, 0, -1)) and not node.kwargs
    return op_name(node) == "getitem" and node.args[1] == (Ellipsis, slice(None, -1, None))


def _check_softmax(softmax: Node, scores: Any) -> None:
    dim = argument(softmax, 1, "dim", None)
    if dim not in (-1, len(shape_of(scores)) - 1):
        raise Stop(f"the softmax runs over dimension {dim}, not over the keys")


def _read_sinks(scores: Any, drops_column: bool, found: dict[str, Any]) -> Any:
    scores = _without_maximum(through(scores))
    if op_name(scores) != "cat":
        if drops_column:
            raise Stop("a column is dropped after the softmax that was not added before it")
        return scores
    parts = scores.args[0]
    if not drops_column or len(parts) != 2 or argument(scores, 1, "dim", 0) not in (-1, 3):
        raise Stop("the scores are concatenated with something that is not a column of sinks")
    sinks = through(parts[1])
    while isinstance(sinks, Node) and op_name(sinks) in ("expand", "reshape", *_TRANSPARENT):
        sinks = sinks.args[0]
    if not isinstance(sinks, Node) or [str(s) for s in shape_of(sinks)] != [str(shape_of(parts[0])[1])]:
        sinks, found["query_sinks"], found["extra"] = None, sinks, "the sinks are not one number per head"
    column = shape_of(parts[1])
    if column[-1] != 1:
        raise Stop(f"{column[-1]} columns of sinks were added, one is known")
    found["sinks"] = sinks
    return parts[0]


def _without_maximum(scores: Any) -> Any:
    """Subtracting the row maximum leaves a softmax as it is."""
    if not isinstance(scores, Node) or op_name(scores) != "sub" or not isinstance(scores.args[1], Node):
        return scores
    maximum: Any = scores.args[1]
    while isinstance(maximum, Node) and op_name(maximum) in ("getitem", "getattr", "values"):
        maximum = maximum.args[0]
    if isinstance(maximum, Node) and op_name(maximum) in ("max", "amax") and maximum.args[0] is scores.args[0]:
        over_keys = argument(maximum, 1, "dim", None) in (-1, [-1], (-1,))
        return through(scores.args[0]) if over_keys and argument(maximum, 2, "keepdim", False) else scores
    return scores


def _read_scores(scores: Any, found: dict[str, Any]) -> Any:
    """Mask, softcap and scale, in the order in which they are undone."""
    scores = _read_mask(through(scores), found)
    scores = read_softcap(through(scores), found)
    inner, factor = _times_number(through(scores))
    found["scale"] = factor
    inner = through(inner)
    if factors(inner) is None:
        what = op_name(inner) if isinstance(inner, Node) else repr(inner)
        raise Stop(f"{what} stands between the scores and the softmax, which no idiom knows")
    return inner


def _read_mask(scores: Any, found: dict[str, Any]) -> Any:
    name = op_name(scores)
    if name == "add":
        first, second = scores.args[0], scores.args[1]
        if not isinstance(first, Node) or not isinstance(second, Node):
            raise Stop("a number is added to the scores")
        for masked in (first, second):
            _check_one_mask(through(masked))
        if not _holds_scores(first):
            first, second = second, first
        if not example(second).dtype.is_floating_point:  # added to scores, True is 1: no mask
            raise Stop(f"a tensor of {example(second).dtype} is added to the scores")
        found["mask"], found["mask_at"] = second, scores
        return _without_bias(first, found)
    if name == "where":
        condition, inner, hidden = (argument(scores, i, n, None) for i, n in enumerate(("condition", "input", "other")))
        if isinstance(hidden, Node) and op_name(hidden) == "scalar_tensor":  # how ATen writes a number here
            hidden = hidden.args[0]
        if isinstance(hidden, (int, float)) and hidden <= ADDITIVE_HIDDEN and _holds_scores(inner):
            found["mask"], found["mask_at"] = condition, scores
            return inner
    return scores


def _check_one_mask(scores: Any) -> None:
    """Raises `Stop` for ``where(table[..., n - q : n, :n], scores, hidden)`` beneath an added mask."""
    if op_name(scores) != "where" or not _holds_scores(argument(scores, 1, "input", None)):
        return
    table, cut = argument(scores, 0, "condition", None), False
    while isinstance(table, Node) and op_name(table) in ("getitem", "slice", "to", "reshape"):
        cut = cut or op_name(table) in ("getitem", "slice")
        if any(isinstance(example(part), torch.Tensor) for part in table.all_input_nodes[1:]):
            break
        table = table.args[0]
    if isinstance(table, Node) and table.op in ("placeholder", "get_attr") and cut:
        raise Stop(
            f"beside its mask, the attention hides keys by a table ({table.name}) that is cut by the number of keys, "
            "not by positions: it fits no cache but one with exactly a slot for each token seen"
        )
    raise Stop("the scores go through two masks")


def _without_bias(scores: Any, found: dict[str, Any]) -> Any:
    """The scores before a position bias came to them."""
    total = through(scores)
    if op_name(total) != "add":
        return scores
    holding = [term for term in total.args[:2] if _holds_scores(term)]
    if len(holding) != 1 or any(op_name(through(term)) == "add" for term in holding):
        raise Stop("more than one tensor (a position bias) is added to the masked scores")
    found["extra"] = "a second tensor (a position bias) is added to the scores"
    (found["bias"],) = (term for term in total.args[:2] if term is not holding[0])
    return holding[0]


def _holds_scores(node: Any) -> bool:
    """Whether a matmul lies behind this value, through what may stand between scores and mask."""
    for _ in range(8):
        node = through(node)
        if not isinstance(node, Node):
            return False
        if factors(node) is not None:
            return True
        name = op_name(node)
        if name not in ("mul", "truediv", "div", "tanh", "add"):
            return False
        node = node.args[0]
    return False


def read_softcap(scores: Any, found: dict[str, Any]) -> Any:
    inner, cap = _times_number(scores)
    tanh = through(inner)
    if not isinstance(tanh, Node) or op_name(tanh) != "tanh":
        return scores
    inner, factor = _times_number(through(tanh.args[0]))
    if abs(factor * cap - 1.0) > 1e-6:
        raise Stop(f"a tanh with factors {factor} and {cap} is no softcap")
    found["softcap"] = cap
    return inner


def _times_number(node: Any) -> tuple[Any, float]:
    """``x * number`` or ``x / number`` as (x, factor); (node, 1.0) otherwise."""
    if isinstance(node, Node) and len(node.args) == 2:
        a, b = node.args
        if op_name(node) == "mul" and isinstance(b, (int, float)):
            return a, float(b)
        if op_name(node) == "mul" and isinstance(a, (int, float)):
            return b, float(a)
        if op_name(node) in ("truediv", "div") and isinstance(b, (int, float)):
            return a, 1.0 / float(b)
    return node, 1.0


def _first_matmul(node: Node) -> Any:
    """The matmul behind a refused chain, so that the refusal can name its layer."""
    seen: set[Node] = set()
    queue = [node]
    while queue:
        current = queue.pop(0)
        product = factors(current)
        if product is not None and current is not node and _untransposed(product[1]) is not None:
            return current
        for parent in current.all_input_nodes:
            if parent not in seen and len(seen) < 64:
                seen.add(parent)
                queue.append(parent)
    return None


def _untransposed(node: Any) -> Node | None:
    """``k`` from ``k.transpose(2, 3)``."""
    node = through(node)
    if not isinstance(node, Node) or example(node) is None:
        return None
    ndim = len(shape_of(node))
    if op_name(node) == "permute" and ndim == 4:
        return node.args[0] if list(node.args[1]) == [0, 1, 3, 2] else None  # type: ignore[arg-type, return-value]
    if op_name(node) != "transpose":
        return None
    dims = {int(d) % ndim for d in node.args[1:3]} if len(node.args) == 3 else set()  # type: ignore[arg-type]
    return node.args[0] if dims == {ndim - 2, ndim - 1} and isinstance(node.args[0], Node) else None
