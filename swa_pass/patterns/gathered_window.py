"""A window that is gathered anew by an index tensor: transformers 4.5x' SlidingWindowLayer.

    index = (arange(W) + (position > W - 1)) % W       stays while there is room, moves by one slot afterwards
    full = state[:, :, index].index_copy(2, position.clamp(max=W - 1), new)
    state.copy_(full)

Key 0 of what is read is at position ``max(position - (W - 1), 0)``.
"""

from __future__ import annotations

from torch.fx import Node

from ..formula import IF, AtLeastZero, Lin, maximum, minimum, remainder, truth
from ..graph import shape_of
from .moves import PLACE, moved_and_written
from .state import StateUse


def match(read: Node, reader: Node) -> StateUse | None:
    moved = moved_and_written(read, reader)
    if moved is None or not isinstance(moved.index, Node):
        return None
    capacity = shape_of(moved.state)[2]
    position = _position(moved.slot, capacity)
    if position is None:
        return None
    last = Lin(capacity - 1)
    if moved.target not in (minimum(position, last), minimum(maximum(position, Lin(0)), last)):
        return None
    first = maximum(position - Lin(capacity - 1), Lin(0))
    return StateUse(
        "gathered_window", moved.state, moved.new, moved.value, moved.writes, None, position, first, "window"
    )


def _position(slot: object, capacity: int) -> Lin | None:
    """p, if the slot at place k is ``(k + (p >= capacity)) % capacity``."""
    for condition in _conditions(slot):
        position = condition.lin + Lin(capacity)
        if slot == remainder(PLACE + truth(AtLeastZero(position - Lin(capacity))), capacity):
            return position
    return None


def _conditions(slot: object) -> list[AtLeastZero]:
    """Conditions that the formula counts as 0 or 1."""
    found: list[AtLeastZero] = []
    if isinstance(slot, Lin):
        for key, _ in slot.terms:
            if isinstance(key, tuple) and key[0] == IF and isinstance(key[1], AtLeastZero):
                found.append(key[1])
    return found
