"""Positions past 2^31. A ring runs for ever, so its clock must not end where 32 bits do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import W, assert_oracle, compiled_calls, full_logits, make_pair, positions_of, token_ids
from test_ops_common import Case, impl, make_case, one_thread

from swa_pass.compat import output_cache

__all__ = ["impl", "one_thread"]  # fixtures


@pytest.fixture(scope="module")
def pair():
    return make_pair("mistral")


def far(cache, tokens):
    """The same cache, had `tokens` more been seen before those that it holds."""
    snapshot = cache.snapshot()
    layers = {i: replace(state, first=state.first + tokens) for i, state in snapshot.layers.items()}
    cache.restore(replace(snapshot, seen=snapshot.seen + tokens, layers=layers))
    assert cache.get_seq_length() == snapshot.seen + tokens > 2**31 - W


@pytest.mark.parametrize("tokens", [2**31 - 3 * W, 2**31 + 5, 2**32 + 1, 2**40])
@pytest.mark.parametrize("chunks", [[1] * (2 * W), [3, W + 3, 1, 1]], ids=["one by one", "chunks"])
def test_a_model_far_out(pair, tokens, chunks):
    """RoPE knows differences only. With the positions of a short text given, the logits are those of the short text."""
    prompt, more = 2 * W + 5, sum(chunks)
    ids = token_ids(prompt + more)
    positions = positions_of(torch.ones(1, prompt + more))
    with torch.no_grad(), compiled_calls(pair, 1 + len(chunks)):
        output = pair.model(ids[:, :prompt], position_ids=positions[:, :prompt], use_cache=True)
        cache, parts, done = output_cache(output), [output.logits], prompt
        far(cache, tokens)
        for new in chunks:
            given = {"position_ids": positions[:, done : done + new], pair.runtime.cache_name: cache}
            parts.append(pair.model(ids[:, done : done + new], use_cache=True, **given).logits)
            done += new
    assert cache.get_seq_length() == tokens + prompt + more
    assert_oracle(pair, torch.cat(parts, 1), lambda model: full_logits(model, ids))


def test_a_rollback_far_out(pair):
    ids = token_ids(4 * W)
    with torch.no_grad():
        cache = output_cache(pair.model(ids[:, : 2 * W], use_cache=True))
        far(cache, 2**31 + 5)
        positions = positions_of(torch.ones(1, 4 * W))
        key = pair.runtime.cache_name
        pair.model(token_ids(5, seed=9), position_ids=positions[:, :5], **{key: cache})
        cache.crop(-5)
        with pytest.raises(ValueError, match="cannot take back"):
            cache.crop(-17)
        got = pair.model(ids[:, 2 * W :], position_ids=positions[:, 2 * W :], **{key: cache}).logits
    assert_oracle(pair, got, lambda model: full_logits(model, ids)[:, 2 * W :])


def test_positions_that_the_model_counts_itself(pair):
    """Not given: the model is asked for 2^31 and more by the cache, and gets the same as when they are given."""
    ids, start = token_ids(2 * W + 3), 2**31 + 5
    results = []
    for given in (False, True):
        with torch.no_grad():
            cache = output_cache(pair.model(ids[:, : 2 * W], use_cache=True))
            far(cache, start)
            kwargs = {"position_ids": torch.arange(3)[None] + start + 2 * W} if given else {}
            with compiled_calls(pair, 1):
                results.append(pair.model(ids[:, 2 * W :], **kwargs, **{pair.runtime.cache_name: cache}).logits)
    assert torch.equal(*results)
    assert results[0].isfinite().all()


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("starts", [None, [70, 40]])
def test_every_kernel_far_out(impl, tokens, starts):
    """A ring repeats itself every C tokens: C * n tokens later, the same stores give the same bits."""
    near: Case = make_case(tokens=tokens, window=W, slack=16, lengths=[74, 68], starts=starts)
    slots = near.k_store.shape[2]
    shift = (2**31 // slots + 7) * slots
    outputs = []
    for by in (0, shift, shift + 1):  # the last one is a wrong position: it must be seen
        stores = near.k_store.clone().nan_to_num_(0.5), near.v_store.clone().nan_to_num_(0.5)
        lengths = near.lengths + by
        first = None if near.starts is None else near.starts + by
        args = (near.q, near.k_new, near.v_new, *stores, lengths, first)
        outputs.append((impl.attend(*args, **near.options), *stores))
        impl.append(*args[1:6], window=W)
    for a, b in zip(outputs[0], outputs[1], strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(outputs[0][0], outputs[2][0])
    assert not torch.equal(outputs[0][1], outputs[2][1])
