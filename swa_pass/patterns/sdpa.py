"""``scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)``.

In ATen graphs it may have become the operator of one device, whose first result is the attention.
"""

from __future__ import annotations

import math

from torch.fx import Node

from ..graph import argument, op_name, shape_of
from .site import AttentionSite

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_KEYWORDS = {*_ARGUMENTS, "scale", "enable_gqa"}
#: Operators of one device: where (position, name) their mask, dropout and is_causal are.
_DEVICE = {
    "_scaled_dot_product_flash_attention_for_cpu": ((99, "attn_mask"), (3, "dropout_p"), (4, "is_causal")),
    "_scaled_dot_product_efficient_attention": ((3, "attn_bias"), (5, "dropout_p"), (6, "is_causal")),
    "_scaled_dot_product_cudnn_attention": ((3, "attn_bias"), (5, "dropout_p"), (6, "is_causal")),
}


def match(node: Node) -> AttentionSite | None:
    call, known = node, _KEYWORDS
    if op_name(node) == "getitem" and node.args[1] == 0 and isinstance(node.args[0], Node):
        call = node.args[0]  # (output, log-sum-exp, ...)
    if call.op != "call_function" or not shape_of(node):
        return None
    if op_name(call) == "scaled_dot_product_attention" and call is node:
        query, key, value, mask, dropout, is_causal = (
            argument(call, i, name, default)
            for i, (name, default) in enumerate(zip(_ARGUMENTS, (None,) * 4 + (0.0, False)))
        )
    elif op_name(call) in _DEVICE and call is not node:
        query, key, value = (argument(call, i, name, None) for i, name in enumerate(_ARGUMENTS[:3]))
        places = zip(_DEVICE[op_name(call)], (None, 0.0, False))
        mask, dropout, is_causal = (argument(call, i, name, default) for (i, name), default in places)
        known = _KEYWORDS | {"attn_bias", "compute_log_sumexp", "return_debug_mask"}
    else:
        return None
    unknown = sorted(set(call.kwargs) - known)
    head_dim = shape_of(query)[-1]
    scale = call.kwargs.get("scale")
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
        mask_at=call,
        grouped=call is not node or bool(call.kwargs.get("enable_gqa", False)),  # a device's operator always shares
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
