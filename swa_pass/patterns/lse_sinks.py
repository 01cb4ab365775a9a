"""Eager attention whose sinks scale its result: ``attention(q, k, v) * sigmoid(logsumexp(scores) - sinks)``.

With s a head's sink and l = logsumexp(scores), ``sigmoid(l - s) = exp(l) / (exp(l) + exp(s))``: the same as one more
logit in the denominator of the softmax. Read backwards, casts aside:

    mul(attention, f)                     the site; attention is one that patterns/eager.py knows, without sinks
    f = unsqueeze(sigmoid(l - sinks), -1)
    l = logsumexp(scores, -1)             of what goes into the softmax
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from ..graph import argument, op_name, shape_of
from . import eager
from .eager import validate
from .site import AttentionSite

__all__ = ["match", "validate"]


def match(node: Node) -> AttentionSite | None:
    if op_name(node) != "mul" or len(node.args) != 2 or not all(isinstance(a, Node) for a in node.args):
        return None
    attention: Any = node.args[0]
    factor: Any = node.args[1]
    site = eager.match(attention)
    if site is None or site.sinks is not None:
        return None
    sinks = _sinks_of(factor, eager.softmax_input(attention))
    if sinks is None or [str(size) for size in shape_of(sinks)] != [str(shape_of(attention)[1])]:
        return None
    return replace(site, node=node, inner=attention, sinks=sinks)


def _sinks_of(factor: Any, scores: Any) -> Node | None:
    """The sinks, if `factor` is what belongs to these scores."""
    last_axis = _step(factor, "unsqueeze")
    if last_axis is None or argument(last_axis, 1, "dim", None) not in (-1, 3):
        return None
    sigmoid = _step(last_axis.args[0], "sigmoid")
    difference = _step(sigmoid.args[0], "sub") if sigmoid is not None else None
    total = _step(difference.args[0], "logsumexp") if difference is not None else None
    if total is None or difference is None or argument(total, 1, "dim", None) not in (-1, 3, [-1], (-1,)):
        return None
    if eager.through(total.args[0]) is not eager.through(scores):
        return None
    sinks = eager.through(difference.args[1])
    if isinstance(sinks, Node) and op_name(sinks) == "reshape":
        if [str(size) for size in shape_of(sinks)] != ["1", str(shape_of(scores)[1]), "1"]:
            return None
        sinks = sinks.args[0]
    return sinks if isinstance(sinks, Node) else None


def _step(node: Any, name: str) -> Node | None:
    node = eager.through(node)
    return node if isinstance(node, Node) and op_name(node) == name else None
