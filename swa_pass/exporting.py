"""`swa_pass.export`: a decoder as one `torch.export.ExportedProgram` that carries its KV state and never outgrows it.

    program(input_ids (B, q)) -> logits          q = 1, 2, ...: the same graph reads a prompt, a chunk or one token

    state (buffers)                  slots
    cache.keys_0   cache.values_0    W + slack      a sliding layer: a ring
    cache.keys_5   cache.values_5    max_length     a global layer: a linear store
    cache.lengths                                   tokens seen, one number a row; advanced once, by the program

How it is made:

    1  torch.export traces the forward with `ExportCache`, whose length is a tensor. Masks come out as formulas over an
       unknown position, exactly as in `capture`.
    2  The passes prove each mask in that graph and put attention on the stores in place. A layer that is not proven
       is an error here: nothing else could be right past the window.
    3  The graph is exported once more. Sizes that only the stock attention had guards on are gone by then, so that the
       promised ranges can be checked; and, with ``lowering="aten"``, our operators become plain ATen (`ops.aten`).

Step 3 is why "tokens <= W" or a maximal length of W cannot stay in the graph unseen: its sizes have named ranges, and
torch.export fails where an operation needs less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, GraphModule, Node

from .api import check_model, runtime_of
from .cache import DEFAULT_SLACK
from .capture import first_line
from .compat import Cache, CacheLayerMixin, cache_argument
from .discover import discover
from .graph import is_metadata_check, op_name, shape_of
from .hooks import Watch, hooked
from .ops import aten
from .passes import rewrite_graph
from .probe import CaptureError
from .render import ranges
from .spec import LayerSpec

LOWERINGS = ("ops", "aten")
#: Sample sizes while tracing. Any would do above 1 (torch makes 0 and 1 constants) that differ from one another.
_ROWS, _TOKENS = 2, 5


def export(
    model: Any,
    *,
    batch: int = 1,
    max_length: int | None = None,
    slack: int = DEFAULT_SLACK,
    lowering: str = "ops",
    dynamic_batch: bool = False,
    left_padding: bool = False,
    logits_to_keep: int = 0,
) -> ExportedProgram:
    """Exports a Hugging Face decoder with its KV caches inside: prefill and decode, to any length.

    The program takes ``input_ids`` (B, q) int64, q >= 1, and returns logits (B, q, vocabulary), or (B, 1, vocabulary)
    with ``logits_to_keep=1``. Each call continues where the last one ended. ``program.module()``, what
    `torch.export.load` returns and an AOTInductor package all work the same way. `reset_state` starts anew.

    Args:
        batch: rows that the state has room for.
        max_length: tokens a row that global layers keep; the program refuses more, by name. A model in which every
            layer slides needs none and has no limit.
        slack: slots of a ring beyond its window. ``cache.lengths`` may be lowered by so many tokens, to take them back.
        lowering: ``"ops"``: attention is `swa_pass::attend_append`, so the process that runs the program imports
            `swa_pass.ops` (which needs torch only). ``"aten"``: plain ATen operators; nothing of ours is needed.
        dynamic_batch: any number of rows from 1 to `batch` may be given. It must stay the same until a reset.
        left_padding: the program takes a second input, ``starts`` (B,) int64: how many pads each row begins with. The
            same in every call.
        logits_to_keep: 0: logits at all positions; 1: at the last one.

    The weights are the model's own tensors, not copies, under their names in its state_dict.

    Raises:
        TypeError: not a transformers model.
        ValueError: arguments that do not fit, or a model of the wrong kind (encoder-decoder, in training mode, ...).
        RuntimeError: layers whose attention could not be proven, by index, or a forward that cannot be exported.
    """
    check_model(model)
    _check_arguments(model, batch, slack, lowering, logits_to_keep, dynamic_batch)
    specs = _proven(model)
    _check_max_length(specs, max_length)
    decoder = Decoder(model, specs, batch, max_length or 0, slack, logits_to_keep)
    decoder.eval()
    dynamic_rows = dynamic_batch and batch > 1
    rows = _ROWS if dynamic_rows else batch
    device = next(model.parameters()).device
    inputs = [torch.zeros(rows, _TOKENS, dtype=torch.int64, device=device)]
    if left_padding:
        inputs.append(torch.zeros(rows, dtype=torch.int64, device=device))
    traced = _trace(decoder, inputs, dynamic_rows)
    _fuse(type(model).__name__, traced, specs)
    step = _flat(traced)
    _guard(step, max_length or 0)
    if lowering == "aten":
        _lower(step)
    limit = {} if max_length is None else {"max": max_length}
    sizes: dict[int, Any] = {1: Dim("tokens", min=1, **limit)}
    if dynamic_rows:
        sizes[0] = Dim("batch", min=1, max=batch)
    shapes = [sizes, {0: sizes[0]} if dynamic_rows else None][: len(inputs)]
    with torch.no_grad():
        return torch.export.export(step, tuple(inputs), dynamic_shapes=tuple(shapes), strict=False)


def reset_state(module: nn.Module) -> None:
    """Forgets all tokens of an exported program's module (`program.module()`). Stores keep their memory."""
    module.get_buffer("cache.lengths").zero_()


# ------------------------------------------------------------------------------------------------ what is traced


class ExportLayer(CacheLayerMixin):
    """One layer's stores while a forward is traced; the traced half of `cache.layers.StoreLayer`."""

    is_compileable = False
    is_initialized = True

    def __init__(self, index: int, window: int | None, stores: tuple[Tensor, Tensor], lengths: Tensor, starts: Any):
        self.index, self.window, self.is_sliding = index, window or 0, window is not None
        self.stores, self.lengths, self.starts = stores, lengths, starts

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        return None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        ops, place = torch.ops.swa_pass, (self.lengths, self.window, self.index, self.starts)
        keys = ops.view.default(self.stores[0], key_states, *place)
        values = ops.view.default(self.stores[1], value_states, *place)
        ops.append.default(key_states, value_states, *self.stores, self.lengths, window=self.window)
        return keys, values

    def get_seq_length(self) -> Any:
        return self.lengths[0]

    def get_mask_sizes(self, query_length: Any) -> tuple[Any, Any]:
        if not self.is_sliding:
            return self.stores[0].shape[2], 0
        return self.window - 1 + query_length, torch.clamp(self.lengths[0] - (self.window - 1), min=0)

    def get_max_length(self) -> int:
        return self.window if self.is_sliding else self.stores[0].shape[2]


class ExportCache(Cache):
    layers: list[Any]

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.layers[layer_idx].get_seq_length()

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[Any, Any]:
        return self.layers[layer_idx].get_mask_sizes(query_length)


class State(nn.Module):
    """The buffers: a pair of stores for each layer, zeros, and the tokens seen."""

    lengths: Tensor

    def __init__(self, specs: Sequence[LayerSpec], rows: int, max_length: int, slack: int) -> None:
        super().__init__()
        for spec in specs:
            slots = max_length if spec.window is None else spec.window + slack
            shape, device = (rows, spec.kv_heads, slots), spec.device
            keys = torch.zeros(*shape, spec.head_dim, dtype=spec.k_dtype, device=device)
            self.register_buffer(f"keys_{spec.index}", keys)
            values = torch.zeros(*shape, spec.v_head_dim, dtype=spec.v_dtype, device=device)
            self.register_buffer(f"values_{spec.index}", values)
        # Never one element: in AOTInductor (torch 2.13) Inductor takes a buffer of one element for a constant, also one
        # that the program changes, and folds its first value into the code.
        self.register_buffer("lengths", torch.zeros(max(rows, 2), dtype=torch.int64, device=specs[0].device))


class Decoder(nn.Module):
    """input_ids (and starts) -> logits, with the state as buffers."""

    def __init__(
        self,
        model: Any,
        specs: Sequence[LayerSpec],
        rows: int,
        max_length: int,
        slack: int,
        logits_to_keep: int,
    ) -> None:
        super().__init__()
        self.model = model
        self.cache = State(specs, rows, max_length, slack)
        self.windows = [(spec.index, spec.window) for spec in specs]
        self.options = {"logits_to_keep": logits_to_keep} if logits_to_keep else {}
        runtime = runtime_of(model)
        self.cache_name = cache_argument(model.forward if runtime is None else runtime.stock)

    def forward(self, input_ids: Tensor, starts: Tensor | None = None) -> Tensor:
        rows, tokens = input_ids.shape
        lengths = self.cache.lengths[:rows]
        layers: list[Any] = []
        for index, window in self.windows:
            stores = (self.cache.get_buffer(f"{name}_{index}") for name in ("keys", "values"))
            keys, values = (store if isinstance(rows, int) else store[:rows] for store in stores)
            layers.append(ExportLayer(index, window, (keys, values), lengths, starts))
        options: dict[str, Any] = dict(self.options)
        if starts is not None:
            positions = lengths[0] + torch.arange(tokens, device=input_ids.device)
            options["position_ids"] = (positions - starts[:, None]).clamp(min=0)
        options[self.cache_name or ""] = ExportCache(layers=layers)
        logits = self.model(input_ids=input_ids, use_cache=True, **options).logits
        (self.cache.lengths if isinstance(rows, int) else lengths).add_(tokens)
        return logits


# ------------------------------------------------------------------------------------------------ steps


def _proven(model: Any) -> tuple[LayerSpec, ...]:
    """What each layer is, or an error that names all layers that an exported graph could not hold."""
    name = type(model).__name__
    if hooked(model) or Watch(model).sees():
        raise ValueError(
            f"{name} has hooks on its submodules (accelerate's, or register_forward_hook), which a graph does not "
            "show. Export the model on one device, without them."
        )
    runtime = runtime_of(model)
    try:
        specs = discover(model, model.forward if runtime is None else runtime.stock)
    except CaptureError as error:
        raise RuntimeError(f"{name} cannot be exported: {error}") from error
    bad: dict[str, list[int]] = {}
    for spec in specs:
        if spec.kind not in ("sliding", "full"):
            bad.setdefault(spec.reason, []).append(spec.index)
        elif spec.state:
            bad.setdefault("a convolution or recurrence state beside the keys", []).append(spec.index)
    _refuse(name, bad)
    return specs


def _refuse(name: str, layers: dict[str, list[int]]) -> None:
    if layers:
        found = "; ".join(f"layers {ranges(indexes)}: {reason}" for reason, indexes in layers.items())
        raise RuntimeError(
            f"{name} cannot be exported with its cache: {found}. Only plain sliding and global attention can be held "
            "in fixed stores; export this model with transformers' own tools, up to the window."
        )


def _trace(decoder: Decoder, inputs: list[Tensor], dynamic_rows: bool) -> ExportedProgram:
    sizes = {1: Dim.DYNAMIC, **({0: Dim.DYNAMIC} if dynamic_rows else {})}
    shapes = [sizes, {0: Dim.DYNAMIC} if dynamic_rows else None][: len(inputs)]
    try:
        with torch.no_grad():
            return torch.export.export(decoder, tuple(inputs), dynamic_shapes=tuple(shapes), strict=False)
    except Exception as error:
        raise RuntimeError(
            f"{type(decoder.model).__name__} cannot be exported: torch.export failed in its forward with "
            f"{first_line(error)}"
        ) from error


def _fuse(name: str, traced: ExportedProgram, specs: Sequence[LayerSpec]) -> None:
    """The passes on the traced graph; every layer must come out as attention on its store."""
    _tidy(traced)
    result = rewrite_graph(traced.graph_module, states=False)
    bad: dict[str, list[int]] = {}
    for spec in specs:
        if spec.index not in result.fused:
            found = [f.refusal or f.extra for f in result.findings if f.layer == spec.index and (f.refusal or f.extra)]
            bad.setdefault(found[0] if found else "its cache access did not match", []).append(spec.index)
    _refuse(name, bad)


def _tidy(traced: ExportedProgram) -> None:
    """Takes out what ATen graphs have and Dynamo's have not: slices of everything, checks of dtypes, and numbers that
    became constant tensors (``torch.tensor(0.0)`` in a mask)."""
    graph, signature = traced.graph, traced.graph_signature
    targets = {spec.arg.name: spec.target for spec in signature.input_specs if spec.kind == InputKind.CONSTANT_TENSOR}
    for node in list(graph.nodes):
        name = op_name(node)
        source: Any = node.args[0] if node.args else None
        if is_metadata_check(node):
            graph.erase_node(node)
        elif name in ("detach", "detach_") or (
            name == "slice" and source.op != "placeholder" and _sizes(node) == _sizes(source)
        ):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        elif name == "lift_fresh_copy" and source.name in targets:
            value = traced.constants[targets[source.name]]
            if value.dim() == 0:
                with graph.inserting_before(node):
                    number = graph.call_function(
                        torch.ops.aten.full.default,
                        ([], value.item()),
                        {"dtype": value.dtype, "device": value.device},
                    )
                number.meta.update(node.meta)
                node.replace_all_uses_with(number)
                graph.erase_node(node)


def _sizes(node: Any) -> list[str]:
    return [str(size) for size in shape_of(node)]


def _flat(program: ExportedProgram) -> GraphModule:
    """The program as a module whose parameters and buffers have the model's own names, and the state ``cache.*``."""
    signature, constants = program.graph_signature, program.constants
    tensors: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    unsaved: list[str] = []
    unused = {node.name for node in program.graph.nodes if node.op == "placeholder" and not node.users}
    for spec in signature.input_specs:
        if spec.kind == InputKind.USER_INPUT or spec.arg.name in unused:
            continue
        assert spec.target is not None
        name = spec.target.removeprefix("model.")
        held = program.state_dict if spec.target in program.state_dict else constants
        tensors[name], names[spec.arg.name] = held[spec.target], name
        if spec.kind != InputKind.PARAMETER and not spec.persistent:
            unsaved.append(name)
    user_inputs = set(signature.user_inputs)
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in unused and node.name not in user_inputs:
            continue
        if node.op == "placeholder" and node.name in names:
            copies[node] = graph.get_attr(names[node.name])
        elif node.op == "output":
            (logits,) = node.args[0]
            graph.output(copies[logits])
        else:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    step = GraphModule(tensors, graph)
    for name in unsaved:  # they belong in no state_dict, as in the model
        owner, _, leaf = name.rpartition(".")
        step.get_submodule(owner).register_buffer(leaf, tensors[name], persistent=False)
    return step


def _guard(step: GraphModule, max_length: int) -> None:
    """What the state must fulfil, checked before anything is written."""
    first = next(node for node in step.graph.nodes if node.op == "call_function")
    state = next(node for node in step.graph.nodes if node.op == "get_attr" and node.target == "cache.lengths")
    ids = next(node for node in step.graph.nodes if node.op == "placeholder")
    assert first is not None
    with step.graph.inserting_before(first):
        step.graph.call_function(aten.check_state, (state, ids, max_length))
    step.recompile()


def _lower(step: GraphModule) -> None:
    """Our operators as functions made of ATen ones; exporting the module again traces through them."""
    for node in step.graph.nodes:
        if op_name(node) in ("swa_pass::attend", "swa_pass::attend_append"):
            node.target = getattr(aten, op_name(node).removeprefix("swa_pass::"))
    step.recompile()


# ------------------------------------------------------------------------------------------------ checks


def _check_arguments(
    model: Any, batch: int, slack: int, lowering: str, logits_to_keep: int, dynamic_batch: bool
) -> None:
    if batch < 1:
        raise ValueError(f"batch is the number of rows that the state has room for, at least 1; got {batch}")
    if slack < 0:
        raise ValueError(f"slack must be >= 0 tokens, got {slack}")
    if lowering not in LOWERINGS:
        raise ValueError(f"lowering={lowering!r}: use one of {', '.join(map(repr, LOWERINGS))}")
    if logits_to_keep not in (0, 1):
        raise ValueError(f"logits_to_keep={logits_to_keep}: use 0 (all positions) or 1 (the last), as q may be 1")


def _check_max_length(specs: Sequence[LayerSpec], max_length: int | None) -> None:
    full = [spec.index for spec in specs if spec.window is None]
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length={max_length}: global layers {ranges(full)} need room for at least one token")
    if max_length is None and full:
        raise ValueError(
            f"layers {ranges(full)} are global and keep every token, in stores of a fixed size: pass max_length, the "
            "largest number of tokens that a row will have"
        )


__all__ = ["LOWERINGS", "export", "reset_state"]
