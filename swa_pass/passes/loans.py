"""Finds attention of one query a row on stores that the caller owns, which a ring may stand in for. Changes nothing.

What is proven from the graph is that the mask hides every key more than `window` - 1 positions before a position B,
whatever else it hides (padding, an input of the graph). B is where the new token is written, or the last token that the
2D mask of the caller shows in its first row, as optimum-habana counts. That both are one, and that nothing later is
shown, no graph says; so the rewritten graph compares what its ring shows with what the mask shows (passes/lend.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node

from ..formula import Field, Lin
from ..graph import argument, changed_in_place, example, op_name, shape_of
from ..masks import Mask, implied, unknown
from ..patterns import AttentionSite, grouped_eager, hpu_fused, token_store
from ..patterns.state import StateUse, same_tensor
from .states import reader_beyond
from .verdict import Verdict, outermost

#: What may lie between operands and result, because it has no sizes of its own that would count slots.
_SIZELESS = {
    *("matmul", "__matmul__", "transpose", "mul", "truediv", "div", "tanh", "add", "softmax", "dropout", "where"),
    *("to", "float", "type_as", "half", "bfloat16", "contiguous"),
}


@dataclass(frozen=True)
class Loan(Verdict):
    """One attention on a caller's stores.

    plain: its mask, (B or 1, 1, 1, S), before it was made to fit grouped heads.  inner: nodes from the operands to the
    result, in order.  token: the graph input that the position written is counted from, with `offset` added.
    window: keys that a query sees, its own included; 0 where nothing bounds them, which is no refusal.
    """

    keys: StateUse
    values: StateUse
    plain: Node
    inner: tuple[Node, ...]
    token: Node | None
    offset: int

    @property
    def window(self) -> int:
        return self.mask.window or 0

    def __str__(self) -> str:
        return f"{self.keys.state.name}: {self.refusal or f'window {self.window}'}"


def sites(gm: GraphModule) -> Iterator[tuple[AttentionSite, str]]:
    """Every attention as Gaudi graphs have it, and what its idiom says against it."""
    for node in gm.graph.nodes:
        for idiom in (hpu_fused, grouped_eager):
            site = idiom.match(node)
            if site is not None:
                yield site, idiom.validate(site)


def find_loans(gm: GraphModule) -> list[Loan]:
    memo = last_tokens(gm)
    found = []
    for site, problem in sites(gm):
        keys, values = (token_store.match(source, site.node) for source in (site.key, site.value))
        if keys is None or values is None:
            continue
        plain = without_group(site.mask)
        inner = between(site)
        token, offset = _counted_from(keys.query_offset, gm)
        problem = problem or _mismatch(site, keys, values, plain, token) or _sized(inner, site)
        mask = unknown(problem) if problem else _prove(plain, keys, memo)
        found.append(_alone(Loan(site, mask, problem, keys, values, plain, inner, token, offset)))
    return outermost(found)


def last_tokens(gm: GraphModule) -> dict[Node, Field]:
    """Fields of ``x.cumsum(d).argmax(d)``: the last place that holds anything, a number that the graph is not told."""
    memo: dict[Node, Field] = {}
    for node in gm.graph.nodes:
        counted = node.args[0] if op_name(node) == "argmax" else None
        if not isinstance(counted, Node) or op_name(counted) != "cumsum" or changed_in_place(node) is not None:
            continue
        if argument(node, 1, "dim", None) == argument(counted, 1, "dim", 0):
            memo[node] = _symbols(node)
    return memo


def _symbols(node: Node) -> Field:
    return Field(shape_of(node), lambda index: Lin.symbol(("last token", node.name, *index)))


def without_group(mask: object) -> Node:
    """(B, 1, T, S) behind (B, 1, 1, T, S), and behind slices that take everything."""
    while isinstance(mask, Node) and mask.args and isinstance(mask.args[0], Node):
        inner, outer = ([str(size) for size in shape_of(node)] for node in (mask.args[0], mask))
        takes_all = op_name(mask) in ("getitem", "slice", "contiguous", "alias") and inner == outer
        groups = op_name(mask) == "unsqueeze" and len(outer) == 5 and argument(mask, 1, "dim", None) == 1
        if not takes_all and not groups:
            break
        mask = mask.args[0]
    return mask  # type: ignore[return-value]


def between(site: AttentionSite) -> tuple[Node, ...]:
    """Nodes from the operands of an attention to its result, which is the last of them."""
    operands = {site.query, site.key, site.value, site.mask}
    found, queue = {site.node}, [site.node]
    while queue:
        for source in queue.pop().all_input_nodes:
            if source not in operands and source not in found and source.op.startswith("call"):
                found.add(source)
                queue.append(source)
    return tuple(node for node in site.node.graph.nodes if node in found)


def _sized(inner: tuple[Node, ...], site: AttentionSite) -> str:
    fused = site.node.args[0] if op_name(site.node) == "getitem" else None
    if fused is not None and inner == (fused, site.node):
        return ""
    other = next((node for node in inner if op_name(node) not in _SIZELESS), None)
    return f"{op_name(other)} stands in the attention, and may count its keys" if other is not None else ""


def _counted_from(position: Lin, gm: GraphModule) -> tuple[Node | None, int]:
    """(input, number) for a position that is one element of an input plus a number; (None, 0) otherwise."""
    inputs = {node.name: node for node in gm.graph.nodes if node.op == "placeholder"}
    if len(position.terms) != 1:
        return None, 0
    ((symbol, factor),) = position.terms
    known = isinstance(symbol, tuple) and factor == 1 and all(place == Lin(0) for place in symbol[1:])
    return (inputs.get(symbol[0]), position.const) if known else (None, 0)


def _mismatch(site: AttentionSite, keys: StateUse, values: StateUse, plain: Node, token: Node | None) -> str:
    if str(shape_of(site.query)[-2]) != "1":
        return f"{shape_of(site.query)[-2]} queries of one new token"
    if same_tensor(keys.state, values.state):
        return "keys and values are kept in one tensor"
    if keys.query_offset != values.query_offset:
        return "keys and values are kept at other positions"
    if token is None:
        return f"the position of the new token is {keys.query_offset}, which is no element of an input"
    if not example(keys.state).is_floating_point():
        return f"keys of {example(keys.state).dtype} have no NaN, with which a store that is behind is marked"
    if plain.op == "placeholder":
        return (
            f"its mask comes in as the graph input {plain.name}, so what it shows is not in this graph. "
            "Compile the whole decoder, whose graph makes the mask, not layer by layer"
        )
    shape = shape_of(plain)
    if len(shape) != 4 or [str(size) for size in shape[1:3]] != ["1", "1"]:
        return f"its mask has the shape {tuple(shape)}, not (rows, 1, 1, keys)"
    if len(shape_of(site.mask)) != len(shape_of(site.node)):
        return f"its mask has {len(shape_of(site.mask))} dimensions and its result {len(shape_of(site.node))}"
    return ""


def _prove(plain: Node, keys: StateUse, memo: dict[Node, Field]) -> Mask:
    """Sliding, if every key more than a fixed distance before the query's position is hidden; full otherwise."""
    windows = []
    for form in implied(plain, memo):
        for base in (keys.query_offset, *_named(form)):
            distance = form - (Lin.symbol("k") - base)  # k >= base - distance
            if distance.is_const and distance.const >= 0:
                windows.append(distance.const + 1)
    return Mask("sliding", window=min(windows)) if windows else Mask("full")


def _named(form: Lin) -> list[Lin]:
    """The last tokens of 2D masks that a form speaks of."""
    return [Lin.symbol(symbol) for symbol, _ in form.terms if isinstance(symbol, tuple) and symbol[0] == "last token"]


def _alone(loan: Loan) -> Loan:
    """Refuses a loan if something else reads what would be in the ring only."""
    if loan.refused or not loan.window:
        return loan
    slots = loan.keys.slots
    if isinstance(slots, int) and slots <= loan.window:
        return replace(loan, problem=f"the store holds {slots} positions, no more than the window")
    for use in (loan.keys, loan.values):
        changed = next((node for node in (loan.site.query, use.new) if changed_in_place(node)), None)
        if changed is not None:
            return replace(loan, problem=f"{changed.name} is changed in place")
        reader = reader_beyond({use.state, *use.writes}, {loan.site.node, *use.writes})
        if reader:
            return replace(loan, problem=f"its keys or values are also read by {reader}")
    return loan
