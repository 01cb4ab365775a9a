"""Intel's fused attention as graphs hold it: ``torch.ops.hpu.sdpa_recomp_fwd(q, k, v, mask, ...)[0]`` and relatives.

    q (B, heads, T, D), k and v (B, kv_heads, S, D), mask (B, 1, T, S)
    q (B, kv_heads, group, T, D), k and v (B, kv_heads, 1, S, D), mask (B, 1, 1, T, S)

The operators belong to a plugin that may not be here, so they are known by name, and their arguments by the names in
their schemas: the plugin's generations differ in how many there are.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..graph import op_name, shape_of
from .site import AttentionSite

_NAMES = ("hpu::sdpa_recomp_fwd", "hpu::sdpa_fwd")
_NEEDED = ("q", "k", "v", "attention_mask", "p", "is_causal")


def match(node: Node) -> AttentionSite | None:
    if op_name(node) != "getitem" or node.args[1] != 0 or not isinstance(node.args[0], Node):
        return None
    call = node.args[0]
    if call.op != "call_function" or not qualified_name(call.target).startswith(_NAMES):
        return None
    given = arguments(call)
    missing = [name for name in _NEEDED if name not in given]
    if missing or not all(isinstance(given[name], Node) for name in ("q", "k", "v")):
        return None
    return AttentionSite(
        node=node,
        query=given["q"],
        key=given["k"],
        value=given["v"],
        mask=given["attention_mask"],
        scale=given.get("scale"),
        is_causal=given["is_causal"],
        dropout=given["p"],
        grouped=True,
        problem=_problem(given),
    )


def validate(site: AttentionSite) -> str:
    if site.problem:
        return site.problem
    if site.dropout != 0.0:
        return f"attention dropout is on (p={site.dropout}); call model.eval()"
    if site.is_causal:
        return "the fused attention runs with is_causal, which says nothing about a window"
    return "" if isinstance(site.mask, Node) else "the attention has no mask"


def _problem(given: dict[str, Any]) -> str:
    if any(len(shape_of(given[name])) not in (4, 5) for name in ("q", "k", "v")):
        return "the fused attention has operands of other than four or five dimensions"
    if given.get("valid_seq_len") is not None:
        return "the fused attention counts valid keys, which a ring does not keep in order"
    if tuple(given.get("window_size", (-1, -1))) != (-1, -1):
        return "the fused attention has a window of its own, which a ring does not keep in order"
    return ""


def qualified_name(target: Any) -> str:
    """``namespace::name`` of an operator, with or without its overload; empty for anything else."""
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "_qualified_op_name", ""))


def arguments(call: Node) -> dict[str, Any]:
    """Arguments of an operator's call by their names in its schema, with defaults; empty if it has overloads."""
    target: Any = call.target
    if hasattr(target, "overloads"):
        names = target.overloads()
        if len(names) != 1:
            return {}
        target = getattr(target, names[0])
    schema = target._schema.arguments
    given = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    given.update(zip((argument.name for argument in schema), call.args))
    given.update(call.kwargs)
    return given
