"""Exact integer and boolean formulas, and tensors as functions of their indices.

Integers are linear forms (`Lin`) over index variables and opaque symbols (a shape, an element of a tensor that the
graph does not make). Anything that is not understood becomes `Opaque`, never a guess, and whoever decides about a
formula must refuse it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

#: First elements of symbols that stand for a computed number. No node of a graph can have such a name, so an element of
#: an input, ``(name, *indices)``, is never taken for one.
SIZE, MAX, FLOOR, IF = "size of", "max of", "floor of", "if it holds"

# ---------------------------------------------------------------------------------------------- scalar formulas


@dataclass(frozen=True)
class Lin:
    """Integer linear form ``const + sum(coefficient * symbol)``; symbols are hashable keys."""

    const: int = 0
    terms: tuple[tuple[Any, int], ...] = ()

    @staticmethod
    def symbol(key: Any) -> Lin:
        return Lin(0, ((key, 1),))

    @staticmethod
    def build(const: int, terms: dict[Any, int]) -> Lin:
        kept = sorted(((k, c) for k, c in terms.items() if c != 0), key=lambda kc: repr(kc[0]))
        return Lin(const, tuple(kept))

    def __add__(self, other: Lin) -> Lin:
        terms = dict(self.terms)
        for key, coefficient in other.terms:
            terms[key] = terms.get(key, 0) + coefficient
        return Lin.build(self.const + other.const, terms)

    def scaled(self, factor: int) -> Lin:
        return Lin.build(self.const * factor, {k: c * factor for k, c in self.terms})

    def __neg__(self) -> Lin:
        return self.scaled(-1)

    def __sub__(self, other: Lin) -> Lin:
        return self + (-other)

    @property
    def is_const(self) -> bool:
        return not self.terms

    def __str__(self) -> str:
        parts = [f"{'' if c == 1 else '-' if c == -1 else f'{c}*'}{_symbol_name(k)}" for k, c in self.terms]
        if self.const or not parts:
            parts.append(str(self.const))
        return " + ".join(parts).replace("+ -", "- ")


def _symbol_name(key: Any) -> str:
    if isinstance(key, tuple) and key and key[0] == MAX:
        return f"max({key[1]}, {key[2]})"
    if isinstance(key, tuple) and key and key[0] == FLOOR:
        return f"floor(({key[1]}) / {key[2]})"
    if isinstance(key, tuple) and key and key[0] == IF:
        return f"[{key[1]}]"
    if isinstance(key, tuple):
        return f"{key[0]}[{', '.join(map(str, key[1:]))}]"
    return str(key)


@dataclass(frozen=True)
class AtLeastZero:
    """The atom ``lin >= 0``."""

    lin: Lin

    def __str__(self) -> str:
        return f"({self.lin} >= 0)"


@dataclass(frozen=True)
class And:
    parts: tuple[Any, ...]

    def __str__(self) -> str:
        return "(" + " & ".join(map(str, self.parts)) + ")"


@dataclass(frozen=True)
class Or:
    parts: tuple[Any, ...]

    def __str__(self) -> str:
        return "(" + " | ".join(map(str, self.parts)) + ")"


@dataclass(frozen=True)
class Not:
    part: Any

    def __str__(self) -> str:
        return f"~{self.part}"


@dataclass(frozen=True)
class Select:
    """``where(condition, a, b)`` with constants: an additive mask."""

    condition: Any
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"where({self.condition}, {self.a}, {self.b})"


@dataclass(frozen=True)
class Opaque:
    """A value this module does not understand; `why` says which operation stopped it."""

    why: str

    def __str__(self) -> str:
        return f"<{self.why}>"


@dataclass(frozen=True)
class Datum(Opaque):
    """A number that is not understood either, but is computed from weights and kept keys and values alone: no position
    has a part in it. `node` computes a tensor of them, this one stands at `place`."""

    node: str
    place: tuple[Lin, ...]


@dataclass(frozen=True)
class Ranked:
    """Whether `value` at this place is among the largest of its row, along the keys."""

    value: Any

    def __str__(self) -> str:
        return f"top({self.value})"


Formula: TypeAlias = Ranked | Lin | AtLeastZero | And | Or | Not | Select | Opaque | bool | float


def maximum(a: Lin, b: Lin) -> Lin:
    """``max(a, b)`` as an opaque symbol with a canonical name, so that equal maxima compare equal."""
    if (a - b).is_const:
        return a if (a - b).const >= 0 else b
    first, second = sorted((a, b), key=repr)
    return Lin.symbol((MAX, first, second))


def minimum(a: Lin, b: Lin) -> Lin:
    return -maximum(-a, -b)


def truth(condition: Any) -> Lin:
    """A condition as a number: 1 where it holds, 0 elsewhere."""
    return Lin(int(condition)) if isinstance(condition, bool) else Lin.symbol((IF, condition))


#: Names of the index variables in a mask's formula.
INDEXES = ("batch", "head", "q", "k")


def is_nonnegative(a: Lin) -> bool:
    """True for a form that is at least zero because every symbol in it (an index, a size) is."""
    return a.const >= 0 and all(c > 0 and _never_negative(key) for key, c in a.terms)


def _never_negative(symbol: Any) -> bool:
    if symbol in INDEXES:
        return True
    if isinstance(symbol, tuple) and symbol[0] == MAX:
        return any(part.is_const and part.const >= 0 for part in symbol[1:])
    return isinstance(symbol, tuple) and symbol[0] in (SIZE, IF)


def moves_with(a: Lin, index: str) -> bool:
    """Whether a form may change with an index, or with anything but indices."""
    return any(_may_move(symbol, index) for symbol, _ in a.terms)


def _may_move(symbol: Any, index: str) -> bool:
    if isinstance(symbol, tuple) and symbol[0] == FLOOR:
        return moves_with(symbol[1], index)
    return symbol == index or symbol not in INDEXES


def quotient(a: Lin, divisor: int) -> Lin:
    """``floor(a / divisor)``, `divisor` > 0, as an opaque symbol with a canonical name."""
    if a.is_const:
        return Lin(a.const // divisor)
    return Lin.symbol((FLOOR, a, divisor))


def remainder(a: Lin, divisor: int) -> Lin:
    """``a mod divisor``, `divisor` > 0, at least zero as Python's is."""
    return a - quotient(a, divisor).scaled(divisor)


def _logical(kind: type[And] | type[Or], identity: bool, a: Formula, b: Formula) -> Formula:
    parts: list[Any] = []
    for part in (a, b):
        if isinstance(part, bool):
            if part is not identity:
                return part
        elif isinstance(part, (And, Or)) and isinstance(part, kind):
            parts.extend(part.parts)
        else:
            parts.append(part)
    if not parts:
        return identity
    return parts[0] if len(parts) == 1 else kind(tuple(parts))


def conjunction(a: Formula, b: Formula) -> Formula:
    return _logical(And, True, a, b)


def disjunction(a: Formula, b: Formula) -> Formula:
    """``a | b``, without what another part holds already: ``(x & y) | x`` is ``x``."""
    whole = _logical(Or, False, a, b)
    if not isinstance(whole, Or):
        return whole
    parts = {part: frozenset(part.parts if isinstance(part, And) else (part,)) for part in whole.parts}  # each once
    kept = [part for part, needs in parts.items() if not any(other < needs for other in parts.values())]
    return kept[0] if len(kept) == 1 else Or(tuple(kept))


def negation(a: Formula) -> Formula:
    if isinstance(a, bool):
        return not a
    if isinstance(a, Not):
        return a.part
    if isinstance(a, AtLeastZero):  # not(x >= 0)  <=>  -x - 1 >= 0 for integers
        return AtLeastZero(-a.lin - Lin(1))
    if isinstance(a, And):
        return functools.reduce(disjunction, map(negation, a.parts))
    if isinstance(a, Or):
        return functools.reduce(conjunction, map(negation, a.parts))
    return Not(a)


def _atom(lin: Lin) -> Formula:
    return lin.const >= 0 if lin.is_const else AtLeastZero(lin)


COMPARISONS: dict[str, Callable[[Lin, Lin], Formula]] = {
    "ge": lambda a, b: _atom(a - b),
    "gt": lambda a, b: _atom(a - b - Lin(1)),
    "le": lambda a, b: _atom(b - a),
    "lt": lambda a, b: _atom(b - a - Lin(1)),
    "eq": lambda a, b: conjunction(_atom(a - b), _atom(b - a)),
    "ne": lambda a, b: negation(conjunction(_atom(a - b), _atom(b - a))),
}

# ---------------------------------------------------------------------------------------------- tensors as functions


@dataclass(frozen=True)
class Field:
    """A tensor as a function of its indices: ``at((i, j, ...)) -> formula``; `shape` holds ints and SymInts."""

    shape: tuple[Any, ...]
    at: Callable[[tuple[Lin, ...]], Formula]

    @property
    def ndim(self) -> int:
        return len(self.shape)


def is_one(size: Any) -> bool:
    """Only a plain 1 broadcasts: Dynamo specialises sizes 0 and 1, so a symbolic size is never 1."""
    return isinstance(size, int) and size == 1


def constant(value: Formula) -> Field:
    return Field((), lambda _: value)


def broadcast_at(field: Field, index: tuple[Lin, ...]) -> Formula:
    """Value of `field` at an index of a shape that it broadcasts to."""
    own = index[len(index) - field.ndim :] if field.ndim else ()
    return field.at(tuple(Lin(0) if is_one(size) else i for size, i in zip(field.shape, own, strict=True)))


def elementwise(shape: tuple[Any, ...], fn: Callable[..., Formula], *fields: Field) -> Field:
    return Field(shape, lambda index: fn(*(broadcast_at(f, index) for f in fields)))
