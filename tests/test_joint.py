"""Layers that hold keys and the state of a convolution or a recurrence: rings for the keys, stock's state beside them.

One model fuses its attention and has recurrences (zaya), one adds position biases, so that its rings are read in time
order, and has convolutions only (inkling), one adds sinks that differ from query to query (inkling 2, extended).
"""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace

import families
import pytest
import torch
import transformers
from helpers import distance, poison
from transformers import cache_utils

import swa_pass
from swa_pass.api import runtime_of
from swa_pass.cache.joint import JointLayer
from swa_pass.compat import joint_states, output_cache
from swa_pass.passes.pads import hide_pads

W = 8
TOLERANCE, MUTATED = 2e-4, 1e-2
NAMES = ["zaya", "inkling_text", pytest.param("inkling2_text", marks=pytest.mark.extended)]
by_name = pytest.mark.parametrize("name", NAMES)
#: The same, with one model by default and the others extended: each needs graphs of its own, which takes its time.
by_first = pytest.mark.parametrize(
    "name", ["zaya", *(pytest.param(name, marks=pytest.mark.extended) for name in ("inkling_text", "inkling2_text"))]
)
PROMPT, STEPS = 2 * W + 3, 3 * W + 2


@functools.cache
def models(name):
    entry = families.BY_NAME[name]
    if not hasattr(transformers, entry["config_class"]):
        pytest.skip(f"this transformers has no {name}")
    stock = families.build(entry)
    model = swa_pass.apply(copy.deepcopy(stock), backend="eager")
    mutants = [families.mutant(entry, stock, change) for change in (-1, 1)]
    return SimpleNamespace(stock=stock, model=model, mutants=mutants, runtime=runtime_of(model))


@torch.no_grad()
def run(both, ids, cache, chunks, mask=None, seen=0, before_step=None):
    """Logits of `ids` read in chunks after `seen` tokens. mask: of the whole sequence."""
    mask = torch.ones(ids.shape[0], seen + ids.shape[1], dtype=torch.int64) if mask is None else mask
    parts, done = [], 0
    for new in chunks:
        total = seen + done + new
        kwargs = families._positions(both.model, mask[:, :total], seen + done)
        if before_step is not None:
            before_step(cache)
        cached = {both.runtime.cache_name: cache, "use_cache": True}
        out = both.model(input_ids=ids[:, done : done + new], attention_mask=mask[:, :total], **kwargs, **cached)
        parts.append(out.logits)
        done += new
    assert cache.get_seq_length() == seen + ids.shape[1]
    return torch.cat(parts, 1)


def wanted(stock, ids, mask=None):
    return families.whole(stock, ids, torch.ones_like(ids) if mask is None else mask)


def check(both, got, ids, first, real=None):
    """`got` are the stock model's logits of ids[:, first:], and not those of a window wrong by one."""
    real = torch.ones_like(ids[:, first:], dtype=torch.bool) if real is None else real
    assert distance(got[real], wanted(both.stock, ids)[:, first:][real]) < TOLERANCE
    for mutant in both.mutants:
        assert distance(got[real], wanted(mutant, ids)[:, first:][real]) > MUTATED


# ------------------------------------------------------------------------------------------------- the model on rings


@by_name
def test_every_step_of_a_padded_batch(name):
    """Rows with and without left pads; what must be unseen is NaN (pads are read, and hidden, where time order is)."""
    both = models(name)
    ids, mask = families.batch(both.stock, PROMPT + STEPS)
    cache, before = both.runtime.make_cache(), both.runtime.compiled_calls
    hidden = lambda cache: poison(cache, float("nan"))  # noqa: E731
    got = run(both, ids, cache, [PROMPT, *[1] * STEPS], mask, before_step=hidden)
    assert both.runtime.compiled_calls - before == STEPS, "decode steps run in graphs, the first call makes the states"
    real = mask.bool()
    assert distance(got[real], wanted(both.stock, ids, mask)[real]) < TOLERANCE
    for mutant in both.mutants:
        assert distance(got[real], wanted(mutant, ids, mask)[real]) > MUTATED
    assert all(isinstance(layer, JointLayer) for layer in cache.layers)
    assert [layer.policy.capacity for layer in cache.layers if layer.is_sliding] == [W + 16] * 2
    no_pads = wanted(both.stock, ids)
    assert distance(got[1:], no_pads[1:]) > MUTATED, "this test cannot tell whether pads are seen"


@by_name
def test_a_wrong_start_is_seen(name, monkeypatch):
    """The pads of a decode step come from `starts`: one that is off by one changes the logits."""
    both = models(name)
    ids, mask = families.batch(both.stock, PROMPT + 1)
    cache = both.runtime.make_cache()
    mask[1, : PROMPT - 2] = 0  # so that pads lie in the window
    run(both, ids[:, :PROMPT], cache, [PROMPT], mask)
    snapshot, prepare = cache.snapshot(), cache.prepare
    good = run(both, ids[:, PROMPT:], cache, [1], mask, seen=PROMPT)
    assert distance(good, wanted(both.stock, ids, mask)[:, PROMPT:]) < TOLERANCE
    cache.restore(snapshot)

    def off_by_one(*given):
        prepare(*given)
        cache.clock.starts[1] -= 1

    monkeypatch.setattr(cache, "prepare", off_by_one)
    assert distance(run(both, ids[:, PROMPT:], cache, [1], mask, seen=PROMPT), good) > 1e-3


@by_first
def test_chunked_prompts(name):
    both = models(name)
    ids = families.ids_of(4 * W)
    got = run(both, ids, both.runtime.make_cache(), [3, W, 1, 2 * W, 1, 3])
    check(both, got, ids, 0)


@by_name
@torch.no_grad()
def test_beams(name):
    both = models(name)
    ids = families.ids_of(W + 3, batch=2)
    given = {"max_new_tokens": W + 4, "num_beams": 2, "do_sample": False, "eos_token_id": None}
    ours = both.model.generate(ids, **given)
    assert torch.equal(ours, both.stock.generate(ids, use_cache=False, **given))
    assert not torch.equal(ours, both.mutants[0].generate(ids, use_cache=False, **given))


@by_first
def test_snapshots(name, tmp_path):
    """Restored again and again, also as three rows and into another cache."""
    both = models(name)
    prefix, suffixes = families.ids_of(PROMPT), families.ids_of(W + 2, batch=3, seed=1)
    cache = both.runtime.make_cache()
    run(both, prefix, cache, [PROMPT])
    snapshot = cache.snapshot()
    assert set(snapshot.states) == {0, 1, 2, 3}
    for where, rows in ((cache, 1), (both.runtime.make_cache(), 3), (cache, 1)):
        where.restore(snapshot, rows=rows)
        ids = torch.cat([prefix.expand(rows, -1), suffixes[:rows]], 1)
        check(both, run(both, suffixes[:rows], where, [3, *[1] * (W - 1)], seen=PROMPT), ids, PROMPT)
    with pytest.raises(ValueError, match="convolution or recurrence"):
        snapshot.save(tmp_path / "no")
    stateless = swa_pass.HybridCache(cache.windows, owner=cache.owner)
    with pytest.raises(ValueError, match=r"states in layers \[0, 1, 2, 3\], and the cache in layers \[\]"):
        stateless.restore(snapshot)


@by_first
def test_rows_are_chosen_repeated_and_moved(name):
    both = models(name)
    ids, more = families.ids_of(PROMPT, batch=3), families.ids_of(W, batch=4, seed=1)
    cache = both.runtime.make_cache()
    run(both, ids, cache, [PROMPT])
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 2, 2]))
    whole = torch.cat([ids[[0, 2, 0, 0]], more], 1)
    check(both, run(both, more, cache, [1] * W, seen=PROMPT), whole, PROMPT)
    other = torch.cat([ids[[0, 2, 0, 1]], more], 1)
    assert distance(wanted(both.stock, whole)[:, PROMPT:], wanted(both.stock, other)[:, PROMPT:]) > MUTATED


@by_first
def test_after_a_reset(name):
    both = models(name)
    ids = families.ids_of(PROMPT + W)
    cache = both.runtime.make_cache()
    run(both, families.ids_of(3 * W, seed=1), cache, [W, *[1] * (2 * W)])
    cache.reset()
    check(both, run(both, ids, cache, [PROMPT, *[1] * W]), ids, 0)


# ------------------------------------------------------------------------------------------------------------ rollback


def test_convolutions_are_rolled_back_as_far_as_they_recorded():
    both = models("inkling_text")
    ids = families.ids_of(PROMPT + 2 * W)
    cache = both.runtime.make_cache()
    run(both, ids[:, :PROMPT], cache, [PROMPT])
    with pytest.raises(ValueError, match="cannot be rolled back"):
        cache.crop(-1)
    cache.activate_past_recording()
    with pytest.raises(ValueError, match="recorded the last 0"):
        cache.crop(-1)
    draft = families.ids_of(6, seed=1)
    run(both, draft, cache, [4, 1, 1], seen=PROMPT)
    before = [layer.policy.seen for layer in cache.stores]
    with pytest.raises(ValueError, match="recorded the last 6"):
        cache.crop(-7)
    assert [layer.policy.seen for layer in cache.stores] == before
    cache.crop(-5)
    whole = torch.cat([ids[:, :PROMPT], draft[:, :1], ids[:, PROMPT:]], 1)
    got = run(both, ids[:, PROMPT:], cache, [2, *[1] * (2 * W - 2)], seen=PROMPT + 1)
    check(both, got, whole, PROMPT + 1)


def test_a_convolution_that_recorded_everything_goes_back_to_anywhere():
    both = models("inkling_text")
    ids = families.ids_of(3 * W)
    cache = both.runtime.make_cache()
    cache.activate_past_recording()
    run(both, families.ids_of(5, seed=1), cache, [5])
    cache.crop(-5)
    run(both, torch.cat([ids[:, :2], families.ids_of(5, seed=1)], 1), cache, [7])
    cache.crop(-5)
    check(both, run(both, ids[:, 2:], cache, [W, *[1] * (2 * W - 2)], seen=2), ids, 2)


def test_recurrences_are_not_rolled_back():
    both = models("zaya")
    ids = families.ids_of(PROMPT + W)
    cache = both.runtime.make_cache()
    run(both, ids[:, :PROMPT], cache, [PROMPT])
    assert not cache.is_croppable
    with pytest.raises(ValueError, match="cannot be rolled back"):
        cache.crop(-1)
    check(both, run(both, ids[:, PROMPT:], cache, [1] * W, seen=PROMPT), ids, PROMPT)
    cache.activate_past_recording()
    with pytest.raises(ValueError, match="cannot be rolled back"):
        cache.crop(-1)


@torch.no_grad()
def test_prompt_lookup():
    """Drafts that are taken back, by `generate` itself: convolutions only, as in stock."""
    both = models("inkling_text")
    ids = families.ids_of(W).repeat(1, 3)
    given = {"max_new_tokens": 3 * W, "do_sample": False, "eos_token_id": None}
    ours = both.model.generate(ids, prompt_lookup_num_tokens=3, **given)
    assert torch.equal(ours, both.stock.generate(ids, use_cache=False, **given))
    assert not torch.equal(ours, both.mutants[0].generate(ids, use_cache=False, **given))


# ----------------------------------------------------------------------------------------------------- what is refused


@by_name
def test_rows_with_a_state_do_not_join(name):
    both = models(name)
    caches = [both.runtime.make_cache() for _ in range(2)]
    for cache in caches:
        run(both, families.ids_of(W), cache, [W])
    with pytest.raises(ValueError, match="knows no left pads"):
        caches[0].join(caches[1])


@by_name
def test_no_export(name):
    with pytest.raises(RuntimeError, match=r"layers 0-3: a convolution or recurrence state beside the keys"):
        swa_pass.export(models(name).stock, max_length=64)


def test_a_layer_of_the_models_own_making_is_refused(monkeypatch):
    """Its state may be anything, so it is not taken apart."""

    class Own(cache_utils.LinearAttentionAndSlidingWindowAttentionLayer):
        pass

    stock = models("zaya").stock
    monkeypatch.setitem(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "hybrid_sliding", Own)
    report = swa_pass.explain(swa_pass.apply(copy.deepcopy(stock)))
    assert "cache layers 0, 2 hold keys and a convolution or recurrence state in a layer of the model's own" in str(
        report.notes
    )


def test_states_belong_to_layers_with_keys():
    state = cache_utils.LinearAttentionLayer()
    with pytest.raises(ValueError, match=r"states names layers \[2\]"):
        swa_pass.HybridCache([8, None], states={2: state})
    assert swa_pass.HybridCache([8, None], states={1: state}).states == {1: state}


# ------------------------------------------------------------------------------------------------------- what is said


@by_name
def test_the_report_is_exact(name):
    both = models(name)
    report = swa_pass.explain(both.model)
    assert [(layer.kind, layer.action, layer.state) for layer in report.layers] == [
        ("sliding", "rewritten", True),
        ("full", "kept", True),
    ] * 2
    assert "sliding + state" in str(report)
    context, rows = 5 * W, 2
    cache = both.runtime.make_cache(hint=context)
    run(both, families.ids_of(context, batch=rows), cache, [context])
    assert report.kv_bytes(context, rows) == cache.nbytes
    assert "2 rings, 2 linear, 4 states" in repr(cache)


@torch.no_grad()
def test_generate_makes_this_cache_and_says_what_it_did():
    both = models("zaya")
    out = both.model.generate(families.ids_of(W), max_new_tokens=W, return_dict_in_generate=True, do_sample=False)
    assert output_cache(out).states
    assert "refused" not in str(swa_pass.explain(both.model))


# --------------------------------------------------------------------------------------------------------- one by one


@pytest.mark.parametrize("kind", ["sliding", "full"])
def test_same_as_the_stock_layer(kind):
    """Keys, masks and states of every call."""
    if kind == "sliding":
        stock = cache_utils.LinearAttentionAndSlidingWindowAttentionLayer(sliding_window=W, number_of_states=2)
    else:
        stock = cache_utils.LinearAttentionAndFullAttentionLayer(number_of_states=2)
    half = cache_utils.LinearAttentionLayer(number_of_states=2)
    cache = swa_pass.HybridCache([W if kind == "sliding" else None], states={0: half})
    ours = cache.layers[0]
    for tokens in (3, 1, 9, 1, 2 * W, 1):
        k, v, conv, recurrent = (
            torch.randn(2, 2, tokens, 4),
            torch.randn(2, 2, tokens, 4),
            torch.randn(2, 6, tokens),
            None,
        )
        assert ours.get_mask_sizes(tokens) == stock.get_mask_sizes(tokens)
        for got, want in zip(ours.update(k, v), stock.update(k, v), strict=True):
            assert torch.equal(got, want)
        for index in (0, 1):
            recurrent = torch.randn(2, 5)
            for layer in (cache, stock):
                place = (0,) if layer is cache else ()
                layer.update_recurrent_state(recurrent, *place, state_idx=index)
            conv = conv + index
            got = cache.update_conv_state(conv, 0, state_idx=index, conv_kernel_size=4)
            assert torch.equal(got, stock.update_conv_state(conv, state_idx=index, conv_kernel_size=4))
            assert torch.equal(cache.get_conv_state(0, index), stock.conv_states[index])
            assert torch.equal(cache.get_recurrent_state(0, index), recurrent)
    assert cache.has_previous_state(0)
    assert cache.is_linear == [False]
    cache.reset()
    assert not cache.has_previous_state(0)
    assert cache.get_conv_state(0) is None


def test_the_state_half_is_stocks_own():
    halves = joint_states(models("zaya").stock.config)
    assert {type(half) for half in halves.values()} == {cache_utils.LinearAttentionLayer}
    assert len({id(half) for half in halves.values()}) == 4


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_hide_pads(kind, window):
    """Against a loop over all keys."""
    keys, lengths, starts = 6, torch.tensor([9, 9]), torch.tensor([0, 8])
    mask = torch.rand(1, 2, 3, keys) > 0.3 if kind == "boolean" else torch.randn(1, 2, 3, keys)
    got = hide_pads(mask, lengths, starts, window)
    first = 9 - (window - 1) if window else 0
    for row, start in enumerate(starts.tolist()):
        for key in range(keys):
            hidden = False if kind == "boolean" else torch.finfo(mask.dtype).min
            seen = mask[0, :, :, key] if first + key >= start else torch.full_like(mask[0, :, :, key], hidden)
            assert torch.equal(got[row, :, :, key], seen)
