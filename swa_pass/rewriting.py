"""The pass by itself: on captured graphs and exported programs, without a live model."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node

from .cache import DEFAULT_SLACK
from .graph import example
from .passes import Rewrite, rewrite_graph


def rewrite(graph: Any, *, own_state: bool = True, slack: int = DEFAULT_SLACK) -> Rewrite:
    """Finds attention on KV caches in a captured graph and replaces what is proven. Returns what was done.

    Args:
        graph: a ``torch.fx.GraphModule`` (from Dynamo, make_fx, or ``ExportedProgram.module()``), which is changed in
            place, or a ``torch.export.ExportedProgram``, which is left as it is.
        own_state: tensors that the module holds (buffers) belong to this graph alone, so their layout may change: a
            sliding layer's state becomes a ring. False: they are somebody else's too, and only what keeps their layout
            is done.
        slack: tokens by which positions may go back in a ring that replaces a store with a slot for every position.

    Returns:
        `Rewrite`: ``result.graph`` (of the kind that was given; the same object where nothing matched),
        ``result.matches``, ``result.refusals`` (a sentence each), ``result.owned`` (rings and counters, by name).

    Raises:
        TypeError: neither kind of graph.
        ValueError: a negative slack.
    """
    if slack < 0:
        raise ValueError(f"slack must be >= 0 tokens, got {slack}")
    if isinstance(graph, GraphModule):
        return rewrite_graph(graph, own_state=own_state, slack=slack)
    if not isinstance(graph, ExportedProgram):
        raise TypeError(
            f"swa_pass.rewrite works on a torch.fx.GraphModule or a torch.export.ExportedProgram, not on a "
            f"{type(graph).__name__}. For a transformers model use swa_pass.apply(model) or swa_pass.export(model)."
        )
    module = graph.module()
    assert isinstance(module, GraphModule)
    result = rewrite_graph(module, own_state=own_state, slack=slack)
    if not result.changed:
        return dataclasses.replace(result, graph=graph)
    return dataclasses.replace(result, graph=_exported_again(module, graph))


def _exported_again(module: GraphModule, old: ExportedProgram) -> ExportedProgram:
    """The rewritten module as a program with the inputs, and the dynamic sizes, of the old one."""
    if old.example_inputs is None:
        raise ValueError("this program was saved without example inputs; rewrite its module() and export that")
    args, kwargs = old.example_inputs
    for node in [node for node in module.graph.nodes if node.op == "call_module" and not node.users]:
        module.graph.erase_node(node)  # guards on the inputs: export makes them anew
    module.recompile()
    with torch.no_grad():
        return torch.export.export(module, args, kwargs, dynamic_shapes=_dynamic_shapes(old))


def _dynamic_shapes(program: ExportedProgram) -> Any:
    """`dynamic_shapes` for exporting again, in the structure of the program's (args, kwargs) by position."""
    wanted = set(program.graph_signature.user_inputs)
    dims: dict[str, Any] = {}
    specs = []
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in wanted:
            specs.append(_dims_of(node, program, dims))
    args, kwargs = torch.utils._pytree.tree_unflatten(specs, program.call_spec.in_spec)
    names = [*_parameter_names(program, len(args)), *kwargs]
    return dict(zip(names, [*args, *kwargs.values()]))


def _parameter_names(program: ExportedProgram, count: int) -> list[str]:
    """Names of the forward's positional parameters, as the unlifted module has them."""
    module: Any = program.module()
    codegen = module.graph._codegen
    names = getattr(getattr(codegen, "pytree_info", None), "orig_args", None)
    return [name for name in names if name != "self"][:count] if names else [f"arg_{i}" for i in range(count)]


def _dims_of(node: Node, program: ExportedProgram, dims: dict[str, Any]) -> Any:
    value = example(node)
    if not isinstance(value, torch.Tensor):
        return None
    spec: dict[int, Any] = {}
    for axis, size in enumerate(value.shape):
        if isinstance(size, int):
            continue
        symbol = size.node.expr
        if not symbol.is_Symbol:
            spec[axis] = Dim.AUTO
            continue
        if str(symbol) not in dims:
            limits = program.range_constraints.get(symbol)
            low = int(limits.lower) if limits is not None else 2
            high = int(limits.upper) if limits is not None and limits.upper.is_Integer else None
            dims[str(symbol)] = Dim(str(symbol), min=max(low, 1), max=high)
        spec[axis] = dims[str(symbol)]
    return spec or None
