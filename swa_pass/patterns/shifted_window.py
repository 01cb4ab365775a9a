"""A window that moves by one slot for every token: StaticSlidingWindowLayer once it is full, and many by hand.

    moved = state.roll(-1, 2)                      full = cat([state[:, :, 1:], new], 2)
    moved[:, :, tensor([-1])] = new                state.copy_(full)
    state.copy_(moved)

          before   k3 k4 k5 k6        after   k4 k5 k6 k7        the newest key is always the last

Where fewer tokens were seen than there are slots, the first slots hold nothing, and the mask must say so.
"""

from __future__ import annotations

from torch.fx import Node

from ..formula import Lin
from ..graph import argument, op_name, shape_of
from .moves import moved_and_written, shifts_by_one
from .state import StateUse, is_state, is_tokens, sliced_tokens, stored_at_end, value_read


def match(read: Node, reader: Node) -> StateUse | None:
    return _concatenated(read, reader) or _moved(read, reader)


def _moved(read: Node, reader: Node) -> StateUse | None:
    moved = moved_and_written(read, reader)
    if moved is None:
        return None
    capacity = shape_of(moved.state)[2]
    if not shifts_by_one(moved.slot, capacity) or moved.target != Lin(capacity - 1):
        return None
    return _use(moved.state, moved.new, moved.value, moved.writes)


def _concatenated(read: Node, reader: Node) -> StateUse | None:
    value = value_read(read, reader)
    if value is None:
        return None
    if op_name(value) not in ("cat", "concat") or argument(value, 1, "dim", 0) not in (2, -2):
        return None
    parts = value.args[0]
    if not isinstance(parts, (list, tuple)) or len(parts) != 2:
        return None
    old = sliced_tokens(parts[0])
    if old is None or not is_state(old[0]) or old[1] != Lin(1) or not is_tokens(parts[1], old[0]):
        return None
    stored = stored_at_end(value, old[0])
    if stored is None or shape_of(parts[1])[2] != 1 or not isinstance(parts[1], Node):
        return None
    return _use(old[0], parts[1], value, (stored,))


def _use(state: Node, new: Node, value: Node, writes: tuple[Node, ...]) -> StateUse:
    """Positions are counted from the first slot here: which tokens those are, only the mask can say."""
    last = Lin(shape_of(state)[2] - 1)
    return StateUse("shifted_window", state, new, value, writes, None, last, Lin(0), "window", fills=True)
