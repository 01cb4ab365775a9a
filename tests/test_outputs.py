"""What callers ask for besides the next token, and which path that takes, counted.

Hidden states, logits and scores come out of the compiled graphs. Attention weights do not exist there, and forward
hooks would be frozen into them: such a call runs eager on the same rings, which are then read in time order.
"""

from __future__ import annotations

import pytest
import torch
from helpers import MUTATED, TOLERANCE, F, S, W, compiled_calls, distance, make_pair, token_ids

from swa_pass.cache import HybridCache
from swa_pass.compat import output_cache

GREEDY = {"max_new_tokens": 2 * W, "do_sample": False, "return_dict_in_generate": True}
EVERYTHING = {**GREEDY, "output_hidden_states": True, "output_logits": True, "output_scores": True}


@pytest.fixture(scope="module", params=["mistral", pytest.param("gemma3", marks=pytest.mark.extended)])
def pair(request):
    """Fresh: the first call that asks for hidden states is special, transformers then puts its hooks on."""
    return make_pair(request.param)


@pytest.fixture(scope="module")
def eager_pair():
    """Attention weights exist in the eager implementation only."""
    return make_pair("gemma3", attn_implementation="eager", layer_types=[S, F])


def last_states(output):
    """Hidden states of the newest token at every step, all layers: (steps, layers + 1, hidden)."""
    return torch.stack([torch.stack([layer[0, -1] for layer in step]) for step in output.hidden_states])


def test_hidden_states_logits_and_scores_on_rings(pair):
    ids = token_ids(W + 3)
    with compiled_calls(pair, 2 * W):
        ours = pair.model.generate(ids, **EVERYTHING)
    cached = pair.stock.generate(ids, **EVERYTHING)
    whole = pair.stock.generate(ids, use_cache=False, **EVERYTHING)
    assert torch.equal(ours.sequences, whole.sequences)
    for mine, stock in zip(ours.hidden_states, cached.hidden_states, strict=True):
        assert [layer.shape for layer in mine] == [layer.shape for layer in stock]
    assert distance(last_states(ours), last_states(whole)) < TOLERANCE
    assert distance(torch.stack(ours.logits), torch.stack(whole.logits)) < TOLERANCE
    assert distance(torch.stack(ours.scores), torch.stack(whole.scores)) < TOLERANCE
    for mutant in pair.mutants.values():
        wrong = mutant.generate(ids, use_cache=False, **EVERYTHING)
        assert distance(last_states(ours), last_states(wrong)) > MUTATED


def test_hidden_states_asked_for_in_the_config(pair):
    ids = token_ids(2 * W)
    for model in (pair.model, pair.stock):
        model.config.output_hidden_states = True
    try:
        with compiled_calls(pair, 1), torch.no_grad():
            ours = pair.model(ids, use_cache=True).hidden_states
        with torch.no_grad():
            theirs = pair.stock(ids, use_cache=False).hidden_states
    finally:
        for model in (pair.model, pair.stock):
            model.config.output_hidden_states = False
    assert distance(torch.stack(ours), torch.stack(theirs)) < TOLERANCE
    with compiled_calls(pair, 1), torch.no_grad():
        assert pair.model(ids, use_cache=True).hidden_states is None


def both_hooked(pair, make_hook):
    """The same kind of hook on both models; returns what removes them."""
    handles = [model.model.layers[0].mlp.register_forward_hook(make_hook()) for model in (pair.model, pair.stock)]
    return lambda: [handle.remove() for handle in handles]


def test_forward_hooks(pair, caplog):
    """They see what stock's see, at every step, on rings that are read eagerly. Without them: compiled again.

    Dynamo does not notice a hook that comes after the graph was made: this one would change no token.
    """
    ids, given = token_ids(2 * W), {"max_new_tokens": W, "do_sample": False}
    plain = pair.stock.generate(ids, use_cache=False, **given)
    with compiled_calls(pair, W):
        assert torch.equal(pair.model.generate(ids, **given), plain)
    for _ in range(2):
        remove = both_hooked(pair, lambda: lambda module, args, output: output.flip(-1))
        with compiled_calls(pair, 0):
            ours = pair.model.generate(ids, return_dict_in_generate=True, **given)
        theirs = pair.stock.generate(ids, use_cache=False, **given)
        remove()
        assert isinstance(output_cache(ours), HybridCache)
        assert torch.equal(ours.sequences, theirs)
        assert not torch.equal(ours.sequences, plain)
        with compiled_calls(pair, W):
            assert torch.equal(pair.model.generate(ids, **given), plain)
    assert sum("forward hooks" in record.getMessage() for record in caplog.records) == 1


def test_a_hook_on_all_modules(pair):
    """Registered with torch itself, for every module there is, as profilers do."""
    ids, calls = token_ids(2 * W), []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: calls.append(module))
    try:
        with compiled_calls(pair, 0), torch.no_grad():
            ours = pair.model(ids, use_cache=True).logits
        assert pair.model.model.layers[1].mlp in calls
        with torch.no_grad():
            assert distance(ours, pair.stock(ids, use_cache=False).logits) < TOLERANCE
    finally:
        handle.remove()


def test_hooks_on_the_model_itself_do_not_slow_it(pair):
    calls = []
    handle = pair.model.register_forward_hook(lambda module, args, output: calls.append(1))
    with compiled_calls(pair, W):
        pair.model.generate(token_ids(2 * W), max_new_tokens=W, do_sample=False)
    handle.remove()
    assert len(calls) == W


def test_attention_weights_in_time_order(eager_pair):
    """Stock's shapes and values after the rings have wrapped: W keys on a sliding layer, all of them on a global one.

    The keys of a ring are in another order; a row that was taken from it as it is would be permuted.
    """
    pair, ids = eager_pair, token_ids(W + 3)
    with compiled_calls(pair, 0):
        ours = pair.model.generate(ids, output_attentions=True, **GREEDY)
    cache = output_cache(ours)
    assert isinstance(cache, HybridCache)
    assert cache.stores[0].policy.seen > cache.stores[0].policy.capacity, "the ring has not wrapped"
    theirs = pair.stock.generate(ids, output_attentions=True, **GREEDY)
    assert torch.equal(ours.sequences, theirs.sequences)
    for step, (mine, stock) in enumerate(zip(ours.attentions, theirs.attentions, strict=True)):
        if step:
            assert [tuple(a.shape) for a in mine] == [(1, 4, 1, W), (1, 4, 1, W + 3 + step)]
        for a, b in zip(mine, stock, strict=True):
            assert distance(a, b) < 1e-5
    last = ours.attentions[-1][0]
    assert distance(last, last.roll(1, -1)) > 1e-3, "this test cannot see an order"


def test_attention_weights_and_then_rings_again(eager_pair):
    """One cache through both paths: steps that give weights between steps that do not."""
    pair, ids = eager_pair, token_ids(4 * W)
    with torch.no_grad():
        whole = pair.stock(ids, use_cache=False).logits
        cache, parts = None, []
        for step, (first, stop) in enumerate([(0, 2 * W), *((n, n + 1) for n in range(2 * W, 4 * W))]):
            given = {} if cache is None else {pair.runtime.cache_name: cache}
            with compiled_calls(pair, step % 2):
                output = pair.model(ids[:, first:stop], use_cache=True, output_attentions=step % 2 == 0, **given)
            cache = output_cache(output)
            parts.append(output.logits)
            assert bool(output.attentions) == (step % 2 == 0)
        assert distance(torch.cat(parts, 1), whole) < TOLERANCE
        for mutant in pair.mutants.values():
            assert distance(torch.cat(parts, 1), mutant(ids, use_cache=False).logits) > MUTATED
