"""Attention written out with grouped heads in a dimension of their own, as optimum-habana does it.

    matmul(softmax(matmul(q, k^T) * scale + mask), v)
    q (B, kv_heads, group, T, D), k and v (B, kv_heads, 1, S, D), mask (B, 1, 1, T, S)

The steps in between are those of `eager`, which is also how a model with one group, or one kv head, looks.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from ..graph import shape_of
from . import eager
from .site import AttentionSite


def match(node: Node) -> AttentionSite | None:
    if len(shape_of(node)) not in (4, 5):
        return None
    site = eager.read(node)
    return None if site is None else replace(site, grouped=True)


validate = eager.validate
