"""`kv_dtype`: keys and values in one byte a number.

The oracle is the stock model without a cache whose keys and values are rounded just before each attention, as the
stores round them. So the rings are held to the same tolerance as exact ones, and what quantisation itself costs is
measured elsewhere (docs/benchmarks.md). In float64: in float32 a number on the border of two steps may go either way.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import families
import pytest
import torch
from helpers import (
    TOLERANCE,
    Pair,
    W,
    assert_oracle,
    distance,
    feed,
    full_logits,
    left_padded,
    one_by_one,
    poison,
    positions_of,
    tiny,
    token_ids,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import swa_pass
from swa_pass.api import runtime_of
from swa_pass.cache.store import KV_DTYPES
from swa_pass.compat import output_cache
from swa_pass.ops.quant import rounded

BOTH = [("mistral", "int8"), ("gemma3", "float8")]


@contextmanager
def rounding(kv_dtype: str) -> Iterator[None]:
    """Inside, stock models round keys and values before they attend."""

    def attention(module, query, key, value, *args, **kwargs):
        key, value = (rounded(t, KV_DTYPES[kv_dtype]) for t in (key, value))
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = before


def oracle(kv_dtype, ids, columns=slice(None), **given):
    def logits(stock):
        with rounding(kv_dtype):
            return full_logits(stock, ids, **given)[:, columns]

    return logits


@pytest.fixture(scope="module", params=BOTH, ids="-".join)
def made(request):
    family, kv_dtype = request.param
    stock = tiny(family).double()
    return Pair(swa_pass.apply(copy.deepcopy(stock), backend="eager", kv_dtype=kv_dtype), stock), kv_dtype


@pytest.mark.parametrize("chunks", [one_by_one(3 * W, 2 * W), one_by_one(1, 3 * W), [W + 3] * 4])
def test_logits_are_those_of_rounded_keys(made, chunks):
    pair, kv_dtype = made
    ids = token_ids(sum(chunks))
    got, cache = feed(pair, ids, chunks, before_step=lambda cache: poison(cache, float("nan")))
    assert {store.data.dtype for layer in cache.stores for store in (layer.k, layer.v)} == {KV_DTYPES[kv_dtype]}
    assert_oracle(pair, got, oracle(kv_dtype, ids))
    assert distance(got, full_logits(pair.stock, ids)) > 1e-3, "nothing was rounded"


def test_left_padded_rows(made):
    pair, kv_dtype = made
    rows, ids, mask, starts = left_padded((3, 2 * W, 11), 4 * W)
    got, _ = feed(pair, ids, one_by_one(2 * W, 2 * W), attention_mask=mask)
    for row, alone, start in zip(got, rows, starts.tolist(), strict=True):
        assert_oracle(pair, row[None, start:], oracle(kv_dtype, alone))


def test_bytes_are_those_of_the_report(made):
    pair, _ = made
    report = swa_pass.explain(pair.model)
    _, cache = feed(pair, token_ids(40, batch=3), [40])
    assert cache.nbytes == report.kv_bytes(40, batch=3)
    assert report.kv_bytes(40) * 5 < report.stock_kv_bytes(40) * 3, "float64 to one byte and scales"
    assert report.to_dict()["kv_dtype"] == str(cache.clock.kv_dtype)


@torch.no_grad()
def test_the_cache_alone_reads_the_same(made):
    """A mask with a hole runs the stock forward on our cache, token by token and in chunks alike."""
    pair, kv_dtype = made
    ids = token_ids(3 * W)
    mask = torch.ones_like(ids)
    mask[0, 9:11] = 0
    parts, cache = [], None
    for first, stop in [(0, 12), *((n, n + 1) for n in range(12, 3 * W))]:
        given = {} if cache is None else {pair.runtime.cache_name: cache}
        output = pair.model(ids[:, first:stop], attention_mask=mask[:, :stop], use_cache=True, **given)
        cache, parts = output_cache(output), [*parts, output.logits]
    got, seen = torch.cat(parts, 1), mask[0].bool()
    assert_oracle(pair, got[:, seen], lambda stock: oracle(kv_dtype, ids, attention_mask=mask)(stock)[:, seen])


@torch.no_grad()
def test_snapshots_rollback_and_rows(made, tmp_path):
    """Everything that moves tokens moves their scales with them."""
    pair, kv_dtype = made
    ids = token_ids(5 * W, batch=2)
    _, cache = feed(pair, ids[:, : 3 * W], [3 * W])
    cache.snapshot().save(tmp_path / "prefix.safetensors")
    feed(pair, ids[:, 3 * W : 4 * W], [W], cache=cache, seen=3 * W)
    cache.crop(-W)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 1]))
    got, _ = feed(pair, ids[:, 3 * W :], [1] * 2 * W, cache=cache, seen=3 * W)
    assert_oracle(pair, got, oracle(kv_dtype, ids, slice(3 * W, None)))
    other = pair.runtime.make_cache()
    other.restore(swa_pass.load_snapshot(tmp_path / "prefix.safetensors"))
    got, _ = feed(pair, ids[:, 3 * W :], [1] * 2 * W, cache=other, seen=3 * W)
    assert_oracle(pair, got, oracle(kv_dtype, ids, slice(3 * W, None)))
    with pytest.raises(ValueError, match="kv_dtype"):
        swa_pass.HybridCache(pair.runtime.make_cache().windows).restore(cache.snapshot())


def test_generate_and_what_is_compiled(made):
    pair, _ = made
    ids = token_ids(2 * W, batch=2)
    given = {"max_new_tokens": 2 * W, "do_sample": False}
    before = pair.runtime.compiled_calls
    whole = pair.model.generate(ids, **given)
    assert pair.runtime.compiled_calls - before == 2 * W
    assert torch.equal(whole, pair.model.generate(ids, **given, prefill_chunk_size=5)), "chunks do not matter"
    for step in pair.runtime.steps.values():
        for rewrite in step.rewrites:
            assert not rewrite.views_left
            assert len(rewrite.fused) == pair.stock.config.num_hidden_layers


@pytest.mark.parametrize("name", ["gemma4_text", "gemma2"])
@torch.no_grad()
def test_shared_keys_and_softcap(name):
    """The fused graphs against the stock forward on the same kind of cache, which reads its keys in time order."""
    stock = families.build(families.BY_NAME[name]).double()
    model = swa_pass.apply(copy.deepcopy(stock), backend="eager", kv_dtype="int8")
    runtime, ids = runtime_of(model), families.ids_of(4 * W)
    positions = positions_of(torch.ones_like(ids))

    def stepwise(run):
        parts, cache = [], runtime.make_cache()
        for first, stop in [(0, 2 * W), *((n, n + 1) for n in range(2 * W, 4 * W))]:
            given = {"position_ids": positions[:, first:stop], runtime.cache_name: cache}
            parts.append(run(input_ids=ids[:, first:stop], use_cache=True, **given).logits)
        return torch.cat(parts, 1)

    got = stepwise(model)
    assert runtime.compiled_calls == 2 * W + 1
    assert all(not rewrite.views_left for step in runtime.steps.values() for rewrite in step.rewrites)
    assert distance(got, stepwise(stock)) < TOLERANCE
    assert distance(got, full_logits(stock, ids)) > 1e-3, "nothing was rounded"


def test_the_name_is_checked():
    with pytest.raises(ValueError, match='kv_dtype=\'int4\': use "int8", "float8"'):
        swa_pass.apply(tiny("mistral"), kv_dtype="int4")
    with pytest.raises(ValueError, match="load the model in that dtype"):
        swa_pass.HybridCache([8], kv_dtype=torch.bfloat16)
