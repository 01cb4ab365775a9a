"""flex_attention as an attention idiom: models, and the block masks and score functions that must be refused."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import F, Pair, S, assert_oracle, feed, full_logits, left_padded, one_by_one, positions_of, tiny
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import swa_pass
from swa_pass.api import missing_for_inductor
from swa_pass.capture import own_code
from swa_pass.passes import Finding, find_sites
from swa_pass.probe import ProbeCache

W = 8


def flex_pair(family: str, backend: str = "eager", **overrides: Any) -> Pair:
    """An applied model on flex_attention, and its twin on the attention that `family` has by itself."""
    stock = tiny(family, **overrides)
    model = copy.deepcopy(stock)
    model.set_attn_implementation("flex_attention")
    return Pair(swa_pass.apply(model, backend=backend), stock)


NEEDS_COMPILER = pytest.mark.skipif(bool(missing_for_inductor()), reason="Inductor needs a C++ compiler")


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        pytest.param("gemma3", "eager", marks=pytest.mark.extended, id="gemma3-eager"),
        pytest.param("gemma3", "inductor", marks=[pytest.mark.extended, NEEDS_COMPILER], id="gemma3-inductor"),
        pytest.param("mistral", "eager", id="mistral-eager"),
        pytest.param("mistral", "inductor", marks=NEEDS_COMPILER, id="mistral-inductor"),
    ],
)
def test_model_on_flex_attention(family: str, backend: str) -> None:
    """Prefill and decode past the window, a row left padded: every layer matched in every graph, logits of stock."""
    extra = {"attn_logit_softcapping": 5.0, "layer_types": [S, F]} if family == "gemma3" else {"num_hidden_layers": 1}
    pair = flex_pair(family, backend, **extra)
    pair.stock.set_attn_implementation("eager")
    _, ids, mask, _ = left_padded([2 * W + 3, 2 * W], 4 * W)
    got, _ = feed(pair, ids, one_by_one(2 * W + 3, 2 * W - 3), attention_mask=mask)
    real = mask.bool()

    def reference(model: Any) -> Tensor:
        return full_logits(model, ids, attention_mask=mask, position_ids=positions_of(mask))[real]

    assert_oracle(pair, got[real], reference)
    layers = len(pair.runtime.specs)
    for step in pair.runtime.steps.values():
        for rewrite in step.rewrites:
            assert rewrite.matches == layers
            assert not rewrite.left_alone
            assert not [op for op in rewrite.ops_after if "vmap" in op or "batch_dim" in op or op == "argsort"]


# ------------------------------------------------------------------------------------------------ one attention


Q, SLOTS = 3, 320


class _Seen(Exception):
    """The graph was looked at; it need not run."""


def site_of(attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Finding:
    """What is found about ``attention(query, keys, values, first position)`` on a cache of ours."""
    seen: list[Finding] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.extend(find_sites(gm))

        def stop(*_: Any) -> Any:
            raise _Seen

        return stop

    def step(query: Tensor, new: Tensor, cache: Any) -> Tensor:
        keys, values = cache.update(new, new, 0)
        return attention(query, keys, values, cache.get_seq_length())

    cache = ProbeCache(1, torch.device("cpu"), {}, {})
    compiled = torch.compile(own_code(step), backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad(), contextlib.suppress(_Seen):
        compiled(torch.randn(1, 4, Q, 16), torch.randn(1, 2, Q, 16), cache)
    return seen[0]


def windowed(first: Tensor, window: int = W) -> Callable[..., Tensor]:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q + first) & (k > q + first - window)

    return mask_mod


def test_window_is_proven() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
        blocks = create_block_mask(windowed(first), 1, None, Q, SLOTS, device="cpu")
        return flex_attention(q, k, v, block_mask=blocks, enable_gqa=True, scale=0.3)  # type: ignore[return-value]

    found = site_of(attention)
    assert not found.refused
    assert (found.mask.kind, found.mask.window) == ("sliding", W)
    assert (found.site.scale, found.site.softcap, found.site.grouped) == (0.3, 0.0, True)


def test_softcap_is_read() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
        blocks = create_block_mask(windowed(first), 1, None, Q, SLOTS, device="cpu")

        def cap(score: Tensor, *place: Tensor) -> Tensor:
            return 5.0 * torch.tanh(score / 5.0)

        return flex_attention(q, k, v, score_mod=cap, block_mask=blocks, enable_gqa=True)  # type: ignore[return-value]

    assert site_of(attention).site.softcap == 5.0


def test_position_bias_is_refused() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
        blocks = create_block_mask(windowed(first), 1, None, Q, SLOTS, device="cpu")

        def bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + (i - j)

        return flex_attention(q, k, v, score_mod=bias, block_mask=blocks, enable_gqa=True)  # type: ignore[return-value]

    assert "score_mod changes the scores by add" in site_of(attention).refusal


def test_other_heads_other_windows_is_refused() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j <= i + first) & (j > i + first - W - h)

        blocks = create_block_mask(mask_mod, 1, 4, Q, SLOTS, device="cpu")
        return flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)  # type: ignore[return-value]

    assert site_of(attention).refused


@pytest.mark.parametrize("window", [W - 1, W + 1])
def test_lists_of_another_mask_are_refused(window: int) -> None:
    """Blocks made for one window and a mask_mod of another: which of them hides a key depends on where blocks end."""

    def attention(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
        blocks = create_block_mask(windowed(first), 1, None, Q, SLOTS, device="cpu")
        blocks.mask_mod = windowed(first, window)
        return flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)  # type: ignore[return-value]

    assert "another mask than its mask_mod" in site_of(attention).refusal


def test_lists_from_outside_are_refused() -> None:
    blocks = create_block_mask(lambda b, h, q, k: k <= q + 160, 1, None, Q, SLOTS, device="cpu")

    def attention(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)  # type: ignore[return-value]

    assert "not made in this graph" in site_of(attention).refusal
