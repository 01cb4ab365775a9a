"""HybridCache on its own: no pass, no applied model."""

from __future__ import annotations

import pytest
import torch
from helpers import W, distance, full_logits, tiny, token_ids, with_window
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import swa_pass
from swa_pass.compat import cache_argument
from swa_pass.spec import Report

B, KV, D = 2, 2, 4
WINDOWS = (None, 1, 2, 3, 8)


def fresh(tokens, batch=B, head_dim=D, dtype=torch.float32):
    return torch.randn(batch, KV, tokens, head_dim, dtype=dtype), torch.randn(batch, KV, tokens, head_dim, dtype=dtype)


class AllKeys:
    """The oracle: every key ever given, in a list, and what a window shows of it."""

    def __init__(self, window):
        self.window = window
        self.k = self.v = torch.zeros(B, KV, 0, D)

    def update(self, k, v):
        seen = self.k.shape[2]
        self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        first = 0 if self.window is None else max(seen - (self.window - 1), 0)
        return self.k[:, :, first:], self.v[:, :, first:], first


def feed(cache, oracles, tokens):
    """One call for every layer; checks keys, values, sizes and length against the oracles."""
    for layer, oracle in zip(cache.layers, oracles, strict=True):
        k, v = fresh(tokens, batch=oracle.k.shape[0])
        length, offset = layer.get_mask_sizes(tokens)
        got_k, got_v = cache.update(k, v, layer.index)
        want_k, want_v, first = oracle.update(k, v)
        assert torch.equal(got_k, want_k)
        assert torch.equal(got_v, want_v)
        assert (length, offset) == (want_k.shape[2], first)
        assert cache.get_seq_length(layer.index) == layer.get_seq_length() == oracle.k.shape[2]


def filled(chunks, windows=WINDOWS, **kwargs):
    cache, oracles = swa_pass.HybridCache(windows, **kwargs), [AllKeys(w) for w in windows]
    for tokens in chunks:
        feed(cache, oracles, tokens)
    return cache, oracles


def snapshot(cache):
    return [
        (None if layer.k_store is None else layer.k_store.clone(), layer.v_store, vars(layer.policy).copy())
        for layer in cache.layers
    ]


def assert_unchanged(cache, before):
    for layer, (k_store, v_store, policy) in zip(cache.layers, before, strict=True):
        assert vars(layer.policy) == policy
        assert layer.v_store is v_store
        if k_store is not None:  # bit for bit, unwritten memory included
            assert torch.equal(layer.k_store.view(torch.int32), k_store.view(torch.int32))


def addresses(cache):
    return [(layer.k_store.data_ptr(), layer.v_store.data_ptr()) for layer in cache.layers]


# -------------------------------------------------------------------------------------------------- eager, time order


@pytest.mark.parametrize("slack", [0, 16])
@pytest.mark.parametrize("chunks", [[1] * 40, [3, 1, 1, 8, 2, 9, 30, 1, 1], [40, 1, 1, 1], [7] * 9, [8] * 9, [9] * 9])
def test_any_chunking_in_time_order(chunks, slack):
    filled(chunks, slack=slack)


@pytest.mark.parametrize("window", [2, 3, 8])
def test_same_as_the_stock_layers(window):
    """Where the stock layers are right (a window of one never evicts there), ours return the very same keys."""
    cache = swa_pass.HybridCache([window, None])
    stock = [DynamicSlidingWindowLayer(sliding_window=window), DynamicLayer()]
    for tokens in (3, 1, 1, 9, 1, 30, 1, 8):
        for ours, theirs in zip(cache.layers, stock, strict=True):
            assert ours.get_mask_sizes(tokens) == theirs.get_mask_sizes(tokens)
            k, v = fresh(tokens)
            for got, want in zip(ours.update(k, v), theirs.update(k, v), strict=True):
                assert torch.equal(got, want)
            assert ours.get_seq_length() == theirs.get_seq_length()
            assert ours.get_max_length() == theirs.get_max_length()


def test_keys_are_those_the_next_query_sees():
    cache, oracles = filled([5, 30, 1])
    for layer, oracle in zip(cache.layers, oracles, strict=True):
        reach = oracle.k.shape[2] if layer.window == 0 else layer.window - 1
        assert torch.equal(layer.keys, oracle.k[:, :, oracle.k.shape[2] - reach :])
        assert torch.equal(layer.values, oracle.v[:, :, oracle.v.shape[2] - reach :])


def test_memory_of_rings_is_bounded_and_linear_stores_grow():
    cache, oracles = filled([10])
    rings = [layer for layer in cache.layers if layer.is_sliding]
    for _ in range(40):
        feed(cache, oracles, 11)
    assert all(layer.k_store.shape[2] <= layer.window + 16 for layer in rings)
    assert cache.layers[0].k_store.shape[2] >= 450
    assert cache.nbytes == sum(2 * layer.k_store.numel() * 4 for layer in cache.layers)


def test_addresses_are_fixed_between_growths():
    cache, oracles = filled([10], hint=200)
    before = addresses(cache)
    for _ in range(170):
        feed(cache, oracles, 1)
    assert addresses(cache) == before


# ---------------------------------------------------------------------------------------------------------- rollback


@pytest.mark.parametrize("back", [0, 1, 5, 16])
@pytest.mark.parametrize("chunks", [[3, 30], [1] * 40, [50], [4, 4, 9]])
def test_crop_up_to_slack_is_exact(chunks, back):
    cache, oracles = filled(chunks)
    cache.crop(-back)
    for oracle in oracles:
        kept = oracle.k.shape[2] - back
        oracle.k, oracle.v = oracle.k[:, :, :kept], oracle.v[:, :, :kept]
    for tokens in (1, 3, 20, 1):
        feed(cache, oracles, tokens)


def test_crop_too_deep_changes_nothing():
    cache, oracles = filled([3, 40])
    before = snapshot(cache)
    with pytest.raises(ValueError, match=r"layer \d: cannot take back 40 tokens.*slack"):
        cache.crop(-40)
    assert_unchanged(cache, before)
    assert cache.get_seq_length() == 43
    feed(cache, oracles, 2)


def test_crop_takes_negative_numbers_only():
    cache, _ = filled([3])
    before = snapshot(cache)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(2)
    assert_unchanged(cache, before)


def test_crop_to_nothing_before_anything_was_evicted():
    cache, oracles = filled([6])
    cache.crop(-6)
    for oracle in oracles:
        oracle.k = oracle.v = torch.zeros(B, KV, 0, D)
    feed(cache, oracles, 9)


def test_recorded_bursts_can_be_taken_back_whole():
    """Assisted decoding: bursts longer than slack, and a crop after each."""
    cache, oracles = filled([30])
    for layer in cache.layers:
        layer.activate_past_recording()
    for burst in ((40, 39), (3, 3), (100, 60)):
        for _ in range(burst[0] // 10 or 1):
            feed(cache, oracles, min(burst[0], 10))
        assert all(layer.is_croppable for layer in cache.layers)
        cache.crop(-burst[1])
        for oracle in oracles:
            kept = oracle.k.shape[2] - burst[1]
            oracle.k, oracle.v = oracle.k[:, :, :kept], oracle.v[:, :, :kept]
        feed(cache, oracles, 1)


# ----------------------------------------------------------------------------------------------------- rows and reset


def test_reset_keeps_the_memory():
    cache, _ = filled([30])
    before = addresses(cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    oracles = [AllKeys(w) for w in WINDOWS]
    for tokens in (3, 20, 1):
        feed(cache, oracles, tokens)
    assert addresses(cache) == before


def test_reorder_keeps_addresses():
    cache, oracles = filled([30, 1])
    before, rows = addresses(cache), torch.tensor([1, 1])
    cache.reorder_cache(rows)
    assert addresses(cache) == before
    for oracle in oracles:
        oracle.k, oracle.v = oracle.k[rows], oracle.v[rows]
    for tokens in (1, 9):
        feed(cache, oracles, tokens)


@pytest.mark.parametrize("indices", [torch.tensor([2]), torch.tensor([5, 0, 0]), torch.tensor([True, False] * 3)])
def test_repeat_and_select_rows(indices):
    cache, oracles = filled([2 * W + 5])
    cache.batch_repeat_interleave(3)
    for oracle in oracles:
        oracle.k, oracle.v = oracle.k.repeat_interleave(3, 0), oracle.v.repeat_interleave(3, 0)
    feed(cache, oracles, 1)
    cache.batch_select_indices(indices)
    for oracle in oracles:
        oracle.k, oracle.v = oracle.k[indices], oracle.v[indices]
    for tokens in (1, 20):
        feed(cache, oracles, tokens)


def test_row_operations_on_an_empty_cache():
    cache = swa_pass.HybridCache(WINDOWS)
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    cache.crop(0)
    cache.reset()
    assert cache.get_seq_length() == 0


# ----------------------------------------------------------------------------------------------------------- refusals


def test_full_cache_is_said_before_any_write():
    cache, oracles = filled([20], windows=(8, None), max_length=24)
    feed(cache, oracles, 4)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=r"layer 1: cache full: .*24"):
        cache.layers[1].update(*fresh(1))
    assert_unchanged(cache, before)


def test_full_cache_is_said_before_the_rings_move():
    """A step is refused as a whole: the ring of an earlier layer must not have taken the token."""
    cache, _ = filled([24], windows=(8, None), max_length=24)
    before = snapshot(cache)

    def step():
        for layer in cache.layers:
            cache.update(*fresh(1), layer.index)

    with pytest.raises(ValueError, match="cache full"):
        step()
    assert_unchanged(cache, before)


def test_rings_alone_are_never_full():
    _, oracles = filled([20, 30], windows=(8, 3), max_length=24)
    assert oracles[0].k.shape[2] == 50


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"batch": 3}, "batch 3"), ({"head_dim": 8}, "head_dim 8"), ({"dtype": torch.float16}, "dtype torch.float16")],
)
def test_other_tensors_are_refused(wrong, named):
    cache, oracles = filled([20])
    before = snapshot(cache)
    with pytest.raises(ValueError, match=rf"layer 0: keys do not fit the cache: {named} given"):
        cache.update(*fresh(1, **wrong), 0)
    assert_unchanged(cache, before)
    feed(cache, oracles, 1)


@pytest.mark.parametrize(("windows", "named"), [([], "empty"), ([8, 0], "window=0"), ([-3], "window=-3")])
def test_windows_are_checked(windows, named):
    with pytest.raises(ValueError, match=named):
        swa_pass.HybridCache(windows)


def test_gradients_are_refused():
    cache = swa_pass.HybridCache([8])
    k, v = fresh(3)
    with pytest.raises(RuntimeError, match="no_grad"):
        cache.update(k.requires_grad_(), v, 0)


# ------------------------------------------------------------------------------------------------------ in stock models


@pytest.fixture(scope="module")
def gemma_specs():
    return swa_pass.explain(tiny("gemma3")).layers


@pytest.mark.parametrize("context", [1, 20, 64, 65, 200])
def test_bytes_are_those_of_the_report(gemma_specs, context):
    specs = gemma_specs
    report = Report("tiny", specs, slack=16)
    cache = swa_pass.HybridCache([s.window for s in specs], hint=context)
    for layer, spec in zip(cache.layers, specs, strict=True):
        layer.update(*(torch.zeros(3, spec.kv_heads, min(context, 5), spec.head_dim) for _ in range(2)))
    assert cache.nbytes == report.kv_bytes(context, batch=3)
    assert report.kv_bytes(context, 3) == 3 * report.kv_bytes(context)


def windows_of(model):
    kinds = getattr(model.config, "layer_types", None) or ["sliding_attention"] * model.config.num_hidden_layers
    return [W if kind == "sliding_attention" else None for kind in kinds]


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize("chunks", [[1] * 30, [5, *[1] * 20], [30, 1, 1, 9, 1], [W] * 4])
@torch.no_grad()
def test_eager_in_a_stock_model(family, chunks):
    model, ids = tiny(family), token_ids(sum(chunks), batch=2)
    cache, parts, done = swa_pass.HybridCache(windows_of(model)), [], 0
    for new in chunks:
        parts.append(model(ids[:, done : done + new], **{cache_argument(model.forward): cache}).logits)
        done += new
    got = torch.cat(parts, dim=1)
    assert distance(got, full_logits(model, ids)) < 5e-5
    for wrong in (W - 1, W + 1):
        assert distance(got, full_logits(with_window(model, wrong), ids)) > 1e-2


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@torch.no_grad()
def test_traced_in_a_stock_model(family):
    """A user's own torch.compile, without our pass: constant widths and a tensor offset, from the first token on."""
    model, ids = tiny(family), token_ids(5 * W + 6, batch=2)
    config = model.config
    cache = swa_pass.HybridCache(windows_of(model), hint=6 * W)
    cache.early_initialization(2, config.num_key_value_heads, config.head_dim, torch.float32, torch.device("cpu"))
    graphs = []

    def count(gm, inputs):
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(model.forward, backend=count, fullgraph=True)
    parts, done = [], 0
    for new in (3, 7, *[1] * (3 * W), 9, *[1] * (5 * W - 3 * W - 15)):
        parts.append(compiled(ids[:, done : done + new], **{cache_argument(model.forward): cache}).logits)
        done += new
    assert graphs, "nothing was compiled"
    assert cache.get_seq_length() == done
    # and back: an eager call sees what the traced ones wrote
    parts.append(model(ids[:, done:], **{cache_argument(model.forward): cache}).logits)
    got = torch.cat(parts, dim=1)
    assert distance(got, full_logits(model, ids)) < 5e-5
    for wrong in (W - 1, W + 1):
        assert distance(got, full_logits(with_window(model, wrong), ids)) > 1e-2
