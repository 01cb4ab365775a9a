"""A store with a slot for every position: StaticCache of global layers, optimum-habana, gpt-fast.

    in place     store.index_copy_(2, position, new)   store[:, :, position] = new     attention reads the store
    functional   full = index_copy(store, 2, position, new)   attention reads full     store.copy_(full)

Slot p holds position p, so reading the window in place and leaving the rest alone is the same to every other reader.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..formula import Lin
from ..graph import op_name, shape_of
from .positions import first_position
from .state import StateUse, along_tokens, from_start, is_state, is_tokens, stored_at_end, written_before

_WRITES = ("index_copy_", "index_put_")


def match(read: Node, reader: Node) -> StateUse | None:
    value = from_start(read)
    found = _in_place(value, reader) or _functional(value)
    if found is None:
        return None
    state, write, stored = found
    written = along_tokens(write)
    if written is None or not is_tokens(written[1], state):
        return None
    index, new = written
    if not isinstance(index, Node) or len(shape_of(index)) != 1:
        return None
    position = first_position(index)
    if position is None:
        return None
    return StateUse("linear_store", state, new, value, (stored,), index, position, Lin(0), "linear")


def _in_place(value: Node, reader: Node) -> tuple[Node, Node, Node] | None:
    """(state, write, what stores it): the attention reads the state, or the result of the write to it."""
    state: Any = value if is_state(value) else value.args[0] if op_name(value) in _WRITES else None
    if not is_state(state):
        return None
    writes = written_before(state, reader)
    if len(writes) != 1 or value not in (state, writes[0]):
        return None
    return state, writes[0], writes[0]


def _functional(value: Node) -> tuple[Node, Node, Node] | None:
    state: Any = value.args[0] if op_name(value) in ("index_copy", "index_put") else None
    stored = stored_at_end(value, state) if is_state(state) else None
    return (state, value, stored) if stored is not None else None
