"""Reading a paged store: the blocks of a window, side by side.

    block_table[b] = [7, 2, 9, ...]        pages (blocks, kv_heads, size, head_dim), size = 4

    position   0 1 2 3 | 4 5 6 7 | 8 9 ...          position p of row b is in block block_table[b, p // size],
    block         7    |    2    |  9               at place p % size

Of a window only the blocks that it reaches into are read, ``(window - 2) // size + 2`` of them at most, whatever the
length of the text. Nothing is read back to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor


def window_of(
    k_pages: Tensor, v_pages: Tensor, table: Tensor, lengths: Tensor, starts: Tensor | None, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Dense stores (B, kv_heads, slots, head_dim) that begin with each row's first needed block, and `lengths` and
    `starts` counted from there."""
    blocks, size = table.shape[1], k_pages.shape[2]
    needed = min(blocks, (window - 2) // size + 2) if window > 0 else blocks
    first = ((lengths - (window - 1)) // size if window > 0 else torch.zeros_like(lengths)).clamp(0, blocks - needed)
    chosen = table.gather(1, first[:, None] + torch.arange(needed, device=table.device)).long()
    skipped = first * size
    later = None if starts is None else (starts - skipped).clamp(min=0)
    return _side_by_side(k_pages, chosen), _side_by_side(v_pages, chosen), lengths - skipped, later


def _side_by_side(pages: Tensor, chosen: Tensor) -> Tensor:
    batch, blocks = chosen.shape
    _, kv_heads, size, head_dim = pages.shape
    return pages[chosen].transpose(1, 2).reshape(batch, kv_heads, blocks * size, head_dim).contiguous()
