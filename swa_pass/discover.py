"""Finds out what each layer's attention really is, from the graph of a forward on a probe cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from .capture import capture
from .compat import DynamicCache, cache_argument, joint_states, state_layers
from .graph import example, shape_of
from .log import logger
from .passes import Finding, find_sites
from .passes.find import UnmatchedView, unmatched_views
from .probe import CaptureError
from .recording import NotRecorded, record
from .spec import LayerSpec


def discover(model: Any, forward: Any) -> tuple[LayerSpec, ...]:
    """What each cache layer's attention is, proven from the graph's own masks.

    Returns one spec per cache layer; `action` is what the run-time graphs are expected to do. A recorded graph is taken
    where it leaves nothing open; otherwise Dynamo's decides, and says why.

    Raises:
        CaptureError: there is no such graph.
    """
    return _recorded(model, forward) or _captured(model, forward)


def _recorded(model: Any, forward: Any) -> tuple[LayerSpec, ...]:
    """Specs from the recorded forward; none where it cannot be recorded, or a layer of it is refused."""
    try:
        specs = _specs(record(model, forward), model)
    except (NotRecorded, CaptureError) as why:
        logger.debug("the forward was not recorded: %s", why)
        return ()
    return () if any(spec.action == "refused" for spec in specs) else specs


def _captured(model: Any, forward: Any) -> tuple[LayerSpec, ...]:
    try:
        gm = capture(model, forward)
    except CaptureError:
        layers = _grown(model, forward)
        if layers is None:
            raise
        gm = capture(model, forward, layers)
    return _specs(gm, model)


def _specs(gm: GraphModule, model: Any) -> tuple[LayerSpec, ...]:
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
