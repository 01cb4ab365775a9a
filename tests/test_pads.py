"""Attention with more in its scores than a mask: proven, read in time order, and told about left pads."""

from __future__ import annotations

import pytest
import torch
from test_passes import B, D, H, Layer, W, inputs, rewritten

from swa_pass.graph import op_name
from swa_pass.passes.pads import hide_pads

MIN = torch.finfo(torch.float32).min


class Biased(Layer):
    """Scores with a bias for each query, head and distance, from a table of each query; `sinks` of each query."""

    repeat = True
    form = "sdpa"  # the bias is in the mask; "added": after the scale; "after": after the mask
    sinks = False
    biases = 1
    causal = True
    hides = MIN
    by = "distance"  # or what a ring cannot give: "index" of the key, "width" of the read, mean of "keys", "hiding" one

    def bias(self, q, keys, lengths, n=0):
        table = torch.sin(q.sum(-1, keepdim=True) + torch.arange(W + 3) + n) * 2.0
        width, query = keys.shape[2], lengths[0] + torch.arange(q.shape[2])[:, None]
        first = torch.clamp(lengths[0] - (self.window - 1), min=0) if self.window else 0
        away = query - (first + torch.arange(width)[None])
        if self.by == "index":
            away = torch.arange(width)[None]
        elif self.by == "width":
            away = torch.arange(q.shape[2])[:, None] + width - q.shape[2] - torch.arange(width)[None]
        elif self.by == "keys":
            table = table + keys.mean()
        bias = table.gather(-1, away.clamp(0, W + 2).expand(*q.shape[:3], width))
        if self.by == "hiding":
            bias = torch.where(torch.arange(width)[None] == 1, MIN, bias)
        return bias.masked_fill((away < 0) | (away >= W + 3), 0.0)

    def mask(self, lengths, new, width, shown):
        self.lengths = lengths
        visible = super().mask(lengths, new, width, shown)
        if not self.causal:
            visible = visible | ~super().mask(lengths, new, width, 0)
        return visible

    def attention(self, q, keys, values, mask):
        keys, values = self.heads(keys), self.heads(values)
        bias = sum(self.bias(q, keys, self.lengths, n) for n in range(self.biases))
        if self.form == "sdpa":
            mask = torch.where(mask, bias, self.hides)
            return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=0.3)
        scores, mask = torch.matmul(q, keys.transpose(2, 3)) * 0.3, torch.where(mask, 0.0, self.hides)
        if self.form == "after":
            scores = scores + mask + bias
        else:
            for n in range(self.biases):
                scores = scores + self.bias(q, keys, self.lengths, n)
            scores = scores + mask
        if self.sinks:
            sinks = q.sum(-1, keepdim=True)
            scores = torch.cat([scores, sinks + keys.mean() if self.by == "keys" else sinks], -1)
        weights = torch.softmax(scores, -1)
        return torch.matmul(weights[..., :-1] if self.sinks else weights, values)


def padded(layer, args):
    """What the layer is with pads: each row's mask hides what comes before its start."""
    lengths, starts = args[5], args[6]
    mask = layer.mask
    layer.mask = lambda *given: hide_pads(mask(*given), lengths, starts, layer.window)
    try:
        return layer(*[a.clone() for a in args])
    finally:
        del layer.mask


GOOD = [
    pytest.param({}, id="sdpa"),
    pytest.param({"form": "added"}, id="added"),
    pytest.param({"form": "added", "sinks": True}, id="sinks-and-bias"),
    pytest.param({"form": "added", "sinks": True, "biases": 0}, id="sinks"),
    pytest.param({"window": 0, "shown": 0}, id="linear"),
    pytest.param({"window": 0}, id="window-on-linear"),
    pytest.param({"sites": 2}, id="two-sites"),
]


@pytest.mark.parametrize(("new", "seen"), [(1, 20), (3, 11), (1, 3)])
@pytest.mark.parametrize("knobs", GOOD)
def test_read_in_time_order_with_pads_hidden(knobs, new, seen):
    layer, args = Biased(**knobs), inputs(new, seen)
    _, rewrite, run = rewritten(layer, args)
    assert (rewrite.fused, rewrite.views_left, rewrite.padded) == ((), (7,), (7,))
    assert [(f.refusal, f.mask.kind, f.mask.window) for f in rewrite.findings] == [
        ("", "sliding" if layer.shown else "full", layer.shown or None)
    ] * layer.sites
    assert all(f.extra for f in rewrite.findings)
    for starts in ([0, 0], [0, seen - 1], [max(seen - 2, 0), 1]):
        args[6] = torch.tensor(starts)
        got, want = run(*[a.clone() for a in args]), padded(layer, args)
        real = (seen + torch.arange(new))[None] >= args[6][:, None]  # pads see nothing: any number will do
        got, want = (out.transpose(1, 2)[real] for out in (got, want))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    args[6] = torch.tensor([0, seen - 2])
    assert (run(*[a.clone() for a in args]) - want_of(layer, args)).abs().max() > 1e-3, (
        "a start wrong by one is not seen"
    )


def want_of(layer, args):
    return padded(layer, [*args[:6], args[6] + 1])


REFUSED = [
    pytest.param({"shown": W + 1}, "shows 9", id="a-key-too-many"),
    pytest.param({"shown": W - 1}, "shows 7", id="a-key-too-few"),
    pytest.param({"shown": 0}, "shows all", id="global-on-a-ring"),
    pytest.param({"form": "added", "shown": W + 1}, "shows 9", id="added-a-key-too-many"),
    pytest.param({"causal": False}, "additive mask holds values", id="not-causal"),
    pytest.param({"hides": -100.0}, "additive mask holds values", id="hides-too-little"),
    pytest.param({"form": "after"}, "", id="a-bias-outside-the-mask"),
    pytest.param({"form": "added", "biases": 2}, "more than one tensor", id="two-biases"),
    pytest.param({"by": "index"}, "the distance of query and key", id="bias-by-key-index"),
    pytest.param({"by": "width"}, "the distance of query and key", id="bias-by-number-of-keys"),
    pytest.param({"by": "keys"}, "the distance of query and key", id="bias-from-keys"),
    pytest.param({"form": "added", "by": "index"}, "the distance of query and key", id="added-bias-by-key-index"),
    pytest.param({"form": "added", "by": "width"}, "the distance of query and key", id="added-bias-by-number-of-keys"),
    pytest.param({"by": "hiding"}, "the distance of query and key", id="bias-that-hides-by-index"),
    pytest.param(
        {"form": "added", "by": "hiding"}, "the distance of query and key", id="added-bias-that-hides-by-index"
    ),
    pytest.param({"form": "added", "by": "keys", "sinks": True, "biases": 0}, "sinks", id="sinks-from-keys"),
    pytest.param({"window": 0, "by": "width"}, "the distance of query and key", id="linear-bias-by-number-of-keys"),
]


@pytest.mark.parametrize(("knobs", "sentence"), REFUSED)
def test_what_is_not_proven_is_left_alone(knobs, sentence):
    layer, args = Biased(**knobs), inputs()
    _, rewrite, run = rewritten(layer, args)
    assert (rewrite.fused, rewrite.views_left, rewrite.padded) == ((), (7,), ())
    assert rewrite.ops_after == rewrite.ops_before
    assert all(f.refused for f in rewrite.findings)
    assert any(sentence in f.refusal for f in rewrite.findings), [f.refusal for f in rewrite.findings]
    got, want = (call(*[a.clone() for a in args]) for call in (run, layer))
    torch.testing.assert_close(got, want)


def test_one_mask_for_equal_sites():
    graph, _, _ = rewritten(Biased(sites=2, form="added"), inputs())
    hidden = [node for node in graph.graph.nodes if node.target is hide_pads]
    assert len(hidden) == len({node.args[0] for node in hidden})
    assert all(node.meta["example_value"].shape[0] == B for node in hidden)
    assert [op_name(user) for node in hidden for user in node.users] == ["add"] * 2


def test_a_chunk_is_not_told_about_pads():
    """Stock counts chunks from each row's first token, so hiding the pads alone would be wrong."""

    class Chunked(Biased):
        def mask(self, lengths, new, width, shown):
            self.lengths = lengths
            query, key = lengths[0] + torch.arange(new)[:, None], torch.arange(width)[None]
            return ((key <= query) & (key // 4 == query // 4))[None, None].expand(B, 1, new, width)

    for form in ("sdpa", "added"):
        _, rewrite, _ = rewritten(Chunked(window=0, form=form), inputs())
        assert [(f.refusal, f.mask.kind) for f in rewrite.findings] == [("", "chunked")]
        assert (rewrite.fused, rewrite.padded) == ((), ())


@pytest.mark.parametrize("knobs", [{}, {"form": "added", "sinks": True}], ids=["sdpa", "added"])
def test_shapes_of_the_attention(knobs):
    layer, args = Biased(**knobs), inputs(2)
    _, _, run = rewritten(layer, args)
    assert run(*[a.clone() for a in args]).shape == (B, H, 2, D)
