"""Models whose weights are quantised: rings and compiled steps around torchao's own kernels.

Weights that were loaded from a GGUF file are covered by the demo's model (test_real_model.py): transformers turns them
into plain tensors. Only weights that stay quantised are special, because they are no plain tensors.
"""

from __future__ import annotations

import copy
import logging
import warnings

import pytest
import torch
from helpers import TOLERANCE, Pair, W, assert_oracle, distance, feed, full_logits, one_by_one, tiny, token_ids

import swa_pass
from swa_pass.api import runtime_of
from swa_pass.passes.decode_linear import use_decode_linear

logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns about CUDA extensions that it cannot load here
torchao = pytest.importorskip("torchao.quantization")

GREEDY = {"max_new_tokens": 2 * W, "do_sample": False}


def int8(model):
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    assert type(model.model.layers[0].self_attn.q_proj.weight) is not torch.nn.Parameter
    return model


@pytest.mark.parametrize("family", ["mistral", pytest.param("gemma3", marks=pytest.mark.extended)])
def test_int8_weights(family):
    """The quantised stock model without a cache, and not one with another window, nor the model before."""
    plain = tiny(family)
    stock = int8(copy.deepcopy(plain))
    pair = Pair(swa_pass.apply(copy.deepcopy(stock), backend="eager"), stock)
    ids = token_ids(5 * W)
    got, _ = feed(pair, ids, one_by_one(3 * W, 2 * W))
    assert_oracle(pair, got, lambda model: full_logits(model, ids))
    assert distance(got, full_logits(plain, ids)) > 100 * TOLERANCE, "these weights are not quantised"
    ours = pair.model.generate(ids[:, : W + 3], **GREEDY)
    assert torch.equal(ours, stock.generate(ids[:, : W + 3], use_cache=False, **GREEDY))


def test_int8_weights_of_a_bfloat16_model():
    """They say that they are bfloat16, and our decode linear, which is for bfloat16, must leave them alone."""
    stock = int8(tiny("gemma3").bfloat16())
    pair = Pair(swa_pass.apply(copy.deepcopy(stock), backend="eager"), stock)
    ids = token_ids(4 * W)
    got, _ = feed(pair, ids, one_by_one(3 * W, W))
    truth = full_logits(copy.deepcopy(stock).float(), ids)
    noise = distance(full_logits(stock, ids).float(), truth)
    assert distance(got.float(), truth) < 3 * noise
    (decode,) = pair.runtime.steps["decode"].rewrites
    assert "swa_pass::linear" not in decode.ops_after


def test_the_decode_linear_takes_plain_weights_only():
    def linears(layer):
        counts = []

        def count(gm, inputs):
            counts.append(use_decode_linear(gm))
            return gm.forward

        with torch.no_grad():
            torch.compile(lambda x: layer(x), backend=count, fullgraph=True)(torch.randn(1, 32, dtype=torch.bfloat16))
        return counts

    layer = torch.nn.Linear(32, 32, dtype=torch.bfloat16)
    assert linears(layer) == [1]
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig())
    assert linears(layer) == [0]


@pytest.mark.parametrize("first", ["apply", "quantise"])
def test_torchs_own_dynamic_quantisation(first, caplog):
    """Dynamo cannot trace its packed weights. Found at the first call: the stock path. Later: eager. Both are said."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it deprecated
        model, stock = tiny("mistral"), tiny("mistral")
        ids = token_ids(2 * W)
        if first == "apply":
            swa_pass.apply(model, backend="eager")
            model.generate(ids, **GREEDY)
        for each in (model, stock):
            torch.ao.quantization.quantize_dynamic(each, {torch.nn.Linear}, inplace=True)
        with caplog.at_level(logging.WARNING, logger="swa_pass"):
            swa_pass.apply(model, backend="eager")
            with torch.no_grad():
                ours = [model(ids, use_cache=True).logits, model(ids, use_cache=True).logits]
                theirs = stock(ids, use_cache=False).logits
    assert distance(ours[0], ours[1]) == 0
    assert distance(ours[0], theirs) < TOLERANCE
    said = [record.getMessage() for record in caplog.records if record.name == "swa_pass"]
    assert len(said) == 1
    assert "stock path" in said[0] or "runs eager" in said[0]
    assert runtime_of(model).compiled_calls == (2 * W if first == "apply" else 0)
