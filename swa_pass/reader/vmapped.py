"""Functions of indices that were mapped over axes, as ``torch.vmap`` shows in Dynamo's graphs.

    x = _add_batch_dim(arange(q), 0, level)          one element of it: no axis is left
    y = ...                                          any operations on x
    _remove_batch_dim(y, level, q, 0)                all of them: the axis is back

Between the two, an element's place along the axis is an index that only the second one knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import Node

from ..formula import Field, Formula, Lin, Opaque
from ..graph import argument, shape_of
from .core import read, reads

#: Places along the mapped axes, by level, of the element that is being read.
_places: dict[int, Lin] = {}


@contextmanager
def _at(level: int, place: Lin) -> Iterator[None]:
    before = _places.get(level)
    _places[level] = place
    try:
        yield
    finally:
        if before is None:
            del _places[level]
        else:
            _places[level] = before


@reads("_add_batch_dim")
def _mapped(node: Node, memo: dict[Node, Field]) -> Field:
    source, dim, level = read(node.args[0], memo), argument(node, 1, "in_dim", 0), argument(node, 2, "level", 0)

    def at(index: tuple[Lin, ...]) -> Formula:
        place = _places.get(level)
        return (
            Opaque("an axis that is still mapped") if place is None else source.at((*index[:dim], place, *index[dim:]))
        )

    return Field(shape_of(node), at)


@reads("_remove_batch_dim")
def _collected(node: Node, memo: dict[Node, Field]) -> Field:
    source, level, dim = read(node.args[0], memo), argument(node, 1, "level", 0), argument(node, 3, "out_dim", 0)

    def at(index: tuple[Lin, ...]) -> Formula:
        with _at(level, index[dim]):
            return source.at((*index[:dim], *index[dim + 1 :]))

    return Field(shape_of(node), at)
