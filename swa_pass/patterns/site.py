"""One attention in a graph, whatever idiom it was written in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node


@dataclass(frozen=True)
class AttentionSite:
    """Attention of `query` (B, heads, q, head_dim) on `key` and `value` (B, heads or kv_heads, kv, head_dim).

    node: its result, (B, heads, q, v_head_dim).  mask: boolean or additive, or None.  grouped: the idiom itself
    shares kv heads among query heads; otherwise `key` already has as many heads as `query`.
    inner: an attention within this one, which by itself would match too.
    problem: what `match` saw that this idiom does not allow (empty: nothing).
    """

    node: Node
    query: Node
    key: Node
    value: Node
    mask: Any
    scale: Any
    is_causal: Any
    dropout: Any
    grouped: bool
    softcap: float = 0.0
    sinks: Node | None = None
    inner: Node | None = None
    problem: str = ""
