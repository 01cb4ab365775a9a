"""FusedSDPA: what it is called with, in both generations of its signature."""

from __future__ import annotations

import pytest
import torch
from gaudi_helpers import assert_upstream, attentions, gaudi, kernel_calls, step_logits
from gaudi_models import NEW, W
from habana_frameworks.torch.hpex import kernels
from habana_frameworks.torch.hpex.kernels.FusedSDPA import FusedSDPA12, FusedSDPA15

from swa_pass.integrations.optimum_habana import step as step_module
from swa_pass.ops.hpu_kernel import FusedAttention, matmul_attention


@pytest.fixture(params=[FusedSDPA12, FusedSDPA15], ids=["12 arguments", "15 arguments"])
def generation(request, monkeypatch):
    monkeypatch.setattr(kernels, "FusedSDPA", request.param)
    return request.param


@pytest.mark.parametrize("scenario", ["short", "long", "padded"])
def test_calls_at_every_step(generation, scenario, references):
    """Scale and recompute mode are said; a ring is read whole, without a window; without a mask once it is full."""
    model = gaudi("gemma3", references)
    assert model._swa_pass_gaudi.fused.fused is generation
    logits = step_logits(model, scenario, use_flash_attention=True, flash_attention_recompute=True)
    assert_upstream(logits, references, "gemma3", scenario)
    calls = kernel_calls()
    layers = 3
    assert len(calls) == NEW * layers
    assert {call.scale for call in calls} == {21**-0.5}
    assert {call.recompute for call in calls[:layers]} == {True}
    assert {call.recompute for call in calls[layers:]} == {False}
    assert {call.window for call in calls} == {(-1, -1)}
    assert not any(call.is_causal for call in calls)
    prompt = {"short": W - 3, "long": 2 * W + 3, "padded": W + 2}[scenario]
    pads = W - 1 if scenario == "padded" else 0
    for step in range(1, NEW):
        tokens = prompt + step  # with the one that this step reads
        sliding, full, _ = calls[step * layers : (step + 1) * layers]
        assert sliding.k == (2, 2, W, 8)
        assert sliding.mask == (None if tokens >= W + pads else (2, 1, 1, W)), f"{tokens} tokens"
        assert full.k[2] == full.mask[-1] == prompt + NEW


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_softcap_and_sinks_stay_out_of_it(family, references):
    step_logits(gaudi(family, references), "long", use_flash_attention=True)
    assert not kernel_calls()


def test_mixtral_has_no_option_and_takes_it_always(references):
    step_logits(gaudi("mixtral", references), "short")
    assert len(kernel_calls()) == NEW * 3


def test_causal_flag_is_used_only_where_it_is_right(references):
    """Without pads: the global layer, and a sliding layer whose prompt fits into the window."""
    causal = {}
    for scenario in ("short", "long", "padded"):
        kernel_calls().clear()
        step_logits(gaudi("gemma3", references), scenario, use_flash_attention=True, flash_attention_causal_mask=True)
        causal[scenario] = [call.is_causal for call in kernel_calls()[:3]]
    assert causal == {"short": [True] * 3, "long": [False, True, False], "padded": [False] * 3}


@pytest.mark.parametrize("flash", [False, True])
def test_long_prompts_go_in_blocks(flash, references, monkeypatch):
    """No mask over the whole prompt: a block of queries and the keys that it can see."""
    monkeypatch.setattr(step_module, "PREFILL_BLOCK", 4)
    logits = step_logits(gaudi("gemma3", references), "long", use_flash_attention=flash)
    assert_upstream(logits, references, "gemma3", "long")
    if flash:
        sliding = kernel_calls()[:5]
        assert [call.k[2] for call in sliding] == [4, 8, 4 + W - 1, 4 + W - 1, 3 + W - 1]


def test_unknown_signature_is_refused():
    class Renamed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, mask=None, p=0.0, causal=False, scale=None, mode="None", recompute_mode=None): ...

    with pytest.raises(ValueError, match=r"attn_mask.*without use_flash_attention"):
        FusedAttention(Renamed)

    class Old(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, softmax_mode="None"): ...

    with pytest.raises(ValueError, match="recompute_mode"):
        FusedAttention(Old)


def test_matmul_attention_against_plain_torch():
    """Scale, softcap, mask and sinks, with grouped heads, written out in double precision."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 8) for heads, n in ((4, 3), (2, 5), (2, 5)))
    mask = torch.zeros(2, 1, 3, 5).masked_fill(torch.rand(2, 1, 3, 5) < 0.3, torch.finfo(torch.float32).min)
    sinks = torch.randn(4)
    got = matmul_attention(None, q, k, v, mask, scale=0.3, softcap=2.0, sinks=sinks)
    keys, values = k.repeat_interleave(2, 1).double(), v.repeat_interleave(2, 1).double()
    scores = torch.tanh(q.double() @ keys.mT * 0.3 / 2.0) * 2.0 + mask.double()
    top = torch.maximum(scores.amax(-1, keepdim=True), sinks.double()[None, :, None, None])
    weights = (scores - top).exp()
    weights = weights / (weights.sum(-1, keepdim=True) + (sinks.double()[None, :, None, None] - top).exp())
    torch.testing.assert_close(got.double(), weights @ values, atol=1e-5, rtol=0)


def test_stores_are_read_where_they_lie(references):
    """Decode hands the ring itself to attention: no copy, no gather."""
    model = gaudi("mistral", references)
    step_logits(model, "long", use_flash_attention=True)
    store = attentions(model)[0].k_cache
    assert store.forward(torch.zeros(2, 2, 1, 8), 2, torch.tensor(3)) is store.cache
