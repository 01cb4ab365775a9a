"""What callers ask for that is not ours to do: as stock, or an error that says why, before anything changes."""

from __future__ import annotations

import logging

import pytest
import torch
from helpers import MUTATED, TOLERANCE, W, compiled_calls, distance, make_pair, token_ids

import swa_pass
from swa_pass.compat import generate_cache_key, output_cache

GREEDY = {"max_new_tokens": W, "do_sample": False}
FAMILIES = ["mistral", pytest.param("gpt_oss", marks=pytest.mark.extended)]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    return make_pair(request.param)


def outcome(call):
    """What a call returned, or the error that it raised."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_positions(pair, use_cache, masked):
    """Two texts in one row, told by positions that begin anew. Stock separates them only without a cache and a mask;
    whatever it does in a case is what we do."""
    ids = token_ids(21)
    given = {"position_ids": torch.cat([torch.arange(12), torch.arange(9)])[None], "use_cache": use_cache}
    if masked:
        given["attention_mask"] = torch.ones_like(ids)
    with torch.no_grad():
        with compiled_calls(pair, int(use_cache)):
            ours = pair.model(ids, **given).logits
        assert distance(ours, pair.stock(ids, **given).logits) < TOLERANCE
        for mutant in pair.mutants.values():
            assert distance(ours, mutant(ids, **given).logits) > MUTATED


@pytest.mark.parametrize("name", ["dynamic", "static", "offloaded", "offloaded_static", "quantized"])
def test_an_implementation_by_name(pair, name, caplog):
    """It wins, said once; where stock refuses it (offloading without a GPU, quantising sliding layers) so do we."""
    ids = token_ids(2 * W)
    with caplog.at_level(logging.WARNING, logger="swa_pass"), compiled_calls(pair, 0):
        ours = [outcome(lambda: pair.model.generate(ids, cache_implementation=name, **GREEDY)) for _ in range(2)]
    theirs = outcome(lambda: pair.stock.generate(ids, cache_implementation=name, **GREEDY))
    for each in ours:
        assert type(each) is type(theirs)
        assert each == theirs if isinstance(theirs, str) else torch.equal(each, theirs)
    assert isinstance(theirs, str) == (name in ("offloaded", "offloaded_static", "quantized")), theirs
    assert sum(repr(name) in record.getMessage() for record in caplog.records if record.name == "swa_pass") == 1
    with compiled_calls(pair, W):  # and the next call is on rings again
        assert torch.equal(pair.model.generate(ids, **GREEDY), pair.stock.generate(ids, use_cache=False, **GREEDY))


@pytest.mark.parametrize(
    "options",
    [
        {"dola_layers": "low"},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"num_beams": 3, "force_words_ids": [[5]]},
    ],
    ids=["dola", "contrastive search", "group beams", "constrained beams"],
)
def test_strategies_that_transformers_gave_up(pair, options):
    """They live in repositories of their own now. Without trust in those, stock refuses, and we with the same words."""
    ids = token_ids(2 * W)
    theirs = outcome(lambda: pair.stock.generate(ids, **GREEDY, **options))
    assert "trust_remote_code" in theirs
    assert outcome(lambda: pair.model.generate(ids, **GREEDY, **options)) == theirs


def test_a_strategy_of_the_callers(pair):
    """What is left of them: `custom_generate` as a function, which gets our cache as any other strategy does."""

    def last_of_two(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        name = pair.runtime.cache_name
        while not stopping_criteria(input_ids, None).all():
            new = input_ids[:, kwargs[name].get_seq_length() :]
            output = model(new, use_cache=True, **{name: kwargs[name]})
            second = output.logits[:, -1].topk(2).indices[:, 1:]
            input_ids = torch.cat([input_ids, second], 1)
        return input_ids

    ids, given = token_ids(2 * W), {"custom_generate": last_of_two, **GREEDY}
    before = pair.runtime.compiled_calls
    ours, theirs = (outcome(lambda m=m: m.generate(ids, **given)) for m in (pair.model, pair.stock))
    assert torch.is_tensor(theirs), theirs
    assert torch.equal(ours, theirs)
    assert pair.runtime.compiled_calls - before == W
    assert not torch.equal(ours, pair.stock.generate(ids, **GREEDY))


@pytest.mark.parametrize("shorter", [0, 1, W])
def test_a_prompt_with_nothing_new(pair, shorter):
    """The cache holds all of it. Stock reads it once more, behind itself; here it is an error."""
    output = pair.model.generate(token_ids(2 * W), return_dict_in_generate=True, **GREEDY)
    cache, key = output_cache(output), pair.runtime.cache_name
    seen, keys = cache.get_seq_length(), cache.stores[0].keys.clone()
    again = output.sequences[:, : seen - shorter]
    with pytest.raises(ValueError, match=f"holds {seen} tokens already and the prompt has {seen - shorter}"):
        pair.model.generate(again, **{key: cache}, **GREEDY)
    assert cache.get_seq_length() == seen
    assert torch.equal(cache.stores[0].keys, keys)
    ours = pair.model.generate(output.sequences, **{key: cache}, **GREEDY)
    assert torch.equal(ours, pair.stock.generate(output.sequences, use_cache=False, **GREEDY))


def gradients(model, first_too):
    """Of a loss on a text that is read in two parts."""
    ids, model = token_ids(3 * W), model.requires_grad_(True)
    with torch.set_grad_enabled(first_too):
        output = model(ids[:, :12], use_cache=True)
    second = model(ids[:, 12:], use_cache=True, **{generate_cache_key(model): output_cache(output)}).logits
    loss = second.square().mean() + (output.logits.square().mean() if first_too else 0)
    loss.backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return found


def test_gradients_through_a_cache(pair):
    """Both parts with gradients: stock's. A ring that is written in place cannot carry them, and says so."""
    theirs = gradients(pair.stock, True)
    assert torch.equal(gradients(pair.model, True), theirs)
    assert theirs.abs().max() > 0
    with pytest.raises(RuntimeError, match="cannot carry gradients"):
        gradients(pair.model, False)
    for model in (pair.model, pair.stock):
        model.requires_grad_(False)
    assert isinstance(output_cache(pair.model(token_ids(W), use_cache=True)), swa_pass.HybridCache)
