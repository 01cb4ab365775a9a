"""Tensors that a graph makes from nothing, and arithmetic and logic on them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ..formula import (
    COMPARISONS,
    AtLeastZero,
    Field,
    Formula,
    Lin,
    Opaque,
    Ranked,
    Select,
    conjunction,
    disjunction,
    elementwise,
    is_nonnegative,
    is_one,
    maximum,
    minimum,
    negation,
    quotient,
    remainder,
    truth,
)
from ..graph import argument, example, integer, op_name, shape_of
from .core import READERS, Reader, leaf, operation, read, reads

# ---------------------------------------------------------------------------------------------- makers


@reads("arange")
def _arange(node: Node, memo: dict[Node, Field]) -> Field:
    bounds: list[Any] = [a for a in node.args if a is not None]
    if "end" in node.kwargs:
        bounds.append(node.kwargs["end"])
    start = integer(argument(node, 99, "start", bounds[0] if len(bounds) > 1 else 0))
    step = integer(bounds[2] if len(bounds) > 2 else argument(node, 99, "step", 1))
    if start is None or step is None or not step.is_const:
        return leaf(node, example(node))
    first, stride = start, step.const
    return Field(shape_of(node), lambda index: first + index[0].scaled(stride))


@reads(
    "new_ones",
    "ones",
    "ones_like",
    "new_zeros",
    "zeros",
    "zeros_like",
    "full",
    "full_like",
    "new_full",
    "tensor",
    "scalar_tensor",
)
def _filled(node: Node, memo: dict[Node, Field]) -> Field:
    fake = example(node)
    name = op_name(node)
    value: Any
    if "ones" in name or "zeros" in name:
        value = 1 if "ones" in name else 0
    elif name in ("tensor", "scalar_tensor"):
        value = node.args[0]
        while isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
    else:
        value = argument(node, 2 if name == "new_full" else 1, "fill_value", None)
    if isinstance(value, Node) or not isinstance(value, (bool, int, float)):
        return leaf(node, fake)
    if fake.dtype == torch.bool:
        return Field(tuple(fake.shape), lambda index: bool(value))
    if fake.is_floating_point():
        return Field(tuple(fake.shape), lambda index: float(value))
    return Field(tuple(fake.shape), lambda index: Lin(int(value)))


# ---------------------------------------------------------------------------------------------- arithmetic


def _lift(fn: Callable[[Lin, Lin], Formula], node: Node) -> Callable[[Formula, Formula], Formula]:
    def lifted(a: Formula, b: Formula) -> Formula:
        for part in (a, b):
            if isinstance(part, Opaque):
                return Opaque(part.why)
        if not isinstance(a, Lin) or not isinstance(b, Lin):
            return Opaque(f"the operation {op_name(node)} on values that are not integers")
        return fn(a, b)

    return lifted


def _binary(node: Node, memo: dict[Node, Field], fn: Callable[[Formula, Formula], Formula]) -> Field:
    a, b = read(node.args[0], memo), read(node.args[1], memo)
    return elementwise(shape_of(node), fn, a, b)


@reads("add", "sub")
def _add(node: Node, memo: dict[Node, Field]) -> Field:
    sign = 1 if operation(node) == "add" else -1
    alpha = node.kwargs.get("alpha", 1)
    if not isinstance(alpha, int):
        return leaf(node, example(node))
    return _binary(node, memo, _lift(lambda a, b: a + b.scaled(sign * alpha), node))


@reads("rsub")
def _rsub(node: Node, memo: dict[Node, Field]) -> Field:
    return _binary(node, memo, _lift(lambda a, b: b - a, node))


@reads("mul")
def _mul(node: Node, memo: dict[Node, Field]) -> Field:
    def product(a: Lin, b: Lin) -> Formula:
        if a.is_const:
            return b.scaled(a.const)
        return a.scaled(b.const) if b.is_const else Opaque("a product of two positions")

    def multiplied(a: Formula, b: Formula) -> Formula:
        if example(node).dtype == torch.bool:
            return conjunction(_as_bool(a, node), _as_bool(b, node))
        return _lift(product, node)(a, b)

    return _binary(node, memo, multiplied)


@reads("floordiv", "floor_divide", "div")
def _floordiv(node: Node, memo: dict[Node, Field]) -> Field:
    if op_name(node) == "div" and node.kwargs.get("rounding_mode") != "floor":
        return leaf(node, example(node))

    def floored(a: Lin, b: Lin) -> Formula:
        return quotient(a, b.const) if b.is_const and b.const > 0 else Opaque("a division of two positions")

    return _binary(node, memo, _lift(floored, node))


@reads("neg")
def _neg(node: Node, memo: dict[Node, Field]) -> Field:
    return elementwise(
        shape_of(node), lambda a: -a if isinstance(a, Lin) else Opaque("neg of a mask"), read(node.args[0], memo)
    )


@reads("clamp", "clamp_min", "clamp_max", "maximum", "minimum", "relu")
def _clamp(node: Node, memo: dict[Node, Field]) -> Field:
    name = op_name(node)
    low: Any = None
    high: Any = None
    if name == "relu":
        low = 0
    elif name in ("maximum", "clamp_min"):
        low = argument(node, 1, "other" if name == "maximum" else "min", None)
    elif name in ("minimum", "clamp_max"):
        high = argument(node, 1, "other" if name == "minimum" else "max", None)
    else:
        low, high = argument(node, 1, "min", None), argument(node, 2, "max", None)
    field = read(node.args[0], memo)
    if low is not None:
        field = elementwise(shape_of(node), _lift(maximum, node), field, read(low, memo))
    return field if high is None else elementwise(shape_of(node), _lift(minimum, node), field, read(high, memo))


@reads("remainder", "fmod", "mod")
def _remainder(node: Node, memo: dict[Node, Field]) -> Field:
    def modulo(a: Lin, b: Lin) -> Formula:
        if not b.is_const or b.const <= 0:
            return Opaque("a remainder of two positions")
        if op_name(node) == "fmod" and not is_nonnegative(a):
            return Opaque("fmod of what may be negative")
        return remainder(a, b.const)

    return _binary(node, memo, _lift(modulo, node))


@reads("cumsum")
def _cumsum(node: Node, memo: dict[Node, Field]) -> Field:
    """Of equal numbers along one dimension: ``ones(n).cumsum(0)`` counts from 1."""
    source = read(node.args[0], memo)
    value = source.at((Lin.symbol("any"),)) if source.ndim == 1 else None
    if not isinstance(value, Lin) or not value.is_const:
        return leaf(node, example(node))
    step = value.const
    return Field(source.shape, lambda index: index[0].scaled(step) + Lin(step))


@reads("sum")
def _sum(node: Node, memo: dict[Node, Field]) -> Field:
    source = read(node.args[0], memo)
    if source.ndim != 0 and not (source.ndim == 1 and is_one(source.shape[0])):
        return leaf(node, example(node))
    value = source.at((Lin(0),) * source.ndim)
    if isinstance(value, (bool, AtLeastZero)):
        value = truth(value)
    return Field(shape_of(node), lambda index: value)


def _comparison(name: str) -> Reader:
    def compared(node: Node, memo: dict[Node, Field]) -> Field:
        integers = _lift(COMPARISONS[name], node)

        def compare(a: Formula, b: Formula) -> Formula:
            if isinstance(a, Lin) and isinstance(b, float) and math.isinf(b):  # any integer is less than infinity
                return bool(getattr(operator, name)(0.0, b))
            if isinstance(b, Lin) and isinstance(a, float) and math.isinf(a):
                return bool(getattr(operator, name)(a, 0.0))
            if isinstance(a, Select) and _is_number(a.a) and _is_number(a.b) and _is_number(b):
                return _where(a.condition, compare(a.a, b), compare(a.b, b))
            if isinstance(a, float) and _is_number(b):
                return bool(getattr(operator, name)(a, _number(b)))
            return integers(a, b)

        return _binary(node, memo, compare)

    return compared


for _name in COMPARISONS:
    READERS[_name] = _comparison(_name)


def _is_number(value: Formula) -> bool:
    return type(value) is float or (isinstance(value, Lin) and value.is_const)


def _number(value: Formula) -> float:
    assert isinstance(value, (float, Lin))
    return float(value.const) if isinstance(value, Lin) else value


def _where(condition: Formula, a: Formula, b: Formula) -> Formula:
    """``where(condition, a, b)`` of booleans."""
    return disjunction(conjunction(condition, a), conjunction(negation(condition), b))


def _as_bool(value: Formula, node: Node) -> Formula:
    if isinstance(value, (Lin, float, Select)):
        return Opaque(f"the operation {op_name(node)} on values that are not boolean")
    return value


@reads("and", "or")
def _and_or(node: Node, memo: dict[Node, Field]) -> Field:
    combine = conjunction if operation(node) == "and" else disjunction
    return _binary(node, memo, lambda a, b: combine(_as_bool(a, node), _as_bool(b, node)))


@reads("not")
def _not(node: Node, memo: dict[Node, Field]) -> Field:
    return elementwise(shape_of(node), lambda a: negation(_as_bool(a, node)), read(node.args[0], memo))


@reads("where")
def _chosen(node: Node, memo: dict[Node, Field]) -> Field:
    fields = [read(argument(node, i, n, None), memo) for i, n in enumerate(("condition", "input", "other"))]

    def choose(condition: Formula, a: Formula, b: Formula) -> Formula:
        if isinstance(condition, bool):
            return a if condition else b
        return Select(condition, a, b)

    return elementwise(shape_of(node), choose, *fields)


@reads("scatter")
def _scatter(node: Node, memo: dict[Node, Field]) -> Field:
    """Ones where the largest numbers of each row are: ``zeros.scatter(-1, topk(x, n).indices, 1.0)``."""
    fake, dim, places = example(node), argument(node, 1, "dim", None), argument(node, 2, "index", None)
    number = argument(node, 3, "value" if "value" in node.kwargs else "src", None)
    found = (
        places.args[0] if isinstance(places, Node) and op_name(places) == "getitem" and places.args[1] == 1 else None
    )
    zeros = read(node.args[0], memo)
    if number != 1 or not isinstance(found, Node) or op_name(found) != "topk" or dim not in (-1, fake.ndim - 1):
        return leaf(node, fake)
    ranked = read(found.args[0], memo)
    last = argument(found, 2, "dim", -1) in (-1, fake.ndim - 1) and argument(found, 3, "largest", True) is True
    if not last or not fake.is_floating_point() or [str(s) for s in ranked.shape] != [str(s) for s in fake.shape]:
        return leaf(node, fake)

    def at(index: tuple[Lin, ...]) -> Formula:
        if zeros.at(index) != 0.0:
            return Opaque("a scatter into numbers other than zeros")
        return Select(Ranked(ranked.at(index)), 1.0, 0.0)

    return Field(tuple(fake.shape), at)


@reads("masked_fill")
def _masked_fill(node: Node, memo: dict[Node, Field]) -> Field:
    fields = [read(argument(node, i, n, None), memo) for i, n in enumerate(("input", "mask", "value"))]

    floating = example(node).is_floating_point()

    def fill(kept: Formula, condition: Formula, value: Formula) -> Formula:
        if floating and isinstance(value, Lin) and value.is_const:
            value = float(value.const)  # mask.masked_fill_(condition, 0)
        if isinstance(condition, bool):
            return value if condition else kept
        return Select(negation(_as_bool(condition, node)), kept, value)

    return elementwise(shape_of(node), fill, *fields)
