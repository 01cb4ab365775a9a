"""Every way of generating, on models of every kind: the stock tokens, and every forward on rings.

Counted: each forward of the model must be a compiled graph in which all layers are fused. A mode that quietly ran the
stock path would be right and useless.
"""

from __future__ import annotations

import copy
import functools
from contextlib import contextmanager
from types import SimpleNamespace

import families
import pytest
import torch
from families import ids_of
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

import swa_pass
from swa_pass.api import runtime_of
from swa_pass.compat import output_cache

W = 8
NAMES, MORE = ["mistral", "gemma4_text", "gpt_oss"], ["gemma2", "gemma3_text", "cohere2"]
pytestmark = pytest.mark.parametrize("name", [*NAMES, *(pytest.param(n, marks=pytest.mark.extended) for n in MORE)])
ENTRIES = families.BY_NAME


def build(name, seed=0):
    entry = copy.deepcopy(ENTRIES[name])
    entry["config"].update(pad_token_id=0, eos_token_id=None)
    stock = families.build(entry)
    if seed:
        torch.manual_seed(seed)
        for parameter in stock.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
    return stock


@functools.cache
def models(name):
    stock = build(name)
    model = swa_pass.apply(copy.deepcopy(stock), backend="eager")
    calls = []
    model.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True)
    mutant = families.mutant({**ENTRIES[name], "config": {**ENTRIES[name]["config"], "eos_token_id": None}}, stock, 1)
    return SimpleNamespace(stock=stock, model=model, mutant=mutant, calls=calls, runtime=runtime_of(model))


@contextmanager
def on_rings(both):
    """All forwards inside go through compiled graphs."""
    both.calls.clear()
    before = both.runtime.compiled_calls
    yield
    done = both.runtime.compiled_calls - before
    assert len(both.calls) == done > 0, f"{len(both.calls)} forwards, {done} of them on rings"
    for step in both.runtime.steps.values():
        assert all(not rewrite.views_left for rewrite in step.rewrites)


def same(both, ids, **given):
    """Ours on rings, the stock model without a cache: the same tokens."""
    given = {"max_new_tokens": 2 * W, "do_sample": False, **given}
    with on_rings(both):
        torch.manual_seed(1)
        ours = both.model.generate(ids, **given)
    torch.manual_seed(1)
    theirs = both.stock.generate(ids, use_cache=False, **{k: v for k, v in given.items() if k not in NEED_A_CACHE})
    assert torch.equal(ours, theirs)
    return ours


#: Modes that stock cannot run without a cache and that must not change the tokens.
NEED_A_CACHE = ("prompt_lookup_num_tokens", "assistant_model", "assistant_early_exit", "prefill_chunk_size")


def test_greedy_and_the_test_can_fail(name):
    both = models(name)
    ids = ids_of(3 * W)
    ours = same(both, ids)
    wrong = both.mutant.generate(ids, use_cache=False, max_new_tokens=2 * W, do_sample=False)
    assert not torch.equal(ours, wrong)


@pytest.mark.parametrize("sequences", [1, 3])
def test_sampling(name, sequences):
    same(models(name), ids_of(W + 3), do_sample=True, num_return_sequences=sequences)


@pytest.mark.parametrize("beams", [2, 3])
@pytest.mark.parametrize("prompt", [W - 1, 3 * W])
def test_beams(name, beams, prompt):
    same(models(name), ids_of(prompt), num_beams=beams)


def test_beams_left_padded_and_sampled(name):
    both = models(name)
    ids = ids_of(2 * W, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :5], ids[1, :5] = 0, 0
    same(both, ids, num_beams=2, attention_mask=mask)
    same(both, ids, num_beams=2, attention_mask=mask, do_sample=True)


def test_prompt_lookup(name):
    same(models(name), ids_of(5).repeat(1, 4), prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("applied", [False, True])
def test_assisted(name, applied):
    """The drafts of another model are mostly wrong: every burst is rolled back, across many wraps."""
    assistant = build(name, seed=1)
    both, options = models(name), {"assistant_model": assistant, "max_new_tokens": 3 * W}
    if applied:
        swa_pass.apply(assistant, backend="eager")
    else:
        try:
            both.stock.generate(ids_of(2 * W + 5), do_sample=False, **options)
        except RuntimeError as error:  # transformers 5.17 with gemma4_text
            pytest.skip(f"stock alone fails with this assistant: {error}")
    same(both, ids_of(2 * W + 5), **options)
    if applied:
        assert runtime_of(assistant).compiled_calls > 0


@pytest.mark.parametrize("chunk", [1, W, 2 * W + 3])
def test_chunked_prefill(name, chunk):
    same(models(name), ids_of(4 * W + 1), prefill_chunk_size=chunk)


def test_longer_and_shorter_between_calls(name):
    both = models(name)
    for new in (3, 4 * W, 1, W):
        same(both, ids_of(W + 2), max_new_tokens=new)


def test_embeddings_and_given_positions(name):
    both = models(name)
    ids = ids_of(2 * W)
    given = {"max_new_tokens": W, "do_sample": False}
    if name != "gemma4_text":  # its per-layer embeddings are looked up by token
        embeddings = both.stock.get_input_embeddings()(ids)
        with on_rings(both):
            ours = both.model.generate(inputs_embeds=embeddings, **given)
        assert torch.equal(ours, both.stock.generate(inputs_embeds=embeddings, **given))
    positions = torch.arange(2 * W)[None] + 40
    with on_rings(both), torch.no_grad():
        ours = both.model(ids, position_ids=positions, use_cache=True).logits
    theirs = both.stock(ids, position_ids=positions, use_cache=False).logits
    assert (ours - theirs).abs().max() < 1e-3


class Ids:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.ids, self.ended = [], False

    def put(self, value):
        self.ids += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_streaming(name):
    both = models(name)
    ids, streamer = ids_of(W + 1), Ids()
    with on_rings(both):
        ours = both.model.generate(ids, max_new_tokens=2 * W, do_sample=False, streamer=streamer)
    assert streamer.ended
    assert streamer.ids == ours[0].tolist()


class StopAt(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


def test_stop_in_the_window_and_go_on(name):
    both = models(name)
    ids = ids_of(W - 2)
    given = {"max_new_tokens": 3 * W, "do_sample": False, "return_dict_in_generate": True}
    with on_rings(both):
        first = both.model.generate(ids, stopping_criteria=StoppingCriteriaList([StopAt(W + 3)]), **given)
        assert first.sequences.shape[1] == W + 3
        cache = output_cache(first)
        second = both.model.generate(first.sequences, **{both.runtime.cache_name: cache}, **given)
    theirs = both.stock.generate(first.sequences, use_cache=False, max_new_tokens=3 * W, do_sample=False)
    assert torch.equal(second.sequences, theirs)


def test_chat_on_one_cache(name):
    both = models(name)
    given = {"max_new_tokens": 5, "do_sample": False}
    cache, seen = both.runtime.make_cache(), ids_of(3)
    for turn, more in enumerate((1, 3, W, W + 4)):
        seen = torch.cat([seen, ids_of(more, seed=turn + 1)], 1)
        with on_rings(both):
            ours = both.model.generate(seen, **{both.runtime.cache_name: cache}, **given)
        assert torch.equal(ours, both.stock.generate(seen, use_cache=False, **given))
        seen = ours


def test_what_wins_over_our_cache(name):
    """A stock cache of the caller's, an implementation asked for by name, no cache: the stock path, and right."""
    both = models(name)
    ids, given = ids_of(2 * W), {"max_new_tokens": W, "do_sample": False}
    theirs = both.stock.generate(ids, use_cache=False, **given)
    before = both.runtime.compiled_calls
    cache = DynamicCache(config=both.stock.config)
    assert torch.equal(both.model.generate(ids, **{both.runtime.cache_name: cache}, **given), theirs)
    assert cache.get_seq_length() == 3 * W - 1
    assert torch.equal(both.model.generate(ids, cache_implementation="static", **given), theirs)
    assert torch.equal(both.model.generate(ids, use_cache=False, **given), theirs)
    assert both.runtime.compiled_calls == before


def test_hidden_states(name):
    both = models(name)
    ids = ids_of(2 * W)
    given = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_hidden_states": True}
    with on_rings(both):
        ours = both.model.generate(ids, **given)
    theirs = both.stock.generate(ids, **given)
    assert torch.equal(ours.sequences, theirs.sequences)
    for a, b in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.shape == y.shape
            assert (x - y).abs().max() < 1e-3


def test_repeat_and_select(name):
    """The protocol that contrastive search and its relatives use."""
    both = models(name)
    ids = ids_of(2 * W + 5)
    with torch.no_grad(), on_rings(both):
        cache = output_cache(both.model(ids, use_cache=True))
        cache.batch_repeat_interleave(3)
        more = ids_of(2, batch=3, seed=1)
        key = both.runtime.cache_name
        wide = both.model(more, use_cache=True, **{key: cache}).logits
        cache.batch_select_indices(torch.tensor([2]))
        last = both.model(more[:1], use_cache=True, **{key: cache}).logits
        whole = torch.cat([ids.expand(3, -1), more], 1)
    assert (wide - both.stock(whole, use_cache=False).logits[:, -2:]).abs().max() < 2e-3
    final = torch.cat([whole[2:], more[:1]], 1)
    assert (last - both.stock(final, use_cache=False).logits[:, -2:]).abs().max() < 2e-3
