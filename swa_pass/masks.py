"""Proves what an attention mask is: full causal, sliding causal with W, or something we do not touch.

The mask's formula (see `reader`) is a statement about a query index and a key index. With the absolute positions of
both given as linear forms, ``d = query position - key position`` is the only thing that a causal or a sliding mask may
depend on, and a conjunction of bounds on ``d`` is decided exactly, for *all* positions:

    d >= 0                                        full causal
    d >= 0  and  d <= W - 1                       sliding causal: W keys, the query's own included
    d >= 0  and  floor(query/C) == floor(key/C)   chunked: the query's own chunk of C, up to itself
    top(data) and d >= 0, or data on d >= 0       picked: by numbers that belong to a key, at any distance
    anything else                                 named, and refused

Nothing is probed numerically and no configuration is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from torch.fx import Node

from .formula import (
    FLOOR,
    INDEXES,
    And,
    AtLeastZero,
    Datum,
    Field,
    Formula,
    Lin,
    Not,
    Opaque,
    Or,
    Ranked,
    Select,
    broadcast_at,
    conjunction,
    is_nonnegative,
    is_one,
    moves_with,
    negation,
    quotient,
)
from .reader import read

#: An additive mask hides a key with a number at or below this: after softmax the weight is exactly zero for any
#: score that a float16 attention can hold (scores are below 65504, and exp(-1e4) is 0 in float32).
ADDITIVE_HIDDEN = -1e4


#: Verdicts about which nothing can be said that a rewrite could use; each comes with a reason.
REFUSED = ("unknown", "bidirectional", "blocks", "picked")


#: A sentence, or what makes it once it is read: formulas can be long.
Reason: TypeAlias = str | Callable[[], str]


@dataclass(frozen=True)
class Mask:
    """Verdict about a mask.

    kind: ``"full"`` (causal, no limit), ``"sliding"`` (causal, `window` keys including self), ``"chunked"`` (causal
    within chunks of `window` keys), ``"bidirectional"``, ``"blocks"`` (causal, and more keys by another rule: a prefix,
    an image), ``"picked"`` (causal, and keys are chosen or weighed by their content), ``"unknown"``, or ``"given"``
    (`GIVEN`: it stays, so nothing was proven).
    why: for those that are `refused`, which part of the formula stands against a rewrite (`reason`, before it is read).
    seen: where slots fill one by one, how many tokens the mask says came before this step.
    """

    kind: str
    window: int | None = None
    why: Reason = field(default="", compare=False)
    seen: Lin | None = None

    @property
    def refused(self) -> bool:
        return self.kind in REFUSED

    @property
    def reason(self) -> str:
        return self.why if isinstance(self.why, str) else self.why()


#: A mask that a pass leaves as it is, whatever it shows.
GIVEN = Mask("given")


def unknown(why: Reason) -> Mask:
    return Mask("unknown", None, why)


def prove(
    mask: Node,
    query_offset: Lin,
    key_offset: Lin,
    queries: Any = None,
    keys: Any = None,
    memo: dict[Node, Field] | None = None,
    fills: bool = False,
    biased: bool = False,
) -> Mask:
    """Decides about a mask tensor of shape (..., queries, keys).

    Args:
        mask: the graph's mask node, boolean (True = visible) or additive.
        query_offset: absolute position of query index 0; query ``i`` is at ``query_offset + i``.
        key_offset: absolute position of key index 0.
        queries, keys: how many there are; an axis of size 1 has only the index 0.
        memo: fields already read in this graph.
        fills: the keys are a window of slots that fill from its end, and positions are counted from the first slot. The
            mask must hide the slots that hold nothing yet; `Mask.seen` is the number of tokens that it counts with.
        biased: an additive mask may add any finite numbers (a position bias) to the scores of what it shows.
    """
    tensor = read(mask, memo)
    if not 2 <= tensor.ndim <= 4:
        return unknown(f"the mask has {tensor.ndim} dimensions")
    query = Lin(0) if is_one(queries) else Lin.symbol("q")
    key = Lin(0) if is_one(keys) else Lin.symbol("k")
    index = (*map(Lin.symbol, INDEXES[:2]), query, key)[-tensor.ndim :]
    value = broadcast_at(tensor, index)
    formula = _visible(_without_bias(value) if biased else value)
    if isinstance(formula, Mask):
        return _picked(value, query_offset + query, key_offset + key) or formula
    if not fills:
        return decide(formula, query_offset + query, key_offset + key)
    first, formula = _first_slot(formula, key)
    if first is None:
        return unknown("the mask shows slots that hold no token yet")
    if is_one(queries) and isinstance(keys, int) and query_offset == key_offset + Lin(keys - 1):
        # the query is the newest key, so no key comes after it, whether the mask says so or not
        formula = conjunction(formula, AtLeastZero(query_offset - key_offset - key))
    return replace(decide(formula, query_offset + query, key_offset + key), seen=query_offset - first)


def prove_around(mask: Node, keys: Any, memo: dict[Node, Field] | None = None) -> tuple[Mask, Lin]:
    """Decides about a mask of one query per row, whose position only the mask knows. Returns the verdict, and the
    position: the last key that the mask shows, in terms of the graph's inputs.

    Key k is at position k. Arguments as in `prove`.
    """
    tensor = read(mask, memo)
    if not 2 <= tensor.ndim <= 4:
        return unknown(f"the mask has {tensor.ndim} dimensions"), Lin(0)
    key = Lin(0) if is_one(keys) else Lin.symbol("k")
    index = (*map(Lin.symbol, INDEXES[:2]), Lin(0), key)[-tensor.ndim :]
    formula = _visible(broadcast_at(tensor, index))
    if isinstance(formula, Mask):
        return formula, Lin(0)
    for part in formula.parts if isinstance(formula, And) else (formula,):
        if isinstance(part, AtLeastZero) and dict(part.lin.terms).get("k") == -1:  # x - k >= 0
            position = part.lin + key
            if not position.is_const:
                return decide(formula, position, key), position
    return unknown("the mask has no last key, so the query's position is not known"), Lin(0)


def implied(mask: Node, memo: dict[Node, Field] | None = None) -> list[Lin]:
    """Forms over the indices ``"q"`` and ``"k"`` that are at least zero wherever the mask shows a key.

    The mask may hide more than these say (padding), or add finite numbers to what it shows: where one of the forms is
    negative, the key is hidden. Empty if nothing of the kind is known. An axis of size 1 has only the index 0.
    """
    tensor = read(mask, memo)
    if not 2 <= tensor.ndim <= 4:
        return []
    names = (Lin(0) if is_one(size) else Lin.symbol(name) for name, size in zip(INDEXES[-tensor.ndim :], tensor.shape))
    return [part.lin for part in _implied(tensor.at(tuple(names)))]


def _implied(formula: Formula) -> list[AtLeastZero]:
    """Atoms that hold wherever a key with this value of the mask is shown."""
    if isinstance(formula, AtLeastZero):
        return [formula]
    if isinstance(formula, And):
        return [atom for part in formula.parts for atom in _implied(part)]
    if isinstance(formula, Select):
        if _hides(formula.b):
            return _implied(formula.condition) + _implied(formula.a)
        if _hides(formula.a):
            return _implied(negation(formula.condition)) + _implied(formula.b)
    return []


def _without_bias(value: Formula) -> Formula:
    """The condition under which an additive mask does not hide a key, whatever it adds then. A mask that hides nothing
    by itself comes back as it is."""
    shown: Formula | None = None
    while isinstance(value, Select) and (_hides(value.a) or _hides(value.b)):
        condition = value.condition if _hides(value.b) else negation(value.condition)
        shown = condition if shown is None else conjunction(shown, condition)
        value = value.a if _hides(value.b) else value.b
    return value if shown is None else shown


def _hides(value: Formula) -> bool:
    return isinstance(value, float) and value <= ADDITIVE_HIDDEN


def _first_slot(formula: Formula, key: Lin) -> tuple[Lin | None, Formula]:
    """x, from the part ``key >= x`` in which x moves with the tokens seen; and the formula without that part."""
    parts = list(formula.parts) if isinstance(formula, And) else [formula]
    for part in parts:
        if not isinstance(part, AtLeastZero):
            continue
        first = key - part.lin
        if not first.is_const and not any(symbol in INDEXES for symbol, _ in first.terms):
            rest = [other for other in parts if other is not part]
            whole: Formula = True
            for other in rest:
                whole = conjunction(whole, other)
            return first, whole
    return None, formula


def decide(formula: Formula, query: Lin, key: Lin) -> Mask:
    """Decides about a formula, given the absolute positions of query and key as linear forms."""
    formula = _visible(formula)
    if isinstance(formula, Mask):
        return formula
    parts = formula.parts if isinstance(formula, And) else (formula,)
    lower: int | None = None  # d >= lower
    upper: int | None = None  # d <= upper
    chunk, parts = _chunk(parts, query, key)
    for part in parts:
        if part is True or _always(part):
            continue
        if part is False:
            return unknown("the mask hides every key")
        if not isinstance(part, AtLeastZero):
            return Mask("blocks" if isinstance(part, Or) else "unknown", None, partial(_describe, part))
        with_d = part.lin - (query - key)
        against_d = part.lin + (query - key)
        if with_d.is_const:  # d + c >= 0
            bound = -with_d.const
            lower = bound if lower is None else max(lower, bound)
        elif against_d.is_const:  # -d + c >= 0
            bound = against_d.const
            upper = bound if upper is None else min(upper, bound)
        else:
            return unknown(partial("the mask depends on more than the distance of query and key: {}".format, part))
    if lower is None:
        return Mask("bidirectional", None, "the mask lets a query see later keys (it is not causal)")
    if lower != 0:
        if lower < 0:
            return Mask("bidirectional", None, f"the mask lets a query see {-lower} later keys")
        return unknown(f"the mask hides the {lower} nearest keys")
    if chunk is not None:
        return Mask("chunked", chunk) if upper is None else unknown("the mask is both chunked and sliding")
    if upper is None:
        return Mask("full")
    if upper < 0:
        return unknown("the mask hides every key")
    return Mask("sliding", window=upper + 1)


def _picked(value: Formula, query: Lin, key: Lin) -> Mask | None:
    """The verdict ``"picked"``, if an additive mask shows earlier keys by numbers that belong to the keys.

    Such a number is the same for every query, so where one query passes a key by, that is because of other keys and not
    of how far away it is: a later query may see it again.
    """
    causal: Formula = True
    rankings = []
    while isinstance(value, Select) and _hides(value.b):
        if isinstance(value.condition, Ranked):
            rankings.append(_picked(value.condition.value, query, key))
        else:
            causal = conjunction(causal, value.condition)
        value = value.a
    if not isinstance(value, Datum) or any(moves_with(place, "q") for place in value.place):
        return None
    shown, what = decide(causal, query, key), "numbers that are computed from the kept keys or values"
    if shown.kind == "sliding":
        return unknown(
            f"a window of {shown.window} slides, but within it {what} decide which keys a query sees and how much they "
            "count, for which the fused attention has no place"
        )
    if shown.kind != "full" or any(ranking is None or ranking.kind != "picked" for ranking in rankings):
        return None
    return Mask(
        "picked",
        None,
        f"{what} decide which earlier keys a query sees and how much they count, at any distance: no window slides, "
        "and any key may be needed again",
    )


def _chunk(parts: tuple[Any, ...], query: Lin, key: Lin) -> tuple[int | None, tuple[Any, ...]]:
    """C, if among the parts are both halves of ``floor(query / C) == floor(key / C)``; and the other parts."""
    sizes = {k[2] for part in parts if isinstance(part, AtLeastZero) for k, _ in part.lin.terms if k[0] == FLOOR}
    for size in sizes:
        ahead = quotient(query, size) - quotient(key, size)
        halves = {AtLeastZero(ahead), AtLeastZero(-ahead)}
        if halves <= set(parts):
            return size, tuple(part for part in parts if part not in halves)
    return None, parts


def _visible(formula: Formula) -> Any:
    """The condition under which a key is visible, for boolean and additive masks."""
    if isinstance(formula, (bool, And, Or, Not, AtLeastZero)):
        return formula
    if isinstance(formula, Opaque):
        return unknown(f"the mask comes from {formula.why}, which is not proven")
    if isinstance(formula, Select):
        shown, hidden = formula.a, formula.b
        if isinstance(shown, float) and shown == 0.0 and isinstance(hidden, float) and hidden <= ADDITIVE_HIDDEN:
            return _visible(formula.condition)
        if isinstance(shown, Select) and isinstance(hidden, float) and hidden <= ADDITIVE_HIDDEN:
            inner = _visible(shown)
            return inner if isinstance(inner, Mask) else conjunction(_visible(formula.condition), inner)
        return unknown(
            partial("the additive mask holds values other than 0 and a large negative number: {}".format, formula)
        )
    return unknown(partial("the mask is neither boolean nor additive: {}".format, formula))


def _always(part: Formula) -> bool:
    """True for an atom that holds because every symbol in it (an index, a size) is at least zero."""
    return isinstance(part, AtLeastZero) and is_nonnegative(part.lin)


def _describe(part: Formula) -> str:
    if isinstance(part, Opaque):
        return f"part of the mask comes from {part.why}, which is not proven"
    if isinstance(part, Or):
        return f"the mask also shows keys by another rule: {part}"
    return f"part of the mask is not understood: {part}"
