"""Whether a rewritten graph still uses positions that are counted from a ring's first key.

A step may be captured with such positions (`StoreLayer.get_query_offset`): the difference of a query's and a key's is
the same as ever, and it is all that a proven mask depends on. Once the attention is fused the mask is gone, and nothing
may be left that saw those numbers, or a ring in time order, whose mask would be one of them.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ..formula import MAX, Field, Lin
from ..graph import example
from ..patterns import kv_view
from ..reader import read


def counts_from_first(gm: GraphModule) -> bool:
    """True if a ring is read in time order, or if anything is the number of keys that a ring holds for a query:
    ``tokens - max(tokens - (W - 1), 0)``."""
    memo: dict[Node, Field] = {}
    for node in gm.graph.nodes:
        if kv_view.is_view(node) and node.args[3]:
            return True
        fake = example(node)
        if isinstance(fake, torch.Tensor) and fake.ndim == 0 and not fake.is_floating_point():
            value = read(node, memo).at(())
            if isinstance(value, Lin) and len(value.terms) == 2 and _held(value):
                return True
    return False


def _held(value: Lin) -> bool:
    maxima = [(symbol, factor) for symbol, factor in value.terms if isinstance(symbol, tuple) and symbol[0] == MAX]
    if len(maxima) != 1 or maxima[0][1] != -1:
        return False
    seen = value + Lin.symbol(maxima[0][0])
    return any((seen - part).is_const for part in maxima[0][0][1:])
