"""`swa_pass.rewrite` on graphs of stock transformers models, with the caches that transformers itself uses."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
from helpers import TOLERANCE, W, full_logits, tiny, token_ids, with_window
from helpers import F as FULL
from helpers import S as SLIDING
from test_rewrite import SLACK, dynamo_graph, error, names
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.integrations import executorch

import swa_pass

LENGTH = 5 * W + 1


def exported(model, rows=2):
    """The program that transformers' own recipe makes: decode, with a StaticCache of 64 positions in every layer."""
    recipe = executorch.TorchExportableModuleWithStaticCache
    if "batch_size" not in inspect.signature(recipe).parameters:
        pytest.skip("transformers before 5.24 exports static caches in another way")
    cache = {"batch_size": rows, "max_cache_len": 64}
    model.generation_config = GenerationConfig(
        use_cache=True, cache_implementation="static", max_length=64, cache_config=cache
    )
    inputs = {"input_ids": torch.zeros(rows, 1, dtype=torch.int64), "cache_position": torch.tensor([0])}
    with torch.no_grad():
        return torch.export.export(recipe(model, **cache), (), inputs, strict=False)


def decoded(module, ids):
    steps = [module(input_ids=ids[:, t : t + 1], cache_position=torch.tensor([t])) for t in range(ids.shape[1])]
    return torch.cat([s[0] if isinstance(s, (tuple, list)) else s for s in steps], dim=1)


@pytest.mark.parametrize("family", ["gemma3", "mistral", "gpt_oss"])
def test_transformers_own_export_runs_on_rings(family):
    """The stock program keeps 64 positions in every layer, and cannot go on beyond; sliding layers become rings."""
    model = tiny(family)
    ids = token_ids(LENGTH, 2)
    module = exported(model).module()
    result = swa_pass.rewrite(module, slack=SLACK)
    layers = model.config.num_hidden_layers
    sliding = layers if family == "mistral" else model.config.layer_types.count(SLIDING)
    assert (result.matches, result.refusals) == (layers, [])
    assert names(module).count("swa_pass::attend_append") == layers
    assert not any(name == "softmax" or "scaled_dot" in name for name in names(module) if family != "gpt_oss")
    rings = [ring for name, ring in result.owned.items() if "ring" in name]
    assert len(rings) == 2 * sliding
    assert all(ring.shape[2] == W + SLACK for ring in rings)
    for buffer in module.buffers():  # tracing left a token in them
        if buffer.dim() == 4:
            buffer.zero_()
    got = decoded(module, ids)
    assert error(got, full_logits(model, ids)) < TOLERANCE
    for off in (-1, 1):
        assert error(got, full_logits(with_window(model, W + off), ids)) > 1e-2


@pytest.mark.parametrize("family", ["gemma3", "mistral", "gpt_oss"])
def test_a_dynamic_cache_in_a_dynamo_graph(family):
    model = tiny(family)
    ids = token_ids(21, 2)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)

    graphs = []

    def compiler(gm, inputs):
        result = swa_pass.rewrite(gm, own_state=False)
        graphs.append((result.matches, result.refusals, names(gm).count("swa_pass::attend")))
        return gm

    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(model, backend=compiler, fullgraph=True)(ids[:, 20:], past_key_values=cache)
    layers = model.config.num_hidden_layers
    assert graphs == [(layers, [], layers)]
    assert error(out.logits, full_logits(model, ids)[:, 20:]) < TOLERANCE
    assert error(out.logits, full_logits(with_window(model, W + 1), ids)[:, 20:]) > 1e-2
    kept = [layer.keys.shape[2] for layer in cache.layers]  # the cache is transformers' and stays what it was
    assert kept == [
        W - 1 if kind == SLIDING else 21 for kind in getattr(model.config, "layer_types", [SLIDING] * layers)
    ]


@pytest.mark.parametrize("seen", [4, 20])
def test_a_live_static_cache_keeps_its_order(seen):
    """Its window is in order of time, transformers reads it so, and its positions are numbers of one step."""
    model = tiny("gemma3", layer_types=[SLIDING, FULL])
    ids = token_ids(seen + 1, 2)
    cache = StaticCache(config=model.config, max_cache_len=64)
    with torch.no_grad():
        model(ids[:, :seen], past_key_values=cache)
    gm = dynamo_graph(lambda x: model(x, past_key_values=cache).logits, (ids[:, seen:],))
    result = swa_pass.rewrite(gm, own_state=False)
    assert any("keys" in refusal for refusal in result.refusals)
    assert not any(finding.window for finding in result.states if not finding.refusal)


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_a_compiled_model_with_transformers_caches(family):
    """torch.compile with our backend, under a loop of the caller's: right at every step, whatever was fused."""
    model = tiny(family)
    ids = token_ids(2 * W + 5, 2)
    want = full_logits(model, ids).detach()
    for make in (DynamicCache, lambda config: StaticCache(config=config, max_cache_len=64)):
        torch._dynamo.reset()
        cache = make(config=model.config)
        compiled = torch.compile(model, backend=swa_pass.backend("eager"))
        with torch.no_grad():
            steps = [compiled(ids[:, :5], past_key_values=cache).logits]
            steps += [compiled(ids[:, t : t + 1], past_key_values=cache).logits for t in range(5, ids.shape[1])]
        assert error(torch.cat(steps, dim=1), want) < TOLERANCE


def test_continuous_batching(monkeypatch):
    """transformers' own loop, on a sliding and a full layer: its gathers go, and the answers stay.

    transformers keeps the update of its paged cache out of every compiled graph; here it is let in.
    """
    cache = pytest.importorskip("transformers.generation.continuous_batching.cache").PagedAttentionCache
    model = tiny("qwen3", tie_word_embeddings=False, layer_types=[SLIDING, FULL])
    model.set_attn_implementation("sdpa")
    texts = [token_ids(length, 1)[0].tolist() for length in (14, 6, 25)]
    config = GenerationConfig(max_new_tokens=2 * W, do_sample=False, eos_token_id=-1)
    fields = inspect.signature(transformers.ContinuousBatchingConfig).parameters
    page = "page_size" if "page_size" in fields else "block_size"
    sizes = transformers.ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64, **{page: 16})

    def answers():
        out = model.generate_batch(inputs=texts, generation_config=config, continuous_batching_config=sizes)
        return [out[name].generated_tokens for name in sorted(out)]

    want = answers()
    plain = getattr(cache.update, "_torchdynamo_orig_callable", None) or inspect.unwrap(cache.update)
    monkeypatch.setattr(cache, "update", plain)
    results = []

    def look(gm, _):
        results.append(swa_pass.rewrite(gm))
        return gm

    torch._dynamo.reset()
    monkeypatch.setattr(model, "forward", torch.compile(model.forward, backend=look))
    assert answers() == want
    assert [result.refusals for result in results] == [[]] * len(results)
    decode = next(result for result in results if result.matches == 2)
    gathers = ("index_select", "masked_scatter_", "scaled_dot_product_attention")
    assert [decode.ops_before.count(name) for name in gathers] == [4, 2, 2]
    assert [decode.ops_after.count(name) for name in gathers] == [0, 0, 0]
    assert decode.ops_after.count("swa_pass::attend_tokens") == 2
    assert decode.ops_after.count("index_copy_") == decode.ops_before.count("index_copy_") == 4
    stock = [model.generate(torch.tensor([text]), generation_config=config, use_cache=False)[0] for text in texts]
    assert [row[len(text) :].tolist() for row, text in zip(stock, texts)] == want
