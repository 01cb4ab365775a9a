"""The stores have the dtype of the keys and values that come, each its own. Bits are never reinterpreted."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import (
    TOLERANCE,
    W,
    assert_oracle,
    compiled_calls,
    distance,
    feed,
    full_logits,
    make_pair,
    one_by_one,
    tiny,
    token_ids,
)

import swa_pass
from swa_pass.api import runtime_of
from swa_pass.cache import HybridCache
from swa_pass.compat import generate_cache_key, output_cache


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def test_float32_keys_with_bfloat16_values_are_refused_by_name(caplog):
    """RoPE leaves the keys of this model in float32 under autocast: no fused attention for that, so the stock path."""
    stock = tiny("gemma3")
    model = swa_pass.apply(copy.deepcopy(stock), backend="eager")
    ids = token_ids(3 * W)
    with torch.no_grad(), autocast():
        ours = model(ids, use_cache=True).logits
        assert distance(ours, stock(ids, use_cache=True).logits) == 0
        reasons = {layer.reason for layer in swa_pass.explain(model).refused}
    assert reasons == {"keys are torch.float32 and values are torch.bfloat16"}
    assert sum("stock path" in record.getMessage() for record in caplog.records) == 1
    with torch.no_grad():  # and without autocast nothing is refused
        assert isinstance(output_cache(model(ids, use_cache=True)), HybridCache)


def test_a_cache_by_hand_keeps_float32_keys_and_bfloat16_values():
    stock, ids = tiny("gemma3"), token_ids(5 * W)
    cache, parts = HybridCache([W, None, W]), []
    with torch.no_grad(), autocast():
        for first, stop in [(0, 2 * W), *((n, n + 1) for n in range(2 * W, 5 * W))]:
            parts.append(stock(ids[:, first:stop], **{generate_cache_key(stock): cache}).logits)
        whole = stock(ids, use_cache=False).logits.float()
    for layer in cache.stores:
        assert (layer.k_store.dtype, layer.v_store.dtype) == (torch.float32, torch.bfloat16)
    truth = full_logits(stock, ids)
    assert distance(torch.cat(parts, 1).float(), truth) < 3 * distance(whole, truth)


@pytest.mark.parametrize("new", [1, 3])
def test_a_cache_of_another_dtype_is_an_error(new):
    """A model that became bfloat16, and the cache it filled before: refused by name, and the cache is as it was."""
    model = swa_pass.apply(tiny("mistral"), backend="eager")
    ids = token_ids(2 * W)
    with torch.no_grad():
        cache = output_cache(model(ids, use_cache=True))
        keys = [layer.keys.clone() for layer in cache.stores]
        model.bfloat16()
        with pytest.raises((ValueError, RuntimeError), match=r"bfloat16.*float32|float32.*bfloat16"):
            model(ids[:, :new], **{runtime_of(model).cache_name: cache})
        assert cache.get_seq_length() == 2 * W
        assert all(torch.equal(layer.keys, kept) for layer, kept in zip(cache.stores, keys, strict=True))
        again = swa_pass.apply(tiny("mistral"), backend="eager")  # float() would not bring the rounded bits back
        more = again(ids[:, :new], **{runtime_of(again).cache_name: cache}).logits
    twice = torch.cat([ids, ids[:, :new]], 1)
    assert distance(more, full_logits(tiny("mistral"), twice)[:, -new:]) < TOLERANCE


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_the_default_dtype_does_not_matter(default):
    pair = make_pair("mistral")
    ids = token_ids(4 * W)
    torch.set_default_dtype(default)
    try:
        got, cache = feed(pair, ids, one_by_one(2 * W, 2 * W))
        with compiled_calls(pair, 2):
            pair.model.generate(ids, max_new_tokens=2, do_sample=False)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {layer.k_store.dtype for layer in cache.stores} == {torch.float32}
    assert_oracle(pair, got, lambda model: full_logits(model, ids))
