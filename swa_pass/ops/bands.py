"""Sliding attention of many new tokens by the kernel under torch's SDPA, once the window moves.

Queries are cut into blocks. A block of N sees window - 1 + N keys, at the same places whichever block it is, so one
small mask serves all of them; and blocks are a *batch*, whose keys overlap in memory:

    window 4, blocks of 2        keys    0 1 2 3 4 5 6 7 8 ...
                                 block 0 [. . . q q]            strides of the batch: 2 tokens, for queries and keys
                                 block 1     [. . . q q]
                                 block 2         [. . . q q]

One call, no key copied, and no more work than the window asks for: L tokens cost O(L * window).
"""

from __future__ import annotations

import torch
from torch import Tensor

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def block_of(window: int) -> int:
    """Queries of a block: more of them fill matrix products better, and look at more keys that they do not see."""
    return 128 if window <= 256 else 256


def band(first_query: int, end_query: int, first_key: int, end_key: int, start: int, window: int) -> Tensor:
    """(queries, keys) bool: start <= key, query - window < key <= query, all absolute positions."""
    query = torch.arange(first_query, end_query)[:, None]
    key = torch.arange(first_key, end_key)[None, :]
    visible = (key <= query) & (key >= start)
    return visible & (key > query - window) if window > 0 else visible


def attend_bands(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, sinks: Tensor | None, out: Tensor) -> None:
    """Attention of queries (B, H, Q, D) over keys (B, KV, window - 1 + Q, D) and values (the same shape): query i sees
    keys i to i + window - 1. Into `out` (B, H, Q, Dv), which may have fewer numbers a head. sinks: (H,)."""
    tokens, block = q.shape[2], block_of(window)
    whole = tokens // block * block
    end = window - 1 + block
    mask = torch.zeros(block, end, dtype=q.dtype)
    mask.masked_fill_(~band(window - 1, end, 0, end, 0, window), float("-inf"))
    for row in range(q.shape[0]):
        for first, last, size in ((0, whole, block), (whole, tokens, tokens - whole)):
            if first == last:
                continue
            wide = window - 1 + size
            blocks = [
                x[row, :, first:].unfold(1, count, size).permute(1, 0, 3, 2)  # (blocks, heads, count, dim), a view
                for x, count in ((q[:, :, :last], size), (k, wide), (v, wide))
            ]
            found, lse = FLASH(*blocks, 0.0, False, attn_mask=mask[:size, :wide], scale=scale)
            found = found[..., : out.shape[3]]
            if sinks is not None:  # one logit more in the denominator
                found = found * torch.sigmoid(lse - sinks.float()[:, None])[..., None]
            out[row, :, first:last].unflatten(1, (-1, size)).copy_(found.transpose(0, 1))
