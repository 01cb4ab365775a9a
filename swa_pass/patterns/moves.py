"""A state whose slots move: ``state.roll(-1, 2)``, ``state[:, :, index]``, ``index_select(state, 2, index)``.

All three read slot ``index[j]`` at place j; the index is read as a formula, so how it was computed does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ..formula import Formula, Lin, remainder
from ..graph import argument, has_side_effect, op_name, shape_of
from ..reader import read
from .positions import assume
from .state import along_tokens, is_state, is_tokens, stored_at_end, value_read

#: The place of a slot, in formulas about an index.
PLACE = Lin.symbol("k")


@dataclass(frozen=True)
class Moved:
    """`value`: the state's slots, slot ``slot`` (a formula of PLACE) at each place, `new` at place ``target``."""

    state: Node
    new: Node
    value: Node
    slot: Formula
    target: Formula
    index: Any
    writes: tuple[Node, ...]


def moved_and_written(read_node: Node, reader: Node) -> Moved | None:
    """The read of a state that was moved, got one new token, and is stored again. None for anything else."""
    value = value_read(read_node, reader)
    if value is None:
        return None
    write = value
    if op_name(value) in ("index_copy", "index_put", "index_copy_", "index_put_"):
        moved = value.args[0]
    else:  # rolled[:, :, index] = new, on the moved tensor itself
        moved = value
        writers = [user for user in value.users if op_name(user) in ("setitem", "index_copy_", "index_put_")]
        if len(writers) != 1 or writers[0].args[0] is not value:
            return None
        write = writers[0]
    written = along_tokens(write)
    if not isinstance(moved, Node) or written is None:
        return None
    found = _slots(moved)
    if found is None:
        return None
    state, slot = found
    stored = stored_at_end(value, state) or stored_at_end(moved, state)
    index, new = written
    if stored is None or not is_tokens(new, state) or shape_of(new)[2] != 1:
        return None
    capacity = shape_of(state)[2]
    target = read(index, assume(index) if isinstance(index, Node) else None)
    if not isinstance(capacity, int) or target.ndim > 1:
        return None
    place = target.at((Lin(0),) * target.ndim)
    if isinstance(place, Lin) and place.is_const and place.const < 0:
        place = place + Lin(capacity)
    in_place = (write,) if has_side_effect(write) else ()
    return Moved(state, new, value, slot, place, index, (stored, *in_place))


def _slots(moved: Node) -> tuple[Node, Formula] | None:
    name, state = op_name(moved), moved.args[0] if moved.args else None
    if not is_state(state):
        return None
    assert isinstance(state, Node)
    capacity = shape_of(state)[2]
    if not isinstance(capacity, int):
        return None
    index: Any = None
    if name == "roll":
        shifts, dims = argument(moved, 1, "shifts", None), argument(moved, 2, "dims", None)
        shifts, dims = _single(shifts), _single(dims)
        if dims not in (2, -2) or not isinstance(shifts, int):
            return None
        return state, remainder(PLACE - Lin(shifts), capacity)
    if name == "index_select":
        index = argument(moved, 2, "index", None) if argument(moved, 1, "dim", None) in (2, -2) else None
    elif name in ("index", "getitem") and isinstance(moved.args[1], (tuple, list)) and len(moved.args[1]) >= 3:
        first, second, index, *rest = moved.args[1]
        if any(part not in (None, slice(None)) for part in (first, second, *rest)) or len(rest) > 1:
            return None
        if name == "getitem" and (first is None or second is None or None in rest):
            return None
    if not isinstance(index, Node) or len(shape_of(index)) != 1 or shape_of(index)[0] != capacity:
        return None
    return state, read(index).at((PLACE,))


def _single(value: Any) -> Any:
    return value[0] if isinstance(value, (tuple, list)) and len(value) == 1 else value


def shifts_by_one(slot: Formula, capacity: int) -> bool:
    """Whether place j holds what was at j + 1 (whatever the last place holds: the new token goes there)."""
    return slot in (PLACE + Lin(1), remainder(PLACE + Lin(1), capacity))
