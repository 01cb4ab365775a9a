"""One attention forward for all families, in the place of the stock one.

Projections, norms, rotary embedding and output projection are the layer's own modules. What is ours: the store that
the new tokens go to, the mask, and the call of the attention core.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swa_pass.ops.hpu_kernel import FusedAttention, matmul_attention

from . import step as step_module
from .families import Family
from .step import Step


@dataclass(frozen=True)
class Layer:
    """The facts about one attention layer, read once from its module. window: keys a query sees, itself included."""

    index: int
    window: int | None
    scale: float
    softcap: float | None
    sinks: bool
    family: Family


def describe(attention: Any, index: int, window: int | None, family: Family) -> Layer:
    softcap = getattr(attention, "attn_logit_softcapping", None)
    return Layer(index, window, attention.scaling, softcap, hasattr(attention, "sinks"), family)


def forward(
    attention: Any,
    layer: Layer,
    step: Step,
    fused: FusedAttention | None,
    hidden_states: Tensor,
    position_ids: Tensor,
    position_embeddings: Any,
) -> tuple[Tensor, None, Any]:
    """hidden_states (B, n, hidden). Returns (output, no weights, logical shapes of keys and values or None)."""
    rows, queries, _ = hidden_states.shape
    shape = (rows, queries, -1, attention.head_dim)
    q = attention.q_proj(hidden_states).view(shape).transpose(1, 2)
    k = attention.k_proj(hidden_states).view(shape).transpose(1, 2)
    v = attention.v_proj(hidden_states).view(shape).transpose(1, 2)
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k = _rotated(attention, layer, step, q, k, v, position_ids, position_embeddings)
    past = None
    if step.use_cache:
        k, v = attention.k_cache(k, 2, step.token_idx), attention.v_cache(v, 2, step.token_idx)
        past = (attention.k_cache.get_shape(), attention.v_cache.get_shape())
        k, v = k.to(q.dtype), v.to(q.dtype)
    if step.decoding:
        out = _decode(attention, layer, step, fused, q, k, v)
    else:
        out = _prompt(attention, layer, step, fused, q, k, v)
    out = out.transpose(1, 2).reshape(rows, queries, -1)
    return attention.o_proj(out), None, past


def _rotated(
    attention: Any, layer: Layer, step: Step, q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor, given: Any
) -> tuple[Tensor, Tensor]:
    """RoPE: on a Gaudi by the family's own helper, which takes the fused kernel there. Elsewhere that helper expects
    other arguments in some families (Mistral, gpt-oss), so it is written out."""
    if layer.sinks:  # gpt-oss makes cos and sin once, in the decoder
        cos, sin = given
    else:
        length = attention.k_cache.get_shape()[-2] if step.decoding else q.shape[2]
        local = getattr(attention, "rotary_emb_local", None) if layer.window is not None else None
        cos, sin = (local or attention.rotary_emb)(v, seq_len=length)
    if q.device.type == "hpu":
        return sys.modules[type(attention).__module__].apply_customized_rope(q, k, cos, sin, position_ids, False)
    cos, sin = cos[position_ids][:, None], sin[position_ids][:, None]
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def _decode(attention: Any, layer: Layer, step: Step, fused: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if layer.window is not None:
        mask = step.ring_mask(k.shape[2], q.device)
    else:
        if step.cache_idx is not None:  # bucket_internal: the written part of the store, in steps of a bucket
            k, v = k[:, :, : step.cache_idx], v[:, :, : step.cache_idx]
        mask = step.linear_mask(k.shape[2], q.device)
    return _core(attention, layer, step, fused, q, k, v, mask, causal=False, recompute=False)


def _prompt(attention: Any, layer: Layer, step: Step, fused: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Blocks of queries, each with the keys that it can see: O(length * window) on a sliding layer."""
    length, block, parts = q.shape[2], step_module.PREFILL_BLOCK, []
    fits = layer.window is None or length <= layer.window
    if _takes_fused(layer, step, fused) and step.causal_flag and step.unmasked and fits:
        return _core(attention, layer, step, fused, q, k, v, None, causal=True, recompute=step.recompute)
    for first in range(0, length, block):
        stop = min(first + block, length)
        oldest = 0 if layer.window is None else max(first - layer.window + 1, 0)
        mask = step.prompt_mask(first, stop, oldest, layer.window, q.device)
        seen = slice(oldest, stop)
        parts.append(
            _core(attention, layer, step, fused, q[:, :, first:stop], k[:, :, seen], v[:, :, seen], mask,
                  causal=False, recompute=step.recompute)
        )  # fmt: skip
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _core(
    attention: Any, layer: Layer, step: Step, fused: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *,
    causal: bool, recompute: bool,
) -> Tensor:  # fmt: skip
    if _takes_fused(layer, step, fused):
        return fused(q, k, v, mask, scale=layer.scale, causal=causal, recompute=recompute,
                     fast_softmax=step.fast_softmax and not step.decoding)  # fmt: skip
    sinks = attention.sinks if layer.sinks else None
    return matmul_attention(attention, q, k, v, mask, scale=layer.scale, softcap=layer.softcap, sinks=sinks,
                            softmax_bf16=step.softmax_bf16)  # fmt: skip


def _takes_fused(layer: Layer, step: Step, fused: FusedAttention | None) -> bool:
    return fused is not None and step.flash and fused.takes(layer.softcap, layer.sinks)
