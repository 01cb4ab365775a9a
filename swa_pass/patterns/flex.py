"""``flex_attention(query, key, value, score_mod, block_mask, scale, ...)`` with a block mask that this graph makes.

    mask = vmap(mask_mod)(arange(B), arange(H), arange(q), arange(kv))        every element of it
    sums = mask.pad(...).view(B, H, rows, BQ, columns, BK).sum over blocks    how much of each block is visible
    some, all = (sums > 0) & (sums < BQ * BK), sums == BQ * BK
    numbers, indices = dense.sum(-1), dense.argsort(-1, descending)           of both: which blocks are looked at
    flex_attention(q, k, v, score_mod, (q, kv, numbers, indices, ..., BQ, BK, mask_mod), scale, ...)

What is attended to depends on the lists of blocks as well as on `mask_mod`. So the site's mask is the tensor that the
lists are made from, and it must be the formula of `mask_mod`. Lists from elsewhere could say anything: refused.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from ..formula import INDEXES, Field, Lin, broadcast_at, constant, is_one
from ..graph import argument, attribute, first_writer, integer, op_name, shape_of
from ..reader import read
from . import eager
from .site import AttentionSite


def match(node: Node) -> AttentionSite | None:
    call: Any = node.args[0] if op_name(node) == "getitem" and node.args[1] == 0 else None
    if not isinstance(call, Node) or op_name(call) != "flex_attention" or len(call.args) < 9 or not shape_of(node):
        return None
    query, key, value, score_mod, block_mask, scale, _, score_buffers, mask_buffers = call.args[:9]
    softcap, problem = _softcap(score_mod, score_buffers)
    mask, unproven = _mask(query, key, block_mask, mask_buffers)
    return AttentionSite(
        node=node,
        query=query,  # type: ignore[arg-type]
        key=key,  # type: ignore[arg-type]
        value=value,  # type: ignore[arg-type]
        mask=mask,
        scale=scale,
        is_causal=False,
        dropout=0.0,
        grouped=str(shape_of(query)[1]) != str(shape_of(key)[1]),
        softcap=softcap,
        problem=problem or unproven,
    )


def validate(site: AttentionSite) -> str:
    if site.problem:
        return site.problem
    if not isinstance(site.scale, (int, float)):
        return f"the scale is computed in the graph ({site.scale}), not a number"
    return ""


def _submodule(node: Any) -> GraphModule | None:
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    module = attribute(node.graph.owning_module, str(node.target))
    return module if isinstance(module, GraphModule) else None


def _inside(module: GraphModule) -> tuple[list[Node], Any]:
    """The inputs and the result of a small graph."""
    nodes = list(module.graph.nodes)
    result = nodes[-1].args[0]
    if isinstance(result, (list, tuple)) and len(result) == 1:
        result = result[0]
    return [node for node in nodes if node.op == "placeholder"], result


def _softcap(score_mod: Any, buffers: Any) -> tuple[float, str]:
    """The softcap that `score_mod` is, 0.0 for none; and what else it does, or empty."""
    module = _submodule(score_mod)
    if module is None:
        return 0.0, "flex_attention's score_mod is not in the graph"
    inputs, result = _inside(module)
    found: dict[str, Any] = {"softcap": 0.0}
    try:
        score = eager.read_softcap(eager.through(result), found)
    except eager.Stop as stop:
        return 0.0, f"in flex_attention's score_mod: {stop}"
    if eager.through(score) is inputs[0]:
        return found["softcap"], ""
    what = op_name(score) if isinstance(score, Node) else repr(score)
    return 0.0, f"flex_attention's score_mod changes the scores by {what}, which is no softcap"


def _mask(query: Any, key: Any, block_mask: Any, buffers: Any) -> tuple[Node | None, str]:
    """The mask as a tensor of the graph; and why it cannot be said what it is, or empty."""
    if not isinstance(block_mask, (list, tuple)) or len(block_mask) < 9:
        return None, "flex_attention has no block mask"
    queries, keys, *lists = block_mask[:6]
    given, wanted = [integer(queries), integer(keys)], [integer(shape_of(x)[2]) for x in (query, key)]
    if given != wanted or None in given:
        return None, f"flex_attention's block mask is for {queries} queries and {keys} keys, not for these"
    *block, mask_mod = block_mask[-3:]
    mask = _behind_lists(lists, block)
    if mask is None:
        return None, (
            "flex_attention's lists of blocks are not made in this graph from a mask, so its mask_mod does not say "
            "all; make the block mask with create_block_mask inside the forward"
        )
    module = _submodule(mask_mod)
    if module is None or not _same(mask, module, buffers):
        return None, "flex_attention's lists of blocks come from another mask than its mask_mod"
    return mask, ""


def _same(mask: Node, mask_mod: GraphModule, buffers: Any) -> bool:
    """Whether a tensor (B, 1, q, kv) holds what `mask_mod` says about every element, for every head."""
    inputs, result = _inside(mask_mod)
    batch, _, query, key = (
        Lin(0) if is_one(size) else Lin.symbol(name) for size, name in zip(shape_of(mask), INDEXES, strict=True)
    )
    places = (batch, Lin.symbol(INDEXES[1]), query, key)
    outer: dict[Node, Field] = {}
    inner = dict(zip(inputs, [*map(constant, places), *(read(buffer, outer) for buffer in buffers)]))
    return len(inputs) == 4 + len(buffers) and bool(
        read(result, inner).at(()) == broadcast_at(read(mask, outer), places)
    )


# ------------------------------------------------------------------------------------------------ lists of blocks


def _behind_lists(lists: list[Any], block: list[Any]) -> Node | None:
    """The mask that these four were made from: numbers and indices of the blocks that are visible in part, and of those
    that are visible as a whole."""
    partly, wholly = _dense(lists[0], lists[1]), _dense(lists[2], lists[3])
    both, full = _back(partly, "to", "and"), _back(wholly, "to", "eq")
    if both is None or full is None or not all(isinstance(size, int) for size in block):
        return None
    if any(first_writer(node) is not None for node in (*lists, partly, wholly)):
        return None
    some, not_all = both.args[:2]
    area = block[0] * block[1]
    sums = full.args[0]
    for part, name, number in ((some, "gt", 0), (not_all, "lt", area), (full, "eq", area)):
        if not isinstance(part, Node) or op_name(part) != name or part.args[0] is not sums or part.args[1] != number:
            return None
    return _summed(sums, block)


def _dense(numbers: Any, indices: Any) -> Node | None:
    """The table of visible blocks, 1 or 0, that was turned into a list."""
    total, order = _back(numbers, "to", "sum"), _back(indices, "to", "argsort")
    if total is None or order is None or total.args[0] is not order.args[0]:
        return None
    along = [argument(node, 1, "dim", None) for node in (total, order)]
    dense: Any = total.args[0]
    if along != [-1, -1] or not argument(order, 2, "descending", False) or op_name(dense) != "to":
        return None
    return dense.args[0]


def _summed(sums: Any, block: list[Any]) -> Node | None:
    """The mask (B, 1, q, kv) whose visible elements were counted block by block, past its edge none."""
    split = _back(sums, "sum", "permute", "reshape")
    if split is None or argument(sums, 1, "dim", None) != [-2, -1]:
        return None
    order = list(sums.args[0].args[1:])
    sizes = shape_of(split)
    if order != [0, 1, 2, 4, 3, 5] or [sizes[3], sizes[5]] != block:
        return None
    mask: Any = split.args[0]
    if op_name(mask) == "pad":
        amounts, mode, value = (
            argument(mask, 1, "pad", ()),
            argument(mask, 2, "mode", ""),
            argument(mask, 3, "value", None),
        )
        if len(amounts) != 4 or amounts[0] != 0 or amounts[2] != 0 or mode != "constant" or value:
            return None
        mask = mask.args[0]
    return mask if isinstance(mask, Node) and len(shape_of(mask)) == 4 and is_one(shape_of(mask)[1]) else None


def _back(node: Any, *names: str) -> Node | None:
    """Back through a chain of these operations; the last of them."""
    for n, name in enumerate(names):
        node = node.args[0] if n and isinstance(node, Node) else node
        if not isinstance(node, Node) or op_name(node) != name:
            return None
    return node
