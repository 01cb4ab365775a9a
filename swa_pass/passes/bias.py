"""What may be added to the scores of an attention that reads a ring in time order.

A time-ordered read of a ring begins at another key than the whole sequence does, and what lies behind the newest token
is zeros. Numbers that belong to keys are then still right if they follow from the distance of query and key alone:

    position bias     gather(x, -1, f(query - key)), where x knows no key; times anything without a key axis
                      where(g(query - key), bias, number), masked_fill: the same; sums of such
    sinks of a query  anything that knows no key

Anything else (a table by key index, a distance counted from the number of keys, a mean over keys) is not proven.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.fx import Node

from ..formula import FLOOR, INDEXES, MAX, And, AtLeastZero, Field, Formula, Lin, Not, Opaque, Or, broadcast_at, is_one
from ..graph import argument, example, op_name, shape_of
from ..masks import ADDITIVE_HIDDEN
from ..patterns import AttentionSite
from ..patterns.kv_view import is_view
from ..reader import read

_TRANSPARENT = ("to", "float", "type_as", "contiguous", "half", "bfloat16", "clone", "expand")


class Extras:
    """Decides about the extras of the sites of one graph.

    sites: the nodes of all attentions on the cache; what comes out of them is right, whatever they read.
    """

    def __init__(self, sites: Collection[Node], memo: dict[Node, Field]) -> None:
        self.memo = memo
        self._keyless: set[Node] = set(sites)

    def problem(self, site: AttentionSite, in_mask: bool, distance: Lin) -> str:
        """Why the extras of a site are not proven; empty if they are.

        in_mask: a bias is a part of the mask; what the mask hides has been proven.
        distance: absolute position of query index "q" minus that of key index "k".
        """
        if site.query_sinks is not None and not self.knows_no_key(site.query_sinks):
            return "the sinks are computed from the keys"
        added = [site.bias, _shown(site.mask) if in_mask else None]
        if not all(self._by_distance(bias, distance) for bias in added):
            return "what is added to the scores is not proven to follow from the distance of query and key"
        return ""

    def knows_no_key(self, node: Any) -> bool:
        """Whether a value does not depend on what the cache gives back, other than through an attention."""
        if not isinstance(node, Node):
            return True
        queue, seen = [node], {node}
        while queue:
            current = queue.pop()
            if is_view(current):
                return False
            if current in self._keyless:
                continue
            new = [source for source in current.all_input_nodes if source not in seen]
            seen.update(new)
            queue += new
        self._keyless |= seen
        return True

    def _by_distance(self, node: Any, distance: Lin) -> bool:
        if not isinstance(node, Node):
            return True  # a number
        name = op_name(node)
        if name in _TRANSPARENT:
            return self._by_distance(node.args[0], distance)
        if name in ("where", "masked_fill"):
            names = ("condition", "input", "other") if name == "where" else ("mask", "input", "value")
            order = (0, 1, 2) if name == "where" else (1, 0, 2)
            condition, a, b = (argument(node, i, n, None) for i, n in zip(order, names))
            known = _formula_by_distance(self._at(condition, node), distance)
            return known and self._by_distance(a, distance) and self._by_distance(b, distance)
        if name in ("add", "sub"):
            return all(
                self._by_distance(term, distance) or (_has_no_key_axis(term) and self.knows_no_key(term))
                for term in node.args[:2]
            )
        if name == "mul":
            return any(
                self._by_distance(a, distance) and _has_no_key_axis(b) and self.knows_no_key(b)
                for a, b in (node.args[:2], node.args[1::-1])
                if isinstance(a, Node) and not _has_no_key_axis(a)
            )
        if name == "gather":
            source, dim, place = (argument(node, i, n, None) for i, n in enumerate(("input", "dim", "index")))
            last = dim in (-1, len(shape_of(node)) - 1)
            return last and self.knows_no_key(source) and _lin_by_distance(self._at(place, node), distance)
        if example(node) is not None and not shape_of(node):
            return self.knows_no_key(node)
        return False

    def _at(self, node: Any, of: Node) -> Formula:
        """The value of a node that broadcasts to the shape of `of`, at the names of the indices."""
        field, shape = read(node, self.memo), shape_of(of)
        if field.ndim > len(shape) or len(shape) > len(INDEXES):
            return Opaque("another shape")
        names = zip(INDEXES[len(INDEXES) - len(shape) :], shape)
        return broadcast_at(field, tuple(Lin(0) if is_one(size) else Lin.symbol(name) for name, size in names))


def _shown(node: Any) -> Any:
    """What an additive mask adds where it hides nothing; where it hides has been proven."""
    while isinstance(node, Node):
        name = op_name(node)
        if name in _TRANSPARENT or (name == "masked_fill" and _hides(argument(node, 2, "value", None))):
            node = node.args[0]
        elif name == "where" and _hides(argument(node, 2, "other", None)):
            node = argument(node, 1, "input", None)
        else:
            break
    return node


def _hides(value: Any) -> bool:
    if isinstance(value, Node) and op_name(value) in ("scalar_tensor", "tensor", "full"):
        value = value.args[0] if op_name(value) != "full" else value.args[1]
    return isinstance(value, (int, float)) and value <= ADDITIVE_HIDDEN


def _has_no_key_axis(node: Any) -> bool:
    return not isinstance(node, Node) or not shape_of(node) or is_one(shape_of(node)[-1])


def _formula_by_distance(formula: Formula, distance: Lin) -> bool:
    if isinstance(formula, bool):
        return True
    if isinstance(formula, AtLeastZero):
        return _lin_by_distance(formula.lin, distance)
    if isinstance(formula, Not):
        return _formula_by_distance(formula.part, distance)
    return isinstance(formula, (And, Or)) and all(_formula_by_distance(part, distance) for part in formula.parts)


def _lin_by_distance(lin: Formula, distance: Lin) -> bool:
    """Whether an integer is one of the distance alone: a multiple of it, and maxima and quotients of such integers."""
    if not isinstance(lin, Lin):
        return False
    times = -dict(lin.terms).get("k", 0)
    rest = lin - distance.scaled(times)
    return all(_symbol_by_distance(symbol, distance) for symbol, _ in rest.terms)


def _symbol_by_distance(symbol: Any, distance: Lin) -> bool:
    if not isinstance(symbol, tuple) or symbol[0] not in (MAX, FLOOR):
        return False
    parts = symbol[1:] if symbol[0] == MAX else symbol[1:2]
    return all(_lin_by_distance(part, distance) for part in parts)
