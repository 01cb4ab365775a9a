"""Known bugs of positions, lengths and 2D masks."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    F,
    S,
    W,
    assert_oracle,
    feed,
    full_logits,
    left_padded,
    make_pair,
    one_by_one,
    shared_pair,
    token_ids,
)

import swa_pass
from swa_pass.compat import output_cache

both_families = pytest.mark.parametrize("family", ["mistral", "gemma3"])


def manual_loop(pair, ids):
    """What users write: no positions, no mask, the cache from the last output."""
    cache, parts = None, []
    with torch.no_grad():
        for i in range(ids.shape[1]):
            kwargs = {} if cache is None else {pair.runtime.cache_name: cache}
            output = pair.model(ids[:, i : i + 1], **kwargs)
            cache = output_cache(output)
            parts.append(output.logits)
            assert [cache.get_seq_length(n) for n in range(len(cache.layers))] == [i + 1] * len(cache.layers)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("family", ["gemma3", "cohere2", "qwen2"])
def test_case_28_length_is_tokens_seen(family):
    """A length taken from a sliding layer that saturates at W gives wrong positions."""
    pair = make_pair("qwen2", layer_types=[F, S]) if family == "qwen2" else shared_pair(family)
    ids = token_ids(4 * W)
    calls = pair.runtime.compiled_calls
    got = manual_loop(pair, ids)
    assert pair.runtime.compiled_calls - calls == 4 * W
    assert_oracle(pair, got, lambda model: full_logits(model, ids))


@both_families
@pytest.mark.parametrize("later", [5, 1, W, W + 4])
def test_case_29_second_turn(family, later):
    pair = shared_pair(family)
    ids = token_ids(3 * W + later + 3)
    first, cache = feed(pair, ids[:, : 3 * W], one_by_one(W, 2 * W))
    second, _ = feed(pair, ids[:, 3 * W :], [later, 1, 1, 1], cache=cache, seen=3 * W)
    assert_oracle(pair, torch.cat([first, second], dim=1), lambda model: full_logits(model, ids))


@both_families
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("prompt", [1, 11])
def test_case_30_positions_by_hand(family, batch, prompt):
    pair = shared_pair(family)
    ids = token_ids(3 * W, batch)
    positions = (torch.arange(3 * W) + 40).expand(batch, -1)
    got, _ = feed(pair, ids, one_by_one(prompt, 3 * W - prompt), position_ids=positions)
    assert_oracle(pair, got, lambda model: full_logits(model, ids, position_ids=positions))


@both_families
def test_case_30_positions_of_each_row(family):
    """Rows at other positions, and positions that jump: they turn the keys, and say nothing about what is visible."""
    pair = shared_pair(family)
    ids = token_ids(3 * W, 2)
    positions = torch.stack([torch.arange(3 * W), torch.arange(3 * W) * 2 + 7])
    got, _ = feed(pair, ids, one_by_one(11, 3 * W - 11), position_ids=positions)
    ones = torch.ones_like(ids)  # without a mask the stock model takes jumps for packed sequences
    assert_oracle(pair, got, lambda model: full_logits(model, ids, position_ids=positions, attention_mask=ones))


@both_families
def test_case_32_mask_as_long_as_everything_seen(family):
    pair = shared_pair(family)
    rows, ids, mask, starts = left_padded((2 * W + 1, 2 * W + 5), 2 * W + 5)
    got, _ = feed(pair, ids, [15, *[1] * (2 * W + 5 - 15)], attention_mask=mask)
    real = torch.cat([row[start:] for row, start in zip(got, starts.tolist(), strict=True)])
    assert_oracle(pair, real, lambda model: torch.cat([full_logits(model, row)[0] for row in rows]))


@both_families
@pytest.mark.parametrize("chunks", [one_by_one(15, 20), [12, 12, 11], [1] * 35])
def test_case_32_a_hole_in_the_mask(family, chunks):
    """A hole is no left padding: such calls run on keys in time order, and are exact."""
    pair = shared_pair(family)
    ids, mask = token_ids(35), torch.ones(1, 35, dtype=torch.int64)
    mask[:, 9:12] = 0
    cache, parts, done = None, [], 0
    with torch.no_grad():
        for new in chunks:
            kwargs = {} if cache is None else {pair.runtime.cache_name: cache}
            total = done + new
            output = pair.model(
                ids[:, done:total],
                attention_mask=mask[:, :total],
                position_ids=torch.arange(done, total)[None],
                **kwargs,
            )
            cache, done = output_cache(output), total
            parts.append(output.logits)
    assert isinstance(cache, swa_pass.HybridCache)
    real = mask[0].bool()
    got = torch.cat(parts, dim=1)[:, real]
    assert_oracle(pair, got, lambda model: full_logits(model, ids, attention_mask=mask)[:, real])
    # and the hole matters: without it other logits come out
    assert (got - full_logits(pair.stock, ids)[:, real]).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["mistral", "phi3"])
def test_case_33_forty_windows(family):
    """Keys keep their rotation; eviction must not shift it. phi3 rotates only half of each head."""
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
    if family == "phi3":
        theta["rope_parameters"]["partial_rotary_factor"] = 0.5
    pair = make_pair(family, **theta)
    ids = token_ids(40 * W + 3)
    got, _ = feed(pair, ids, one_by_one(3 * W, 37 * W + 3))
    assert_oracle(pair, got, lambda model: full_logits(model, ids))


def test_case_35_rope_on_sliding_layers_only():
    """Cohere 2 turns no keys on its global layers."""
    pair = shared_pair("cohere2")
    ids = token_ids(4 * W)
    got, _ = feed(pair, ids, one_by_one(3 * W, W))
    assert_oracle(pair, got, lambda model: full_logits(model, ids))
