"""Attention on Intel Gaudi: Intel's FusedSDPA, or matrix products where it has no argument for what is needed.

    softcap (Gemma 2) and sinks (gpt-oss)   matmul, softmax, matmul; FusedSDPA knows no softcap, and its sinks are new
    values of another head_dim than keys    the same
    everything else                         FusedSDPA, with scale and recompute mode said explicitly

At decode FusedSDPA gets a ring and a mask or none, never a window: a ring's slots are not in time order.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

#: What we say explicitly, by the names that both known generations of the signature (12 and 15 arguments) have.
_NEEDED = ("attn_mask", "dropout_p", "is_causal", "scale", "softmax_mode", "recompute_mode")


class FusedAttention:
    """FusedSDPA called by the names of its arguments, whatever their number in the installed plugin."""

    def __init__(self, fused: Any) -> None:
        self.fused = fused
        try:
            parameters = list(inspect.signature(fused.forward).parameters.values())[1:]  # the first is autograd's ctx
        except (TypeError, ValueError) as error:
            raise ValueError(f"FusedSDPA of the installed plugin hides its signature ({error}). {_WAY_OUT}") from error
        self.names = [parameter.name for parameter in parameters]
        missing = [name for name in _NEEDED if name not in self.names]
        if missing or len(self.names) < 9:
            raise ValueError(
                f"FusedSDPA of the installed plugin takes {self.names}, without {missing or 'q, k, v'}. {_WAY_OUT}"
            )
        self.last = max(self.names.index(name) for name in _NEEDED)
        self.defaults = [parameter.default for parameter in parameters]

    @staticmethod
    def takes(softcap: float | None, sinks: bool, head_dim: Any = 0, value_dim: Any = 0) -> bool:
        """Whether it has arguments for this attention."""
        return not softcap and not sinks and head_dim == value_dim

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, causal: bool,
                 fast_softmax: bool, recompute: bool) -> Tensor:  # fmt: skip
        said = {
            "attn_mask": mask,
            "dropout_p": 0.0,
            "is_causal": causal,
            "scale": scale,
            "softmax_mode": "fast" if fast_softmax else "None",
            "recompute_mode": recompute,
        }
        rest = [said.get(self.names[i], self.defaults[i]) for i in range(3, self.last + 1)]
        return self.fused.apply(q, k, v, *rest)


_WAY_OUT = "Call generate without use_flash_attention, and please report the version of habana-torch-plugin."


def fused_attention() -> FusedAttention | None:
    """The plugin's kernel, or None where there is no plugin."""
    try:
        from habana_frameworks.torch.hpex import kernels
    except ImportError:
        return None
    return FusedAttention(kernels.FusedSDPA) if getattr(kernels, "FusedSDPA", None) else None


def matmul_attention(
    layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float,
    softcap: float | None = None, sinks: Tensor | None = None, softmax_bf16: bool = False,
) -> Tensor:  # fmt: skip
    """q (B, heads, T, D), k (B, kv_heads, S, D), v (B, kv_heads, S, Dv), mask (B or 1, 1, T, S), additive, or None;
    returns (B, heads, T, Dv).

    Through the layer's own `matmul_qk` and `matmul_av` where it has them: quantisation tools replace those.
    """
    rows, heads, queries, head_dim = q.shape
    kv_heads = k.shape[1]
    scores = getattr(layer, "matmul_qk", torch.matmul)(
        q.reshape(rows, kv_heads, heads // kv_heads, queries, head_dim), k.unsqueeze(2).transpose(-2, -1)
    )
    scores = scores * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask.unsqueeze(1)
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, kv_heads, heads // kv_heads, 1, 1)
        scores = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=q.dtype if softmax_bf16 else torch.float32).to(q.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    out = getattr(layer, "matmul_av", torch.matmul)(weights, v.unsqueeze(2))
    return out.reshape(rows, heads, queries, v.shape[3])
