"""`generate` on an applied model against the stock model without a cache."""

from __future__ import annotations

import logging

import pytest
import torch
from helpers import F, W, assert_oracle, feed, full_logits, left_padded, make_pair, shared_pair, token_ids
from transformers import DynamicCache

import swa_pass
from swa_pass.compat import output_cache

families = pytest.mark.parametrize("family", ["mistral", "gemma3"])
pytestmark = families


@torch.no_grad()
def both(pair, ids, *, only_ours=None, **kwargs):
    """Tokens from the applied model and from the stock one without a cache; the same arguments, the same seed.

    only_ours: arguments that make no sense without a cache and must not change the tokens.
    """
    kwargs = {"do_sample": False, "max_new_tokens": 2 * W, **kwargs}
    calls = pair.runtime.compiled_calls
    torch.manual_seed(1)
    ours = pair.model.generate(ids, **kwargs, **(only_ours or {}))
    assert pair.runtime.compiled_calls > calls, "nothing ran compiled"
    torch.manual_seed(1)
    theirs = pair.stock.generate(ids, use_cache=False, **kwargs)
    return ours, theirs


def assert_same_tokens(pair, ids, **kwargs):
    ours, theirs = both(pair, ids, **kwargs)
    assert torch.equal(ours, theirs)
    return ours


def test_tokens_tell_a_wrong_window(family):
    """The check on all others here: greedy tokens of a window that is wrong by one differ."""
    pair, ids = shared_pair(family), token_ids(3 * W, 4)
    ours = assert_same_tokens(pair, ids)
    for mutant in pair.mutants.values():
        with torch.no_grad():
            wrong = mutant.generate(ids, max_new_tokens=2 * W, do_sample=False, use_cache=False)
        assert not torch.equal(ours, wrong)


@pytest.mark.parametrize("prompt", [1, 2, W - 1, W, W + 1, 2 * W, 3 * W, 5 * W + 3])
def test_prompts_of_any_length(family, prompt):
    pair = shared_pair(family)
    calls = pair.runtime.compiled_calls
    assert_same_tokens(pair, token_ids(prompt))
    assert pair.runtime.compiled_calls - calls == 2 * W


@pytest.mark.parametrize("lengths", [(3, 3 * W), (1, W, 2 * W + 5), (W, W)])
def test_left_padded_batches(family, lengths):
    """Each row as alone: the batch must be the stock batch, and that must be the single rows."""
    pair = shared_pair(family)
    rows, ids, mask, starts = left_padded(lengths, max(lengths))
    ours = assert_same_tokens(pair, ids, attention_mask=mask)
    for row, start, tokens in zip(rows, starts.tolist(), ours, strict=True):
        with torch.no_grad():
            alone = pair.stock.generate(row, max_new_tokens=2 * W, do_sample=False, use_cache=False)
        assert torch.equal(tokens[start:], alone[0])


def test_left_padding_without_a_mask(family):
    """`generate` infers the mask from the pad token."""
    pair = shared_pair(family)
    _, ids, _, _ = left_padded((3, 3 * W), 3 * W)
    assert_same_tokens(pair, ids)


@pytest.mark.parametrize("chunk", [1, 3, W - 1, W, W + 3, 3 * W])
def test_chunked_prefill(family, chunk):
    assert_same_tokens(shared_pair(family), token_ids(4 * W + 1), only_ours={"prefill_chunk_size": chunk})


def test_twice_and_longer(family):
    pair, ids = shared_pair(family), token_ids(2 * W)
    first = assert_same_tokens(pair, ids)
    assert torch.equal(assert_same_tokens(pair, ids), first)
    assert torch.equal(assert_same_tokens(pair, ids, max_new_tokens=5 * W)[:, : first.shape[1]], first)


def test_sampling_under_a_seed(family):
    assert_same_tokens(shared_pair(family), token_ids(W + 3), do_sample=True, num_return_sequences=3)


@pytest.mark.parametrize("beams", [2, 3])
@pytest.mark.parametrize("prompt", [W - 1, 3 * W])
def test_beams(family, beams, prompt):
    assert_same_tokens(shared_pair(family), token_ids(prompt), num_beams=beams)


def test_beams_on_padded_rows(family):
    _, ids, mask, _ = left_padded((3, 2 * W), 2 * W)
    assert_same_tokens(shared_pair(family), ids, attention_mask=mask, num_beams=2)


def test_prompt_lookup(family):
    """Draft bursts that are taken back: the ring must hold what they covered."""
    ids = token_ids(W).repeat(1, 3)
    assert_same_tokens(shared_pair(family), ids, only_ours={"prompt_lookup_num_tokens": 3}, max_new_tokens=4 * W)


# ------------------------------------------------------------------------------------------------- the caller's choice


def messages(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "swa_pass" and r.levelno >= logging.WARNING]


def test_the_callers_cache_wins(family, caplog):
    pair, ids = shared_pair(family), token_ids(2 * W)
    with torch.no_grad(), caplog.at_level(logging.INFO, logger="swa_pass"):
        for _ in range(2):
            cache = DynamicCache(config=pair.model.config)
            kwargs = {pair.runtime.cache_name: cache, "do_sample": False, "max_new_tokens": W}
            calls = pair.runtime.compiled_calls
            ours = pair.model.generate(ids, return_dict_in_generate=True, **kwargs)
            assert output_cache(ours) is cache
            assert pair.runtime.compiled_calls == calls
            theirs = pair.stock.generate(ids, max_new_tokens=W, do_sample=False, use_cache=False)
            assert torch.equal(ours.sequences, theirs)
    assert len(messages(caplog)) <= 1, "said once, however often it happens"
    assert all("DynamicCache" in message for message in messages(caplog))


def test_cache_implementation_wins(family):
    pair, ids = shared_pair(family), token_ids(2 * W)
    calls = pair.runtime.compiled_calls
    with torch.no_grad():
        ours = pair.model.generate(
            ids, max_new_tokens=W, do_sample=False, cache_implementation="static", return_dict_in_generate=True
        )
        theirs = pair.stock.generate(ids, max_new_tokens=W, do_sample=False, use_cache=False)
    assert type(output_cache(ours)).__name__ == "StaticCache"
    assert torch.equal(ours.sequences, theirs)
    assert pair.runtime.compiled_calls == calls


def test_no_cache_is_no_cache(family):
    pair = shared_pair(family)
    ids = token_ids(2 * W)
    calls = pair.runtime.compiled_calls
    with torch.no_grad():
        output = pair.model.generate(
            ids, max_new_tokens=W, do_sample=False, use_cache=False, return_dict_in_generate=True
        )
        assert output_cache(pair.model(ids, use_cache=False)) is None
    assert output_cache(output) is None
    assert pair.runtime.compiled_calls == calls


def test_our_cache_may_be_given(family):
    """A HybridCache of the caller's runs on the fast path, and holds what was generated."""
    pair, ids = shared_pair(family), token_ids(2 * W)
    cache = pair.runtime.make_cache()
    ours, theirs = None, None
    with torch.no_grad():
        calls = pair.runtime.compiled_calls
        ours = pair.model.generate(ids, max_new_tokens=W, do_sample=False, **{pair.runtime.cache_name: cache})
        theirs = pair.stock.generate(ids, max_new_tokens=W, do_sample=False, use_cache=False)
    assert torch.equal(ours, theirs)
    assert pair.runtime.compiled_calls - calls == W
    assert cache.get_seq_length() == 3 * W - 1


# ------------------------------------------------------------------------------------------------------- several turns


@pytest.mark.parametrize("first", [3, 2 * W + 5])
@pytest.mark.parametrize("later", [1, 3, W, W + 4])
def test_chat_turns(family, first, later):
    """Three turns on the cache that `generate` returned, each as a fresh run without a cache."""
    pair, cache, ids = shared_pair(family), None, token_ids(first)
    for turn in range(3):
        kwargs = {} if cache is None else {pair.runtime.cache_name: cache}
        with torch.no_grad():
            output = pair.model.generate(ids, max_new_tokens=W, do_sample=False, return_dict_in_generate=True, **kwargs)
            theirs = pair.stock.generate(ids, max_new_tokens=W, do_sample=False, use_cache=False)
        assert torch.equal(output.sequences, theirs)
        cache = output_cache(output)
        assert isinstance(cache, swa_pass.HybridCache)
        ids = torch.cat([output.sequences, token_ids(later, seed=turn + 1)], dim=1)


def test_a_turn_after_a_manual_prefill(family):
    pair, ids = shared_pair(family), token_ids(3 * W)
    _, cache = feed(pair, ids[:, : 2 * W], [2 * W])
    with torch.no_grad():
        ours = pair.model.generate(ids, max_new_tokens=W, do_sample=False, **{pair.runtime.cache_name: cache})
        theirs = pair.stock.generate(ids, max_new_tokens=W, do_sample=False, use_cache=False)
    assert torch.equal(ours, theirs)


def test_inputs_embeds(family):
    pair, ids = shared_pair(family), token_ids(2 * W + 5)
    embeds = pair.stock.get_input_embeddings()(ids).detach()
    calls = pair.runtime.compiled_calls
    with torch.no_grad():
        kwargs = {"inputs_embeds": embeds, "max_new_tokens": W, "do_sample": False}
        assert torch.equal(pair.model.generate(**kwargs), pair.stock.generate(use_cache=False, **kwargs))
    assert pair.runtime.compiled_calls - calls == W


def test_output_logits(family):
    pair, ids = shared_pair(family), token_ids(2 * W)
    kwargs = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with torch.no_grad():
        ours = pair.model.generate(ids, **kwargs)
        theirs = pair.stock.generate(ids, use_cache=False, **kwargs)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), atol=5e-5, rtol=0)


def test_hidden_states(family):
    """Stock values, and calls of several forms do not take the fast path from one another."""
    pair, ids = make_pair(family), token_ids(2 * W)
    with torch.no_grad():
        hidden = pair.model(ids, output_hidden_states=True).hidden_states
        expected = pair.stock(ids, output_hidden_states=True).hidden_states
    assert len(hidden) == len(expected)
    for mine, stock in zip(hidden, expected, strict=True):
        torch.testing.assert_close(mine, stock, atol=5e-4, rtol=1e-4)
    got, _ = feed(pair, ids, [2 * W])
    assert_oracle(pair, got, lambda model: full_logits(model, ids))


def test_attention_weights_come_from_the_stock_path(family):
    """A fused operator has no weights to give: such a call runs eager, in time order, and is right."""
    pair, ids = shared_pair(family), token_ids(3 * W)
    with torch.no_grad():
        output = pair.model(ids, output_attentions=True)
        expected = pair.stock(ids, output_attentions=True)
    assert_oracle(pair, output.logits, lambda model: full_logits(model, ids))
    if expected.attentions and expected.attentions[0] is not None:
        for mine, stock in zip(output.attentions, expected.attentions, strict=True):
            torch.testing.assert_close(mine, stock, atol=1e-5, rtol=0)


def test_needle_on_a_global_layer(family):
    """The first token moves the logits five windows later where a global layer sees it, and not at all otherwise."""
    pair, ids = shared_pair(family), token_ids(5 * W)
    changed = ids.clone()
    changed[0, 0] = changed[0, 0] % 127 + 1
    moved = (feed(pair, ids, [5 * W])[0] - feed(pair, changed, [5 * W])[0])[:, -1].abs().max().item()
    has_global = F in (getattr(pair.model.config, "layer_types", None) or [])
    assert (moved > 1e-3) if has_global else (moved == 0)
