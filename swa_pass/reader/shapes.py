"""Operations that move, select or cast elements."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.fx import Node

from ..formula import (
    AtLeastZero,
    Field,
    Formula,
    Lin,
    Opaque,
    Select,
    elementwise,
    is_nonnegative,
    is_one,
    quotient,
    remainder,
    truth,
)
from ..graph import argument, example, integer, op_name, shape_of
from .core import leaf, literal, read, reads

# ---------------------------------------------------------------------------------------------- shapes


@reads("to", "contiguous", "clone", "detach", "detach_", "bool", "long", "int", "type_as", "alias", "lift_fresh_copy")
def _same(node: Node, memo: dict[Node, Field]) -> Field:
    source, fake = read(node.args[0], memo), example(node)
    before = example(node.args[0])
    if op_name(node) == "lift_fresh_copy" and isinstance(node.args[0], Node) and node.args[0].op == "get_attr":
        return literal(node.args[0])  # how torch.tensor([...]) looks once it is traced
    if before.dtype == fake.dtype or {before.dtype, fake.dtype} <= {torch.int32, torch.int64}:
        return source
    if before.is_floating_point() and fake.is_floating_point():
        return source  # of an additive mask: 0 stays 0, and what hides a key hides it in any of these types
    if before.dtype == torch.bool and fake.dtype in (torch.int32, torch.int64):
        return Field(source.shape, lambda index: _counted(source.at(index)))
    return Field(source.shape, lambda index: Opaque(f"a cast from {before.dtype} to {fake.dtype}"))


@reads("copy_")
def _copied(node: Node, memo: dict[Node, Field]) -> Field:
    """The tensor that was written: it holds what was copied into it."""
    whole, numbers = example(node), example(node.args[1])
    if not isinstance(numbers, torch.Tensor) or not {whole.dtype, numbers.dtype} <= {torch.int32, torch.int64}:
        return leaf(node, whole)
    return elementwise(tuple(whole.shape), lambda a: a, read(node.args[1], memo))


def _counted(condition: Formula) -> Formula:
    known = isinstance(condition, (bool, AtLeastZero))
    return truth(condition) if known else Opaque(f"a condition used as a number: {condition}")


@reads("expand", "expand_as", "broadcast_to")
def _expand(node: Node, memo: dict[Node, Field]) -> Field:
    return elementwise(shape_of(node), lambda a: a, read(node.args[0], memo))


@reads("cat")
def _cat(node: Node, memo: dict[Node, Field]) -> Field:
    """One part after the other; where all but the last have sizes that are known."""
    fake = example(node)
    tensors: Any = argument(node, 0, "tensors", ())
    dim = argument(node, 1, "dim", 0) % fake.dim()
    sizes: list[Any] = [shape_of(tensor)[dim] if len(shape_of(tensor)) == fake.dim() else None for tensor in tensors]
    if not sizes or not all(isinstance(size, int) for size in sizes[:-1]) or sizes[-1] is None:
        return leaf(node, fake)
    parts = [read(tensor, memo) for tensor in tensors]

    def part_at(n: int, index: tuple[Lin, ...]) -> Formula:
        place = Lin(0) if is_one(sizes[n]) else index[dim] - Lin(sum(sizes[:n]))
        return parts[n].at((*index[:dim], place, *index[dim + 1 :]))

    def at(index: tuple[Lin, ...]) -> Formula:
        value = part_at(len(parts) - 1, index)
        for n in range(len(parts) - 2, -1, -1):
            last = Lin(sum(sizes[: n + 1]) - 1)
            value = _first_or_second(last - index[dim], part_at(n, index), value)
        return value

    return Field(tuple(fake.shape), at)


def _first_or_second(room: Lin, first: Formula, second: Formula) -> Formula:
    """`first` where `room` is at least zero; the parts of a ``cat`` in order."""
    if type(first) is type(second) and first == second:
        return first
    if room.is_const:
        return first if room.const >= 0 else second
    return Select(AtLeastZero(room), first, second)


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
        return _merged(node, source, shape)
    from_out = dict(zip(kept_in, kept_out, strict=True))
    return Field(
        shape,
        lambda index: source.at(tuple(index[from_out[d]] if d in from_out else Lin(0) for d in range(source.ndim))),
    )


def _merged(node: Node, source: Field, shape: tuple[Any, ...]) -> Field:
    """A reshape that makes one dimension of two that are next to each other, as repeated heads are."""
    for d in range(source.ndim - 1):
        inner = source.shape[d + 1]
        wanted = (*source.shape[:d], source.shape[d] * inner, *source.shape[d + 2 :])
        if isinstance(inner, int) and [str(s) for s in wanted] == [str(s) for s in shape]:
            break
    else:
        return leaf(node, example(node))

    def at(index: tuple[Lin, ...]) -> Formula:
        pair = quotient(index[d], inner), remainder(index[d], inner)
        return source.at((*index[:d], *pair, *index[d + 1 :]))

    return Field(shape, at)


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
        return leaf(node, example(node))

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


@reads("pad", "constant_pad_nd")
def _pad(node: Node, memo: dict[Node, Field]) -> Field:
    """Equal integers that more of them are put around."""
    equal = _element(read(node.args[0], memo))
    number = argument(node, 3, "value", None) if op_name(node) == "pad" else argument(node, 2, "value", 0)
    constant = op_name(node) != "pad" or argument(node, 2, "mode", "constant") == "constant"
    if not constant or isinstance(number, bool) or not isinstance(number, int) or equal != Lin(number):
        return leaf(node, example(node))
    return Field(shape_of(node), lambda index: Lin(number))


def _element(field: Field) -> Formula | None:
    """What every element is, where all are equal; None otherwise."""
    value = field.at(tuple(Lin.symbol(("any", n)) for n in range(field.ndim)))
    return value if isinstance(value, bool) or (isinstance(value, Lin) and value.is_const) else None


@reads("index")
def _index(node: Node, memo: dict[Node, Field]) -> Field:
    source, keys = read(node.args[0], memo), node.args[1]
    if not isinstance(keys, (list, tuple)) or len(keys) != source.ndim or None in keys:
        return leaf(node, example(node))
    return _gather(node, source, [read(key, memo) for key in keys])


def _gather(node: Node, source: Field, places: list[Field]) -> Field:
    """``source[i, j, ...]`` with integer tensors: the element at the places' values, where those cannot be negative
    (a negative index would count from the end), or where all elements are equal."""
    equal = _element(source)
    if equal is not None:
        return Field(shape_of(node), lambda index: equal)

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
