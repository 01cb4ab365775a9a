"""The passes on small graphs made with the cache's own operators, and on a model with Gemma 3's layer pattern."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import F as FULL
from helpers import S as SLIDING
from helpers import W, assert_oracle, feed, full_logits, make_pair, token_ids

from swa_pass.graph import op_name, shape_of
from swa_pass.passes import rewrite_graph

B, H, KV, D, SLOTS = 2, 4, 2, 16, 24
ops = torch.ops.swa_pass


class Layer:
    """One attention layer as a traced HybridCache and transformers' SDPA path write it; knobs make it wrong."""

    window = W  # of the cache
    shown = W  # of the mask
    dropout = 0.0
    causal_flag = False
    extra_reader = False
    repeat = False  # repeat_kv by expand and reshape, or grouped heads
    sites = 1
    second_shown: int | None = None  # another mask for the second site
    late_append = False
    keys_twice = False  # the keys serve as values

    def __init__(self, **knobs):
        for name, value in knobs.items():
            assert hasattr(type(self), name)
            setattr(self, name, value)

    def mask(self, lengths, new, width, shown):
        query = lengths[0] + torch.arange(new)[:, None]
        first = torch.clamp(lengths[0] - (self.window - 1), min=0) if self.window else 0
        key = first + torch.arange(width)[None, :]
        visible = (key <= query) & (key > query - shown) if shown else key <= query
        return visible[None, None].expand(B, 1, new, width)

    def heads(self, x):
        if not self.repeat:
            return x
        return x[:, :, None].expand(B, KV, H // KV, x.shape[2], D).reshape(B, H, x.shape[2], D)

    def attention(self, q, keys, values, mask):
        return F.scaled_dot_product_attention(
            q,
            self.heads(keys),
            self.heads(values),
            attn_mask=None if self.causal_flag else mask,
            dropout_p=self.dropout,
            is_causal=self.causal_flag,
            scale=0.3,
            enable_gqa=not self.repeat,
        )

    def __call__(self, q, k, v, k_store, v_store, lengths, starts):
        keys = ops.view.default(k_store, k, lengths, self.window, 7, starts)
        values = ops.view.default(v_store, v, lengths, self.window, 7, starts)
        ops.append.default(k, v, k_store, v_store, lengths, window=self.window)
        values = keys if self.keys_twice else values
        out = self.attention(q, keys, values, self.mask(lengths, k.shape[2], keys.shape[2], self.shown))
        for n in range(1, self.sites):
            shown = self.second_shown or self.shown
            out = out + self.attention(q * n + 0.5, keys, values, self.mask(lengths, k.shape[2], keys.shape[2], shown))
        if self.extra_reader:
            out = out + keys.sum()
        return out


def inputs(new=3, seen=11):
    k, v = torch.randn(B, KV, new, D), torch.randn(B, KV, new, D)
    stores = [torch.randn(B, KV, SLOTS, D) for _ in range(2)]
    return [torch.randn(B, H, new, D), k, v, *stores, torch.full((B,), seen), torch.zeros(B, dtype=torch.int64)]


def rewritten(layer, args):
    """Captures the layer, rewrites it; returns what the pass says and a callable."""
    result = {}

    def backend(gm, example_inputs):
        result["graph"], result["rewrite"] = gm, rewrite_graph(gm)
        return gm.forward

    torch._dynamo.reset()
    run = torch.compile(layer.__call__, backend=backend, fullgraph=True)
    run(*[a.clone() for a in args])
    return result["graph"], result["rewrite"], run


def assert_same(layer, run, args):
    """Same result as without the pass, and the same stores afterwards."""
    ours, theirs = [a.clone() for a in args], [a.clone() for a in args]
    torch.testing.assert_close(run(*ours), layer(*theirs), atol=1e-5, rtol=1e-5)
    for mine, stock in zip(ours, theirs, strict=True):
        assert torch.equal(mine, stock)


GOOD = [
    {},
    {"repeat": True},
    {"window": 0, "shown": 0},  # a linear store
    {"window": 0},  # a window on a linear store
    {"window": 1, "shown": 1},
]


@pytest.mark.parametrize("knobs", GOOD, ids=str)
@pytest.mark.parametrize(("new", "seen"), [(3, 11), (1, 20), (5, 2), (1, 0), (9, 13)])
def test_proven_attention_is_fused(knobs, new, seen):
    layer, args = Layer(**knobs), inputs(new, seen)
    graph, rewrite, run = rewritten(layer, args)
    assert rewrite.fused == (7,)
    assert rewrite.views_left == ()
    assert [f.refusal for f in rewrite.findings] == [""]
    assert rewrite.ops_before.count("swa_pass::view") == 2
    assert rewrite.ops_before.count("scaled_dot_product_attention") == 1
    left = [name for name in rewrite.ops_after if name not in ("placeholder", "output")]
    assert left == ["swa_pass::attend_append"], "the old mask or attention is still there"
    (fused,) = (n for n in graph.graph.nodes if op_name(n) == "swa_pass::attend_append")
    assert fused.kwargs["window"] == layer.shown
    assert fused.kwargs["scale"] == pytest.approx(0.3)
    assert_same(layer, run, args)


@pytest.mark.parametrize("by", [-1, 1])
def test_another_window_gives_other_numbers(by):
    """The comparison above can fail."""
    layer, args = Layer(), inputs()
    graph, _, _run = rewritten(layer, args)
    for node in graph.graph.nodes:
        if op_name(node) == "swa_pass::attend_append":
            node.update_kwarg("window", W + by)
    graph.recompile()
    got = graph.forward(*list(_graph_inputs(graph, args)))
    assert (got[0] - layer(*[a.clone() for a in args])).abs().max() > 1e-2


def _graph_inputs(graph, args):
    by_name = dict(zip(("q", "k", "v", "k_store", "v_store", "lengths", "starts"), args, strict=True))
    names = [str(n.target) for n in graph.graph.nodes if n.op == "placeholder"]
    return [by_name[name.removeprefix("L_").removesuffix("_")].clone() for name in names]


REFUSED = [
    ({"dropout": 0.1}, "dropout"),
    ({"causal_flag": True}, "is_causal"),
    ({"shown": W + 1}, "keeps a window of 8 keys, but the mask shows 9"),
    ({"shown": W - 1}, "keeps a window of 8 keys, but the mask shows 7"),
    ({"shown": 0}, "keeps a window of 8 keys, but the mask shows all"),
    ({"sites": 2, "second_shown": W - 2}, "the mask shows 6"),
]


@pytest.mark.parametrize(("knobs", "sentence"), REFUSED, ids=str)
def test_refusals_say_why_and_change_nothing(knobs, sentence):
    layer, args = Layer(**knobs), inputs()
    _graph, rewrite, run = rewritten(layer, args)
    assert rewrite.fused == ()
    assert rewrite.views_left == (7,)
    assert rewrite.ops_after == rewrite.ops_before
    assert any(sentence in f.refusal for f in rewrite.findings), [f.refusal for f in rewrite.findings]
    if not layer.dropout:
        assert_same(layer, run, args)


def test_an_unknown_argument_is_refused():
    """A keyword that a later torch may add is never dropped silently."""
    from swa_pass.patterns import sdpa

    graph, _, _ = rewritten(Layer(shown=W + 1), inputs())
    (node,) = (n for n in graph.graph.nodes if op_name(n) == "scaled_dot_product_attention")
    node.kwargs = {**node.kwargs, "bias_scale": 2.0}
    assert sdpa.validate(sdpa.match(node)) == "scaled_dot_product_attention has the unknown argument bias_scale"


def test_another_reader_of_the_keys_is_refused():
    layer, args = Layer(extra_reader=True), inputs()
    _, rewrite, run = rewritten(layer, args)
    assert (rewrite.fused, rewrite.views_left) == ((), (7,))
    assert rewrite.ops_after == rewrite.ops_before
    assert any(f.refusal for f in rewrite.findings), "left alone without a reason"
    assert_same(layer, run, args)


def test_nothing_to_do():
    """A graph without our cache comes back node for node."""

    def plain(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2

    gm = torch.fx.symbolic_trace(plain)
    before = [(n.op, n.target, n.name) for n in gm.graph.nodes]
    rewrite = rewrite_graph(gm)
    assert (rewrite.findings, rewrite.fused, rewrite.views_left) == ((), (), ())
    assert [(n.op, n.target, n.name) for n in gm.graph.nodes] == before


@pytest.mark.parametrize(("new", "seen"), [(3, 11), (30, 9), (1, 40)])
def test_layers_that_share_keys(new, seen):
    """Both read the store as it was before the step; the last of them writes."""
    layer, args = Layer(sites=2), inputs(new, seen)
    _, rewrite, run = rewritten(layer, args)
    assert rewrite.fused == (7,)
    names = [name for name in rewrite.ops_after if name.startswith("swa_pass::")]
    assert names == ["swa_pass::attend", "swa_pass::attend_append"]
    assert "scaled_dot_product_attention" not in rewrite.ops_after
    assert_same(layer, run, args)


# ------------------------------------------------------------------------------------------------- Gemma 3's pattern

PATTERN = [SLIDING] * 5 + [FULL]


def test_fifteen_of_eighteen_layers():
    """The layers of Gemma 3 270M: 0-4, 6-10 and 12-16 slide, 5, 11 and 17 are global; nothing of the old path is left.

    And one decode graph serves every length, whatever the number of layers.
    """
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm)
        return gm.forward

    pair = make_pair("gemma3", layer_types=PATTERN * 3, backend=keep)
    specs = pair.runtime.specs
    assert [s.index for s in specs if s.kind == "sliding"] == [n for n in range(18) if n % 6 != 5]
    assert {s.window for s in specs if s.kind == "sliding"} == {W}
    assert {s.action for s in specs if s.kind == "sliding"} == {"rewritten"}
    assert [s.index for s in specs if (s.kind, s.action) == ("full", "kept")] == [5, 11, 17]

    ids = token_ids(3 * W)
    got, cache = feed(pair, ids, [1] * (3 * W))
    assert_oracle(pair, got, lambda model: full_logits(model, ids), tolerance=2e-4)  # 18 layers of rounding
    assert sum(layer.is_sliding for layer in cache.layers) == 15

    (rewrite,) = pair.runtime.steps["decode"].rewrites
    assert rewrite.fused == tuple(range(18))
    assert rewrite.views_left == ()
    assert rewrite.ops_before.count("scaled_dot_product_attention") == 18
    assert rewrite.ops_before.count("swa_pass::view") == 36
    after = rewrite.ops_after
    assert after.count("swa_pass::attend_append") == 18
    assert not {"scaled_dot_product_attention", "swa_pass::view", "swa_pass::append"} & set(after)
    (graph,) = graphs
    for node in graph.graph.nodes:
        if op_name(node) == "cat":  # rotate_half and the rotary table: over head_dim, of one token
            assert shape_of(node)[-2] == 1, f"{node} joins keys"
    assert not {"le", "gt", "and", "where", "clamp"} & set(after), "a mask is still built"


@pytest.mark.parametrize("sites", [1, 2])
@pytest.mark.parametrize(("new", "seen"), [(3, 11), (1, 20), (9, 13)])
def test_keys_that_serve_as_values(sites, new, seen):
    """Both reads are of one store, before this step's tokens are written to it and to the other."""
    layer, args = Layer(keys_twice=True, sites=sites), inputs(new, seen)
    _, rewrite, run = rewritten(layer, args)
    assert rewrite.fused == (7,)
    assert rewrite.ops_after.count("swa_pass::attend") == sites
    assert [name for name in rewrite.ops_after if name.startswith("swa_pass")][-1] == "swa_pass::append"
    assert_same(layer, run, args)
