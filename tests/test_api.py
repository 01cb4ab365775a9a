"""apply, revert, explain, warmup, and bad input."""

from __future__ import annotations

import copy
import functools
import logging

import pytest
import torch
from helpers import F, S, W, assert_oracle, distance, feed, full_logits, make_pair, shared_pair, tiny, token_ids
from torch._dynamo.utils import counters
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

import swa_pass
from swa_pass.api import runtime_of
from swa_pass.compat import output_cache


def said(caplog, level=logging.WARNING):
    return [r.getMessage() for r in caplog.records if r.name == "swa_pass" and r.levelno >= level]


def assert_untouched(model, stock):
    assert runtime_of(model) is None
    assert set(vars(model)) == set(vars(stock))


# --------------------------------------------------------------------------------------------------------------- apply


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_apply_is_quick_and_twice_is_once(family):
    model = tiny(family)
    counters.clear()
    assert swa_pass.apply(model, backend="eager") is model
    runtime = runtime_of(model)
    assert not runtime._proofs  # nothing was captured: that is for the first call
    assert not counters["frames"]
    assert swa_pass.apply(model) is model
    assert runtime_of(model) is runtime


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_nothing_else_changes(family, tmp_path):
    """state_dict, config, dtype, device, signature, and what save_pretrained writes."""
    pair = shared_pair(family)
    model, stock = pair.model, pair.stock
    assert list(model.state_dict()) == list(stock.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), stock.parameters(), strict=True))
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in stock.named_buffers()]
    assert model.config.to_dict() == stock.config.to_dict()
    assert model.generation_config.to_dict() == stock.generation_config.to_dict()
    assert (model.dtype, model.device, model.training) == (stock.dtype, stock.device, stock.training)
    model.save_pretrained(tmp_path)
    loaded = type(stock).from_pretrained(tmp_path).eval()
    assert runtime_of(loaded) is None
    ids = token_ids(3 * W)
    assert torch.equal(full_logits(loaded, ids), full_logits(stock, ids))
    model.load_state_dict(stock.state_dict(), strict=True)


def test_revert_restores():
    pair = make_pair("mistral")
    ids = token_ids(3 * W)
    feed(pair, ids, [3 * W])
    model = pair.model
    assert swa_pass.revert(model) is model
    assert_untouched(model, pair.stock)
    assert model.forward.__func__ is type(model).forward
    with torch.no_grad():
        assert torch.equal(model(ids).logits, pair.stock(ids).logits)
        output = model.generate(ids, max_new_tokens=W, do_sample=False, return_dict_in_generate=True)
        theirs = pair.stock.generate(ids, max_new_tokens=W, do_sample=False, use_cache=False)
    assert type(output_cache(output)).__name__ == "DynamicCache"
    assert torch.equal(output.sequences, theirs)
    assert swa_pass.revert(model) is model  # nothing to take back is no error
    again = swa_pass.apply(model, backend="eager")
    assert runtime_of(again) is not None


def test_revert_keeps_a_hook_that_was_there_before():
    """accelerate replaces `forward` on the instance; that is what revert must restore."""
    model = tiny("mistral")
    stock = model.forward

    @functools.wraps(stock)
    def hooked(*args, **kwargs):
        return stock(*args, **kwargs)

    model.forward = hooked
    swa_pass.apply(model, backend="eager")
    swa_pass.revert(model)
    assert model.forward is hooked


def test_a_deep_copy_is_independent():
    """The copy computes with its own weights, through its own graphs, and reverts alone."""
    pair = make_pair("mistral")
    ids = token_ids(3 * W)
    feed(pair, ids, [2 * W, *[1] * W])
    twin = copy.deepcopy(pair.model)
    assert runtime_of(twin) is not pair.runtime
    assert runtime_of(twin).model is twin
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.1)
        expected = copy.deepcopy(pair.stock)
        for parameter in expected.parameters():
            parameter.mul_(1.1)
    twin_pair = type(pair)(twin, expected)
    got, _ = feed(twin_pair, ids, [2 * W, *[1] * W])
    assert_oracle(twin_pair, got, lambda model: full_logits(model, ids))
    got, _ = feed(pair, ids, [2 * W, *[1] * W])
    assert_oracle(pair, got, lambda model: full_logits(model, ids))
    swa_pass.revert(twin)
    assert runtime_of(pair.model) is pair.runtime


def test_weights_may_change_after_apply():
    """Graphs read the weights, they do not hold a copy."""
    pair = make_pair("mistral")
    ids = token_ids(3 * W)
    feed(pair, ids, [2 * W, *[1] * W])
    with torch.no_grad():
        for model in (pair.model, pair.stock):
            for parameter in model.parameters():
                parameter.mul_(0.9)
    got, _ = feed(pair, ids, [2 * W, *[1] * W])
    assert_oracle(pair, got, lambda model: full_logits(model, ids))


# ------------------------------------------------------------------------------------------------------------- explain


def test_explain_before_and_after():
    model = tiny("gemma3")
    before = swa_pass.explain(model)
    assert_untouched(model, tiny("gemma3"))
    swa_pass.apply(model, backend="eager")
    after = swa_pass.explain(model)
    assert before.layers == after.layers
    assert [(s.index, s.kind, s.window, s.action) for s in after.layers] == [
        (0, "sliding", W, "rewritten"),
        (1, "full", None, "kept"),
        (2, "sliding", W, "rewritten"),
    ]
    first = after.layers[0]
    assert (first.heads, first.kv_heads, first.head_dim, first.softcap, first.sinks) == (4, 2, 16, 0.0, False)
    assert first.scale == pytest.approx(16**-0.5)
    assert all(layer.reason for layer in after.layers if layer.action != "rewritten")
    text = str(after)
    assert "sliding" in text
    assert "2 of 2 sliding layers rewritten" in text
    assert after.to_dict()["layers"][0]["window"] == W


@torch.no_grad()
def test_report_bytes_are_those_of_the_cache():
    pair = shared_pair("gemma3")
    for prompt, new, batch in ((5, 10, 1), (3 * W, 2 * W, 2), (100, 60, 3)):
        output = pair.model.generate(
            token_ids(prompt, batch), max_new_tokens=new, do_sample=False, return_dict_in_generate=True
        )
        assert output_cache(output).nbytes == swa_pass.explain(pair.model).kv_bytes(prompt + new - 1, batch)


def test_scale_comes_from_the_graph():
    """Gemma's scale is no function of head_dim."""
    pair = make_pair("gemma3", query_pre_attn_scalar=50)
    assert pair.runtime.specs[0].scale == pytest.approx(50**-0.5)
    ids = token_ids(3 * W)
    got, _ = feed(pair, ids, [3 * W])
    assert_oracle(pair, got, lambda model: full_logits(model, ids))


# -------------------------------------------------------------------------------------------------------------- warmup


def test_warmup_compiles_what_generate_needs(caplog):
    pair = make_pair("mistral")
    with caplog.at_level(logging.INFO, logger="swa_pass"):
        swa_pass.warmup(pair.model, batch=2, length=5)
    assert any("compiled in" in message for message in said(caplog, logging.INFO))
    before = {kind: len(step.rewrites) for kind, step in pair.runtime.steps.items()}
    assert before == {"prefill": 1, "decode": 1}
    ids = token_ids(2 * W, 2)
    with torch.no_grad():
        ours = pair.model.generate(ids, max_new_tokens=2 * W, do_sample=False)
        assert torch.equal(ours, pair.stock.generate(ids, max_new_tokens=2 * W, do_sample=False, use_cache=False))
    assert {kind: len(step.rewrites) for kind, step in pair.runtime.steps.items()} == before


def test_warmup_is_checked():
    with pytest.raises(ValueError, match="apply"):
        swa_pass.warmup(tiny("mistral"))
    model = swa_pass.apply(tiny("mistral"), backend="eager")
    for wrong in ({"batch": 0}, {"length": 0}):
        with pytest.raises(ValueError, match="batch"):
            swa_pass.warmup(model, **wrong)


# ------------------------------------------------------------------------------------------------ gradients, training


@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_those_of_the_stock_model(training):
    """With gradients on, the stock path runs: same loss, same gradients."""
    pair = make_pair("gemma3")
    ids = token_ids(3 * W, 2)
    for model in (pair.model, pair.stock):
        model.train(training)
        torch.manual_seed(3)
        model(ids, labels=ids).loss.backward()
    assert pair.runtime.compiled_calls == 0
    for mine, stock in zip(pair.model.parameters(), pair.stock.parameters(), strict=True):
        assert torch.equal(mine.grad, stock.grad)
    assert any(p.grad.abs().max() > 0 for p in pair.model.parameters())


@torch.no_grad()
def test_generate_in_training_mode():
    pair = shared_pair("mistral")
    ids = token_ids(2 * W)
    calls = pair.runtime.compiled_calls
    pair.model.train()
    try:
        ours = pair.model.generate(ids, max_new_tokens=W, do_sample=False)
    finally:
        pair.model.eval()
    assert pair.runtime.compiled_calls == calls
    assert torch.equal(ours, pair.stock.generate(ids, max_new_tokens=W, do_sample=False, use_cache=False))


# ----------------------------------------------------------------------------------------------------------- bad input


def test_no_sliding_layer(caplog):
    for model in (tiny("gemma3", layer_types=[F, F]), tiny("mistral", sliding_window=None)):
        stock = copy.deepcopy(model)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="swa_pass"):
            assert swa_pass.apply(model, backend="eager") is model
            with torch.no_grad():
                ids = token_ids(3 * W)
                assert torch.equal(model(ids).logits, stock(ids).logits)
        assert len(said(caplog)) == 1
        assert "slid" in said(caplog)[0]


def encoder_decoder():
    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    ).eval()


def not_causal():
    return BertForMaskedLM(
        BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    ).eval()


REFUSED = [
    (encoder_decoder, ValueError, "encoder-decoder"),
    (not_causal, ValueError, "not causal|no decod|no KV cache"),
    (lambda: tiny("mistral").train(), ValueError, "training mode"),
    (lambda: tiny("mistral", sliding_window=0), ValueError, "sliding_window=0"),
    (lambda: tiny("mistral", sliding_window=-8), ValueError, "sliding_window=-8"),
    (lambda: torch.nn.Linear(2, 2), TypeError, "Linear"),
]


@pytest.mark.parametrize(("build", "error", "sentence"), REFUSED)
def test_bad_models(build, error, sentence):
    model = build()
    before = set(vars(model))
    with pytest.raises(error, match=sentence):
        swa_pass.apply(model, backend="eager")
    assert set(vars(model)) == before, "half applied"
    with pytest.raises((ValueError, TypeError), match=sentence):
        swa_pass.explain(model)


def test_bad_arguments():
    model = tiny("mistral")
    with pytest.raises(ValueError, match="slack"):
        swa_pass.apply(model, slack=-1)
    with pytest.raises(Exception, match="nonsense"):
        swa_pass.apply(model, backend="nonsense")
    assert_untouched(model, tiny("mistral"))


def refused_model():
    """A model of which a layer cannot be proven: dropout inside attention stays on."""
    model = tiny("gemma3", layer_types=[S, F])
    model.model.layers[0].self_attn.attention_dropout = 0.1
    model.model.layers[0].self_attn.train()
    return model


def test_strict_raises_on_a_refused_layer():
    model = swa_pass.apply(refused_model(), backend="eager", strict=True)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"layer 0.*dropout"):
        model(token_ids(5))


def test_a_refused_layer_is_said_once(caplog):
    model = swa_pass.apply(refused_model(), backend="eager")
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="swa_pass"):
        for _ in range(3):
            model(token_ids(5))
    assert len(said(caplog)) == 1
    assert "1 of 2 layers" in said(caplog)[0]
    assert "dropout" in said(caplog)[0]
    report = swa_pass.explain(model)
    assert [layer.action for layer in report.layers] == ["refused", "kept"]
    assert runtime_of(model).compiled_calls == 0


def test_wrong_batch_on_a_cache():
    pair = shared_pair("mistral")
    _, cache = feed(pair, token_ids(5, 2), [5])
    stores = [layer.k_store.clone() for layer in cache.layers]
    with torch.no_grad(), pytest.raises(ValueError, match="2 rows and 3"):
        pair.model(token_ids(1, 3), **{pair.runtime.cache_name: cache})
    assert cache.get_seq_length() == 5
    for layer, store in zip(cache.layers, stores, strict=True):
        assert torch.equal(layer.k_store.view(torch.int32), store.view(torch.int32))


def test_both_inputs_are_the_stock_error():
    """What the stock model refuses is refused with the same words, and does not disable the fast path."""
    pair = shared_pair("mistral")
    ids = token_ids(W)
    embeds = pair.stock.get_input_embeddings()(ids).detach()
    with torch.no_grad():
        with pytest.raises(ValueError, match="input") as theirs:
            pair.stock(input_ids=ids, inputs_embeds=embeds)
        with pytest.raises(ValueError, match=str(theirs.value)[:30]):
            pair.model(input_ids=ids, inputs_embeds=embeds)
    got, _ = feed(pair, ids, [W])
    assert distance(got, full_logits(pair.stock, ids)) < 5e-5
