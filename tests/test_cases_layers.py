"""Known bugs of the window's size and of deciding which layers slide."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from helpers import F, Pair, S, W, assert_oracle, distance, feed, full_logits, make_pair, one_by_one, tiny, token_ids

import swa_pass
from swa_pass.api import runtime_of


@pytest.mark.parametrize("window", [1, 2, 3, 512, 10**9])
def test_case_8_any_window(window):
    """`[-W + 1:]` clamps wrongly on short tensors, and is `[-0:]` for a window of one."""
    pair = make_pair("mistral", num_hidden_layers=1, sliding_window=window)
    steps = min(2 * window + 2, 20)
    ids = token_ids(11 + steps)
    got, cache = feed(pair, ids, one_by_one(11, steps))
    tells = [w for w in (window - 1, window + 1) if 0 < w <= 11]
    assert_oracle(pair, got, lambda model: full_logits(model, ids), mutants=tells)
    assert cache.layers[0].k_store.shape[2] <= min(window + 16, 64), "a long window must cost nothing until it is used"
    with torch.no_grad():
        ours = pair.model.generate(ids[:, :11], max_new_tokens=steps, do_sample=False)
        theirs = pair.stock.generate(ids[:, :11], max_new_tokens=steps, do_sample=False, use_cache=False)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("window", [0, -1])
def test_case_8_no_window_below_one(window):
    model = tiny("mistral", sliding_window=window)
    with pytest.raises(ValueError, match=f"sliding_window={window}"):
        swa_pass.apply(model)
    assert runtime_of(model) is None
    assert "forward" not in vars(model)


@pytest.mark.parametrize("family", ["gemma3", "cohere2", "olmo3"])
@pytest.mark.parametrize("pattern", ["ssss", "sfsf", "fsss", "ffff", "ffsf"])
def test_case_17_the_layers_that_slide(family, pattern):
    model = tiny(family, layer_types=[{"s": S, "f": F}[c] for c in pattern])
    report = swa_pass.explain(model)
    assert "".join(layer.kind[0] for layer in report.layers) == pattern
    assert {layer.window for layer in report.sliding} <= {W}
    assert [layer.action for layer in report.layers] == [{"s": "rewritten", "f": "kept"}[c] for c in pattern]


@pytest.mark.parametrize("family", ["cohere2", "olmo3"])
@torch.no_grad()
def test_case_17_tokens_and_logits(family):
    pair = make_pair(family, layer_types=[F, S, S, F])
    ids = token_ids(W + 1 + 3 * W)
    got, cache = feed(pair, ids, one_by_one(W + 1, 3 * W))
    assert_oracle(pair, got, lambda model: full_logits(model, ids))
    assert [layer.is_sliding for layer in cache.layers] == [False, True, True, False]
    ours = pair.model.generate(ids[:, : W + 1], max_new_tokens=2 * W, do_sample=False)
    assert torch.equal(
        ours, pair.stock.generate(ids[:, : W + 1], max_new_tokens=2 * W, do_sample=False, use_cache=False)
    )


@torch.no_grad()
def test_case_17_a_family_that_is_refused():
    """gpt-oss has no SDPA path. Until its idiom is known: the stock logits, and a report that says why."""
    pair = make_pair("gpt_oss")
    ids = token_ids(3 * W)
    output = pair.model(ids)
    assert distance(output.logits, full_logits(pair.stock, ids)) < 5e-5
    report = swa_pass.explain(pair.model)
    assert len(report.layers) == 2
    for layer in report.layers:
        if layer.action == "refused":
            assert layer.kind == "other"
            assert len(layer.reason.split()) > 3
    ours = pair.model.generate(ids, max_new_tokens=W, do_sample=False)
    assert torch.equal(ours, pair.stock.generate(ids, max_new_tokens=W, do_sample=False, use_cache=False))


def test_case_17_no_layer_slides(caplog):
    """Nothing to do: the model comes back unchanged, with one line."""
    model = tiny("gemma3", layer_types=[F, F])
    with torch.no_grad(), caplog.at_level(logging.INFO, logger="swa_pass"):
        applied = swa_pass.apply(copy.deepcopy(model), backend="eager")
        ids = token_ids(3 * W)
        assert distance(applied(ids).logits, full_logits(model, ids)) < 5e-5
        applied(ids)
    warnings = [r for r in caplog.records if r.name == "swa_pass" and r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "slid" in warnings[0].getMessage()


def test_case_17_every_layer_slides():
    """No linear store at all: the memory stops growing."""
    pair = make_pair("cohere2", layer_types=[S, S])
    ids = token_ids(12 * W)
    sizes = []
    got, cache = feed(pair, ids, [W] * 12, before_step=lambda cache: sizes.append(cache.nbytes))
    assert_oracle(pair, got, lambda model: full_logits(model, ids))
    assert all(layer.is_sliding for layer in cache.layers)
    assert len(set(sizes[2:])) == 1


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(("first", "kinds"), [(0, "ssss"), (2, "ffss"), (4, "ffff")])
def test_case_18_max_window_layers(family, first, kinds):
    """Layers from `max_window_layers` on slide, not those below."""
    model = tiny(family, num_hidden_layers=4, max_window_layers=first)
    assert "".join(layer.kind[0] for layer in swa_pass.explain(model).layers) == kinds


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_case_18_logits(family):
    pair = make_pair(family, max_window_layers=1)
    ids = token_ids(4 * W)
    got, cache = feed(pair, ids, one_by_one(3 * W, W))
    assert_oracle(pair, got, lambda model: full_logits(model, ids))
    assert [layer.is_sliding for layer in cache.layers] == [False, True]


@pytest.mark.parametrize(
    "model_arguments",
    [("qwen2", {"use_sliding_window": False}), ("mistral", {"sliding_window": None})],
    ids=["case_19_switched_off", "case_20_none"],
)
@torch.no_grad()
def test_cases_19_20_a_window_that_is_not_used(model_arguments, caplog):
    family, arguments = model_arguments
    stock = tiny(family, **arguments)
    model = copy.deepcopy(stock)
    with caplog.at_level(logging.INFO, logger="swa_pass"):
        assert swa_pass.apply(model, backend="eager") is model
    assert runtime_of(model) is None, "a model without a sliding layer must come back unchanged"
    assert set(vars(model)) == set(vars(stock))
    assert len([r for r in caplog.records if r.name == "swa_pass"]) == 1
    ids = token_ids(3 * W)
    assert torch.equal(model(ids).logits, stock(ids).logits)
    ours = model.generate(ids, max_new_tokens=W, do_sample=False)
    assert torch.equal(ours, stock.generate(ids, max_new_tokens=W, do_sample=False, use_cache=False))
    assert not swa_pass.explain(model).sliding


def test_several_models_in_one_process():
    """Each model's graphs are its own: what Dynamo learned about one must not make another's constants symbols."""
    for family in ("mistral", "gemma3"):
        pair = make_pair(family)
        assert isinstance(pair, Pair)
        ids = token_ids(3 * W)
        got, _ = feed(pair, ids, one_by_one(2 * W, W))
        assert_oracle(pair, got, lambda model: full_logits(model, ids))  # noqa: B023
