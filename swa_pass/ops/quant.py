"""Stores of one byte a number: int8 or float8 with one float32 scale for each token and kv head.

    token (head_dim numbers)   0.50  -1.27   0.02      amax 1.27, so scale = 1.27 / 127 = 0.01
    data (int8)                  50   -127      2
    read back                  0.50  -1.27   0.02      within scale / 2 of what was written

Rounding is symmetric and to nearest even, and the same bit for bit in every implementation. New tokens are rounded
*before* they are attended to: what a query sees of a token never depends on whether it came in the same step or
earlier, so chunks, drafts and rollbacks give the same result.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: The largest number that each store dtype is scaled to.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
#: A token whose numbers are all smaller than this becomes zeros (its scale would have no reciprocal in float32).
SMALLEST = 1e-30


def quantise(tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(..., head_dim) of any float dtype -> the same shape in `dtype`, and the scales (...) in float32."""
    numbers = tokens.float()
    top = numbers.abs().amax(-1)
    kept = ~(top < SMALLEST)  # NaN is kept: it must come out again
    scale = torch.where(kept, top / LARGEST[dtype], 0.0)
    # Not `number / top`, which torch computes as top.reciprocal() * number: one rounding more than a division.
    factor = torch.where(kept, torch.full_like(top, LARGEST[dtype]) / top, 0.0)
    scaled = numbers * factor[..., None]
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


def dequantise(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `quantise`, in `dtype`."""
    return (data.float() * scale[..., None]).to(dtype)


def rounded(tokens: Tensor, store: torch.dtype) -> Tensor:
    """What is read back of `tokens` once they went through a store."""
    return dequantise(*quantise(tokens, store), tokens.dtype)
