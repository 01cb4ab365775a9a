"""``scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)``."""

from __future__ import annotations

import math

from torch.fx import Node

from ..graph import argument, op_name, shape_of
from .site import AttentionSite

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_KEYWORDS = {*_ARGUMENTS, "scale", "enable_gqa"}


def match(node: Node) -> AttentionSite | None:
    if node.op != "call_function" or op_name(node) != "scaled_dot_product_attention" or not shape_of(node):
        return None
    query, key, value, mask, dropout, is_causal = (
        argument(node, i, name, default)
        for i, (name, default) in enumerate(zip(_ARGUMENTS, (None,) * 4 + (0.0, False)))
    )
    unknown = sorted(set(node.kwargs) - _KEYWORDS)
    head_dim = shape_of(query)[-1]
    scale = node.kwargs.get("scale")
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim)  # the documented default of scaled_dot_product_attention
    return AttentionSite(
        node=node,
        query=query,
        key=key,
        value=value,
        mask=mask,
        scale=scale,
        is_causal=is_causal,
        dropout=dropout,
        grouped=bool(node.kwargs.get("enable_gqa", False)),
        problem=f"scaled_dot_product_attention has the unknown argument {unknown[0]}" if unknown else "",
    )


def validate(site: AttentionSite) -> str:
    if site.problem:
        return site.problem
    if site.dropout != 0.0:
        return f"attention dropout is on (p={site.dropout}); call model.eval()"
    if not isinstance(site.scale, (int, float)):
        return f"the scale is computed in the graph ({site.scale}), not a number"
    if site.mask is None and site.is_causal:
        return "the attention uses is_causal, which is aligned to the first key and says nothing about a window"
    if site.mask is None:
        return "the attention has no mask"
    if site.is_causal:
        return "the attention has both a mask and is_causal"
    return ""
