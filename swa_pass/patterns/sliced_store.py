"""A store with a slot for every position, written by a slice whose start is a number of the call.

    in place     store[:, :, start : start + n] = new          attention reads the store
    functional   full = slice_scatter(store, new, 2, start, start + n)      attention reads full      store.copy_(full)

As in `linear_store`, slot p holds position p.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..formula import Lin
from ..graph import argument, integer, op_name, shape_of
from .state import StateUse, from_start, is_state, is_tokens, same_tensor, stored_at_end, takes_tokens, uses_of


def match(read: Node, reader: Node) -> StateUse | None:
    value = from_start(read)
    found = _in_place(value, reader) if is_state(value) else _functional(value)
    if found is None:
        return None
    state, new, start, end, write = found
    first = integer(start)
    if first is None or not is_tokens(new, state):
        return None
    last, count = integer(end), integer(shape_of(new)[2])
    if last is None or count is None or last - first != count:
        return None
    return StateUse("sliced_store", state, new, value, (write,), start, first, Lin(0), "linear")


Found = tuple[Node, Any, Any, Any, Node]


def _functional(value: Node) -> Found | None:
    if op_name(value) != "slice_scatter" or not is_state(value.args[0]):
        return None
    state: Any = value.args[0]
    names = ((2, "dim", 0), (3, "start", None), (4, "end", None), (5, "step", 1))
    dim, start, end, step = (argument(value, i, name, default) for i, name, default in names)
    stored, new = stored_at_end(value, state), value.args[1]
    if isinstance(new, Node) and op_name(new) == "copy":  # copy(slice(store), new), what is left of store[...] = new
        new = new.args[1]
    if stored is None or dim not in (2, -2) or step != 1:
        return None
    return state, new, start, end, stored


def _in_place(state: Node, reader: Node) -> Found | None:
    """The only write before the reader; a later one, or one through another view, makes the pass refuse the site."""
    order = {node: n for n, node in enumerate(state.graph.nodes)}
    found = [write for user in uses_of(state) for write in _written_by(user, state)]
    found = [write for write in found if order[write[-1]] < order[reader]]
    return found[0] if len(found) == 1 else None


def _written_by(user: Node, state: Node) -> list[Found]:
    key: Any = None
    if op_name(user) == "setitem" and same_tensor(user.args[0], state):
        key = user.args[1]
        if _is_slice_of_tokens(key):
            return [(state, user.args[2], key[2].start, key[2].stop, user)]
    elif op_name(user) in ("slice", "getitem") and same_tensor(user.args[0], state):
        start, end = None, None
        if op_name(user) == "slice":
            if argument(user, 1, "dim", 0) not in (2, -2) or argument(user, 4, "step", 1) != 1:
                return []
            start, end = argument(user, 2, "start", None), argument(user, 3, "end", None)
        elif _is_slice_of_tokens(user.args[1]):
            key = user.args[1]
            start, end = key[2].start, key[2].stop
        writes = [w for w in user.users if op_name(w) == "copy_" and w.args[0] is user]
        return [(state, w.args[1], start, end, w) for w in writes]
    return []


def _is_slice_of_tokens(key: Any) -> bool:
    if not takes_tokens(key) or not isinstance(key[2], slice):
        return False
    return key[2].step in (None, 1) and key[2].start is not None
