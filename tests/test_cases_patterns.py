"""Cases 77 and 79: patterns that do not fire, crash or drop something in silence; `is_causal` on a warm cache."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from test_rewrite import dynamo_graph, names
from torch.fx.experimental.proxy_tensor import make_fx

import swa_pass

W, SLOTS, HEAD_DIM, SEEN = 5, 16, 8, 9


class Attention(torch.nn.Module):
    """One attention on a linear store; knobs say how it is written."""

    def __init__(self, core="sdpa", grouping="repeat", mask="bool", scale=0.3, dropout=0.0, causal=False):
        super().__init__()
        self.core, self.grouping, self.mask = core, grouping, mask
        self.scale, self.dropout, self.causal = scale, dropout, causal

    def forward(self, q, k, v, k_store, v_store, position):
        k_store.index_copy_(2, position, k)
        v_store.index_copy_(2, position, v)
        distance = position[:, None] - torch.arange(SLOTS)[None, :]
        visible = ((distance >= 0) & (distance < W))[None, None]
        low = torch.finfo(q.dtype).min if self.mask == "min" else -float("inf")
        mask = visible if self.mask == "bool" else torch.where(visible, 0.0, low).to(q.dtype)
        groups = q.shape[1] // k.shape[1]
        keys, values = k_store, v_store
        if groups > 1 and (self.grouping == "repeat" or self.core == "eager"):
            shape = (*k.shape[:2], groups, SLOTS, HEAD_DIM)
            keys = keys[:, :, None].expand(shape).reshape(k.shape[0], -1, SLOTS, HEAD_DIM)
            values = values[:, :, None].expand(shape).reshape(k.shape[0], -1, SLOTS, HEAD_DIM)
        if self.core == "eager":
            scores = torch.matmul(q, keys.transpose(2, 3)) * self.scale
            scores = torch.where(visible, scores, low) if self.mask == "bool" else scores + mask
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
            return torch.matmul(F.dropout(weights, self.dropout, self.training), values)
        return F.scaled_dot_product_attention(
            q, keys, values, attn_mask=None if self.causal else mask, scale=self.scale, is_causal=self.causal,
            dropout_p=self.dropout if self.training else 0.0, enable_gqa=groups > 1 and self.grouping == "gqa",
        )  # fmt: skip


def inputs(batch=2, heads=4, kv_heads=2, dtype=torch.float32, new=1):
    torch.manual_seed(0)
    stores = [torch.randn(batch, kv_heads, SLOTS, HEAD_DIM, dtype=dtype) for _ in range(2)]
    q = torch.randn(batch, heads, new, HEAD_DIM, dtype=dtype)
    k, v = torch.randn(2, batch, kv_heads, new, HEAD_DIM, dtype=dtype)
    return [q, k, v, *stores, torch.arange(SEEN, SEEN + new)]


def copies(args):
    return [x.clone() for x in args]


MATRIX = [
    (core, grouping, heads, kv_heads, mask)
    for core, grouping, (heads, kv_heads), mask in itertools.product(
        ("sdpa", "eager"), ("repeat", "gqa"), ((4, 2), (4, 1), (2, 2)), ("bool", "min", "inf")
    )
    if core == "sdpa" or grouping == "repeat"
]


@pytest.mark.parametrize(("core", "grouping", "heads", "kv_heads", "mask"), MATRIX)
def test_every_spelling_fires(core, grouping, heads, kv_heads, mask):
    """GQA, MQA and MHA, repeat_kv or enable_gqa, boolean and additive masks, dtypes, one row or two, both IRs."""
    model = Attention(core, grouping, mask).eval()
    for dtype, batch, form in (
        (torch.float32, 2, "dynamo"), (torch.bfloat16, 1, "dynamo"), (torch.float16, 2, "make_fx"),
    ):  # fmt: skip
        args = inputs(batch, heads, kv_heads, dtype)
        gm = dynamo_graph(model, copies(args)) if form == "dynamo" else make_fx(model)(*copies(args))
        order = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
        result = swa_pass.rewrite(gm, own_state=False)
        assert result.refusals == []
        assert result.matches == 1, (dtype, form)
        if form == "dynamo":
            assert len(order) == len(args)
            continue  # its inputs come in the order of their use; numbers are compared below
        ours, stock = copies(args), copies(args)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(gm(*ours), model(*stock), atol=tolerance, rtol=tolerance)
        for a, b in zip(ours, stock):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("core", ["sdpa", "eager"])
@pytest.mark.parametrize("new", [1, 3])
def test_numbers_in_a_compiled_model(dtype, core, new):
    model = Attention(core).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=swa_pass.backend("eager"), fullgraph=True)
    ours, stock = inputs(dtype=dtype, new=new), inputs(dtype=dtype, new=new)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    with torch.no_grad():
        torch.testing.assert_close(compiled(*ours), model(*stock), atol=tolerance, rtol=tolerance)
    for a, b in zip(ours, stock):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("core", ["sdpa", "eager"])
def test_dropout_in_training_is_refused(core):
    gm = dynamo_graph(Attention(core, dropout=0.1).train(), inputs())
    result = swa_pass.rewrite(gm, own_state=False)
    assert result.matches == 0
    assert "dropout is on (p=0.1)" in result.refusals[0]


def test_dropout_that_is_off_is_nothing():
    gm = dynamo_graph(Attention("eager", dropout=0.1).eval(), inputs())
    assert swa_pass.rewrite(gm, own_state=False).matches == 1


@pytest.mark.parametrize("scale", [0.0, -0.5, 1, 2.0])
def test_any_number_is_a_scale(scale):
    model = Attention(scale=scale).eval()
    gm = make_fx(model)(*inputs())
    assert swa_pass.rewrite(gm, own_state=False).matches == 1
    torch.testing.assert_close(gm(*inputs()), model(*inputs()), atol=1e-5, rtol=0)


def test_a_scale_that_is_a_tensor_is_refused_or_right():
    class Learned(Attention):
        def __init__(self):
            super().__init__("eager")
            self.scale = torch.nn.Parameter(torch.tensor(0.3), requires_grad=False)

    model = Learned().eval()
    gm = make_fx(model)(*inputs())
    before = gm.code
    result = swa_pass.rewrite(gm, own_state=False)
    assert (result.matches, gm.code) == (0, before)
    assert len(result.refusals) == 1


@pytest.mark.parametrize("new", [1, 3])
def test_is_causal_on_a_warm_cache_is_no_window(new):
    """SDPA aligns it to the first key: with SLOTS keys and few queries it shows the oldest keys, not the newest."""
    gm = dynamo_graph(Attention(causal=True).eval(), inputs(new=new))
    before = gm.code
    result = swa_pass.rewrite(gm, own_state=False)
    assert (result.matches, gm.code) == (0, before)
    assert "is_causal" in result.refusals[0]


def test_a_rewritten_graph_has_no_is_causal():
    for new in (1, 3):
        gm = dynamo_graph(Attention().eval(), inputs(new=new))
        assert swa_pass.rewrite(gm, own_state=False).matches == 1
        assert not any("scaled_dot_product" in name for name in names(gm))
