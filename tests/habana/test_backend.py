"""`torch.compile(model.model, backend=swa_pass.backend(inner))` on stock Gaudi models: nothing of ours is in them."""

from __future__ import annotations

import os

import pytest
import torch
from gaudi_helpers import distance, generate, step_logits
from gaudi_models import MUTATED, NEW, TOLERANCE, W, inputs_of
from gaudi_stock import compiled, operators, sliding_stores, stock
from hpu_compiler import Inner
from torch._dynamo import trace_rules
from torch._dynamo.utils import counters

import swa_pass
from swa_pass.integrations import optimum_habana
from swa_pass.masks import Mask
from swa_pass.passes import loans

#: Keys that a query sees.
KEYS = {"graph": W + 1, "hf": W}


def logits(model, scenario, **options):
    return step_logits(model, scenario, lazy_mode=False, **options)


@pytest.fixture
def plugin_is_skipped():
    """The real plugin has Dynamo skip its module `hpu`, where sdp_kernel is."""
    import habana_frameworks.torch.hpu as hpu

    before = list(trace_rules.SKIP_DIRS)
    trace_rules.SKIP_DIRS.append(os.path.dirname(hpu.__file__) + os.sep)
    trace_rules._recompile_re()
    yield
    trace_rules.SKIP_DIRS[:] = before
    trace_rules._recompile_re()


@pytest.fixture
def traceable(plugin_is_skipped):
    take_back = optimum_habana.make_traceable()
    yield
    take_back()


@pytest.mark.parametrize("semantics", ["graph", "hf"])
@pytest.mark.parametrize("scenario", ["short", "long", "padded"])
@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_eager_attention(family, scenario, semantics, references):
    """Prompt and NEW steps, twice, against upstream transformers with the window of the graph, or of the config."""
    model, inner, backend = compiled(stock(family, references), window_semantics=semantics)
    wanted = references[family]["logits"][scenario]
    for _ in range(2):
        got = logits(model, scenario)
        assert distance(got, wanted[KEYS[semantics]]) <= TOLERANCE
        for other in {W - 1, W, W + 1} - {KEYS[semantics]}:
            assert distance(got, wanted[other]) > MUTATED
    assert len(inner.graphs) == 2
    assert not counters["graph_break"]
    assert (backend.rings.matches, backend.rings.refusals) == (2, [])


def test_what_reaches_the_inner_compiler(references):
    """Core operators of static shapes; the ring is written whole, in place, as hpu_backend's own passes want it."""
    torch._dynamo.reset()
    plain, inner = stock("gemma3", references), Inner()
    plain.model = torch.compile(plain.model, backend=inner)
    logits(plain, "long")
    model, ours, _ = compiled(stock("gemma3", references))
    logits(model, "long")
    for before, after in zip(inner.graphs, ours.graphs):
        for graph in (before, after):
            assert not [node for node in graph.graph.nodes if "swa_pass::" in str(getattr(node.target, "_schema", ""))]
    before, after = (operators(graphs[1]) for graphs in (inner.lowered, ours.lowered))
    assert operators(inner.lowered[0]) == operators(ours.lowered[0])  # the prompt's graph is stock's
    assert before.count("aten.index_copy.default") == 6
    assert after.count("aten.index_copy.default") == 6 + 1  # and the positions that the slots hold
    for name in ("bmm", "_softmax", "mm", "rotary_pos_embedding"):
        assert len([op for op in before if name in op]) == len([op for op in after if name in op])
    moves = ("index_put", "slice_scatter", "roll", "cat", "swa_pass", "_assert")
    for name in moves:
        assert len([op for op in after if name in op]) <= len([op for op in before if name in op])
    copies = [node for node in ours.lowered[1].graph.nodes if str(node.target) == "aten.copy_.default"]
    assert len(copies) == 6 + 1
    for copy in copies:
        assert copy.args[0].op == "placeholder"
        assert str(copy.args[1].target) == "aten.index_copy.default"
    slots = {tuple(copy.args[0].meta["val"].shape) for copy in copies}
    assert slots == {(2, 2, W + 1, 8), (2, 2, 2 * W + 3 + NEW, 8), (W + 1,)}


@pytest.mark.parametrize("semantics", ["graph", "hf"])
@pytest.mark.parametrize("scenario", ["short", "padded"])
def test_flash_attention(scenario, semantics, traceable, references):
    """Where the plugin makes Dynamo skip sdp_kernel. The scale is stock's, so the reference is stock, uncompiled."""
    model, inner, backend = compiled(stock("gemma3", references), window_semantics=semantics)
    plain = stock("gemma3", references, window=KEYS[semantics] - 1)  # stock shows one key more than its window
    wanted = logits(plain, scenario, use_flash_attention=True)
    for _ in range(2):
        assert distance(logits(model, scenario, use_flash_attention=True), wanted) <= TOLERANCE
    assert len(inner.graphs) == 2
    assert not counters["graph_break"]
    assert (backend.rings.matches, backend.rings.refusals) == (2, [])
    for graph in inner.graphs:
        assert len([op for op in operators(graph) if "sdpa" in op]) == 3
    other = stock("gemma3", references, window=KEYS[semantics])
    assert distance(wanted, logits(other, scenario, use_flash_attention=True)) > MUTATED


def test_flash_attention_breaks_without_make_traceable(plugin_is_skipped, references):
    """The check on the test above. No graph sees both a write and its attention, so none is rewritten."""
    model, inner, backend = compiled(stock("gemma3", references))
    wanted = logits(stock("gemma3", references), "short", use_flash_attention=True)
    assert distance(logits(model, "short", use_flash_attention=True), wanted) <= TOLERANCE
    assert len(inner.graphs) > 2
    assert counters["graph_break"]
    assert backend.rings.matches == 0


def test_a_prompt_without_a_window(traceable, references):
    """flash_attention_causal_mask drops the window from the prompt, in stock code; decode steps have it."""
    options = {"use_flash_attention": True, "flash_attention_recompute": True, "flash_attention_causal_mask": True}
    model, _, backend = compiled(stock("gemma3", references))
    wanted = logits(stock("gemma3", references), "long", **options)
    assert distance(logits(model, "long", **options), wanted) <= TOLERANCE
    assert backend.rings.matches == 2


def test_buckets(references):
    """Attention reads a prefix of the store that grows: one decode graph more, on the same rings."""
    options = {"bucket_size": 8, "bucket_internal": True}
    model, inner, backend = compiled(stock("gemma2", references))
    got = logits(model, "short", **options)
    assert distance(got, references["gemma2"]["logits"]["short"][W + 1]) <= TOLERANCE
    assert len(inner.graphs) <= 4
    assert not backend.rings.refusals


@pytest.mark.parametrize(("family", "flash"), [("mistral", False), ("mistral", True), ("qwen2", False)])
def test_left_alone_to_the_bit(family, flash, references):
    """Qwen 2: the code ignores the window. Mistral: past the window its decode mask hides every key or none, so nothing
    in the graph bounds what a query sees."""
    torch._dynamo.reset()
    plain, inner = stock(family, references), Inner()
    plain.model = torch.compile(plain.model, backend=inner)
    wanted = logits(plain, "long", use_flash_attention=flash)
    model, ours, backend = compiled(stock(family, references))
    assert torch.equal(logits(model, "long", use_flash_attention=flash), wanted)
    assert (backend.rings.matches, backend.rings.refusals, backend.rings.nbytes) == (0, [], 0)
    assert [operators(graph) for graph in ours.graphs] == [operators(graph) for graph in inner.graphs]


def test_layer_by_layer_is_refused(references):
    """Regional compilation: the mask is made outside, so nothing is known about it."""
    torch._dynamo.reset()
    model, inner = stock("gemma2", references), Inner()
    backend = swa_pass.backend(inner, window_semantics="graph")
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend=backend)
    assert distance(logits(model, "long"), references["gemma2"]["logits"]["long"][W + 1]) <= TOLERANCE
    assert backend.rings.matches == 0
    assert backend.rings.refusals
    assert all("Compile the whole decoder" in refusal for refusal in backend.rings.refusals)


def test_a_window_wrong_by_one_is_nan_not_another_token(references, monkeypatch):
    proven = loans._prove

    def one_less(*args):
        mask = proven(*args)
        return Mask(mask.kind, mask.window and mask.window - 1)

    monkeypatch.setattr(loans, "_prove", one_less)
    model, _, _ = compiled(stock("gemma2", references))
    got = logits(model, "long")
    assert not got[0].isnan().any()
    assert got[1:].isnan().all()


def test_rings_hold_what_stock_stores_hold(references):
    model, _, backend = compiled(stock("gemma3", references))
    plain = stock("gemma3", references)
    for each in (model, plain):
        logits(each, "padded")
    last = inputs_of("padded")[2] + NEW - 2  # the last token is never read
    for store, whole in zip(sliding_stores(model), sliding_stores(plain)):
        ring = backend.rings.of(store)
        assert ring.shape == (2, 2, W + 1, 8)
        for position in range(last - W, last + 1):
            assert distance(ring[:, :, position % (W + 1)], whole[:, :, position]) <= TOLERANCE
        assert store.isnan().all()
    assert backend.rings.nbytes == 4 * 2 * 2 * (W + 1) * 8 * 4


@pytest.mark.parametrize("scenario", ["short", "padded"])
def test_slots_that_must_not_be_seen(scenario, references):
    """Slots that hold nothing, or a pad, get a value that would drown everything else."""
    model, _, backend = compiled(stock("gemma3", references))
    prompt, pads = inputs_of(scenario)[2], inputs_of(scenario)[1].logical_not().sum(1).tolist()
    steps = []

    def poison(ids, scores):
        seen = prompt + len(steps)  # tokens in the rings
        steps.append(seen)
        for store in sliding_stores(model):
            ring = backend.rings.of(store)
            for row, pad in enumerate(pads) if ring is not None else ():
                kept = {position % (W + 1) for position in range(max(pad, seen - W), seen)}
                for slot in set(range(W + 1)) - kept:
                    ring[row, :, slot] = 1e4
        return scores

    got = logits(model, scenario, before_step=poison)
    assert len(steps) == NEW
    assert distance(got, references["gemma3"]["logits"][scenario][W + 1]) <= TOLERANCE


def test_beams_are_refused_at_their_first_reordering(references):
    ids, mask, prompt = inputs_of("long")
    model, _, _ = compiled(stock("gemma2", references))
    with pytest.raises(RuntimeError, match="beam search does"):
        generate(model, ids[:, :prompt], mask[:, :prompt], num_beams=3, eos_token_id=96, lazy_mode=False)


def test_a_bigger_batch_afterwards(references):
    ids, mask, prompt = inputs_of("long")
    model, _, backend = compiled(stock("gemma2", references))
    for rows in (2, 4, 2):
        again = torch.arange(rows) % 2
        tokens = generate(model, ids[again, :prompt], mask[again, :prompt], lazy_mode=False)
        plain = generate(stock("gemma2", references), ids[again, :prompt], mask[again, :prompt])
        assert torch.equal(tokens, plain)
    assert not backend.rings.refusals
