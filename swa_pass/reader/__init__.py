"""Reads a tensor of a graph as a formula over its indices.

A mask is not data to us, it is a statement about *positions*. `read` walks the nodes that build a tensor and returns a
`Field`: for symbolic indices ``(i, j, ...)``, the value at that place as an exact integer or boolean formula:

    arange(3) + 5                      at (i,)    ->  i + 5
    (kv[None, :] > q[:, None] - 8)     at (i, j)  ->  j - i + 7 >= 0

The walk works on Dynamo graphs (functions, methods, operators) and on ATen graphs: targets are compared by their
canonical name. An operation that is not in the table below reads as `Opaque`, which no proof accepts.
"""

from __future__ import annotations

from . import arithmetic, shapes, vmapped  # they fill the table
from .core import read

__all__ = ["arithmetic", "read", "shapes", "vmapped"]
