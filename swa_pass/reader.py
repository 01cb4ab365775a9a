"""Reads a tensor of a graph as a formula over its indices.

A mask is not data to us, it is a statement about *positions*. `read` walks the nodes that build a tensor and returns a
`Field`: for symbolic indices ``(i, j, ...)``, the value at that place as an exact integer or boolean formula:

    arange(3) + 5                      at (i,)    ->  i + 5
    (kv[None, :] > q[:, None] - 8)     at (i, j)  ->  j - i + 7 >= 0

The walk works on Dynamo graphs (functions, methods, operators) and on ATen graphs: targets are compared by their
canonical name. An operation that is not in the table below reads as `Opaque`, which no proof accepts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from .formula import (
    COMPARISONS,
    Field,
    Formula,
    Lin,
    Opaque,
    Select,
    conjunction,
    constant,
    disjunction,
    elementwise,
    is_nonnegative,
    is_one,
    maximum,
    negation,
    quotient,
)
from .graph import argument, changed_in_place, example, integer, op_name, shape_of

Reader = Callable[[Node, dict[Node, Field]], Field]
_READERS: dict[str, Reader] = {}


def read(value: Any, memo: dict[Node, Field] | None = None) -> Field:
    """The `Field` of a node, or of a Python scalar. Never raises for an unknown operation: it reads as `Opaque`."""
    memo = {} if memo is None else memo
    if not isinstance(value, Node):
        if isinstance(value, (bool, float)):
            return constant(value)
        lin = integer(value)
        return constant(lin if lin is not None else Opaque(f"the constant {value!r}"))
    if value not in memo:
        memo[value] = _read_node(value, memo)
    return memo[value]


def _read_node(node: Node, memo: dict[Node, Field]) -> Field:
    fake = example(node)
    if not isinstance(fake, torch.Tensor):
        lin = integer(node)
        return constant(lin if lin is not None else Opaque(f"the value {node.name}"))
    writer = changed_in_place(node)
    if writer is not None:
        return Field(tuple(fake.shape), lambda index: Opaque(f"a tensor that {op_name(writer)} changes in place"))
    reader = _READERS.get(op_name(node)) if node.op in ("call_function", "call_method") else None
    if reader is None:
        return _leaf(node, fake)
    return reader(node, memo)


def _leaf(node: Node, fake: torch.Tensor) -> Field:
    """A tensor the graph does not make: its integer elements are symbols, anything else is opaque."""
    if node.op in ("placeholder", "get_attr") and not fake.is_floating_point() and fake.dtype != torch.bool:
        return Field(tuple(fake.shape), lambda index: Lin.symbol((node.name, *index)))
    what = f"the graph input {node.name}" if node.op == "placeholder" else f"the operation {op_name(node)}"
    return Field(tuple(fake.shape), lambda index: Opaque(what))


def reads(*names: str) -> Callable[[Reader], Reader]:
    def register(fn: Reader) -> Reader:
        for name in names:
            _READERS[name] = fn
        return fn

    return register


# ---------------------------------------------------------------------------------------------- makers


@reads("arange")
def _arange(node: Node, memo: dict[Node, Field]) -> Field:
    bounds: list[Any] = [a for a in node.args if a is not None]
    if "end" in node.kwargs:
        bounds.append(node.kwargs["end"])
    start = integer(argument(node, 99, "start", bounds[0] if len(bounds) > 1 else 0))
    step = integer(bounds[2] if len(bounds) > 2 else argument(node, 99, "step", 1))
    if start is None or step is None or not step.is_const:
        return _leaf(node, example(node))
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
    else:
        value = argument(node, 2 if name == "new_full" else 1, "fill_value", None)
    if isinstance(value, Node) or not isinstance(value, (bool, int, float)):
        return _leaf(node, fake)
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
                return part
        if not isinstance(a, Lin) or not isinstance(b, Lin):
            return Opaque(f"the operation {op_name(node)} on values that are not integers")
        return fn(a, b)

    return lifted


def _binary(node: Node, memo: dict[Node, Field], fn: Callable[[Formula, Formula], Formula]) -> Field:
    a, b = read(node.args[0], memo), read(node.args[1], memo)
    return elementwise(shape_of(node), fn, a, b)


@reads("add", "sub")
def _add(node: Node, memo: dict[Node, Field]) -> Field:
    sign = 1 if op_name(node) == "add" else -1
    alpha = node.kwargs.get("alpha", 1)
    if not isinstance(alpha, int):
        return _leaf(node, example(node))
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

    return _binary(node, memo, _lift(product, node))


@reads("floordiv", "floor_divide", "div")
def _floordiv(node: Node, memo: dict[Node, Field]) -> Field:
    if op_name(node) == "div" and node.kwargs.get("rounding_mode") != "floor":
        return _leaf(node, example(node))

    def floored(a: Lin, b: Lin) -> Formula:
        return quotient(a, b.const) if b.is_const and b.const > 0 else Opaque("a division of two positions")

    return _binary(node, memo, _lift(floored, node))


@reads("neg")
def _neg(node: Node, memo: dict[Node, Field]) -> Field:
    return elementwise(
        shape_of(node), lambda a: -a if isinstance(a, Lin) else Opaque("neg of a mask"), read(node.args[0], memo)
    )


@reads("clamp", "clamp_min", "maximum", "relu")
def _clamp(node: Node, memo: dict[Node, Field]) -> Field:
    low = 0 if op_name(node) == "relu" else argument(node, 1, "other" if op_name(node) == "maximum" else "min", None)
    high = argument(node, 2, "max", None) if op_name(node) == "clamp" else None
    if low is None or high is not None:
        return _leaf(node, example(node))
    return elementwise(shape_of(node), _lift(maximum, node), read(node.args[0], memo), read(low, memo))


def _comparison(name: str) -> Reader:
    return lambda node, memo: _binary(node, memo, _lift(COMPARISONS[name], node))


for _name in COMPARISONS:
    _READERS[_name] = _comparison(_name)


def _as_bool(value: Formula, node: Node) -> Formula:
    if isinstance(value, (Lin, float, Select)):
        return Opaque(f"the operation {op_name(node)} on values that are not boolean")
    return value


@reads("and", "or")
def _and_or(node: Node, memo: dict[Node, Field]) -> Field:
    combine = conjunction if op_name(node) == "and" else disjunction
    return _binary(node, memo, lambda a, b: combine(_as_bool(a, node), _as_bool(b, node)))


@reads("not")
def _not(node: Node, memo: dict[Node, Field]) -> Field:
    return elementwise(shape_of(node), lambda a: negation(_as_bool(a, node)), read(node.args[0], memo))


@reads("where")
def _where(node: Node, memo: dict[Node, Field]) -> Field:
    fields = [read(argument(node, i, n, None), memo) for i, n in enumerate(("condition", "input", "other"))]

    def choose(condition: Formula, a: Formula, b: Formula) -> Formula:
        if isinstance(condition, bool):
            return a if condition else b
        return Select(condition, a, b)

    return elementwise(shape_of(node), choose, *fields)


# ---------------------------------------------------------------------------------------------- shapes


@reads("to", "contiguous", "clone", "detach", "bool", "long", "type_as", "alias", "lift_fresh_copy")
def _same(node: Node, memo: dict[Node, Field]) -> Field:
    source, fake = read(node.args[0], memo), example(node)
    before = example(node.args[0])
    if before.dtype == fake.dtype or {before.dtype, fake.dtype} <= {torch.int32, torch.int64}:
        return source
    return Field(source.shape, lambda index: Opaque(f"a cast from {before.dtype} to {fake.dtype}"))


@reads("expand", "expand_as", "broadcast_to")
def _expand(node: Node, memo: dict[Node, Field]) -> Field:
    return elementwise(shape_of(node), lambda a: a, read(node.args[0], memo))


@reads("unsqueeze")
def _unsqueeze(node: Node, memo: dict[Node, Field]) -> Field:
    source = read(node.args[0], memo)
    dim = argument(node, 1, "dim", 0)
    dim = dim if dim >= 0 else dim + source.ndim + 1
    return Field(shape_of(node), lambda index: source.at(index[:dim] + index[dim + 1 :]))


@reads("squeeze", "reshape")
def _drop_or_add_ones(node: Node, memo: dict[Node, Field]) -> Field:
    """A reshape that only adds or removes dimensions of size 1 keeps the meaning of the others."""
    source, shape = read(node.args[0], memo), shape_of(node)
    kept_in = [d for d, size in enumerate(source.shape) if not is_one(size)]
    kept_out = [d for d, size in enumerate(shape) if not is_one(size)]
    if [str(source.shape[d]) for d in kept_in] != [str(shape[d]) for d in kept_out]:
        return _leaf(node, example(node))
    from_out = dict(zip(kept_in, kept_out, strict=True))
    return Field(
        shape,
        lambda index: source.at(tuple(index[from_out[d]] if d in from_out else Lin(0) for d in range(source.ndim))),
    )


@reads("transpose", "permute", "t")
def _permute(node: Node, memo: dict[Node, Field]) -> Field:
    source = read(node.args[0], memo)
    order = list(range(source.ndim))
    if op_name(node) == "permute":
        dims: Any = node.args[1] if isinstance(node.args[1], (list, tuple)) else node.args[1:]
        order = [d % source.ndim for d in dims]
    else:
        a, b = (node.args[1], node.args[2]) if op_name(node) == "transpose" else (0, 1)
        order[a], order[b] = order[b], order[a]  # type: ignore[index]
    return Field(shape_of(node), lambda index: source.at(tuple(index[order.index(d)] for d in range(source.ndim))))


@reads("getitem", "select", "slice")
def _getitem(node: Node, memo: dict[Node, Field]) -> Field:
    source = read(node.args[0], memo)
    if op_name(node) == "getitem":
        keys = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    else:
        dim = argument(node, 1, "dim", 0) % source.ndim
        rest = [argument(node, k, n, d) for k, (n, d) in enumerate((("start", None), ("end", None), ("step", 1)), 2)]
        key = argument(node, 2, "index", 0) if op_name(node) == "select" else slice(*rest)
        keys = (*(slice(None),) * dim, key)
    if all(isinstance(example(key), torch.Tensor) for key in keys) and len(keys) == source.ndim:
        return _gather(node, source, [read(key, memo) for key in keys])
    keys = _without_ellipsis(keys, source.ndim)
    taken = zip([k for k in keys if k is not None], source.shape, _results(keys, shape_of(node)))
    takes = [_take(key, size, result) for key, size, result in taken]
    if any(take is None for take in takes):
        return _leaf(node, example(node))

    def at(index: tuple[Lin, ...]) -> Formula:
        own, position, dimension = [], 0, 0
        for key in keys:
            if key is None:
                position += 1
                continue
            fixed, offset, step = takes[dimension]  # type: ignore[misc]
            dimension += 1
            if fixed:
                own.append(offset)
            else:
                own.append(offset + index[position].scaled(step))
                position += 1
        return source.at((*own, *index[position:]))

    return Field(shape_of(node), at)


@reads("index")
def _index(node: Node, memo: dict[Node, Field]) -> Field:
    source, keys = read(node.args[0], memo), node.args[1]
    if not isinstance(keys, (list, tuple)) or len(keys) != source.ndim or None in keys:
        return _leaf(node, example(node))
    return _gather(node, source, [read(key, memo) for key in keys])


def _gather(node: Node, source: Field, places: list[Field]) -> Field:
    """``source[i, j, ...]`` with integer tensors: the element at the places' values, where those cannot be negative
    (a negative index would count from the end)."""

    def pick(*values: Formula) -> Formula:
        own = []
        for value in values:
            if not isinstance(value, Lin) or not is_nonnegative(value):
                return Opaque(f"an index that may be negative or is not a position: {value}")
            own.append(value)
        return source.at(tuple(own))

    return elementwise(shape_of(node), pick, *places)


def _results(keys: tuple[Any, ...], shape: tuple[Any, ...]) -> list[Any]:
    """For each key that takes a dimension: the size that is left of it, None where a single element is taken."""
    sizes = iter(shape)
    left = [None if key is not None and not isinstance(key, slice) else next(sizes) for key in keys]
    return [size for key, size in zip(keys, left) if key is not None]


def _without_ellipsis(keys: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    if not any(k is Ellipsis for k in keys):
        return keys
    at = next(n for n, k in enumerate(keys) if k is Ellipsis)
    fill = ndim - sum(k is not None and k is not Ellipsis for k in keys)
    return (*keys[:at], *(slice(None),) * fill, *keys[at + 1 :])


def _take(key: Any, size: Any, result: Any) -> tuple[bool, Lin, int] | None:
    """What one index does to one dimension: (is it a single element, offset, step); None if it is data dependent.

    result: the size that a slice leaves.
    """
    if isinstance(key, slice):
        start = Lin(0) if key.start is None else integer(key.start)
        step = 1 if key.step is None else key.step
        if not isinstance(step, int) or step < 1:
            return None
        if start is not None and start.is_const and start.const < 0:
            length = integer(size)
            start = Lin(max(length.const + start.const, 0)) if length is not None and length.is_const else None
        if start is None and step == 1 and key.stop in (None, sys.maxsize):
            start = integer(size - result)  # x[-n:] of a symbolic length: it begins where the result must
        return None if start is None else (False, start, step)
    offset = None if isinstance(example(key), torch.Tensor) else integer(key)
    if offset is None:
        return None
    if offset.is_const and offset.const < 0:
        length = integer(size)
        if length is None:
            return None
        offset = length + offset
    return True, offset, 0
