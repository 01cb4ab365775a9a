"""Rings: what they hold, what must stay unseen, HPU graphs, beams, several generates, bytes."""

from __future__ import annotations

import pytest
import torch
from gaudi_helpers import assert_upstream, attentions, distance, gaudi, generate, graphs, ht, run, step_logits
from gaudi_models import FAMILIES, MUTATED, NEW, TOLERANCE, F, S, W, inputs_of
from gaudi_reference import BEAMS

from swa_pass.integrations import optimum_habana
from swa_pass.integrations.optimum_habana.cache import RingKVCache
from swa_pass.integrations.optimum_habana.step import Step


@pytest.mark.parametrize("scenario", ["short", "long"])
@pytest.mark.parametrize("wrong", [W - 1, W + 1])
def test_a_ring_that_is_off_by_one_is_seen(wrong, scenario, references):
    """The check on test_equality.py: a window wrong by one slot in the rings alone moves the logits."""
    model = gaudi("mistral", references)
    for attention in attentions(model):
        attention.k_cache.window = attention.v_cache.window = wrong
    got = step_logits(model, scenario)
    assert distance(got, references["mistral"]["logits"][scenario][W]) > MUTATED


class HostCounter(RingKVCache):
    """Wrong on purpose: the slot comes from a number on the host, which a recorded graph keeps forever."""

    seen = 0

    def forward(self, cur, dim, idx):
        if cur.shape[2] > 1:
            self.seen = cur.shape[2]
            return super().forward(cur, dim, idx)
        self.seen += 1
        return super().forward(cur, dim, torch.tensor(self.seen))


class HostRead(RingKVCache):
    """Wrong on purpose: reads token_idx on the host."""

    def forward(self, cur, dim, idx):
        return super().forward(cur, dim, torch.tensor(int(idx)))


def with_store(kind, references):
    model = gaudi("mistral", references)
    for attention in attentions(model):
        attention.k_cache, attention.v_cache = kind(W), kind(W)
    return model


def test_replay_catches_a_slot_from_the_host(references):
    """The check on the graph modes: an eager run cannot tell, a replayed one can."""
    eager = step_logits(with_store(HostCounter, references), "long")
    assert_upstream(eager, references, "mistral", "long")
    replayed = run(with_store(HostCounter, references), "long", "graphs")
    assert distance(replayed, references["mistral"]["logits"]["long"][W]) > MUTATED
    with pytest.raises(RuntimeError, match="reads a tensor on the host"):
        run(with_store(HostRead, references), "long", "graphs")


@pytest.mark.parametrize(
    ("scenario", "captures"),
    # prompt, masked steps while the ring fills or holds pads, unmasked steps after that
    [("short", 3), ("long", 2), ("padded", 3)],
)
def test_number_of_graphs(scenario, captures, references):
    before = dict(ht.hpu.graphs.stats)
    run(gaudi("gemma3", references), scenario, "graphs")
    assert ht.hpu.graphs.stats["captures"] - before["captures"] == captures
    assert ht.hpu.graphs.stats["replays"] - before["replays"] == NEW - captures


def test_limit_hpu_graphs_leaves_the_prompt_out(references):
    before = dict(ht.hpu.graphs.stats)
    run(gaudi("gemma3", references), "long", "graphs_limit")
    assert ht.hpu.graphs.stats["bypass"] - before["bypass"] == 1
    assert ht.hpu.graphs.stats["captures"] - before["captures"] == 1


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("scenario", ["short", "padded"])
def test_slots_that_must_not_be_seen(scenario, flash, references):
    """Before every step, each slot that the next query must not see gets a value that would drown everything.

    A mask is added to the scores and zeroes the weights, so what it hides must be finite; see the next test for NaN.
    """
    logits = poisoned(gaudi("gemma3", references), scenario, flash)
    assert_upstream(logits, references, "gemma3", scenario)


@pytest.mark.parametrize("scenario", ["short", "padded"])
def test_without_the_mask_they_are_seen(scenario, references, monkeypatch):
    """The check on the test above."""
    monkeypatch.setattr(Step, "ring_mask", lambda self, slots, device: None)
    logits = poisoned(gaudi("gemma3", references), scenario, flash=False)
    assert distance(logits, references["gemma3"]["logits"][scenario][W]) > MUTATED


def poisoned(model, scenario, flash):
    """Logits of a run in which every hidden slot of every store holds 1e4."""
    prompt = inputs_of(scenario)[2]
    pads = inputs_of(scenario)[1].logical_not().sum(1).tolist()
    steps = []

    def poison(ids, scores):
        seen = prompt + len(steps)  # tokens written so far
        steps.append(seen)
        for attention in attentions(model):
            for store in (attention.k_cache, attention.v_cache):
                for row, pad in enumerate(pads):
                    slots = store.cache.shape[2]
                    kept = {p % slots if slots == W else p for p in range(max(0, seen - slots), seen) if p >= pad}
                    for slot in set(range(slots)) - kept:
                        store.cache[row, :, slot] = 1e4
        return scores

    logits = step_logits(model, scenario, before_step=poison, use_flash_attention=flash)
    assert len(steps) == NEW
    return logits


def test_nothing_of_an_earlier_text_is_left(references):
    """allocate_kv_cache clears: NaN in every slot of every store is gone at the next prompt, at the same address."""
    model = gaudi("gemma3", references)
    step_logits(model, "long")
    stores = [store for a in attentions(model) for store in (a.k_cache, a.v_cache)]
    before = [store.cache.data_ptr() for store in stores]
    for store in stores:
        store.cache.fill_(float("nan"))
    assert_upstream(step_logits(model, "long"), references, "gemma3", "long")
    assert [store.cache.data_ptr() for store in stores] == before


@pytest.mark.parametrize("wrapped", [False, True])
def test_several_generates(wrapped, references):
    """Other prompts, other lengths, and back again: stores that move take their graphs with them."""
    model = gaudi("gemma3", references)
    model = graphs(model) if wrapped else model
    for scenario in ("long", "short", "padded", "long", "short"):
        assert_upstream(step_logits(model, scenario, wrapped=wrapped), references, "gemma3", scenario)
    ids, mask, prompt = inputs_of("long")
    other = generate(model, ids[:, :prompt], mask[:, :prompt], wrapped=wrapped, new=5)
    assert other.shape == (2, prompt + 5)
    assert_upstream(step_logits(model, "long", wrapped=wrapped), references, "gemma3", "long")


@pytest.mark.parametrize("family", ["gemma3", "gemma3_vision", "mistral", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"bucket_size": 8, "bucket_internal": True}], ids=["reuse", "bucket"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["eager", "graphs"])
def test_beams(family, options, wrapped, references):
    """Token for token, from a ring that is not yet full and from one that is; upstream runs without a cache."""
    for scenario in ("short", "long"):
        model = gaudi(family, references)
        model = graphs(model) if wrapped else model
        ids, mask, prompt = inputs_of(scenario)
        got = generate(
            model, ids[:, :prompt], mask[:, :prompt], wrapped=wrapped, num_beams=BEAMS, eos_token_id=96,
            suppress_tokens=[96], **options,
        )  # fmt: skip
        got = got if torch.is_tensor(got) else got[0]
        expected = references[family]["beams"][scenario]
        assert torch.equal(got[:, : expected.shape[1]], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_of_one_token(family, references):
    """The stock code tells a prompt from a decode step by its length alone."""
    ids, mask, _ = inputs_of("long")
    model = gaudi(family, references)
    one = generate(model, ids[:, :1], mask[:, :1])
    with torch.no_grad():  # without a cache: prompt attention on everything so far
        again = model(
            input_ids=one, attention_mask=torch.ones_like(one), use_cache=False,
            position_ids=torch.arange(one.shape[1]).expand(2, -1),
        ).logits  # fmt: skip
    assert torch.equal(again[:, :-1].argmax(-1), one[:, 1:])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("longest", [3, W, 5 * W])
def test_bytes_are_those_of_the_report(family, longest, references):
    model = gaudi(family, references)
    model.allocate_kv_cache(2, longest, min(longest, 3))
    report = optimum_habana.explain(model)
    stores = [store for a in attentions(model) for store in (a.k_cache, a.v_cache)]
    assert report.kv_bytes(longest, 2) == sum(s.cache.numel() * s.cache.element_size() for s in stores)
    assert report.stock_kv_bytes(longest, 2) == 2 * 3 * 2 * 2 * 8 * 4 * longest
    kinds = [S, F, S] if hasattr(model.config.get_text_config(), "layer_types") else [S] * 3
    for attention, kind in zip(attentions(model), kinds):
        assert attention.k_cache.cache.shape == (2, 2, min(W, longest) if kind == S else longest, 8)
        assert attention.k_cache.get_shape() == (2, 2, longest, 8)


def test_tolerance_is_far_from_the_mutants():
    assert TOLERANCE * 100 < MUTATED
