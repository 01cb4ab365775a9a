"""One forward pass: its options, and the masks that its layers share.

Masks are made from the 2D attention mask and `token_idx` alone; what the stock code builds is not looked at. They are
additive, in the dtype of the hidden states, 0 or the most negative number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: Queries of a prompt that go through attention at a time. No mask is ever longer than this on the query side.
PREFILL_BLOCK = 4096


@dataclass
class Step:
    """attention_mask: (B, n) of 0 and 1, or None for all ones. token_idx: 0-dim tensor, tokens so far with this one.
    unmasked: the host knows that no row is padded (prompt), or that every slot of every ring is visible (decode)."""

    attention_mask: Tensor | None
    token_idx: Tensor | None
    dtype: torch.dtype
    queries: int
    use_cache: bool
    unmasked: bool = False
    flash: bool = False
    recompute: bool = False
    causal_flag: bool = False
    fast_softmax: bool = False
    softmax_bf16: bool = False
    cache_idx: int | None = None
    _masks: dict[Any, Tensor] = field(default_factory=dict)

    @property
    def decoding(self) -> bool:
        """One new token that reads the stores (a prompt of one token does, too)."""
        return self.queries == 1 and self.use_cache

    def ring_mask(self, slots: int, device: torch.device) -> Tensor | None:
        """(B, 1, 1, slots) over the slots of a ring, or None where the host knows that all are visible."""
        if self.unmasked:
            return None
        if ("ring", slots) not in self._masks:
            last = _given(self.token_idx) - 1
            position = last - (last - torch.arange(slots, device=device)).remainder(slots)
            visible = (position >= 0)[None]
            if self.attention_mask is not None:
                visible = visible & self.attention_mask.index_select(1, position.clamp(min=0)).bool()
            self._masks["ring", slots] = _additive(visible[:, None, None], self.dtype)
        return self._masks["ring", slots]

    def linear_mask(self, length: int, device: torch.device) -> Tensor:
        """(B, 1, 1, length) over a store in time order of which token_idx tokens are written."""
        if ("linear", length) not in self._masks:
            visible = (torch.arange(length, device=device) < _given(self.token_idx))[None]
            mask = self.attention_mask
            if mask is not None:
                mask = torch.nn.functional.pad(mask, (0, max(length - mask.shape[1], 0)))[:, :length]
                visible = visible & mask.bool()
            self._masks["linear", length] = _additive(visible[:, None, None], self.dtype)
        return self._masks["linear", length]

    def prompt_mask(self, first: int, stop: int, oldest: int, window: int | None, device: torch.device) -> Tensor:
        """(B or 1, 1, stop - first, stop - oldest): queries [first, stop) of a prompt over keys [oldest, stop)."""
        name = (first, stop, oldest, window)
        if name not in self._masks:
            query = torch.arange(first, stop, device=device)[:, None]
            key = torch.arange(oldest, stop, device=device)[None]
            visible = key <= query
            if window is not None:
                visible = visible & (key > query - window)
            visible = visible[None, None]
            if self.attention_mask is not None:
                visible = visible & self.attention_mask[:, None, None, oldest:stop].bool()
            self._masks[name] = _additive(visible, self.dtype)
        return self._masks[name]


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(
        visible.logical_not(), torch.finfo(dtype).min
    )


def _given(token_idx: Tensor | None) -> Tensor:
    assert token_idx is not None  # checked before the first layer
    return token_idx


def left_pads(mask: Tensor | None) -> int | None:
    """Pads of the most padded row, read on the host; None if some row has a pad behind a token."""
    if mask is None:
        return 0
    rows = mask.detach().cpu().bool()
    if not bool(rows[:, -1].all()) or bool((rows[:, :-1] & ~rows[:, 1:]).any()):
        return None
    return int((~rows).sum(1).max())
