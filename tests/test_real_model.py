"""Gemma 3 270M with its real weights: what is proven about it, greedy tokens, and perplexity through the rings.

In float32, where stock's own cached and uncached runs agree to 1e-4 per token: there a window that is wrong by one is
plainly visible (0.03 % of perplexity, 0.1 of a token's log-probability), in bfloat16 it would drown in rounding.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import swa_pass
from swa_pass.api import runtime_of
from swa_pass.compat import output_cache
from swa_pass.demo.text import document, prompts
from swa_pass.demo.weights import gemma

pytestmark = [pytest.mark.weights, pytest.mark.slow]

WINDOW, PREFILL, TOTAL = 512, 600, 2000
SLIDING = [*range(5), *range(6, 11), *range(12, 17)]


@pytest.fixture(scope="module")
def real() -> SimpleNamespace:
    model, tokenizer = gemma(torch.float32)
    model.generation_config.eos_token_id = None
    ids = tokenizer(document() + "\n\n" + document(), return_tensors="pt").input_ids[:, :TOTAL]
    return SimpleNamespace(model=model, tokenizer=tokenizer, ids=ids)


@torch.no_grad()
def log_probabilities(model: torch.nn.Module, ids: torch.Tensor, window: int) -> torch.Tensor:
    """The oracle: stock, no cache, one forward. Log-probability of every token from PREFILL on."""
    swa_pass.revert(model)
    before = model.config.sliding_window
    model.config.sliding_window = window
    try:
        logits = model(ids, use_cache=False).logits[0, PREFILL - 1 : -1]
    finally:
        model.config.sliding_window = before
    return torch.log_softmax(logits, -1).gather(1, ids[0, PREFILL:, None])[:, 0]


@torch.no_grad()
def through_the_rings(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The same, with a prefill of PREFILL tokens and then one token at a time.

    The output layer is two thirds of the weights and has nothing to do with rings: it runs once, at the end.
    """
    head, model.lm_head = model.lm_head, torch.nn.Identity()
    try:
        output = model(ids[:, :PREFILL], logits_to_keep=1)
        cache, hidden = output_cache(output), []
        for position in range(PREFILL, TOTAL):
            hidden.append(output.logits[0, -1])
            output = model(ids[:, position : position + 1], **{runtime_of(model).cache_name: cache}, logits_to_keep=1)
    finally:
        model.lm_head = head
    logits = head(torch.stack(hidden))
    return torch.log_softmax(logits, -1).gather(1, ids[0, PREFILL:, None])[:, 0]


def perplexity(log_probs: torch.Tensor) -> float:
    return log_probs.mean().neg().exp().item()


def test_what_is_proven(real: SimpleNamespace) -> None:
    swa_pass.apply(real.model)
    report = swa_pass.explain(real.model)
    assert [layer.index for layer in report.rewritten] == SLIDING
    assert {layer.window for layer in report.sliding} == {WINDOW}
    assert [layer.index for layer in report.layers if layer.kind == "full"] == [5, 11, 17]
    assert report.refused == []


def test_greedy_tokens(real: SimpleNamespace) -> None:
    prompt = prompts(real.tokenizer, 1).full
    swa_pass.revert(real.model)
    stock = real.model.generate(prompt, max_new_tokens=16, do_sample=False)
    swa_pass.apply(real.model)
    ours = real.model.generate(prompt, max_new_tokens=16, do_sample=False)
    assert torch.equal(ours, stock)
    assert runtime_of(real.model).compiled_calls == 16


def test_perplexity_through_the_rings(real: SimpleNamespace) -> None:
    expected = log_probabilities(real.model, real.ids, WINDOW)
    swa_pass.apply(real.model)
    found = through_the_rings(real.model, real.ids)
    runtime = runtime_of(real.model)
    assert runtime.compiled_calls == 1 + TOTAL - PREFILL
    (decode,) = runtime.steps["decode"].rewrites
    assert set(SLIDING) <= set(decode.fused)
    assert not {"scaled_dot_product_attention", "swa_pass::view", "swa_pass::append"} & set(decode.ops_after)

    def differs(other: torch.Tensor) -> bool:
        off = abs(perplexity(found) / perplexity(other) - 1)
        return off > 5e-5 or (found - other).abs().max().item() > 0.01

    assert abs(perplexity(found) / perplexity(expected) - 1) < 1e-3
    assert not differs(expected)
    for wrong in (WINDOW - 1, WINDOW + 1):
        assert differs(log_probabilities(real.model, real.ids, wrong)), "this test could not see a wrong window"
