"""Our operators in a graph for Intel Gaudi, as core operators and FusedSDPA: none of ours reaches `hpu_backend`.

    before   out = attend_append(q, k, v, k_store, v_store, lengths, starts, window, scale, ...)
    after    slot = lengths[0] % C;  k_store.index_copy_(2, slot, k);  v_store.index_copy_(2, slot, v)
             mask = ... lengths, starts ...                              (B, 1, 1, C), once for all layers alike
             out = hpu.sdpa_recomp_fwd(q, k_store, v_store, mask, ...)   or matmul, softmax, matmul

What stands for an operator is traced from `ops/hpu_ops.py`, which also is what the operator does when it is called on
the device. Shapes come from shapes alone, so one graph serves every length.

Rows must advance together, as those of a HybridCache do: they are written by one index. A row of another length is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.fx.experimental.proxy_tensor import make_fx

from ..graph import example, has_side_effect, op_name, take_place
from ..ops import hpu_ops, schema

#: Operators without a host's list of tokens or blocks; those that have one are not for Gaudi.
_FUNCTIONS: dict[str, Callable[..., Any]] = {**hpu_ops.FUNCTIONS, "linear": torch.nn.functional.linear}


def holds_ours(gm: GraphModule) -> bool:
    """Whether a graph has operators of ours, called as they are or inside of a higher order operator."""
    return any(_mentioned(node) is not None for node in gm.graph.nodes)


def lower_hpu(gm: GraphModule) -> int:
    """Replaces every operator of ours, in place. Returns how many there were.

    Every tensor that goes into one needs an example value, as Dynamo, make_fx and torch.export leave it.

    Raises:
        ValueError: an operator that cannot be expressed, by name. The graph is then as it was.
    """
    found = [node for node in gm.graph.nodes if _mentioned(node) is not None]
    mode, traced = _mode(gm), _Traced()
    graphs = {node: traced(node, mode) for node in found}  # before anything changes
    writer = _Writer(gm)
    for node in list(gm.graph.nodes):
        if node in graphs:
            writer.put(node, graphs[node])
        elif has_side_effect(node) and node.op not in ("placeholder", "output"):
            writer.forget()  # the lengths may be others from here on
    if found:
        gm.graph.lint()
        gm.recompile()
    return len(found)


def _mentioned(node: Node) -> Any:
    """The operator of ours that a node calls, or is given (auto_functionalized)."""
    values = [node.target, *node.args] if node.op == "call_function" else []
    overloads = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    names = (v for v in values if isinstance(v, overloads))
    return next((v for v in names if str(v).startswith(f"{schema.NAMESPACE}.")), None)


def _mode(gm: GraphModule) -> FakeTensorMode:
    """The mode of the graph's own example values; a new one where every value has one of its own (make_fx)."""
    modes = {value.fake_mode for value in map(example, gm.graph.nodes) if isinstance(value, FakeTensor)}
    return modes.pop() if len(modes) == 1 else FakeTensorMode()


class _Traced:
    """What stands for an operator, traced once for all calls of the same shapes and constants."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Graph] = {}

    def __call__(self, node: Node, mode: FakeTensorMode) -> Graph:
        name = op_name(node).removeprefix(f"{schema.NAMESPACE}::").removeprefix("_")
        function = _FUNCTIONS.get(name)
        if function is None:
            raise ValueError(
                f"swa_pass: {_mentioned(node)} (in {node.name}) has no form for Intel Gaudi. Lower the graph before it "
                "is functionalised, and leave attention on listed tokens and blocks as the engine wrote it."
            )
        inputs = node.all_input_nodes
        missing = [source.name for source in inputs if example(source) is None]
        if missing:
            raise ValueError(
                f"swa_pass: {node.name}: nothing is known about the shapes of {', '.join(missing)}; capture the graph "
                "with Dynamo, make_fx or torch.export, which leave example values"
            )
        place = {source: f"{n}" for n, source in enumerate(inputs)}
        said = repr(map_arg((node.args, node.kwargs), lambda source: place[source]))
        key = (name, said, tuple(_kind(source) for source in inputs))
        if key not in self.known:
            self.known[key] = _trace(function, node, [_faked(example(source), mode) for source in inputs], mode)
        return self.known[key]


def _kind(node: Node) -> Hashable:
    value = example(node)
    if not isinstance(value, torch.Tensor):
        return str(value)
    return (str(value.dtype), str(value.device), str(tuple(value.shape)), str(value.stride()))


def _faked(value: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(value, torch.Tensor) or (isinstance(value, FakeTensor) and value.fake_mode is mode):
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _trace(function: Callable[..., Any], node: Node, values: list[Any], mode: FakeTensorMode) -> Graph:
    """The graph of one call, with the node's inputs, in their order, as its placeholders."""
    options = {"_together": True} if function in hpu_ops.FUNCTIONS.values() else {}

    def call(*given: Any) -> Any:
        sources = dict(zip(node.all_input_nodes, given))
        args, kwargs = map_arg((node.args, node.kwargs), sources.__getitem__)
        return function(*args, **kwargs, **options)

    with torch.no_grad(), enable_python_dispatcher(), mode:
        return make_fx(call)(*values).graph


class _Writer:
    """Puts traced graphs into a graph. What follows from lengths and starts alone is there once for all layers."""

    def __init__(self, gm: GraphModule) -> None:
        self.graph = gm.graph
        self.forget()

    def forget(self) -> None:
        self.shared: dict[Hashable, Node] = {}
        self.positions: set[Node] = set()

    def put(self, node: Node, traced: Graph) -> None:
        """`traced` in the place of `node`."""
        arguments = {argument.name: value for argument, value in zip(_arguments(node), node.args)} | node.kwargs
        self.positions |= {x for name in ("lengths", "starts") if isinstance(x := arguments.get(name), Node)}
        copies: dict[Node, Node] = {}
        inputs = iter(node.all_input_nodes)
        with self.graph.inserting_before(node):
            for each in traced.nodes:
                if each.op == "placeholder":
                    copies[each] = next(inputs)
                elif each.op == "output":
                    result = copies[each.args[0]] if isinstance(each.args[0], Node) else None
                else:
                    assert each.op == "call_function", f"tracing left {each.op} {each.target}"
                    copies[each] = self._copy(each, copies)
        if result is not None:
            take_place(result, node)
            node.replace_all_uses_with(result)
        self.graph.erase_node(node)

    def _copy(self, node: Node, copies: dict[Node, Node]) -> Node:
        args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
        about_positions = {copies[source] for source in node.all_input_nodes} <= self.positions
        if not about_positions or has_side_effect(node):
            return self.graph.node_copy(node, copies.__getitem__)
        key = (node.target, repr((args, kwargs)))
        if key not in self.shared:
            self.shared[key] = self.graph.node_copy(node, copies.__getitem__)
            self.positions.add(self.shared[key])
        return self.shared[key]


def _arguments(node: Node) -> Any:
    target: Any = node.target
    overload = getattr(target, "default", target)
    return overload._schema.arguments
