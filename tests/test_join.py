"""Rows that join a batch and leave it: continuous batching by hand, rows of different lengths on one cache."""

from __future__ import annotations

import families
import pytest
import torch
import transformers
from helpers import W, assert_oracle, distance, feed, full_logits, make_pair, poison, shared_pair, token_ids
from test_snapshots import read

import swa_pass
from swa_pass.compat import output_cache


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize(("first", "second"), [(3 * W, 2), (2, 3 * W), (W, W - 1), (3 * W, 2 * W), (5, 5)])
def test_join_go_on_and_leave(family, first, second):
    """Two rows are read apart, go on together past a wrap, one leaves, the other goes on alone."""
    pair = shared_pair(family)
    new = 2 * W
    rows = [token_ids(n + 2 * new, seed=n) for n in (first, second + 1)]
    a, b = (feed(pair, row[:, :n], [n], seen=0)[1] for row, n in zip(rows, (first, second), strict=True))
    a.join(b)
    seen = max(first, second)
    assert a.get_seq_length() == seen
    starts = torch.tensor([seen - first, seen - second])
    poison(a, float("nan"), starts)
    ids = torch.cat([row[:, n : n + 2 * new] for row, n in zip(rows, (first, second), strict=True)])
    mask = torch.ones(2, seen + 2 * new, dtype=torch.int64)
    mask[0, : starts[0]] = mask[1, : starts[1]] = 0
    got, cache = feed(pair, ids[:, :new], [1] * new, cache=a, seen=seen, attention_mask=mask)
    for i, n in enumerate((first, second)):
        assert_oracle(pair, got[i : i + 1], lambda stock, i=i, n=n: full_logits(stock, rows[i][:, : n + new])[:, n:])
    cache.batch_select_indices(torch.tensor([1]))
    alone, _ = feed(pair, ids[1:, new:], [3, *[1] * (new - 3)], cache=cache, seen=seen + new, attention_mask=mask[1:])
    assert_oracle(pair, alone, lambda stock: full_logits(stock, rows[1][:, : second + 2 * new])[:, second + new :])


@pytest.mark.parametrize("back", [1, 9])
def test_rollback_after_a_join(back):
    pair = shared_pair("mistral")
    rows = [token_ids(4 * W, seed=n) for n in (0, 1)]
    a, b = (feed(pair, row[:, :n], [n])[1] for row, n in zip(rows, (3 * W, 2 * W), strict=True))
    a.join(b)
    a.crop(-back)
    ids = torch.cat([rows[0][:, 3 * W - back : 4 * W - back], rows[1][:, 2 * W - back : 3 * W - back]])
    mask = torch.ones(2, 4 * W - back, dtype=torch.int64)
    mask[1, :W] = 0
    got, _ = feed(pair, ids, [1] * W, cache=a, seen=3 * W - back, attention_mask=mask)
    assert_oracle(pair, got[1:], lambda stock: full_logits(stock, rows[1][:, : 3 * W - back])[:, 2 * W - back :])
    assert_oracle(pair, got[:1], lambda stock: full_logits(stock, rows[0][:, : 4 * W - back])[:, 3 * W - back :])
    with pytest.raises(ValueError, match="cannot take back"):
        a.crop(-(16 + W + 1))


def test_what_cannot_be_joined_changes_nothing():
    mistral, gemma = shared_pair("mistral"), shared_pair("gemma3")
    prefix, more = token_ids(2 * W), token_ids(W, seed=1)
    cache = read(mistral, prefix)
    with pytest.raises(ValueError, match=r"was made by Gemma3ForCausalLM"):
        cache.join(read(gemma, prefix))
    with pytest.raises(ValueError, match="no token was read"):
        cache.join(mistral.runtime.make_cache())
    double = swa_pass.HybridCache(cache.windows)
    for layer in range(2):
        double.update(torch.zeros(1, 2, 3, 16).double(), torch.zeros(1, 2, 3, 16).double(), layer)
    with pytest.raises(ValueError, match="float64 in the snapshot"):
        cache.join(double)
    got, _ = feed(mistral, more, [1] * W, cache=cache, seen=2 * W)
    assert distance(got, full_logits(mistral.stock, torch.cat([prefix, more], 1))[:, 2 * W :]) < 5e-5


@torch.no_grad()
def test_a_state_knows_no_pads():
    if not hasattr(transformers, "Lfm3Config"):
        pytest.skip("this transformers has no lfm3")
    model = swa_pass.apply(families.build(families.BY_NAME["lfm3"]), backend="eager")
    ids = families.ids_of(2 * W)
    caches = [output_cache(model(ids, use_cache=True)) for _ in range(2)]
    assert caches[0].states
    with pytest.raises(ValueError, match="knows no left pads"):
        caches[0].join(caches[1])


def test_quantised_rows_join():
    pair = make_pair("mistral")
    model = swa_pass.apply(swa_pass.revert(pair.model), backend="eager", kv_dtype="int8")
    ids = token_ids(2 * W, batch=2)
    with torch.no_grad():
        together = output_cache(model(ids, use_cache=True))
        apart, other = (output_cache(model(row[None], use_cache=True)) for row in ids)
    apart.join(other)
    for one, both in zip(apart.stores, together.stores, strict=True):
        assert torch.equal(one.keys, both.keys)
        assert torch.equal(one.values, both.values)
