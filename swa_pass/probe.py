"""The cache with which a model's forward is looked at: every layer keeps everything, and the length is a *tensor*.

transformers then builds its masks inside the graph, as formulas over an unknown position (with Python lengths it would
skip masks below the window, and the layer would look global). Nothing is computed: a store is a shape.

    320 slots, 160 tokens held:   keys = view(store, new, lengths)   append(new, store, lengths)   mask = ... lengths
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cache.joint import BesideState
from .compat import Cache, CacheLayerMixin, cache_argument, joint_states, mixed_layers, state_layers

#: Capacity of the stores that the probe pretends to have; any value, nothing is allocated or computed. A model with
#: fewer positions gets as many (`_slots`): it may have tables of that size.
_PROBE_SLOTS = 320
#: New tokens in the probe: more than one, so that decode shortcuts do not hide the mask.
_PROBE_TOKENS = 3


class CaptureError(RuntimeError):
    """The forward could not be captured as one graph; the message says why."""


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


def probe_arguments(model: Any, forward: Any, layers: int | None = None) -> dict[str, Any]:
    """The arguments of a call that shows what a forward does: a few tokens, and a new probe cache.

    layers: how many the cache has; None: as many as the config says.

    Raises:
        CaptureError: no cache can be made for this model.
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
    return {
        "input_ids": torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device=device),
        name: ProbeCache(layers, device, state_layers(model.config), joint_states(model.config), _slots(model.config)),
        "use_cache": True,
    }


def _slots(config: Any) -> int:
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if type(positions) is not int or positions <= 2 * _PROBE_TOKENS:
        return _PROBE_SLOTS
    return min(_PROBE_SLOTS, positions)
