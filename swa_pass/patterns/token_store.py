"""A caller's store with a slot for every position, of which one step writes one: optimum-habana's KVCache.

    store.index_copy_(2, position, new)      position: a tensor without dimensions, or of one number
    attention reads store, or store[:, :, :n]; with grouped heads through reshape(B, kv_heads, 1, n, head_dim)

`linear_store` is for indices that name several tokens, and for what our fused operators do in place.
"""

from __future__ import annotations

from torch.fx import Node

from ..formula import Lin
from ..graph import before, op_name, shape_of
from ..reader import read as read_formula
from .state import StateUse, along_tokens, from_start, is_state, is_tokens, written_before


def match(read: Node, reader: Node) -> StateUse | None:
    value = from_start(ungrouped(read))
    state = value.args[0] if op_name(value) == "index_copy_" else value
    if not isinstance(state, Node) or state.op != "placeholder" or not is_state(state):
        return None
    writes = written_before(state, reader)
    if len(writes) != 1 or op_name(writes[0]) != "index_copy_" or value not in (state, writes[0]):
        return None
    written = along_tokens(writes[0])
    if written is None or not is_tokens(written[1], state) or str(shape_of(written[1])[2]) != "1":
        return None
    index, new = written
    if not isinstance(index, Node) or shape_of(index) not in ((), (1,)):
        return None
    field = read_formula(index)
    position = field.at((Lin(0),) * field.ndim)
    if not isinstance(position, Lin):
        return None
    return StateUse("token_store", state, new, value, (writes[0],), index, position, Lin(0), "linear")


def keeps(node: Node) -> bool:
    """Whether a prompt's keys (or values), as its attention reads them, also go into the first slots of a store:
    ``store[:, :, :n].copy_(keys)``."""
    source = ungrouped(node)
    copies = [user for user in source.users if op_name(user) == "copy_" and user.args[1] is source]
    return any(isinstance(copy.args[0], Node) and from_start(copy.args[0]).op == "placeholder" for copy in copies)


def ungrouped(node: Node) -> Node:
    """(B, kv_heads, S, D) behind (B, kv_heads, 1, S, D)."""
    node = before(node, ("contiguous", "alias"), lambda a, b: a.shape == b.shape)
    if op_name(node) not in ("reshape", "unsqueeze") or len(shape_of(node)) != 5 or not isinstance(node.args[0], Node):
        return node
    inner = [str(size) for size in shape_of(node.args[0])]
    outer = [str(size) for size in shape_of(node)]
    return node.args[0] if outer[2] == "1" and outer[:2] + outer[3:] == inner else node
