"""Adapters that put something before the prompt: a past of learnt keys (prefix tuning), or learnt embeddings.

The oracle is the stock model with its own cache. Without one, peft 0.21 gives such a prompt to the first step only.
"""

from __future__ import annotations

import logging

import pytest
import torch
from helpers import MUTATED, TOLERANCE, W, distance, tiny, token_ids, with_window

import swa_pass
from swa_pass.api import runtime_of
from swa_pass.cache import HybridCache
from swa_pass.compat import output_cache

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Position ids are not supported")

GREEDY = {"max_new_tokens": 2 * W, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
CONFIGS = {
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "p-tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, encoder_hidden_size=16),
    "short prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "long prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=W + 3),
}
FAMILIES = ["mistral", pytest.param("gemma3", marks=pytest.mark.extended)]


def adapted(base, kind):
    torch.manual_seed(0)
    model = peft.get_peft_model(base, CONFIGS[kind]()).eval().requires_grad_(False)
    for parameter in model.prompt_encoder.parameters():
        parameter.data.normal_()
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["prompt tuning", "p-tuning"])
def test_learnt_embeddings_on_rings(family, kind):
    model, ids = adapted(tiny(family), kind), token_ids(W + 3)
    theirs = model.generate(input_ids=ids, **GREEDY)
    base = swa_pass.apply(model.get_base_model(), backend="eager")
    ours = model.generate(input_ids=ids, **GREEDY)
    assert isinstance(output_cache(ours), HybridCache)
    assert runtime_of(base).compiled_calls == 2 * W
    assert torch.equal(ours.sequences, theirs.sequences)
    assert distance(torch.stack(ours.logits), torch.stack(theirs.logits)) < TOLERANCE
    plain = tiny(family).generate(ids, **GREEDY)
    assert distance(torch.stack(ours.logits), torch.stack(plain.logits)) > MUTATED, "this prompt changes nothing"
    wrong = adapted(with_window(tiny(family), W + 1), kind).generate(input_ids=ids, **GREEDY)
    assert distance(torch.stack(ours.logits), torch.stack(wrong.logits)) > MUTATED


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["short prefix", "long prefix"])
def test_a_prefix_of_learnt_keys(family, kind, caplog):
    """A forward: the prefix is a stock cache of peft's, so the stock path is taken, said once.

    In `generate`, peft passes it under the old name next to generate's cache, which then wins in stock: so do we.
    """
    model, ids = adapted(tiny(family), kind), token_ids(W + 3)
    theirs = model.generate(input_ids=ids, **GREEDY)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    base = model.get_base_model()
    assert distance(expected, base(ids).logits) > 0.1, "this prefix changes nothing"
    swa_pass.apply(base, backend="eager")
    with caplog.at_level(logging.WARNING, logger="swa_pass"), torch.no_grad():
        for _ in range(2):
            assert distance(model(input_ids=ids).logits, expected) == 0
    said = [record.getMessage() for record in caplog.records if record.name == "swa_pass"]
    assert len(said) == 1
    assert "DynamicCache" in said[0]
    ours = model.generate(input_ids=ids, **GREEDY)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert distance(torch.stack(ours.logits), torch.stack(theirs.logits)) < TOLERANCE
