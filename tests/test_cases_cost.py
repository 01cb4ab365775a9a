"""Known ways to lose memory or time: windows that allocate too much, caches that stay, copies of a whole store."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from helpers import W, assert_oracle, feed, full_logits, make_pair, one_by_one, shared_pair, token_ids
from torch._inductor import compile_fx

from swa_pass.compat import output_cache
from swa_pass.graph import op_name


@torch.no_grad()
def test_case_53_a_huge_window_allocates_little():
    pair = make_pair("mistral", sliding_window=10**6)
    output = pair.model.generate(token_ids(5), max_new_tokens=20, do_sample=False, return_dict_in_generate=True)
    small = make_pair("mistral", sliding_window=10**9)
    assert output_cache(output).nbytes <= small.model.config.num_hidden_layers * 2 * 2 * 64 * 16 * 4


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@torch.no_grad()
def test_case_53_a_cache_dies_with_its_generate(family):
    pair = shared_pair(family)
    alive = []

    def generate():
        output = pair.model.generate(token_ids(5), max_new_tokens=W, do_sample=False, return_dict_in_generate=True)
        alive.extend(weakref.ref(layer.k_store) for layer in output_cache(output).layers)
        alive.append(weakref.ref(output_cache(output)))

    for _ in range(3):
        generate()
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_case_53_memory_is_flat(family):
    """Bytes of the rings after many windows are those after two."""
    pair = shared_pair(family)
    ids, sizes = token_ids(20 * W), []

    def note(cache):
        sizes.append(sum(layer.nbytes for layer in cache.layers if layer.is_sliding))

    feed(pair, ids, one_by_one(4 * W, 16 * W), before_step=note)
    assert len(set(sizes)) == 1


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@torch.no_grad()
def test_case_74_the_same_text_every_time(family):
    """Prompts in any order, then longer ones; logits of a step stay what they were when later steps run.

    What went wrong elsewhere were replays of CUDA graphs that overwrite outputs. Those need a GPU
    (benchmarks/gpu_check.py); this is the same on CPU, where outputs could share memory with a ring or with each other.
    """
    pair = shared_pair(family)
    prompts = [token_ids(length) for length in (5, W, 3 * W + 1, 2, 2 * W)]

    def text(ids, new):
        cache, logits, kept = None, [], []
        for _ in range(new):
            out = pair.model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = output_cache(out)
            logits.append(out.logits)
            kept.append(out.logits.clone())
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
        assert all(torch.equal(late, early) for late, early in zip(logits, kept))
        return [int(out[0, -1].argmax()) for out in kept]

    def wanted(ids, new):
        whole = pair.stock.generate(ids, max_new_tokens=new, do_sample=False, use_cache=False)
        return whole[0, ids.shape[1] :].tolist()

    for order, new in ((range(5), W + 2), (reversed(range(5)), W + 2), ((3, 0), 3 * W)):
        for n in order:
            assert text(prompts[n], new) == wanted(prompts[n], new)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_case_75_no_copy_of_a_store(family, monkeypatch):
    """In the graphs that Inductor generates code from, nothing touches a store but the fused operator.

    Inductor gets the graph whole here, which is the harder case: in pieces it never sees a store (test_pieces.py).
    """
    graphs, original = [], compile_fx.post_grad_passes

    def keep(gm, *args, **kwargs):
        original(gm, *args, **kwargs)  # functionalization is undone in here, or a clone is left where it cannot be
        graphs.append(gm)

    monkeypatch.setattr(compile_fx, "post_grad_passes", keep)
    pair = make_pair(family, backend=torch._dynamo.lookup_backend("inductor"))
    ids = token_ids(6 * W)
    places = set()

    def note(cache):
        places.add(tuple(layer.k_store.data_ptr() for layer in cache.layers if layer.is_sliding))

    with torch._inductor.config.patch(force_disable_caches=True):
        got, _ = feed(pair, ids, one_by_one(4 * W, 2 * W), before_step=note)
    assert_oracle(pair, got, lambda model: full_logits(model, ids))
    assert len(places) == 1, "a ring moved"
    assert len(graphs) == 2
    for gm in graphs:
        fused = [node for node in gm.graph.nodes if op_name(node) == "swa_pass::attend_append"]
        assert len(fused) == len(pair.runtime.specs), "the fused operator did not reach this graph"
        for store in (store for node in fused for store in node.args[3:5]):
            assert store.op == "placeholder", f"a store is made in the graph, by {op_name(store)}"
            # copy_(store, store) is what is left of functionalization; Inductor generates nothing for it
            users = [user for user in store.users if op_name(user) != "copy_" or set(user.args[:2]) != {store}]
            others = {op_name(user) for user in users} - {"swa_pass::attend_append", "sym_size"}
            assert not others, f"a store is touched by {others}"
