"""Old and new tokens side by side in a new tensor: DynamicCache.

    full = cat([past, new], 2)     attention reads full     full, or its last W - 1, goes out as the next call's past

Nothing is written, so the state's layout is the caller's. The attention can still read `past` and `new` where they are.
"""

from __future__ import annotations

from torch.fx import Node

from ..formula import Lin
from ..graph import argument, integer, op_name, shape_of
from .state import StateUse, is_state, is_tokens, sliced_tokens


def match(read: Node, reader: Node) -> StateUse | None:
    if op_name(read) not in ("cat", "concat") or argument(read, 1, "dim", 0) not in (2, -2):
        return None
    parts = argument(read, 0, "tensors", None)
    if not isinstance(parts, (list, tuple)) or len(parts) != 2:
        return None
    past, new = parts
    sliced = sliced_tokens(past)
    source = sliced[0] if sliced is not None else past
    if not is_state(source) or not is_tokens(new, source) or not isinstance(past, Node) or not isinstance(new, Node):
        return None
    held = integer(shape_of(past)[2])
    if held is None or held == Lin(0):
        return None
    return StateUse("joined_tokens", past, new, read, (), None, held, Lin(0), "joined")
