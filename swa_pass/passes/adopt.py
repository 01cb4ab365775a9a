"""Rewrites proven attention on a graph's own states: one fused attention that reads the state in place and writes.

    before   index_copy_(k_state, 2, position, k)   ...   out = attention(q, repeat(k_state), repeat(v_state), mask)
    after    out = attend_append(q, k, v, k_state, v_state, lengths, window, scale, ...)

What becomes of the state:

    linear, of the caller    stays as it is: slot p holds position p, only the window is read
    linear, sliding, owned   becomes a ring of window + slack slots
    window (shift, gather)   becomes a ring, if owned
    joined (cat)             `attend` on the old and the new tokens; nothing is written

A ring holds the last tokens in the order of the calls, where the old state had a slot for each position. Both are the
same as long as positions go on one by one, so a graph with rings counts its tokens (`swa_pass_seen`) and stops with an
error when the caller's position is another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from ..formula import Lin
from ..graph import attribute, erase_all_unused, example, is_metadata_check, shape_of, take_place
from .states import StateFinding

aten = torch.ops.aten
SEEN = "swa_pass_seen"

#: A window that is wider than any text.
ALL = 1 << 30


def adopt_states(gm: GraphModule, findings: list[StateFinding], slack: int) -> dict[str, torch.Tensor]:
    """Rewrites the findings without a refusal. Returns the states that the graph now owns, by name."""
    chosen = [finding for finding in findings if not finding.refused]
    writer = _Writer(gm, slack)
    for finding in chosen:
        writer.rewrite(finding)
    if chosen:
        for check in [node for node in gm.graph.nodes if is_metadata_check(node)]:
            gm.graph.erase_node(check)  # it would keep the old attention alive
        writer.finish()
        erase_all_unused(gm)
        gm.graph.lint()
        gm.recompile()
    return writer.owned


class _Writer:
    """Puts new nodes into one graph; makes a counter at most once."""

    def __init__(self, gm: GraphModule, slack: int) -> None:
        self.gm, self.slack = gm, slack
        self.owned: dict[str, torch.Tensor] = {}
        self._seen: Node | None = None
        self._next: Node | None = None
        self._checked: set[Any] = set()
        self._call = Caller(gm)

    def rewrite(self, finding: StateFinding) -> None:
        site, keys, values = finding.site, finding.keys, finding.values
        ring = finding.owned and finding.window > 0 and keys.layout != "joined"
        with self.gm.graph.inserting_before(site.node):
            position = self._position(finding)
            lengths = self._rows(position, keys.new)
            if ring:
                back = self.slack if keys.layout == "linear" else 0  # a shifted window never knew a way back
                self._continue_at(finding, position, back)
                stores = [self._ring(use.state, finding.window + back) for use in (keys, values)]
            else:
                stores = [keys.state, values.state]
            if keys.layout == "joined":
                stores = [self._call(aten.contiguous.default, store) for store in stores]
            if keys.layout == "linear":
                width = shape_of(site.key)[2]
                if str(width) != str(keys.slots) or (finding.window and not ring):
                    self._fits(finding, position, width)
            if keys.positions is not None and str(shape_of(keys.new)[2]) != "1":
                self._consecutive(keys.positions, keys.new)
            ops = torch.ops.swa_pass
            target = ops.attend.default if keys.layout == "joined" else ops.attend_append.default
            window = finding.window
            if keys.layout == "joined" and not window:
                window = ALL  # a full linear store has no room for the new tokens, which `attend` does not write
            out = self.gm.graph.call_function(
                target,
                (site.query, keys.new, values.new, *stores, lengths),
                {"window": window, "scale": float(site.scale), "softcap": site.softcap, "sinks": site.sinks},
            )
        take_place(out, site.node)
        site.node.replace_all_uses_with(out)
        for use in (keys, values):
            for write in use.writes:
                self._erase_write(write, use.state)

    def finish(self) -> None:
        if self._seen is not None and self._next is not None:
            output = next(node for node in reversed(self.gm.graph.nodes) if node.op == "output")
            with self.gm.graph.inserting_before(output):
                self._call(aten.copy_.default, self._seen, self._next)

    def _erase_write(self, write: Node, state: Node) -> None:
        """Takes a write out; whoever used its result (the state itself) uses the state."""
        write.replace_all_uses_with(state)
        self.gm.graph.erase_node(write)

    # ------------------------------------------------------------------ positions

    def _position(self, finding: StateFinding) -> Node:
        """The position of the first new token, a tensor without dimensions."""
        keys = finding.keys
        if keys.layout == "joined":
            held = self._call(aten.sym_size.int, keys.state, 2) if not isinstance(keys.slots, int) else keys.slots
            return self._call(aten.scalar_tensor.default, held, dtype=torch.int64, device=example(keys.new).device)
        if keys.positions is not None and keys.layout == "linear":
            first = self._call(aten.select.int, keys.positions, 0, 0)
            return self._call(aten._to_copy.default, first, dtype=torch.int64)
        if keys.index is not None and keys.positions is None:
            device = example(keys.new).device
            return self._call(aten.scalar_tensor.default, keys.index, dtype=torch.int64, device=device)
        seen = finding.mask.seen if keys.fills else keys.query_offset
        assert seen is not None
        return self._from_formula(seen, keys.new)

    def _from_formula(self, form: Lin, like: Node) -> Node:
        """Computes a linear form of elements of the graph's inputs."""
        total: Any = self._call(aten.scalar_tensor.default, form.const, dtype=torch.int64, device=example(like).device)
        for (name, *index), factor in form.terms:
            element: Any = next(node for node in self.gm.graph.nodes if node.name == name)
            for place in index:
                element = self._call(aten.select.int, element, 0, place.const)
            total = self._call(aten.add.Tensor, total, element, alpha=factor)
        return total

    def _rows(self, position: Node, new: Node) -> Node:
        batch = shape_of(new)[0]
        rows = batch if isinstance(batch, int) else self._call(aten.sym_size.int, new, 0)
        return self._call(aten.repeat.default, self._call(aten.reshape.default, position, [1]), [rows])

    # ------------------------------------------------------------------ checks at run time

    def _once(self, *check: Any) -> bool:
        """Whether this check is new to the graph: layers share their positions."""
        new = check not in self._checked
        self._checked.add(check)
        return new

    def _continue_at(self, finding: StateFinding, position: Node, back: int) -> None:
        """Stops unless the ring holds what a query at this position needs: see the top of the file."""
        new = finding.keys.new
        if not self._once("continue", finding.mask.seen or finding.keys.query_offset, str(shape_of(new)[2]), back):
            return
        if self._seen is None:
            # Two numbers, always equal: AOTInductor takes a buffer of one element for a constant, written or not.
            self.gm.register_buffer(SEEN, torch.zeros(2, dtype=torch.int64, device=example(new).device))
            self._seen = self.gm.graph.get_attr(SEEN)
            self.owned[SEEN] = attribute(self.gm, SEEN)
        seen = self._call(aten.select.int, self._seen, 0, 0)
        tokens = self._tokens(new)
        if self._next is None:
            self._next = self._call(aten.add.Scalar, position, tokens)
        on = self._call(aten.le.Tensor, position, seen)
        near = self._call(aten.ge.Tensor, self._call(aten.add.Scalar, position, back), seen)
        good = self._call(aten.logical_and.default, on, near)
        good = self._call(aten.logical_or.default, good, self._call(aten.eq.Scalar, position, 0))
        message = (
            "swa_pass: this graph keeps rings, so positions must go on where the last call ended, start again at 0, or "
            f"go back by at most {back} tokens"
        )
        self._call(aten._assert_async.msg, good, message)

    def _fits(self, finding: StateFinding, position: Node, limit: Any) -> None:
        """A write past the end of a linear store is an error of the stock graph too, and in a ring it would be none.
        Past the slots that the attention reads, stock would not see its newest key."""
        new = finding.keys.new
        if not self._once("fits", finding.keys.query_offset, str(shape_of(new)[2]), str(limit)):
            return
        slots = limit if isinstance(limit, int) else self._call(aten.sym_size.int, finding.keys.state, 2)
        end = self._call(aten.add.Scalar, position, self._tokens(new))
        message = f"swa_pass: the store of the graph holds {limit} positions, and this call goes beyond them"
        self._call(aten._assert_async.msg, self._call(aten.le.Scalar, end, slots), message)

    def _consecutive(self, index: Node, new: Node) -> None:
        if not self._once("consecutive", index):
            return
        place = self._call(aten.arange.default, self._tokens(new), dtype=torch.int64, device=example(index).device)
        after_first = self._call(aten.sub.Tensor, index, self._call(aten.select.int, index, 0, 0))
        good = self._call(aten.all.default, self._call(aten.eq.Tensor, after_first, place))
        message = f"swa_pass: the positions in {index.name} must follow one another; this call skips some"
        self._call(aten._assert_async.msg, good, message)

    def _tokens(self, new: Node) -> Any:
        count = shape_of(new)[2]
        return count if isinstance(count, int) else self._call(aten.sym_size.int, new, 2)

    # ------------------------------------------------------------------ nodes

    def _ring(self, state: Node, slots: int) -> Node:
        old = attribute(self.gm, str(state.target))
        name = "swa_pass_ring_" + str(state.target).replace(".", "_")
        batch, kv_heads, _, head_dim = old.shape
        ring = torch.zeros(batch, kv_heads, slots, head_dim, dtype=old.dtype, device=old.device)
        self.gm.register_buffer(name, ring)
        self.owned[name] = ring
        return self.gm.graph.get_attr(name)


class Caller:
    """Adds calls to a graph, with their fake values where the graph has such."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        values = (example(node) for node in gm.graph.nodes)
        modes = {value.fake_mode for value in values if isinstance(value, FakeTensor)}
        self._mode = modes.pop() if len(modes) == 1 else None  # make_fx leaves a mode for every node

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        node = self.gm.graph.call_function(target, args, kwargs)
        if target not in (aten._assert_async.msg, aten.copy_.default):
            value = self._result(target, torch.fx.map_arg(args, example), kwargs)
            if value is not None:
                node.meta["val"] = value
        return node

    def _result(self, target: Callable[..., Any], values: Any, kwargs: dict[str, Any]) -> Any:
        modes = {value.fake_mode for value in values if isinstance(value, FakeTensor)}
        if self._mode is None or any(value is None for value in values) or modes - {self._mode}:
            return None
        with self._mode as mode:
            faked = [mode.from_tensor(x) if type(x) is torch.Tensor else x for x in values]
            return target(*faked, **kwargs)


__all__ = ["ALL", "SEEN", "Caller", "adopt_states"]
