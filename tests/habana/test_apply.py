"""apply, explain, revert: what they say, what they refuse, what they leave alone."""

from __future__ import annotations

import logging
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from gaudi_helpers import assert_upstream, distance, gaudi, generate, graphs, step_logits
from gaudi_models import FAMILIES, MUTATED, W, inputs_of

import swa_pass
from swa_pass.integrations import optimum_habana

IGNORED = ("qwen2", "qwen3", "starcoder2")


def stock_state(model):
    """Everything that apply may touch: attributes of the modules, and the config."""
    return {
        name: {k: v for k, v in vars(module).items() if not k.startswith("_")} for name, module in model.named_modules()
    }, model.config.to_dict() if hasattr(model, "config") else None


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in IGNORED])
def test_plain_apply_finds_the_integration(family, references, caplog):
    model = gaudi(family, references, apply=False)
    with caplog.at_level(logging.WARNING, "swa_pass"):
        assert swa_pass.apply(model) is model
        swa_pass.apply(model)
    said = [r.message for r in caplog.records if "exactly W keys, as in upstream transformers" in r.message]
    assert len(said) == 1
    assert_upstream(step_logits(model, "long"), references, family, "long")


@pytest.mark.parametrize("family", IGNORED)
def test_families_whose_window_stock_ignores_are_opt_in(family, references, caplog):
    model = gaudi(family, references, apply=False)
    before = stock_state(model)
    with caplog.at_level(logging.WARNING, "swa_pass"):
        assert swa_pass.apply(model) is model
    assert 'window_semantics="hf"' in caplog.text
    assert stock_state(model) == before
    optimum_habana.apply(model, window_semantics="hf")
    assert_upstream(step_logits(model, "long"), references, family, "long")


@pytest.mark.parametrize("family", FAMILIES)
def test_revert_and_state_dict(family, references):
    model = gaudi(family, references, apply=False)
    before, keys = stock_state(model), list(model.state_dict())
    optimum_habana.apply(model, window_semantics="hf")
    assert list(model.state_dict()) == keys
    assert model.config.to_dict() == before[1]
    swa_pass.revert(model)
    assert stock_state(model) == before
    optimum_habana.apply(model, window_semantics="hf")
    step_logits(model, "short")
    assert model.config.to_dict() == before[1]
    swa_pass.revert(model)
    swa_pass.revert(model)
    for module in model.modules():
        own = stock_state(module)[0][""]
        assert not {"forward", "pre_attn_forward", "generate", "allocate_kv_cache"} & set(own)
        assert type(module).__name__ != "RingKVCache"


def test_stock_is_what_we_say_it_is(references):
    """The reasons for following upstream: what the stock code does with the window, in one number each."""
    upstream = references["qwen2"]["logits"]["long"]
    stock = step_logits(gaudi("qwen2", references, apply=False), "long")
    assert distance(stock, upstream[W]) > MUTATED
    stock = gaudi("gemma2", references, apply=False)
    for layer in stock.model.layers:
        layer.self_attn.num_key_value_heads = 2  # without it stock cannot allocate
    upstream = references["gemma2"]["logits"]["long"]
    logits = step_logits(stock, "long")
    assert distance(logits, upstream[W + 1]) < 2e-5
    assert distance(logits, upstream[W]) > MUTATED


def test_explain(references):
    model = gaudi("gemma3", references, apply=False)
    assert [layer.action for layer in swa_pass.explain(model).layers] == ["kept"] * 3
    swa_pass.apply(model)
    report = swa_pass.explain(model)
    assert [layer.action for layer in report.layers] == ["rewritten", "kept", "rewritten"]
    assert [layer.window for layer in report.layers] == [W, None, W]
    assert report.layers[0].scale == 21**-0.5
    assert "2 of 2 sliding layers rewritten" in str(report)
    assert swa_pass.explain(swa_pass.apply(gaudi("gemma2", references, apply=False))).layers[0].softcap == 50.0
    assert swa_pass.explain(gaudi("gpt_oss", references)).layers[0].sinks


def refused(call, *words):
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_what_apply_refuses(references):
    model = gaudi("mistral", references, apply=False)
    refused(lambda: optimum_habana.apply(model, window_semantics="stock"), '"hf"')
    refused(lambda: swa_pass.apply(model, backend="eager"), "optimum-habana", "without them")
    refused(lambda: optimum_habana.apply(model.train()), "model.eval()")
    refused(lambda: optimum_habana.apply(graphs(model.eval())), "apply first, then wrap")
    with pytest.raises(TypeError, match="adapt_transformers_to_gaudi"):
        optimum_habana.apply(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="supported are"):
        optimum_habana.explain(torch.nn.Linear(1, 1))


def test_unsupported_family(references):
    from optimum.habana.transformers.models import GaudiPhiForCausalLM
    from transformers import PhiConfig

    model = GaudiPhiForCausalLM(PhiConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=90,
                                          num_attention_heads=2)).eval()  # fmt: skip
    refused(lambda: swa_pass.apply(model), "GaudiPhiForCausalLM", "supported are", "GaudiMistralForCausalLM")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reuse_cache": False}, ("reuse_cache is off", "generate(..., reuse_cache=True)", "layer 0")),
        ({"static_shapes": False}, ("static_shapes=True", "layer 0")),
        ({"output_attentions": True, "return_dict_in_generate": True}, ("attention weights", "revert")),
    ],
)
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_what_generate_refuses(family, options, words, references):
    model = gaudi(family, references)
    ids, mask, prompt = inputs_of("long")
    refused(lambda: generate(model, ids[:, :prompt], mask[:, :prompt], **options), *words)


def test_what_forward_refuses(references):
    model = gaudi("mistral", references)
    ids, mask, _ = inputs_of("short")
    token = {"token_idx": torch.tensor(5), "reuse_cache": True, "use_cache": True}
    refused(lambda: model(input_ids=ids, attention_mask=mask, **token), "allocate_kv_cache first")
    model.allocate_kv_cache(2, 40, 5)
    past = [(torch.Size((2, 2, 40, 8)),) * 2] * 3
    refused(lambda: model(input_ids=ids, past_key_values=past, **token), "one token a step")
    tensors = [(torch.zeros(2, 2, 4, 8),) * 2] * 3
    refused(lambda: model(input_ids=ids[:, :1], past_key_values=tensors, **token), "revert")
    refused(lambda: model(input_ids=ids, attention_mask=mask[:, None, None], use_cache=False), "2D mask")
    refused(lambda: model.train()(input_ids=ids, use_cache=False), "training mode")
    images = gaudi("gemma3_vision", references)
    refused(lambda: images(input_ids=ids, pixel_values=torch.zeros(1, 3, 16, 16)), "pixel_values", "revert")


def test_sinks_over_several_devices_are_refused(references, monkeypatch):
    model = gaudi("gpt_oss", references, apply=False)
    module = sys.modules["swa_pass.integrations.optimum_habana.apply"]
    monkeypatch.setattr(module, "_world_size", lambda: 2)
    refused(lambda: optimum_habana.apply(model), "sinks", "use one device")


def test_a_class_derived_from_a_gaudi_class(references):
    model = gaudi("mistral", references, apply=False)
    model.__class__ = type("MyMistral", (type(model),), {})
    swa_pass.apply(model)
    assert_upstream(step_logits(model, "long"), references, "mistral", "long")


def test_stock_models_need_a_newer_transformers():
    class Stock(torch.nn.Module):
        config = SimpleNamespace(get_text_config=None)

    with pytest.raises(ImportError, match=r"5\.17"):
        swa_pass.apply(Stock())
