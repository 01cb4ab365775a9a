"""HybridCache: rings for sliding layers, linear stores for global ones, behind the transformers Cache protocol.

    layers          windows                 memory per row, 10,000 tokens seen
    0 1 2 3 4       512 512 512 512 512     5 rings of 512 + 16 slots
    5               None                    1 linear store of 10,048 slots
    ...

It is correct on its own (`update` returns keys in time order; see `layers`). On a model that went through
`swa_pass.apply` the graph pass replaces those reads by attention on the stores in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat import Cache
from ..spec import LayerSpec
from .layers import Clock, StoreLayer
from .ring import capacity_for

#: Tokens by which a ring can be rolled back. Assisted decoding asks for more through activate_past_recording().
DEFAULT_SLACK = 16


class HybridCache(Cache):
    """KV cache with one ring per sliding layer and one linear store per global layer.

    Args:
        windows: one entry per cache layer: the window in keys (the query's own included), or None for a global layer.
        slack: tokens that can be rolled back exactly after a ring has wrapped.
        hint: tokens the cache is expected to hold; sizes the first allocation, never a limit.
        max_length: hard limit on the tokens of global layers; None lets them grow.

    Raises:
        ValueError: a window below 1, or an empty list.
    """

    layers: list[StoreLayer]  # type: ignore[assignment]

    def __init__(
        self,
        windows: Sequence[int | None],
        *,
        slack: int = DEFAULT_SLACK,
        hint: int = 0,
        max_length: int | None = None,
    ) -> None:
        if not windows:
            raise ValueError(
                "windows is empty: give one entry per layer (a window in keys, or None for a global layer)"
            )
        self.clock = Clock(last=len(windows) - 1, slack=slack, hint=hint, max_length=max_length)
        super().__init__(layers=[StoreLayer(i, window, self.clock) for i, window in enumerate(windows)])

    def __repr__(self) -> str:
        rings = sum(layer.is_sliding for layer in self.layers)
        seen = self.layers[0].policy.seen
        return f"HybridCache({rings} rings, {len(self.layers) - rings} linear, {seen} tokens seen, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes of KV memory allocated now."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def seen(self) -> int:
        """Tokens seen per row."""
        return self.layers[-1].get_seq_length()

    # ------------------------------------------------------------------ compiled steps

    def prepare(self, specs: Sequence[LayerSpec], batch: int, new: int, starts: Tensor | None) -> None:
        """Makes everything ready for a traced step of `new` tokens: checks, allocates, grows. Writes no key.

        starts: (batch,) int64, absolute index of each row's first real token; None means no left padding.
        """
        held = self.layers[0].batch_size
        if held not in (-1, batch):
            raise ValueError(f"the cache holds {held} rows and {batch} were given. Use a new cache, or reset it.")
        for layer in self.layers:
            layer.check_limit(new)
        for layer, spec in zip(self.layers, specs, strict=True):
            if layer.has_room(new):
                continue
            shape = (batch, spec.kv_heads, 0)
            like_k = torch.empty(*shape, spec.head_dim, dtype=spec.k_dtype, device=spec.device)
            like_v = torch.empty(*shape, spec.v_head_dim, dtype=spec.v_dtype, device=spec.device)
            layer.reserve(like_k, like_v, new)
        self.clock.ensure(batch, self.layers[0].policy.seen, specs[0].device)
        assert self.clock.starts is not None
        self.clock.starts.zero_() if starts is None else self.clock.starts.copy_(starts)

    def advance(self, new: int) -> None:
        """Counts a traced step of `new` tokens."""
        for layer in self.layers:
            layer.policy.advance(new)
        if self.clock.lengths is not None:
            self.clock.lengths.add_(new)

    # ------------------------------------------------------------------ transformers protocol

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx == 0 and self.clock.max_length is not None and not torch.compiler.is_compiling():
            for layer in self.layers:  # before the first ring moves: a full layer further on must leave all as it was
                layer.check_limit(key_states.shape[-2])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.layers[layer_idx].get_seq_length()

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back ``-tokens_to_remove`` tokens in every layer, or raises before anything changes."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number of tokens to remove, got {tokens_to_remove}")
        for layer in self.layers:
            layer.check_crop(-tokens_to_remove)
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Forgets all tokens. The memory and its addresses stay."""
        super().reset()
        self.clock.stale = False
        if self.clock.lengths is not None and self.clock.starts is not None:
            self.clock.lengths.zero_()
            self.clock.starts.zero_()

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._forget_rows()

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._forget_rows()

    def _forget_rows(self) -> None:
        """The per-row tensors are made anew, with the new batch size, before the next traced step."""
        seen = self.seen
        for layer in self.layers:
            layer.policy.advance(seen - layer.policy.seen)
        self.clock.lengths = self.clock.starts = None
        self.clock.stale = False


def cache_bytes(specs: Sequence[LayerSpec], context: int, batch: int, slack: int) -> int:
    """KV bytes that a `HybridCache` made for `context` tokens allocates."""
    total = 0
    for spec in specs:
        slots = capacity_for(context, spec.window, slack if spec.window is not None else 0)
        per_slot = spec.head_dim * spec.k_dtype.itemsize + spec.v_head_dim * spec.v_dtype.itemsize
        total += batch * spec.kv_heads * slots * per_slot
    return total
