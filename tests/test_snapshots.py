"""A prefix is read once and continued many times: always the same as a cold run."""

from __future__ import annotations

import copy
from dataclasses import replace

import families
import pytest
import torch
import transformers
from helpers import TOLERANCE, W, distance, full_logits, make_pair, poison, shared_pair, token_ids
from safetensors.torch import load_file, save_file

import swa_pass
from swa_pass.api import runtime_of
from swa_pass.compat import output_cache

FAMILIES = ("mistral", "gemma3")
by_family = pytest.mark.parametrize("family", FAMILIES)


@torch.no_grad()
def continued(pair, cache, suffix):
    """Logits of a suffix, its first half in one call and the rest token by token."""
    name, parts, half = pair.runtime.cache_name, [], suffix.shape[1] // 2
    for first, stop in [(0, half), *((n, n + 1) for n in range(half, suffix.shape[1]))]:
        parts.append(pair.model(suffix[:, first:stop], use_cache=True, **{name: cache}).logits)
    return torch.cat(parts, 1)


def cold(pair, prefix, suffix):
    return full_logits(pair.stock, torch.cat([prefix, suffix], 1))[:, prefix.shape[1] :]


@torch.no_grad()
def read(pair, prefix):
    return output_cache(pair.model(prefix, use_cache=True))


@by_family
@pytest.mark.parametrize("length", [2, W - 1, W, W + 1, 3 * W, 3 * W + 5])
def test_one_prefix_many_suffixes(family, length):
    pair = shared_pair(family)
    prefix = token_ids(length)
    cache = read(pair, prefix)
    snapshot = cache.snapshot()
    for seed, more in ((1, 2), (2, W + 3), (3, 4 * W), (4, 2)):
        suffix = token_ids(more, seed=seed)
        cache.restore(snapshot)
        assert cache.get_seq_length() == length
        got = continued(pair, cache, suffix)
        assert distance(got, cold(pair, prefix, suffix)) < TOLERANCE
        for mutant in pair.mutants.values() if length + more > W + 1 else ():
            wrong = full_logits(mutant, torch.cat([prefix, suffix], 1))[:, length:]
            assert distance(got, wrong) > 1e-2


@by_family
def test_into_another_cache_and_with_more_rows(family):
    pair = shared_pair(family)
    prefix, suffix = token_ids(3 * W), token_ids(W, batch=3, seed=1)
    snapshot = read(pair, prefix).snapshot()
    cache = pair.runtime.make_cache()
    cache.restore(snapshot, rows=3)
    got = continued(pair, cache, suffix)
    assert distance(got, cold(pair, prefix.expand(3, -1), suffix)) < TOLERANCE
    cache.restore(snapshot)  # and back to one row
    assert distance(continued(pair, cache, suffix[:1]), cold(pair, prefix, suffix[:1])) < TOLERANCE


@by_family
def test_it_keeps_what_is_needed_and_no_more(family):
    pair = shared_pair(family)
    cache = read(pair, token_ids(20 * W))
    snapshot = cache.snapshot()
    for layer in cache.stores:
        kept = snapshot.layers[layer.index].keys.data.shape[2]
        assert kept == (W - 1 + cache.clock.slack if layer.is_sliding else 20 * W)
    before = [state.keys.data.clone() for state in snapshot.layers.values()]
    poison(cache, float("nan"))
    read_on = token_ids(5 * W, seed=1)
    continued(pair, cache, read_on)
    assert all(torch.equal(a, state.keys.data) for a, state in zip(before, snapshot.layers.values())), (
        "no copy was made"
    )


@by_family
def test_every_other_slot_stays_out_of_sight(family):
    """What was in the stores before a restore must not be read after it."""
    pair = shared_pair(family)
    prefix, suffix = token_ids(W + 2), token_ids(2 * W, seed=1)
    cache = read(pair, prefix)
    snapshot = cache.snapshot()
    continued(pair, cache, token_ids(5 * W, seed=2))
    for layer in cache.stores:
        layer.k_store.fill_(float("nan"))
        layer.v_store.fill_(float("nan"))
    cache.restore(snapshot)
    assert distance(continued(pair, cache, suffix), cold(pair, prefix, suffix)) < TOLERANCE


@by_family
def test_addresses_stay_where_the_store_is_large_enough(family):
    pair = shared_pair(family)
    cache = read(pair, token_ids(3 * W))
    snapshot = cache.snapshot()
    before = [layer.k_store.data_ptr() for layer in cache.stores]
    cache.restore(snapshot)
    assert [layer.k_store.data_ptr() for layer in cache.stores] == before


@by_family
def test_rollback_after_a_restore(family):
    pair = shared_pair(family)
    prefix = token_ids(4 * W)
    cache = read(pair, prefix)
    snapshot = cache.snapshot()
    cache.restore(snapshot)
    cache.crop(-cache.clock.slack)
    kept = prefix[:, : 4 * W - cache.clock.slack]
    suffix = token_ids(W, seed=3)
    assert distance(continued(pair, cache, suffix), cold(pair, kept, suffix)) < TOLERANCE
    cache.restore(snapshot)
    with pytest.raises(ValueError, match="cannot take back"):
        cache.crop(-cache.clock.slack - 1)


@by_family
def test_generate_goes_on_from_a_snapshot(family):
    pair = shared_pair(family)
    prefix = token_ids(3 * W)
    snapshot = read(pair, prefix).snapshot()
    cache = pair.runtime.make_cache()
    for seed in (1, 2):
        ids = torch.cat([prefix, token_ids(5, seed=seed)], 1)
        cache.restore(snapshot)
        given = {"max_new_tokens": 2 * W, "do_sample": False}
        ours = pair.model.generate(ids, **{pair.runtime.cache_name: cache}, **given)
        assert torch.equal(ours, pair.stock.generate(ids, use_cache=False, **given))


def test_two_windows():
    """Windows of 8 and 5 and a global layer, without any model: the stores hold exactly the prefix."""
    torch.manual_seed(0)
    cache = swa_pass.HybridCache([8, 5, None], slack=2)
    tokens = torch.randn(3, 2, 2, 1, 2, 40, 4)  # layer, key or value, ...: (batch, kv_heads, tokens, head_dim)

    def feed(first, stop):
        shown = []
        for layer in range(3):
            k, v = (tokens[layer, kind, 0, :, :, first:stop] for kind in range(2))
            shown.append(cache.update(k, v, layer))
        return shown

    feed(0, 19)
    snapshot = cache.snapshot()
    assert [state.first for state in snapshot.layers.values()] == [19 - 7 - 2, 19 - 4 - 2, 0]
    feed(19, 33)
    cache.restore(snapshot)
    for layer, (keys, values) in enumerate(feed(19, 21)):
        first = 0 if layer == 2 else 19 - (7, 4)[layer]
        assert torch.equal(keys, tokens[layer, 0, 0, :, :, first:21])
        assert torch.equal(values, tokens[layer, 1, 0, :, :, first:21])


@by_family
def test_to_disk_and_back(family, tmp_path):
    pair = shared_pair(family)
    prefix, suffix = token_ids(3 * W), token_ids(W, seed=1)
    snapshot = read(pair, prefix).snapshot()
    snapshot.save(tmp_path / "prefix.safetensors")
    loaded = swa_pass.load_snapshot(tmp_path / "prefix.safetensors")
    assert (loaded.seen, loaded.windows, loaded.owner) == (snapshot.seen, snapshot.windows, snapshot.owner)
    cache = pair.runtime.make_cache()
    cache.restore(loaded)
    assert distance(continued(pair, cache, suffix), cold(pair, prefix, suffix)) < TOLERANCE


def test_files_of_others_are_refused(tmp_path):
    path = tmp_path / "file.safetensors"
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="no snapshot of swa_pass"):
        swa_pass.load_snapshot(path)
    pair = shared_pair("mistral")
    read(pair, token_ids(W)).snapshot().save(path)
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = {**file.metadata(), "version": "0"}
    save_file(load_file(path), path, metadata)
    with pytest.raises(ValueError, match="version 0"):
        swa_pass.load_snapshot(path)


def test_a_snapshot_of_another_model_changes_nothing():
    mistral, gemma = shared_pair("mistral"), shared_pair("gemma3")
    theirs = read(gemma, token_ids(2 * W)).snapshot()
    prefix, suffix = token_ids(2 * W), token_ids(W, seed=1)
    cache = read(mistral, prefix)
    with pytest.raises(ValueError, match=r"was made by Gemma3ForCausalLM .* belongs to MistralForCausalLM"):
        cache.restore(theirs)
    other = copy.deepcopy(mistral.stock).to(torch.float64)
    swa_pass.apply(other, backend="eager")
    with torch.no_grad():
        double = output_cache(other(prefix, use_cache=True)).snapshot()
    assert double.layers[0].keys.dtype == torch.float64
    with pytest.raises(ValueError, match="float64"):
        cache.restore(double)
    with pytest.raises(ValueError, match="float64 in the snapshot"):
        cache.restore(replace(double, owner=""))
    with pytest.raises(ValueError, match="windows"):
        swa_pass.HybridCache([W, None]).restore(theirs)
    two = read(mistral, token_ids(W, batch=2)).snapshot()
    with pytest.raises(ValueError, match="2 rows cannot be restored as 3"):
        cache.restore(two, rows=3)
    assert distance(continued(mistral, cache, suffix), cold(mistral, prefix, suffix)) < TOLERANCE


def test_values_of_another_width_change_nothing():
    """Keys fit, values do not: found before the keys are written."""

    def read_with(width):
        cache = swa_pass.HybridCache([W])
        cache.update(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, width), 0)
        return cache

    cache, other = read_with(4), read_with(6).snapshot()
    before = cache.layers[0].keys.clone()
    with pytest.raises(ValueError, match="head_dim 6 in the snapshot, 4 here"):
        cache.restore(other)
    assert torch.equal(before, cache.layers[0].keys)


def test_nothing_read_is_no_snapshot():
    with pytest.raises(ValueError, match="no token was read"):
        make_pair("mistral").runtime.make_cache().snapshot()


@pytest.mark.parametrize("name", ["lfm3", "gemma4_text"])
@torch.no_grad()
def test_hybrids_and_shared_keys(name, tmp_path):
    entry = families.BY_NAME[name]
    if not hasattr(transformers, entry["config_class"]):
        pytest.skip(f"this transformers has no {name}")
    stock = families.build(entry)
    model = swa_pass.apply(copy.deepcopy(stock), backend="eager")
    prefix, suffix = (torch.randint(5, 90, (1, n)) for n in (3 * W, W))
    runtime = runtime_of(model)
    cache = runtime.make_cache() if runtime.active else None
    model(prefix, use_cache=True, **{runtime.cache_name: cache})
    snapshot = cache.snapshot()
    expected = stock(torch.cat([prefix, suffix], 1), use_cache=False).logits[:, 3 * W :]
    for _ in range(2):
        cache.restore(snapshot)
        parts = [model(suffix[:, n : n + 1], use_cache=True, **{runtime.cache_name: cache}).logits for n in range(W)]
        assert distance(torch.cat(parts, 1), expected) < 2e-3
    if snapshot.states:
        with pytest.raises(ValueError, match="convolution or recurrence"):
            snapshot.save(tmp_path / "no")
