"""Graphs are compiled once: one for prefill, one for decode, whatever the lengths, pads and limits."""

from __future__ import annotations

import logging

import pytest
import torch
from helpers import W, assert_oracle, distance, feed, full_logits, left_padded, make_pair, one_by_one, token_ids

pytestmark = pytest.mark.parametrize("family", ["mistral", "gemma3"])


def graphs_of(pair):
    return {kind: len(step.rewrites) for kind, step in pair.runtime.steps.items()}


@torch.no_grad()
def test_case_73_four_generates(family):
    """Other prompt lengths, padding and max_new_tokens compile nothing; another batch size may, once for each graph."""
    pair = make_pair(family)

    def generate(ids, new, **kwargs):
        ours = pair.model.generate(ids, max_new_tokens=new, do_sample=False, **kwargs)
        theirs = pair.stock.generate(ids, max_new_tokens=new, do_sample=False, use_cache=False, **kwargs)
        assert torch.equal(ours, theirs)

    calls = pair.runtime.compiled_calls
    generate(token_ids(5, 2), 3 * W)  # crosses W while decoding
    assert graphs_of(pair) == {"prefill": 1, "decode": 1}
    generate(token_ids(3 * W + 1, 2), 2 * W)
    assert graphs_of(pair) == {"prefill": 1, "decode": 1}
    _, ids, mask, _ = left_padded((3, 2 * W), 2 * W)
    generate(ids, W + 3, attention_mask=mask)
    assert graphs_of(pair) == {"prefill": 1, "decode": 1}
    generate(token_ids(2 * W, 3), 90)  # another batch size, and a linear store that is larger
    assert all(n <= 2 for n in graphs_of(pair).values())
    before = graphs_of(pair)
    generate(token_ids(W, 5), 7)
    assert graphs_of(pair) == before
    assert pair.runtime.compiled_calls - calls == 3 * W + 2 * W + W + 3 + 90 + 7, "some calls ran eager"


def test_growth_compiles_nothing(family):
    """A linear store that grows has a capacity that is a symbol; nothing is compiled when W is crossed either."""
    pair = make_pair(family)
    ids = token_ids(300)
    got, cache = feed(pair, ids, one_by_one(2, 298))
    assert_oracle(pair, got, lambda model: full_logits(model, ids))
    assert graphs_of(pair) == {"prefill": 1, "decode": 1}
    assert cache.layers[1].k_store.shape[2] >= (300 if family == "gemma3" else W)


@torch.no_grad()
def test_the_recompile_limit_is_reported(family, caplog):
    """Dynamo would fall to eager silently. Ours says so, once, and stays right."""
    pair = make_pair(family)
    ids = token_ids(3 * W, 3)
    with torch._dynamo.config.patch(recompile_limit=1), caplog.at_level(logging.WARNING, logger="swa_pass"):
        for batch in (2, 3, 3):  # from one fixed size to another: a second graph
            output = pair.model(ids[:batch])
            assert distance(output.logits, full_logits(pair.stock, ids[:batch])) < 5e-5
    said = [r.getMessage() for r in caplog.records if r.name == "swa_pass" and "limit" in r.getMessage().lower()]
    assert len(said) == 1, [r.getMessage() for r in caplog.records]
    assert "prefill" in said[0]
    (why,) = pair.runtime.steps["prefill"].failed.values()
    assert "limit" in why.lower()


@torch.no_grad()
def test_every_way_to_call_stays_compiled(family):
    """Callers differ in arguments and batch sizes. All of them together must not use up Dynamo's recompile limit."""
    pair = make_pair(family)
    ids = token_ids(2 * W, 3)
    embed = pair.stock.get_input_embeddings()
    calls = 0
    for batch in (1, 2, 3):
        rows = ids[:batch]
        positions = torch.arange(2 * W).expand(batch, -1)
        for kwargs in (
            {"input_ids": rows},
            {"input_ids": rows, "position_ids": positions},
            {"input_ids": rows, "logits_to_keep": 1},
            {"input_ids": rows, "position_ids": positions, "logits_to_keep": 1},
            {"input_ids": rows, "position_ids": positions, "logits_to_keep": 4},
            {"inputs_embeds": embed(rows), "position_ids": positions},
        ):
            got = pair.model(**kwargs).logits
            calls += 1
            assert distance(got, full_logits(pair.stock, rows)[:, -got.shape[1] :]) < 5e-5
            assert pair.runtime.compiled_calls == calls, f"eager: {sorted(kwargs)}, {batch} rows"
