"""What is known about the attention of one layer, and the report made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class LayerSpec:
    """One cache layer, as proven from the captured graph.

    kind: ``"sliding"``, ``"full"``, ``"chunked"``, ``"picked"`` (by the keys' content), ``"state"`` (no keys: a
    convolution or recurrence) or ``"other"``.
    window: keys a query sees, self included, or None.
    action: ``"rewritten"`` (ring and fused attention), ``"kept"`` (not sliding: nothing to gain from a ring) or
    ``"refused"``.  reason: one sentence, for everything that is not rewritten.
    state: beside its keys the layer holds a convolution or recurrence state, which stays what transformers makes it.
    scale: factor on q.k; softcap: 0.0 means none; sinks: a learned extra logit per head in the softmax denominator.
    """

    index: int
    kind: str
    window: int | None
    action: str
    reason: str
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    k_dtype: torch.dtype
    v_dtype: torch.dtype
    device: torch.device
    scale: float = 0.0
    softcap: float = 0.0
    sinks: bool = False
    shares_kv_with: int | None = None
    state: bool = False


@dataclass(frozen=True)
class Report:
    """Result of `swa_pass.explain`: one `LayerSpec` per cache layer, in order.

    kv_dtype: of quantised stores, or None.
    """

    model: str
    layers: tuple[LayerSpec, ...]
    slack: int
    notes: tuple[str, ...] = field(default=())
    kv_dtype: torch.dtype | None = None

    @property
    def sliding(self) -> Sequence[LayerSpec]:
        return [layer for layer in self.layers if layer.kind == "sliding"]

    @property
    def rewritten(self) -> Sequence[LayerSpec]:
        return [layer for layer in self.layers if layer.action == "rewritten"]

    @property
    def refused(self) -> Sequence[LayerSpec]:
        return [layer for layer in self.layers if layer.action == "refused"]

    def kv_bytes(self, context: int, batch: int = 1) -> int:
        """Bytes of KV memory that the cache allocates for `context` tokens per row and `batch` rows."""
        from .cache import cache_bytes

        return cache_bytes(self.layers, context, batch, self.slack, self.kv_dtype)

    def stock_kv_bytes(self, context: int, batch: int = 1) -> int:
        """Bytes if every layer kept the whole context, as an engine without sliding support does."""
        per_token = sum(
            spec.kv_heads * (spec.head_dim * spec.k_dtype.itemsize + spec.v_head_dim * spec.v_dtype.itemsize)
            for spec in self.layers
        )
        return per_token * context * batch

    def to_dict(self) -> dict[str, object]:
        """Plain data, for JSON."""
        layers = []
        for layer in self.layers:
            entry = {name: getattr(layer, name) for name in layer.__dataclass_fields__}
            layers.append({k: str(v) if isinstance(v, (torch.dtype, torch.device)) else v for k, v in entry.items()})
        return {
            "model": self.model,
            "slack": self.slack,
            "kv_dtype": self.kv_dtype and str(self.kv_dtype),
            "layers": layers,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from .render import render

        return render(self)
