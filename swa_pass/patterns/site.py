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
    mask_at: the node that takes the mask.
    problem: what `match` saw that this idiom does not allow (empty: nothing).
    extra: what else goes into the scores or the softmax, for which fused attention has no argument (empty: nothing). It
    is finite, so that the mask alone says which keys are hidden: `bias` is added to the scores, `query_sinks` is a
    logit of each query in the denominator.
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
    mask_at: Node | None = None
    problem: str = ""
    extra: str = ""
    bias: Node | None = None
    query_sinks: Node | None = None
