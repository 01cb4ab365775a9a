"""Captures a model's forward as one graph and finds out what each layer's attention really is.

Dynamo traces the model with a cache whose every layer keeps everything and whose length is a *tensor*. transformers
then builds its masks inside the graph, as formulas over an unknown position (with Python lengths it would skip masks
below the window, and the layer would look global). The graph is never run: two tokens, no weights read, no memory.
"""

from __future__ import annotations

import itertools
import re
import time
import types
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from .cache.joint import BesideState
from .compat import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    cache_argument,
    joint_states,
    mixed_layers,
    state_layers,
    tracing,
)
from .graph import example, shape_of
from .log import logger, quiet_capture
from .passes import Finding, find_sites
from .passes.find import UnmatchedView, unmatched_views
from .spec import LayerSpec

#: Capacity of the stores that the probe pretends to have; any value, nothing is allocated or computed. A model with
#: fewer positions gets as many (`_slots`): it may have tables of that size.
_PROBE_SLOTS = 320
#: New tokens in the probe: more than one, so that decode shortcuts do not hide the mask.
_PROBE_TOKENS = 3


class CaptureError(RuntimeError):
    """The forward could not be captured as one graph; the message says why."""


class _Captured(BaseException):
    """Stops a call after tracing, before anything runs. No `Exception`, or Dynamo would report a failing compiler."""

    def __init__(self, graph: GraphModule) -> None:
        self.graph = graph


class ProbeLayer(CacheLayerMixin):
    """A linear store that exists only while tracing. It seems to hold tokens, as the caches of later calls will."""

    is_sliding = False
    is_compileable = False

    def __init__(self, index: int, lengths: Tensor, slots: int) -> None:
        self.index = index
        self.lengths = lengths
        self.slots = slots
        self.is_initialized = True

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        raise CaptureError(f"the model reads the keys of cache layer {self.index} itself, past the cache's update")

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        raise CaptureError(f"the model reads the values of cache layer {self.index} itself, past the cache's update")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        return None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        ops = torch.ops.swa_pass
        stores = []
        for new in (key_states, value_states):
            batch, kv_heads, _, head_dim = new.shape
            stores.append(new.new_empty(batch, kv_heads, self.slots, head_dim))
        keys = ops.view.default(stores[0], key_states, self.lengths, 0, self.index)
        values = ops.view.default(stores[1], value_states, self.lengths, 0, self.index)
        ops.append.default(key_states, value_states, stores[0], stores[1], self.lengths, window=0)
        return keys, values

    def get_seq_length(self) -> Any:
        return self.lengths[0]

    def get_mask_sizes(self, query_length: Any) -> tuple[Any, Any]:
        return self.slots, 0

    def get_max_length(self) -> int:
        return -1


class JointProbeLayer(ProbeLayer, BesideState):
    """A probe with a hybrid model's own state beside it."""

    def __init__(self, index: int, lengths: Tensor, slots: int, state: Any) -> None:
        super().__init__(index, lengths, slots)
        self.beside = state


class ProbeCache(Cache):
    """A cache of `ProbeLayer`, as many as the model asks for, with a hybrid model's own states in between (`alone`) and
    in the layers (`beside`)."""

    layers: list[Any]

    def __init__(
        self,
        layers: int,
        device: torch.device,
        alone: dict[int, Any],
        beside: dict[int, Any],
        slots: int = _PROBE_SLOTS,
    ) -> None:
        lengths = torch.full((1,), slots // 2, dtype=torch.int64, device=device)
        self.keyed = next((i for i in range(layers) if i not in alone), 0)
        joint = {i: JointProbeLayer(i, lengths, slots, state) for i, state in beside.items()}
        super().__init__(layers=[alone.get(i) or joint.get(i) or ProbeLayer(i, lengths, slots) for i in range(layers)])

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.layers[self.keyed].get_seq_length()

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[Any, Any]:
        return self.layers[self.keyed].get_mask_sizes(query_length)


def capture(model: Any, forward: Any, layers: int | None = None) -> GraphModule:
    """The forward of `model` as one Dynamo graph, with a probe cache.

    layers: how many the cache has; None: as many as the config says.

    Raises:
        CaptureError: the forward takes no cache, or Dynamo cannot trace it as one graph.
    """
    name = cache_argument(forward)
    if name is None:
        raise CaptureError("the model's forward takes no cache argument")
    device = next(model.parameters()).device
    if layers is None:
        layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    if layers is None:
        raise CaptureError(
            "the config names no num_hidden_layers, so it is no plain decoder that a cache can be made for"
        )
    mixed = mixed_layers(model.config)
    if mixed:
        raise CaptureError(
            f"cache layers {', '.join(map(str, mixed))} hold keys and a convolution or recurrence state in a layer of "
            "the model's own, for which there is no ring"
        )
    kwargs = {
        "input_ids": torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device=device),
        name: ProbeCache(layers, device, state_layers(model.config), joint_states(model.config), _slots(model.config)),
        "use_cache": True,
    }

    def stop(gm: GraphModule, inputs: list[Any]) -> Any:
        raise _Captured(gm)  # here, not when the graph is called: Dynamo need not build guards

    started = time.perf_counter()
    with torch.no_grad(), torch._dynamo.config.patch(suppress_errors=False), quiet_capture(), tracing(model.config):
        try:
            torch.compile(own_code(call), backend=stop, fullgraph=True, dynamic=False)(forward, kwargs)
        except _Captured as captured:
            logger.info("captured the forward in %.1f s", time.perf_counter() - started)
            return captured.graph
        except Exception as error:
            raise CaptureError(f"Dynamo could not capture the forward as one graph: {first_line(error)}") from error
    raise CaptureError("the forward ran without reaching a graph")


def _slots(config: Any) -> int:
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if type(positions) is not int or positions <= 2 * _PROBE_TOKENS:
        return _PROBE_SLOTS
    return min(_PROBE_SLOTS, positions)


def call(forward: Any, kwargs: dict[str, Any]) -> Any:
    return forward(**kwargs)


_copies = itertools.count()


def own_code(function: Any) -> Any:
    """A copy of a function with a code object and a name of its own.

    Dynamo keeps graphs and its recompile limit per code object, and what it learnt about changing shapes per name and
    line: two models must not share either.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_copies)}")
    copy = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def first_line(error: BaseException) -> str:
    """One line about what really went wrong: Dynamo wraps the cause, sometimes more than once."""
    while True:
        inner = getattr(error, "inner_exception", None) or error.__cause__
        if inner is None or inner is error:
            break
        error = inner
    text = str(error).strip()
    cause = re.search(r"got (\w+\(.*\))", text)  # an operation failed while it was traced
    return f"{type(error).__name__}: {cause.group(1) if cause else text.splitlines()[0] if text else ''}"


def discover(model: Any, forward: Any) -> tuple[LayerSpec, ...]:
    """What each cache layer's attention is, proven from the captured graph's own masks.

    Returns one spec per cache layer; `action` is what the run-time graphs are expected to do.
    """
    try:
        gm = capture(model, forward)
    except CaptureError:
        layers = _grown(model, forward)
        if layers is None:
            raise
        gm = capture(model, forward, layers)
    findings = find_sites(gm)
    joint = joint_states(model.config)
    specs = [_spec(group) for group in _by_layer(findings).values()]
    specs += [_unmatched(view) for view in unmatched_views(gm, findings)]
    written = {spec.index for spec in specs}
    device = next(model.parameters()).device
    specs += [_state(index, device) for index in state_layers(model.config) if index not in written]
    specs = [replace(spec, state=spec.index in joint) for spec in specs]
    if any(spec.action == "rewritten" for spec in specs):  # then the cache is ours, and those keys' own numbers with it
        specs = [replace(s, kind="other", action="refused") if s.kind == "picked" else s for s in specs]
    specs.sort(key=lambda spec: spec.index)
    if [spec.index for spec in specs] != list(range(len(specs))):
        raise CaptureError(f"the model writes cache layers {[spec.index for spec in specs]}, not 0, 1, 2, ...")
    return tuple(specs)


def _grown(model: Any, forward: Any) -> int | None:
    """How many layers a stock cache has after one token, where the model adds some of its own (it goes through some of
    its layers more than once, with keys for each time); None if it adds none, or cannot be called like this."""
    name, device = cache_argument(forward) or "", next(model.parameters()).device
    try:
        cache = DynamicCache(config=model.config)
        before = len(cache.layers)
        with torch.no_grad():
            forward(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=True, **{name: cache})
    except Exception:
        return None
    return len(cache.layers) if len(cache.layers) > before > 0 else None


def _by_layer(findings: list[Finding]) -> dict[int, list[Finding]]:
    groups: dict[int, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.layer, []).append(finding)
    return groups


def _spec(group: list[Finding]) -> LayerSpec:
    first = group[0]
    refusal = next((f.refusal for f in group if f.refusal), "")
    if not refusal and any(f.mask != first.mask for f in group):
        refusal = f"{len(group)} attentions read this layer's keys under different masks"
    picked = all(f.mask.kind == "picked" and not f.problem for f in group)
    if any(f.keys.store is not first.keys.store for f in group):
        picked = False
        refusal = f"the model writes cache layer {first.layer} more than once in one forward"
    keys, values = example(first.keys.new), example(first.values.new)
    kind, action, reason = first.mask.kind, "rewritten", ""
    if picked:
        action, reason = "kept", refusal
    elif refusal:
        kind, action, reason = "other", "refused", refusal
    elif kind == "sliding" and first.extra:
        reason = f"on a ring that is read in time order, with the model's own attention: {first.extra}"
    elif kind == "full":
        action, reason = "kept", "global attention: every earlier key is visible, so there is nothing to evict"
    elif kind == "chunked":
        action = "kept"
        reason = (
            f"chunked attention: a query sees the keys of its own chunk of {first.mask.window}, which is no window "
            "that slides; the layer keeps its keys in a linear store and its own mask"
        )
    return LayerSpec(
        index=first.layer,
        kind=kind,
        window=first.mask.window if kind == "sliding" else None,
        action=action,
        reason=reason,
        heads=int(shape_of(first.site.query)[1]),
        kv_heads=int(keys.shape[1]),
        head_dim=int(keys.shape[3]),
        v_head_dim=int(values.shape[3]),
        k_dtype=keys.dtype,
        v_dtype=values.dtype,
        device=keys.device,
        scale=float(first.site.scale) if isinstance(first.site.scale, (int, float)) else 0.0,
        softcap=first.site.softcap,
        sinks=first.site.sinks is not None,
    )


def _state(index: int, device: torch.device) -> LayerSpec:
    nothing = torch.get_default_dtype()
    reason = "no attention: a convolution or recurrence, whose state stays what transformers makes it"
    return LayerSpec(index, "state", None, "kept", reason, 0, 0, 0, 0, nothing, nothing, device)


def _unmatched(view: UnmatchedView) -> LayerSpec:
    keys, values = example(view.keys.args[1]), example(view.values.args[1])
    return LayerSpec(
        index=view.layer,
        kind="other",
        window=None,
        action="refused",
        reason=view.reason,
        heads=0,
        kv_heads=int(keys.shape[1]),
        head_dim=int(keys.shape[3]),
        v_head_dim=int(values.shape[3]),
        k_dtype=keys.dtype,
        v_dtype=values.dtype,
        device=keys.device,
    )
