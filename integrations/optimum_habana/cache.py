"""Ring stores in the place of optimum-habana's `KVCache` modules.

A ring has exactly W slots (no slack): once W tokens are in, every slot is visible to the next query, and attention
needs no mask. Slot and position come from the tensor `token_idx`, so that a recorded HPU graph is right at every step.

    W = 4, token_idx = 7 (the token at position 6 is written)      slot  0  1  2  3
                                                                   token 4  5  6  3
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RingKVCache(nn.Module):
    """The keys or values of one sliding layer: (batch, kv_heads, min(window, longest), head_dim), RoPE included.

    The same methods as optimum-habana's KVCache. `get_shape` reports the logical shape (batch, kv_heads, longest,
    head_dim): the stock code takes rope length and mask width from it.
    """

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.cache: Tensor | None = None
        self.logical: torch.Size | None = None
        self.inp_seq_len = -1

    def allocate(self, inp_seq_len: int, dtype: torch.dtype, device: torch.device, shape: Any) -> None:
        """Room for `shape[2]` logical tokens, all zeros. Memory of the right shape is kept: graphs know its address."""
        rows, kv_heads, longest, head_dim = shape
        ring = (rows, kv_heads, min(self.window, longest), head_dim)
        self.logical, self.inp_seq_len = torch.Size(shape), inp_seq_len
        old = self.cache
        if old is not None and tuple(old.shape) == ring and (old.dtype, old.device.type) == (dtype, device.type):
            old.zero_()
        else:
            self.cache = torch.zeros(ring, dtype=dtype, device=device)

    def get_shape(self) -> torch.Size | None:
        return self.logical

    @staticmethod
    def update(prev: Tensor, cur: Tensor, dim: int, idx: Tensor | None, inp_seq_len: int = -1) -> Tensor:
        """Writes `cur` (B, kv_heads, n, head_dim) into the ring `prev` and returns what attention reads.

        One token: at position idx - 1 (idx: 0-dim integer tensor), and the ring is returned. More: a prompt from
        position 0 on, of which the last slots' worth is kept, and `cur` is returned.
        """
        new, slots = cur.shape[2], prev.shape[2]
        if new == 1 and idx is not None:
            return prev.index_copy_(2, (idx - 1).remainder(slots).reshape(1), cur.to(prev.dtype))
        kept = min(new, slots)
        where = torch.arange(new - kept, new, device=cur.device).remainder(slots)
        prev.index_copy_(2, where, cur[:, :, new - kept :].to(prev.dtype))
        return cur

    def forward(self, cur: Tensor, dim: int, idx: Tensor | None) -> Tensor:
        assert self.cache is not None, "allocate_kv_cache comes first"
        return self.update(self.cache, cur, dim, idx, self.inp_seq_len)


def reorder(store: Any, beam_idx: Tensor) -> None:
    """Makes row i of a store (ring or stock) a copy of old row beam_idx[i], at the same address."""
    store.cache.copy_(store.cache.index_select(0, beam_idx.to(store.cache.device)))
