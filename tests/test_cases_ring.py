"""Known bugs of ring arithmetic: boundaries, wraps, chunks, and what exactly a window is.

Numbers are those of the collection of public bug reports that the tests were made from.
"""

from __future__ import annotations

import pytest
import torch
from helpers import (
    W,
    assert_oracle,
    feed,
    full_logits,
    make_pair,
    one_by_one,
    shared_pair,
    stored_keys,
    token_ids,
)

FAMILIES = ("mistral", "gemma3")
pytestmark = pytest.mark.parametrize("family", FAMILIES)


@pytest.mark.parametrize("prompt", [1, W - 2, W - 1, W, W + 1, 2 * W - 1, 2 * W, 2 * W + 1, 3 * W])
def test_case_1_every_step_after_any_prompt(family, prompt):
    """A cache that rolls one step early loses the oldest visible token exactly when the length reaches W."""
    pair = shared_pair(family)
    ids = token_ids(prompt + 3 * W + 2)
    got, _ = feed(pair, ids, one_by_one(prompt, 3 * W + 2))
    assert_oracle(pair, got, lambda model: full_logits(model, ids))


def test_case_2_prompt_longer_than_the_ring(family):
    """Writing before attending lets early queries see later tokens in reused slots: all positions are compared."""
    pair = shared_pair(family)
    ids = token_ids(6 * W + 3)  # longer than window + slack too
    got, _ = feed(pair, ids, [6 * W + 3])
    assert_oracle(pair, got, lambda model: full_logits(model, ids))


@pytest.mark.parametrize("chunks", [[2 * W, 2 * W, 5], [W + 1] * 4, [5 * W, 4 * W, 3]])
def test_case_3_chunks_longer_than_the_window(family, chunks):
    pair = shared_pair(family)
    ids = token_ids(sum(chunks))
    got, _ = feed(pair, ids, chunks)
    assert_oracle(pair, got, lambda model: full_logits(model, ids))


def test_case_4_any_chunking_leaves_the_same_cache(family):
    pair = shared_pair(family)
    ids = token_ids(4 * W)
    caches = []
    for chunk in (4 * W, 1, 3, W):
        chunks = [chunk] * (4 * W // chunk) + [4 * W % chunk] * (4 * W % chunk > 0)
        got, cache = feed(pair, ids, chunks)
        assert_oracle(pair, got, lambda model: full_logits(model, ids))
        caches.append(cache)
    for layer in range(len(caches[0].layers)):
        first = stored_keys(caches[0], layer)
        assert first.shape[2] == (W - 1 if caches[0].layers[layer].is_sliding else 4 * W)
        for other in caches[1:]:
            torch.testing.assert_close(stored_keys(other, layer), first, atol=1e-5, rtol=0)


def test_case_6_ten_wraps(family):
    """Which token a slot holds must come from the logical position, never from the wrapped one."""
    pair = shared_pair(family)
    steps = 10 * (W + 16) + 3  # the ring has W + slack slots
    ids = token_ids(3 + steps)
    got, _ = feed(pair, ids, one_by_one(3, steps))
    assert_oracle(pair, got, lambda model: full_logits(model, ids))


@pytest.mark.parametrize("chunk", [2, 3, W - 1, W, W + 1])
def test_case_7_several_tokens_a_call_evict(family, chunk):
    pair = shared_pair(family)
    ids = token_ids(20 * chunk)
    slots = []

    def note(cache):
        slots.append([layer.k_store.shape[2] for layer in cache.layers if layer.is_sliding])

    got, cache = feed(pair, ids, [chunk] * 20, before_step=note)
    assert_oracle(pair, got, lambda model: full_logits(model, ids))
    assert max(max(s) for s in slots) <= W + 16, "a ring grew beyond window + slack"
    assert [cache.get_seq_length(i) for i in range(len(cache.layers))] == [20 * chunk] * len(cache.layers)


@pytest.mark.parametrize("prompt", [1, 2, W - 1, W, W + 1, 2 * W + 2])
def test_case_10_several_tokens_on_a_warm_cache(family, prompt):
    """A mask made from local row numbers, or one that assumes as many queries as keys."""
    pair = shared_pair(family)
    for new in range(1, W + 4):
        ids = token_ids(prompt + new + W)
        got, _ = feed(pair, ids, [prompt, new, W])  # W more, so that every pair is long enough to tell a wrong window
        assert_oracle(pair, got, lambda model: full_logits(model, ids))  # noqa: B023


@pytest.mark.parametrize("mask", ["absent", "ones", "none"])
def test_case_11_the_window_reaches_decode(family, mask):
    pair = shared_pair(family)
    ids = token_ids(3 * W)
    if mask == "none":
        got, _ = feed(pair, ids, one_by_one(2, 3 * W - 2), bare=True)
    else:
        got, _ = feed(
            pair, ids, one_by_one(2, 3 * W - 2), attention_mask=torch.ones_like(ids) if mask == "ones" else None
        )
    assert_oracle(pair, got, lambda model: full_logits(model, ids))
    sliding = [spec.index for spec in pair.runtime.specs if spec.kind == "sliding"]
    assert sliding == ([0, 1] if family == "mistral" else [0, 2])
    for step in pair.runtime.steps.values():
        for rewrite in step.rewrites:
            assert set(sliding) <= set(rewrite.fused)


def test_case_12_exactly_w_keys_self_included(family):
    """One layer: the token W places back moves nothing, not by a bit; the one W - 1 places back moves the logits."""
    pair = (
        make_pair(family, layer_types=["sliding_attention"])
        if family == "gemma3"
        else make_pair(family, num_hidden_layers=1)
    )
    n = 2 * W + 3
    ids = token_ids(n + 1)
    for chunks in ([n + 1], one_by_one(3, n - 2), [W, W, 4]):
        last = feed(pair, ids, chunks)[0][:, -1]
        for back, moves in ((W + 1, False), (W, False), (W - 1, True), (0, True)):
            changed = ids.clone()
            changed[0, n - back] = changed[0, n - back] % 127 + 1
            moved = (feed(pair, changed, chunks)[0][:, -1] - last).abs().max().item()
            assert (moved > 1e-3) if moves else (moved == 0), f"token {back} places back moved the logits by {moved}"
