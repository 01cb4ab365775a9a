"""What was done with each layer of a Gaudi model, and how many bytes its stores take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from swa_pass.spec import LayerSpec, Report

from .attention import Layer
from .families import decoder_of


class GaudiReport(Report):
    """A report whose stores have static shapes: `context` slots on global layers, min(W, context) on sliding ones."""

    def kv_bytes(self, context: int, batch: int = 1) -> int:
        """Bytes that `allocate_kv_cache` takes for `context` tokens, prompt and new ones together, of `batch` rows."""
        return sum(batch * min(spec.window or context, context) * _token_bytes(spec) for spec in self.layers)


def _token_bytes(spec: LayerSpec) -> int:
    return spec.kv_heads * (spec.head_dim * spec.k_dtype.itemsize + spec.v_head_dim * spec.v_dtype.itemsize)


def spec(
    index: int, window: int | None, heads: int, kv_heads: int, head_dim: int, *, dtype: torch.dtype = torch.bfloat16,
    device: str = "hpu", reason: str = "", action: str | None = None, **more: Any,
) -> LayerSpec:  # fmt: skip
    """One layer of a Gaudi report. window: keys a query sees, or None for a global layer."""
    kind = "full" if window is None else "sliding"
    default = "kept" if window is None else "rewritten"
    why = reason or ("not sliding: the whole context stays" if window is None else "window of the config: W slots")
    return LayerSpec(
        index=index, kind=kind, window=window, action=action or default, reason=why, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, v_head_dim=head_dim, k_dtype=dtype, v_dtype=dtype, device=torch.device(device), **more,
    )  # fmt: skip


def report(model: Any, layers: Sequence[Layer], applied: bool) -> GaudiReport:
    config = decoder_of(model).config
    decoder = decoder_of(model)
    specs = []
    for layer, block in zip(layers, decoder.layers):
        refused = layer.window is not None and not applied
        specs.append(
            spec(
                layer.index,
                layer.window,
                config.num_attention_heads,
                config.num_key_value_heads,
                block.self_attn.head_dim,
                dtype=model.dtype,
                device=str(block.self_attn.o_proj.weight.device),
                reason="not applied: optimum_habana.apply(model) puts it on a ring" if refused else "",
                action="kept" if refused else None,
                scale=layer.scale,
                softcap=layer.softcap or 0.0,
                sinks=layer.sinks,
            )
        )
    return GaudiReport(type(model).__name__, tuple(specs), 0)
