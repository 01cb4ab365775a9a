"""FusedSDPA in both generations of its signature: 12 arguments, and 15 with window_size and sink.

Every call is checked as the plugin checks it, and noted in `calls`.
"""

from dataclasses import dataclass

import torch

from ... import hpu


@dataclass(frozen=True)
class Call:
    q: tuple
    k: tuple
    mask: tuple | None
    is_causal: bool
    scale: float | None
    recompute: bool | None
    window: tuple
    sink: bool


calls: list[Call] = []


def _attend(q, k, v, mask, p, causal, scale, softmax_mode, recompute, valid_seq_len, padding, window, sink):
    if not torch.compiler.is_compiling():
        calls.append(
            Call(tuple(q.shape), tuple(k.shape), None if mask is None else tuple(mask.shape), bool(causal), scale,
                 recompute, tuple(window), sink is not None)
        )  # fmt: skip
    if valid_seq_len is not None and not causal:
        raise AssertionError("valid_seq_len needs is_causal=True in inference")
    if softmax_mode.lower() == "fp32" and q.dtype != torch.bfloat16:
        raise AssertionError("softmax_mode=fp32 needs bf16 inputs")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    recompute = hpu.recompute_sdp_enabled() if recompute is None else recompute
    recompute = recompute or q.shape[-2] == 1  # inference: a decode step always takes the recompute kernel
    if not recompute and (tuple(window) != (-1, -1) or sink is not None):
        raise AssertionError("window_size and sink exist on the recompute kernel only")
    grouped = q.dim() == 4 and k.shape[1] not in (1, q.shape[1])
    if grouped:
        batch, heads, queries, dim = q.shape
        q = q.reshape(batch, k.shape[1], heads // k.shape[1], queries, dim)
        k, v = k.unsqueeze(2), v.unsqueeze(2)
        mask = None if mask is None else mask.unsqueeze(1)
        sink = None if sink is None else sink.reshape(k.shape[1], -1, 1, 1)
    if recompute:
        out = torch.ops.hpu.sdpa_recomp_fwd(
            q, k, v, mask, p, scale, causal, False, softmax_mode.lower(), valid_seq_len, padding.lower(),
            tuple(window), sink,
        )[0]  # fmt: skip
    else:
        out = torch.ops.hpu.sdpa_fwd(
            q, k, v, mask, p, scale, causal, softmax_mode.lower(), valid_seq_len, padding.lower()
        )[0]
    return out.flatten(1, 2) if grouped else out


class FusedSDPA12(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, softmax_mode="None",
                recompute_mode=None, valid_seq_len=None, seq_padding_type="left",
                return_dropout_mask=False):  # fmt: skip
        return _attend(q, k, v, attn_mask, dropout_p, is_causal, scale, softmax_mode, recompute_mode, valid_seq_len,
                       seq_padding_type, (-1, -1), None)  # fmt: skip


class FusedSDPA15(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, softmax_mode="None",
                recompute_mode=None, valid_seq_len=None, seq_padding_type="left", return_dropout_mask=False,
                return_attn_probs=False, window_size=(-1, -1), sink=None):  # fmt: skip
        return _attend(q, k, v, attn_mask, dropout_p, is_causal, scale, softmax_mode, recompute_mode, valid_seq_len,
                       seq_padding_type, window_size or (-1, -1), sink)  # fmt: skip


FusedSDPA = FusedSDPA15
