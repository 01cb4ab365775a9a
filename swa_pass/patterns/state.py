"""How a graph keeps keys or values from one call to the next, whatever idiom it was written in.

A state is a tensor (batch, kv_heads, slots, head_dim) that outlives the call: a buffer of the graph's module, or a
tensor that the caller gives. A cache idiom writes the new tokens into it and yields what the attention reads:

    state, new tokens -> (index_copy | roll and write | gather and write | cat | ...) -> read -> attention
                                        |
                                        +-> written back to the state

`StateUse` says which positions the read shows, in terms of the position of the first new token. With that, the
attention's mask can be proven like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

from torch.fx import Graph, Node

from ..formula import Lin
from ..graph import argument, before, example, integer, op_name, shape_of


@dataclass(frozen=True)
class StateUse:
    """Keys (or values) of one attention, as they come from a state and the new tokens.

    idiom: name of the file that found it.  state: where old tokens live.  new: this step's, (B, kv_heads, N, head_dim).
    value: what is read, and written back.  writes: nodes that change the state, replaced by ours.
    index: where the graph writes by position: the positions of the new tokens, an integer tensor (N,), or the number
        that the first one has.
    key_offset: position of key 0, as the mask counts;  query_offset: position of the first new token.
    fills: slots that hold nothing yet are read too, and the mask must hide them.
    layout: ``"linear"`` (slot p holds position p, so that a fused attention leaves it as it is), ``"window"`` (time
    order, shifted every step: needs a ring instead), ``"joined"`` (old and new side by side, nothing is written).
    """

    idiom: str
    state: Node
    new: Node
    value: Node
    writes: tuple[Node, ...]
    index: Any
    query_offset: Lin
    key_offset: Lin
    layout: str
    fills: bool = False

    @property
    def positions(self) -> Node | None:
        """`index`, if it is a tensor."""
        return self.index if isinstance(self.index, Node) and shape_of(self.index) else None

    @property
    def slots(self) -> Any:
        return shape_of(self.state)[2]


def is_state(node: Any) -> bool:
    """A tensor of four dimensions that the graph is given or holds."""
    return isinstance(node, Node) and node.op in ("placeholder", "get_attr") and len(shape_of(node)) == 4


def uses_of(state: Node) -> list[Node]:
    """Everything that uses the tensor, also through another ``get_attr`` of the same name, in order."""
    graph: Graph = state.graph
    same = [state]
    if state.op == "get_attr":
        same = [node for node in graph.nodes if node.op == "get_attr" and node.target == state.target]
    users = {user for node in same for user in node.users}
    return [node for node in graph.nodes if node in users]


def same_tensor(a: Any, b: Any) -> bool:
    if not isinstance(a, Node) or not isinstance(b, Node):
        return False
    return a is b or (a.op == b.op == "get_attr" and a.target == b.target)


def stored_at_end(value: Node, state: Node) -> Node | None:
    """The ``state.copy_(value)`` that writes a functional result back; None if there is none, or more."""
    copies = [
        user
        for user in uses_of(state)
        if op_name(user) == "copy_" and same_tensor(user.args[0], state) and user.args[1] is value
    ]
    return copies[0] if len(copies) == 1 else None


def value_read(node: Node, reader: Node) -> Node | None:
    """What an attention reads: a value of the graph, or, after ``state.copy_(value)``, that value. None if the state
    was not written by then, or more than once."""
    if op_name(node) == "copy_" and is_state(node.args[0]):
        value = node.args[1]
        return value if isinstance(value, Node) else None
    if not is_state(node):
        return node
    copies = [user for user in uses_of(node) if op_name(user) == "copy_" and same_tensor(user.args[0], node)]
    if len(copies) != 1 or not isinstance(copies[0].args[1], Node):
        return None
    first = next(other for other in node.graph.nodes if other in (copies[0], reader))
    return copies[0].args[1] if first is copies[0] else None


def written_before(state: Node, reader: Node) -> list[Node]:
    """Nodes that write to the state itself and come before `reader`."""
    writes = []
    for node in state.graph.nodes:
        if node is reader:
            break
        if op_name(node) in _WRITES and node.args and same_tensor(node.args[0], state):
            writes.append(node)
    return writes


_WRITES = {"copy_", "index_copy_", "index_put_", "setitem", "scatter_", "zero_", "fill_", "add_"}


def along_tokens(node: Node) -> tuple[Any, Any] | None:
    """(index of dimension 2, what is written) of an index write that takes all of the other dimensions."""
    name = op_name(node).rstrip("_")
    if name == "setitem":
        index, value = node.args[1], node.args[2]
    elif name == "index_put":
        if argument(node, 3, "accumulate", False):
            return None
        index, value = tuple(node.args[1]), node.args[2]  # type: ignore[arg-type]
        index = tuple(slice(None) if part is None else part for part in index)
    elif name == "index_copy":
        dim = argument(node, 1, "dim", None)
        return (node.args[2], node.args[3]) if dim in (2, -2) else None
    else:
        return None
    return (index[2], value) if takes_tokens(index) else None


def takes_tokens(index: Any) -> TypeGuard[tuple[Any, ...]]:
    """Whether an indexing selects in dimension 2 and takes all of the others."""
    if not isinstance(index, tuple) or len(index) < 3:
        return False
    return all(part == slice(None) for part in index[:2] + index[3:])


def is_tokens(node: Any, state: Node) -> bool:
    """Whether a value can be this step's tokens for the state: same batch, heads, head_dim and dtype."""
    if not isinstance(node, Node) or len(shape_of(node)) != 4 or example(node).dtype != example(state).dtype:
        return False
    return [str(shape_of(node)[d]) for d in (0, 1, 3)] == [str(shape_of(state)[d]) for d in (0, 1, 3)]


def from_start(node: Node) -> Node:
    """Back through ``keys[:, :, :n]``: a prefix of the slots shows the same positions."""
    while op_name(node) in ("getitem", "slice") and isinstance(node.args[0], Node):
        parts = _slices(node)
        if parts is None or any(start != Lin(0) for start in parts):
            break
        if [str(s) for s in shape_of(node)[:2]] != [str(s) for s in shape_of(node.args[0])[:2]]:
            break
        if len(shape_of(node)) != 4 or str(shape_of(node)[3]) != str(shape_of(node.args[0])[3]):
            break
        node = node.args[0]
    return before(node, ("contiguous", "alias", "detach"), lambda a, b: a.shape == b.shape)


def _slices(node: Node) -> list[Lin | None] | None:
    """Starts of the slices of an indexing; None if it does anything but slice with step 1."""
    if op_name(node) == "slice":
        if argument(node, 4, "step", 1) != 1:
            return None
        start = argument(node, 2, "start", None)
        return [Lin(0) if start is None else integer(start)]
    keys = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    starts: list[Lin | None] = []
    for key in keys:
        if key is Ellipsis:
            continue
        if not isinstance(key, slice) or key.step not in (None, 1):
            return None
        starts.append(Lin(0) if key.start is None else integer(key.start))
    return starts


def sliced_tokens(node: Any) -> tuple[Node, Lin] | None:
    """``(x, first)`` for ``x[:, :, first:]``, which takes all of the other dimensions."""
    if not isinstance(node, Node) or op_name(node) not in ("getitem", "slice") or len(shape_of(node)) != 4:
        return None
    source = node.args[0]
    if not isinstance(source, Node) or len(shape_of(source)) != 4:
        return None
    if op_name(node) == "slice":
        dim, start, end = argument(node, 1, "dim", 0), argument(node, 2, "start", None), argument(node, 3, "end", None)
        if dim not in (2, -2) or argument(node, 4, "step", 1) != 1:
            return None
    else:
        keys = node.args[1]
        if not takes_tokens(keys) or not isinstance(keys[2], slice) or keys[2].step not in (None, 1):
            return None
        start, end = keys[2].start, keys[2].stop
    first = Lin(0) if start is None else integer(start)
    whole, left = integer(shape_of(source)[2]), integer(shape_of(node)[2])
    if first is None or whole is None or left is None:
        return None
    if first.is_const and first.const < 0:
        first = first + whole
    if end is not None and whole - first != left:
        return None
    return source, first
