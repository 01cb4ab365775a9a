"""Which positions an integer tensor (N,) of new tokens names: ``first, first + 1, ...``, or nothing that is known."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..formula import Field, Lin
from ..graph import changed_in_place, example, op_name, shape_of
from ..reader import read


def first_position(index: Node, memo: dict[Node, Field] | None = None) -> Lin | None:
    """Position of the first new token, if the others follow it one by one.

    A tensor that the caller gives is taken to do so; whoever relies on that checks it at run time.
    """
    field = read(index, assume(index, memo))
    if field.ndim != 1:
        return None
    value = field.at((Lin.symbol("i"),))
    if not isinstance(value, Lin):
        return None
    if shape_of(index)[0] == 1:
        value = field.at((Lin(0),))
        return value if isinstance(value, Lin) else None
    first = value - Lin.symbol("i")
    return None if any("i" in repr(key) for key, _ in first.terms if key == "i") else first


def given(index: Node) -> Node | None:
    """The graph input that `index` is, moved or cast at most; None if the graph makes it itself."""
    while op_name(index) in ("to", "contiguous", "clone", "alias") and isinstance(index.args[0], Node):
        index = index.args[0]
    value = example(index)
    is_input = index.op == "placeholder" and isinstance(value, torch.Tensor) and value.dim() == 1
    known = is_input and value.dtype in (torch.int32, torch.int64) and changed_in_place(index) is None
    return index if known else None


def assume(index: Node, memo: dict[Node, Field] | None = None) -> dict[Node, Field]:
    """`memo`, in which element i of a given `index` is its first element plus i."""
    memo = {} if memo is None else memo
    source = given(index)
    if source is not None and source not in memo:
        shape, name = tuple(example(source).shape), source.name
        memo[source] = Field(shape, lambda at: Lin.symbol((name, Lin(0))) + at[0])
    return memo
