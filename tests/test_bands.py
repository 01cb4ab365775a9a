"""Sliding attention by bands: every size around a block's and a window's, against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swa_pass.ops.bands import attend_bands, block_of


def formula(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, sinks: Tensor | None) -> Tensor:
    q, k, v = (x.double() for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).mT * scale
    query, key = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    scores = scores.masked_fill((key < query) | (key >= query + window), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)], 3)
    return scores.softmax(-1)[..., : k.shape[2]] @ v.repeat_interleave(groups, 1)


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("tokens", [1, 2, 127, 128, 129, 255, 256, 257, 600])
@pytest.mark.parametrize("window", [1, 2, 40, 128, 256, 257, 600])
def test_bands(window: int, tokens: int, sinks: bool) -> None:
    torch.manual_seed(window * 1000 + tokens)
    heads, kv_heads, dim, value_dim = 4, 2, 16, 12
    q = torch.randn(2, tokens, heads, dim).transpose(1, 2)  # as a model makes them: tokens before heads
    k, v = (torch.randn(2, window - 1 + tokens, kv_heads, dim).transpose(1, 2) for _ in range(2))
    logits = torch.randn(heads) if sinks else None
    out = torch.full((2, heads, tokens, value_dim), float("nan"))
    attend_bands(q, k, v, window, 0.5, logits, out)
    expected = formula(q, k, v[..., :value_dim], window, 0.5, logits)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)
    fewer = formula(q, k, v[..., :value_dim], window - 1, 0.5, logits).nan_to_num()
    assert (out - fewer).abs().max() > 1e-3


def test_a_token_out_of_every_window_is_not_seen() -> None:
    window = 300
    block = block_of(window)
    q, k, v = torch.randn(1, 2, 2 * block, 16), *torch.randn(2, 1, 2, window - 1 + 2 * block, 16)
    out = torch.empty_like(q)
    k[:, :, 0], v[:, :, 0] = float("nan"), float("nan")  # query 0 sees it, and its block looks at it
    attend_bands(q, k, v, window, 0.5, None, out)
    assert out[:, :, 0].isnan().all()
    assert out[:, :, block:].isfinite().all()
