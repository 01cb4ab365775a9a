"""Puts rings in the place of a caller's stores: decode steps of stock optimum-habana, in front of `hpu_backend`.

    before   store.index_copy_(2, token_idx - 1, k)                attention(q, store, mask)
    after    ring.index_copy_(2, (token_idx - 1) % slots, k)       attention(q, ring, mask of the slots) + check

Only core operators with static shapes; the attention stays what it was, with fewer keys. The rings come in as inputs of
their own, given by `swa_pass.lending.Rings` at every call, with the position that each slot holds. A slot gets the
mask's own column of its position, so padding and whatever else the mask says is kept to the letter. That is the same
attention as long as the mask shows nothing that is not in the ring; `check` is 0 then, and NaN otherwise, so that a row
whose keys are not all there has no usable logits. (An assertion would need an operator that `hpu_backend` may not have,
a comparison on the host would wait for the device at every step.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node

from ..graph import erase_all_unused, example, op_name, shape_of, take_place
from ..lending import Rings
from ..masks import ADDITIVE_HIDDEN
from .adopt import Caller
from .loans import Loan, find_loans
from .narrow import narrow_prompts

aten = torch.ops.aten

#: Methods that write into their first operand and return it.
_IN_PLACE = {"index_copy_", "masked_fill_", "add_", "sub_", "mul_", "copy_", "fill_", "zero_", "and_", "or_"}


@dataclass(frozen=True)
class Group:
    """Stores that are written at the same position and keep as many slots: places in the graph's arguments."""

    stores: tuple[int, ...]
    slots: int
    token: int
    offset: int


@dataclass(frozen=True)
class Lent:
    """gm: the rewritten copy, or the graph that was given.  loans: every attention on a caller's store.
    examples: values for the inputs that come first now.  behind: places of stores that are still read themselves."""

    gm: GraphModule
    loans: tuple[Loan, ...]
    groups: tuple[Group, ...]
    examples: tuple[Any, ...]
    behind: tuple[int, ...]
    narrowed: int

    def around(self, compiled: Callable[..., Any], rings: Rings) -> Callable[..., Any]:
        """The function that Dynamo calls with the arguments of the graph that it knows."""
        if not self.groups and not self.behind:
            return compiled

        def run(*args: Any) -> Any:
            for place in self.behind:
                rings.check_current(args[place])
            lent: list[Any] = []
            for group in self.groups:
                position = args[group.token].reshape(()) + group.offset
                tensors, held = rings.lend([args[place] for place in group.stores], group.slots, position)
                lent += [held, *tensors]
            return compiled(*lent, *args)

        return run


def lend_rings(gm: GraphModule, hf: bool) -> Lent:
    """Finds and rewrites, on a copy: Dynamo reads its own graph again.

    hf: a query sees one key fewer than the masks show, in prompts as well: W keys, where optimum-habana shows W + 1.
    """
    if not hf and not any(op_name(node) == "index_copy_" for node in gm.graph.nodes):
        return Lent(gm, (), (), (), (), 0)
    copy = copied(gm)
    after_writes(copy.graph)
    loans = find_loans(copy)
    places = {node: n for n, node in enumerate(copy.graph.find_nodes(op="placeholder"))}
    chosen: dict[tuple[Node, int, int], list[Loan]] = {}
    behind = []
    for loan in loans:
        if not loan.refused and loan.window > int(hf) and loan.token is not None:
            chosen.setdefault((loan.token, loan.offset, loan.window - int(hf)), []).append(loan)
        else:
            behind += [places[use.state] for use in (loan.keys, loan.values)]
    narrowed = narrow_prompts(copy) if hf else 0
    writer, groups = _Writer(copy, hf), []
    for (token, offset, slots), group in chosen.items():
        stores = tuple(places[use.state] for loan in group for use in (loan.keys, loan.values))
        groups.append(Group(stores, slots, places[token], offset))
        writer.rewrite(group, token, offset, slots)
    if chosen or narrowed:
        erase_all_unused(copy)
        for write in writer.replaced:
            copy.graph.erase_node(write)
        erase_all_unused(copy)
        copy.graph.lint()
        copy.recompile()
    kept = copy if chosen or narrowed else gm
    return Lent(kept, tuple(loans), tuple(groups), tuple(writer.examples), tuple(behind), narrowed)


def copied(gm: GraphModule) -> GraphModule:
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    for old, new in copies.items():
        new.meta = dict(old.meta)
        if hasattr(old, "_dynamo_source"):  # AOTAutograd asks every input where it comes from
            new._dynamo_source = old._dynamo_source
    module = GraphModule(gm, graph)
    module.meta = dict(gm.meta)
    return module


def after_writes(graph: Graph) -> None:
    """Whoever uses a tensor after a write in place uses the result of that write: the same tensor, and a formula."""
    order = {node: n for n, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op == "call_method" and node.target in _IN_PLACE and isinstance(node.args[0], Node):
            for user in [user for user in node.args[0].users if order[user] > order[node]]:
                user.replace_input_with(node.args[0], node)


class _Writer:
    """Puts new nodes into one graph."""

    def __init__(self, gm: GraphModule, hf: bool) -> None:
        self.graph, self.hf, self.call = gm.graph, hf, Caller(gm)
        self.inputs = list(gm.graph.find_nodes(op="placeholder"))
        self.examples: list[Any] = []
        self.replaced: list[Node] = []
        self._masks: dict[tuple[Node, Node], tuple[Node, Node]] = {}

    def rewrite(self, loans: Sequence[Loan], token: Node, offset: int, slots: int) -> None:
        held = self._input("held", example(token), (slots,), torch.int64)
        rings = [[self._input(use.state.name, example(use.state), self._shape(use.state, slots))
                  for use in (loan.keys, loan.values)] for loan in loans]  # fmt: skip
        with self.graph.inserting_before(self.inputs[-1].next):
            number = self.call(aten.reshape.default, token, [1])
            if example(token).dtype != torch.int64:
                number = self.call(aten._to_copy.default, number, dtype=torch.int64)
            position = self.call(aten.add.Scalar, number, offset)
            slot = self.call(aten.remainder.Scalar, position, slots)
            held = self.call(aten.index_copy_.default, held, 0, slot, position)
        for loan, pair in zip(loans, rings):
            self._attention(loan, pair, position, slot, held, slots)

    def _attention(self, loan: Loan, rings: list[Node], position: Node, slot: Node, held: Node, slots: int) -> None:
        site = loan.site
        shown, check = self._mask(loan.plain, loan.keys.state, position, held, slots)
        grouped = len(shape_of(site.mask)) == 5
        new = {}
        for use, ring, source in zip((loan.keys, loan.values), rings, (site.key, site.value)):
            write = use.writes[0]
            with self.graph.inserting_before(write):
                written = self.call(aten.index_copy_.default, ring, 2, slot, use.new)
                new[source] = self.call(aten.unsqueeze.default, written, 2) if len(shape_of(source)) == 5 else written
            self.replaced.append(write)
        with self.graph.inserting_before(loan.inner[0]):
            new[site.mask] = self.call(aten.unsqueeze.default, shown, 1) if grouped else shown
            if grouped:
                check = self.call(aten.unsqueeze.default, check, 1)
            if example(check).dtype != example(site.node).dtype:
                check = self.call(aten._to_copy.default, check, dtype=example(site.node).dtype)
        for node in loan.inner:
            for old, replacement in new.items():
                node.replace_input_with(old, replacement)
        refresh(loan.inner)
        with self.graph.inserting_before(site.node.next):
            checked = self.call(aten.add.Tensor, site.node, check)
        take_place(checked, site.node)
        site.node.replace_all_uses_with(checked, delete_user_cb=lambda user: user is not checked)

    def _mask(self, plain: Node, store: Node, position: Node, held: Node, slots: int) -> tuple[Node, Node]:
        """The mask of the slots, (B, 1, 1, slots), and 0 or NaN for every row, (B, 1, 1, 1) float32."""
        if (plain, held) not in self._masks:
            with self.graph.inserting_before(plain.next):
                self._masks[plain, held] = self._new_mask(plain, store, position, held, slots)
        return self._masks[plain, held]

    def _new_mask(self, plain: Node, store: Node, position: Node, held: Node, slots: int) -> tuple[Node, Node]:
        call, boolean = self.call, example(plain).dtype == torch.bool
        width = self._size(plain, 3)
        last = width - 1 if isinstance(width, int) else call(operator.sub, width, 1)
        columns = call(aten.index_select.default, plain, 3, call(aten.clamp.default, held, 0, last))
        empty = call(aten.logical_or.default, call(aten.lt.Scalar, held, 0), call(aten.ge.Scalar, held, width))
        seen = plain if boolean else call(aten.gt.Scalar, plain, ADDITIVE_HIDDEN)
        if self.hf:  # one key fewer than the mask shows: the oldest
            oldest = call(aten.sub.Scalar, position, slots)
            empty = call(aten.logical_or.default, empty, call(aten.le.Tensor, held, oldest))
            places = call(aten.arange.default, width, device=example(plain).device)
            seen = call(aten.logical_and.default, seen, call(aten.gt.Tensor, places, oldest))
        hidden = False if boolean else torch.finfo(example(plain).dtype).min
        shown = call(aten.masked_fill.Scalar, columns, empty, hidden)
        kept = shown if boolean else call(aten.gt.Scalar, shown, ADDITIVE_HIDDEN)
        total, left = (call(aten.sum.dim_IntList, part, [3], True, dtype=torch.int32) for part in (seen, kept))
        lost = call(aten.logical_or.default, call(aten.ne.Tensor, total, left), call(aten.eq.Scalar, total, 0))
        outside = call(aten.ge.Scalar, position, self._size(store, 2))  # an error of the write in the stock graph
        lost = call(aten.logical_or.default, lost, outside)
        zero = call(aten.zeros_like.default, lost, dtype=torch.float32)
        return shown, call(aten.masked_fill.Scalar, zero, lost, float("nan"))

    def _size(self, node: Node, dim: int) -> Any:
        size = shape_of(node)[dim]
        return size if isinstance(size, int) else self.call(aten.sym_size.int, node, dim)

    def _shape(self, store: Node, slots: int) -> tuple[Any, ...]:
        rows, kv_heads, _, head_dim = shape_of(store)
        return (rows, kv_heads, slots, head_dim)

    def _input(self, name: str, like: Any, shape: tuple[Any, ...], dtype: torch.dtype | None = None) -> Node:
        """A new input, before those that the graph had and after those that it got from us."""
        with self.graph.inserting_before(self.inputs[0]):
            node = self.graph.placeholder(f"swa_pass_ring_{name}")
        source: Any = LocalSource(node.name)
        node._dynamo_source = source
        make = {"dtype": dtype or like.dtype, "device": like.device}
        if isinstance(like, FakeTensor):
            with like.fake_mode:
                value = torch.empty(shape, **make)
        else:
            value = torch.zeros(shape, **make)
        node.meta["example_value"] = value
        self.examples.append(value)
        return node


def refresh(nodes: Sequence[Node]) -> None:
    """Example values of nodes whose inputs have other shapes now."""
    for node in nodes:
        args: Any = torch.fx.map_arg(node.args, example)
        kwargs: Any = torch.fx.map_arg(node.kwargs, example)
        modes = [value.fake_mode for value in map(example, node.all_input_nodes) if isinstance(value, FakeTensor)]
        if not modes:
            continue
        target: Any = node.target
        with modes[0]:
            value = (
                getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)
            )
        node.meta["example_value"] = value
