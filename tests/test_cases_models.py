"""Known bugs of what single families mean: chunks, shared keys, softcap, scale, sinks, images, given masks."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace

import families
import pytest
import torch
from families import ids_of
from helpers import MUTATED, TOLERANCE, distance

import swa_pass
from swa_pass.api import runtime_of

ENTRIES = families.BY_NAME
W = 8


def entry_of(name, **changes):
    entry = copy.deepcopy(ENTRIES[name])
    entry["config"].update(changes)
    return entry


def applied(stock):
    return swa_pass.apply(copy.deepcopy(stock), backend="eager")


@functools.cache
def models(name):
    """(stock, applied) of a family, made once."""
    stock = families.build(ENTRIES[name])
    return SimpleNamespace(stock=stock, model=applied(stock))


@torch.no_grad()
def steps(model, ids, prompt, **kwargs):
    """Logits at all positions, through one cache of ours; every call must go through a compiled graph."""
    runtime = runtime_of(model)
    before, cache, parts = runtime.compiled_calls, runtime.make_cache(), []
    pieces = [(0, prompt), *((n, n + 1) for n in range(prompt, ids.shape[1]))]
    for first, stop in pieces:
        parts.append(model(ids[:, first:stop], use_cache=True, **{runtime.cache_name: cache}, **kwargs).logits)
    assert runtime.compiled_calls - before == len(pieces)
    return torch.cat(parts, 1)


@torch.no_grad()
def whole(model, ids, **kwargs):
    return model(ids, use_cache=False, **kwargs).logits


def test_case_14_the_window_is_read_from_the_mask_not_from_a_key():
    """MiMo's raw key leaves the query itself out; what counts is the mask."""
    entry = entry_of("mimo_v2_flash")
    del entry["config"]["sliding_window"]
    entry["config"]["sliding_window_size"] = W - 1
    entries = {"sliding_window": ENTRIES["mimo_v2_flash"], "sliding_window_size": entry}
    stocks = {name: families.build(each) for name, each in entries.items()}
    if stocks["sliding_window_size"].config.sliding_window > W + 1:
        pytest.skip("this transformers does not know the raw key")
    ids = ids_of(3 * W)
    logits = {name: whole(stock, ids) for name, stock in stocks.items()}
    for name, stock in stocks.items():
        windows = {layer.window for layer in swa_pass.explain(stock).sliding}
        truth = {
            w: distance(logits[name], whole(families.build(ENTRIES["mimo_v2_flash"], w - W), ids)) for w in (7, 8, 9)
        }
        assert windows == {min(truth, key=truth.get)}, (name, truth)


@pytest.mark.parametrize("keys", ["pattern", "types", "both", "neither"])
def test_case_21_a_config_from_json(tmp_path, keys):
    """The pattern field has been renamed and dropped over time; every spelling must give what the graph does."""
    import json

    import transformers

    config = transformers.Gemma3TextConfig(**_tiny_gemma3(), num_hidden_layers=6)
    config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    if keys in ("pattern", "both"):
        raw["sliding_window_pattern"] = 6
    if keys in ("pattern", "neither"):
        raw.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    torch.manual_seed(0)
    stock = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig.from_pretrained(tmp_path)).eval()
    model = applied(stock)
    assert "".join(layer.kind[0] for layer in swa_pass.explain(model).layers) == "sssssf"
    ids = ids_of(3 * W)
    assert distance(steps(model, ids, 2 * W), whole(stock, ids)) < TOLERANCE


def _tiny_gemma3():
    return {
        "vocab_size": 100, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "sliding_window": W, "initializer_range": 0.2,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
def test_case_23_a_window_in_a_nested_config(name):
    """The text decoder gets its rings, and nothing of the vision tower changes."""
    stock = families.build(ENTRIES[name])
    assert not hasattr(stock.config, "sliding_window")
    model = applied(stock)
    cache = runtime_of(model).make_cache()
    types = getattr(stock.config.get_text_config(decoder=True), "layer_types", None) or ["sliding_attention"] * 2
    windows = [W if kind == "sliding_attention" else None for kind in types]
    assert [layer.window for layer in swa_pass.explain(model).layers] == windows == cache.windows
    towers = [each.model.vision_tower for each in (model, stock)]
    assert all(vars(a).keys() == vars(b).keys() for a, b in zip(*(t.modules() for t in towers), strict=True))
    size = stock.config.vision_config.image_size
    pixels = torch.randn(1, 3, size, size)
    with torch.no_grad():
        assert torch.equal(*(tower(pixels).last_hidden_state for tower in towers))


@pytest.mark.extended
@torch.no_grad()
def test_case_24_cross_attention_is_no_ring():
    """The decoder half by itself: rings for its own sliding layers, and all of a text longer than the window."""
    stock = families.build(ENTRIES["t5gemma"])
    states = torch.randn(1, 3 * W, stock.states.shape[-1])
    stock.states = torch.nn.Parameter(states)
    model = applied(stock)
    ids = ids_of(3 * W)
    got = steps(model, ids, 2 * W)
    assert distance(got, whole(stock, ids)) < TOLERANCE
    stock.states = torch.nn.Parameter(torch.cat([states[:, :1] + 1, states[:, 1:]], 1))
    assert distance(got, whole(stock, ids)) > MUTATED, "the first token of the other text is not seen"


def test_case_24_an_encoder_decoder_is_refused_whole():
    stock = families.build({**ENTRIES["t5gemma"], "driver": None})
    with pytest.raises(ValueError, match="encoder-decoder"):
        swa_pass.apply(stock)
    assert "forward" not in vars(stock)


def test_case_25_the_graph_wins_over_an_edited_config():
    stock = families.build(ENTRIES["ministral"])
    model = copy.deepcopy(stock)
    types = list(model.config.layer_types)
    model.config.layer_types = types[::-1]  # the decoder layers were built with the other order
    report = swa_pass.explain(swa_pass.apply(model, backend="eager"))
    ids = ids_of(4 * W)
    with torch.no_grad():
        got = model(ids, use_cache=True).logits
        truth = swa_pass.revert(model)(ids, use_cache=False).logits
    assert distance(got, truth) < TOLERANCE
    kinds = {"sliding_attention": "s", "full_attention": "f"}
    seen = "".join(layer.kind[0] for layer in report.layers)
    if seen != "".join(kinds[t] for t in model.config.layer_types):
        assert any("the graph wins" in note for note in report.notes)


@torch.no_grad()
def test_case_25_a_layer_called_by_itself():
    """The hook is on the model: its parts are as they were."""
    both = models("mistral")
    hidden, positions = torch.randn(1, 3, 64), torch.arange(3)[None]
    results = []
    for model in (both.stock, both.model):
        embeddings = model.model.rotary_emb(hidden, positions)
        results.append(model.model.layers[0](hidden, position_embeddings=embeddings, position_ids=positions))
    a, b = (r[0] if isinstance(r, tuple) else r for r in results)
    assert torch.equal(a, b)


@pytest.mark.parametrize("prompt", [7, 8, 9, 16, 17])
@pytest.mark.parametrize("pads", [0, 3])
@torch.no_grad()
def test_case_26_chunks_are_no_window(prompt, pads):
    both = models("llama4_text")
    report = swa_pass.explain(both.model)
    assert [layer.kind for layer in report.layers] == ["chunked", "full"] * 2
    assert [layer.action for layer in report.layers] == ["kept"] * 4
    assert not report.sliding
    ids = ids_of(prompt, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :pads] = 0
    given = {"attention_mask": mask, "max_new_tokens": 2 * W, "do_sample": False}
    assert torch.equal(both.model.generate(ids, **given), both.stock.generate(ids, **given))


@torch.no_grad()
def test_case_41_right_padding():
    """Pads behind the tokens are no left padding: such a mask must not reach the graphs, and the rows must be right."""
    for name in ("mistral", "gemma3_text"):
        both = models(name)
        ids, lengths = ids_of(3 * W, batch=2), (3 * W, 2 * W)
        mask = torch.ones_like(ids)
        mask[1, lengths[1] :] = 0
        got = both.model(ids, attention_mask=mask, use_cache=True).logits
        for row, length in enumerate(lengths):
            alone = whole(both.stock, ids[row : row + 1, :length])
            assert distance(got[row : row + 1, :length], alone) < TOLERANCE
        given = {"attention_mask": mask, "max_new_tokens": W, "do_sample": False}
        assert torch.equal(both.model.generate(ids, **given), both.stock.generate(ids, use_cache=False, **given))


@torch.no_grad()
def test_case_43_a_4d_mask_is_used_as_it_is():
    """It may show keys that a window hides; a ring cannot, so the stock path runs and says so."""
    both = models("mistral")
    ids = ids_of(3 * W)
    mask = (torch.rand(1, 1, 3 * W, 3 * W) > 0.3).tril()
    mask.diagonal(dim1=-2, dim2=-1).fill_(True)
    expected = whole(both.stock, ids, attention_mask=mask)
    assert distance(whole(both.model, ids, attention_mask=mask), expected) < TOLERANCE
    assert distance(both.model(ids, attention_mask=mask, use_cache=True).logits, expected) < TOLERANCE
    assert distance(expected, whole(both.stock, ids)) > MUTATED, "this mask shows the same as the window"


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text", "gemma4_kv_eq_moe"])
def test_cases_59_68_layers_that_share_keys(name):
    """One ring for donor and consumers; a prompt past the window: consumers need keys that it pushes out."""
    both = models(name)
    ids = ids_of(5 * W, batch=2)
    got, expected = steps(both.model, ids, 3 * W), whole(both.stock, ids)
    assert distance(got, expected) < 2e-3
    for change in (-1, 1):
        assert distance(got, whole(families.mutant(ENTRIES[name], both.stock, change), ids)) > 0.1
    shared = getattr(both.stock.config, "num_kv_shared_layers", 0) or 0
    own = both.stock.config.layer_types[: both.stock.config.num_hidden_layers - shared]
    rings = [layer for layer in runtime_of(both.model).make_cache().stores if layer.is_sliding]
    assert len(rings) == own.count("sliding_attention")


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_case_68_without_a_cache_it_is_stock(name):
    both = models(name)
    ids = ids_of(3 * W)
    assert torch.equal(whole(both.model, ids), whole(both.stock, ids))


@torch.no_grad()
def test_case_67_images_see_their_whole_block():
    """Image tokens attend to later tokens of their block: such a call runs with the model's own masks, on our cache."""
    entry = copy.deepcopy(ENTRIES["gemma3"])
    entry["config"]["vision_config"]["image_size"] = 56
    entry["config"]["mm_tokens_per_image"] = 16  # more than the window
    stock = families.build(entry)
    model = applied(stock)
    config = stock.config
    pixels = torch.randn(2, 3, 56, 56)
    image = [97, *[config.image_token_id] * 16, 98]
    text = ids_of(6 * W)[0].tolist()
    ids = torch.tensor([[*text[:3], *image, *text[3 : W + 3], *image, *text[W + 3 : 2 * W]]])
    types = (ids == config.image_token_id).long()
    suffix = ids_of(2 * W, seed=7)
    full = torch.cat([ids, suffix], 1)
    full_types = torch.cat([types, torch.zeros_like(suffix)], 1)
    expected = stock(full, pixel_values=pixels, token_type_ids=full_types, use_cache=False).logits
    runtime = runtime_of(model)
    assert runtime.active
    cache = runtime.make_cache()
    parts = [
        model(ids, pixel_values=pixels, token_type_ids=types, use_cache=True, **{runtime.cache_name: cache}).logits
    ]
    for n in range(suffix.shape[1]):
        parts.append(model(suffix[:, n : n + 1], use_cache=True, **{runtime.cache_name: cache}).logits)
    assert distance(torch.cat(parts, 1), expected) < 5e-4
    assert runtime.compiled_calls == suffix.shape[1], "text after an image runs compiled"
    causal = stock(full, pixel_values=pixels, token_type_ids=torch.zeros_like(full_types), use_cache=False).logits
    assert distance(expected, causal) > MUTATED, "this image block cannot be told from plain text"


@pytest.mark.parametrize("cap", [0.5, None])
def test_case_70_softcap(cap):
    stock = families.build(entry_of("gemma2", attn_logit_softcapping=cap))
    stock.set_attn_implementation("eager")  # where SDPA is allowed, it leaves the softcap out
    model = applied(stock)
    ids = ids_of(4 * W)
    got = steps(model, ids, 2 * W + 3)
    assert distance(got, whole(stock, ids)) < 2e-4
    assert {layer.softcap for layer in swa_pass.explain(model).layers} == {cap or 0.0}
    if cap:
        dropped = families.build(entry_of("gemma2", attn_logit_softcapping=None))
        dropped.load_state_dict(stock.state_dict())
        dropped.set_attn_implementation("eager")
        assert distance(got, whole(dropped, ids)) > MUTATED


@pytest.mark.parametrize(
    ("name", "key", "value"), [("gemma3_text", "query_pre_attn_scalar", 100), ("gemma4_text", None, 1.0)]
)
def test_case_71_the_scale_is_the_nodes_own(name, key, value):
    stock = families.build(entry_of(name, **({key: value} if key else {})))
    model = applied(stock)
    ids = ids_of(4 * W)
    got = steps(model, ids, 2 * W + 3)
    assert distance(got, whole(stock, ids)) < 2e-3
    expected = value**-0.5 if key else value
    assert all(layer.scale == pytest.approx(expected) for layer in swa_pass.explain(model).layers)


@torch.no_grad()
def test_case_72_sinks():
    """Sinks of 3.0 take most of the weight away; rows with pads see few keys, where that is plainest."""
    stock = families.build(ENTRIES["gpt_oss"])
    for layer in stock.model.layers:
        layer.self_attn.sinks.fill_(3.0)
    model = applied(stock)
    assert all(layer.sinks for layer in swa_pass.explain(model).layers)
    ids = ids_of(4 * W, batch=2)
    mask = torch.ones_like(ids)
    mask[1, : 2 * W - 1] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    runtime = runtime_of(model)
    cache, parts = runtime.make_cache(), []
    for first, stop in [(0, 2 * W), *((n, n + 1) for n in range(2 * W, 4 * W))]:
        given = {runtime.cache_name: cache, "attention_mask": mask[:, :stop], "position_ids": positions[:, first:stop]}
        parts.append(model(ids[:, first:stop], use_cache=True, **given).logits)
    got = torch.cat(parts, 1)
    expected = stock(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    real = mask.bool()
    assert (got - expected)[real].abs().max() < 5e-4
    for layer in stock.model.layers:
        layer.self_attn.sinks.fill_(-1e4)  # as if there were none
    without = stock(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert (got - without)[real].abs().max() > MUTATED


@pytest.mark.parametrize(("implementation", "dtype"), [("sdpa", torch.float32), ("eager", torch.bfloat16)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_case_77_the_pattern_always_fires(implementation, kv_heads, dtype):
    """Idiom x dtype x grouping: every sliding layer is rewritten, or the report would name it."""
    stock = families.build(entry_of("ministral", num_key_value_heads=kv_heads)).to(dtype)
    stock.set_attn_implementation(implementation)
    model = applied(stock)
    report = swa_pass.explain(model)
    assert (len(report.rewritten), len(report.sliding)) == (2, 2)
    for batch in (1, 2):
        ids = ids_of(3 * W, batch=batch)
        got, expected = steps(model, ids, 2 * W).float(), whole(copy.deepcopy(stock).float(), ids)
        noise = distance(whole(stock, ids).float(), expected)
        assert distance(got, expected) < max(3 * noise, TOLERANCE)
    assert len(swa_pass.explain(model).refused) == 0


@pytest.mark.parametrize("new", [2, W, W + 3])
def test_case_79_several_new_tokens_on_a_warm_cache(new):
    """is_causal is aligned to the first key: with more keys than queries it is another mask."""
    for name in ("mistral", "gemma3_text"):
        both = models(name)
        ids = ids_of(2 * W + new)
        runtime = runtime_of(both.model)
        cache = runtime.make_cache()
        with torch.no_grad():
            both.model(ids[:, : 2 * W], use_cache=True, **{runtime.cache_name: cache})
            got = both.model(ids[:, 2 * W :], use_cache=True, **{runtime.cache_name: cache}).logits
        assert distance(got, whole(both.stock, ids)[:, 2 * W :]) < TOLERANCE
        for step in runtime.steps.values():
            for rewrite in step.rewrites:
                assert "scaled_dot_product_attention" not in rewrite.ops_after
