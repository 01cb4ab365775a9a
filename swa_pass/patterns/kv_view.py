"""Where an attention's keys come from: our cache's time-ordered read, possibly repeated for grouped heads.

The cache's traced `update` emits ``view(store, new, lengths, window, layer, starts[, scale])`` and one
``append``. Between the view and the attention there may be `repeat_kv`:

    view (B, KV, S, D) -> [:, :, None] -> expand (B, KV, G, S, D) -> reshape (B, KV * G, S, D) -> attention
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ..formula import Lin, maximum
from ..graph import before, op_name, shape_of
from ..reader import read


@dataclass(frozen=True)
class KVView:
    """One ``swa_pass::view`` and how often each kv head is repeated on its way to the attention."""

    node: Node
    groups: int

    @property
    def store(self) -> Node:
        return self.node.args[0]  # type: ignore[return-value]

    @property
    def new(self) -> Node:
        return self.node.args[1]  # type: ignore[return-value]

    @property
    def lengths(self) -> Node:
        return self.node.args[2]  # type: ignore[return-value]

    @property
    def starts(self) -> Node | None:
        return self.node.args[5] if len(self.node.args) > 5 else None  # type: ignore[return-value]

    @property
    def scale(self) -> Node | None:
        """Factors of a quantised store."""
        return self.node.args[6] if len(self.node.args) > 6 else None  # type: ignore[return-value]

    @property
    def window(self) -> int:
        return self.node.args[3]  # type: ignore[return-value]

    @property
    def layer(self) -> int:
        return self.node.args[4]  # type: ignore[return-value]

    @property
    def query_offset(self) -> Lin:
        """Absolute position of the first new token: rows of a HybridCache advance together.

        Read as the masks are read, so that both come to the same symbol also where `lengths` is a slice of a buffer.
        """
        position = read(self.lengths).at((Lin(0),))
        return position if isinstance(position, Lin) else Lin.symbol((self.lengths.name, Lin(0)))

    @property
    def key_offset(self) -> Lin:
        """Absolute position of the first key of the view, as the operator defines it."""
        if self.window == 0:
            return Lin(0)
        return maximum(self.query_offset - Lin(self.window - 1), Lin(0))


def is_view(node: Node) -> bool:
    return node.op == "call_function" and op_name(node) == "swa_pass::view"


def find(node: Node) -> KVView | None:
    """Follows an attention's key or value back to the view it comes from, through repeat_kv only."""
    source, groups = ungrouped(node)
    return KVView(source, groups) if is_view(source) else None


def ungrouped(node: Node) -> tuple[Node, int]:
    """What a repeat_kv repeats and how often; the node itself and 1 if it is none."""
    node = _before_moves(node)
    if op_name(node) != "reshape":
        return node, 1
    expanded = _before_moves(node.args[0])
    if not isinstance(expanded, Node) or op_name(expanded) != "expand" or len(shape_of(expanded)) != 5:
        return node, 1
    inserted = expanded.args[0]
    if not isinstance(inserted, Node) or op_name(inserted) not in ("getitem", "unsqueeze"):
        return node, 1
    source = _before_moves(inserted.args[0])
    if not isinstance(source, Node) or len(shape_of(source)) != 4:
        return node, 1
    batch, kv_heads, length, head_dim = shape_of(source)
    groups = shape_of(expanded)[2]
    repeated = (batch, kv_heads, groups, length, head_dim)
    wanted = (batch, kv_heads * groups, length, head_dim)
    one_inserted = (batch, kv_heads, 1, length, head_dim)
    if not isinstance(groups, int) or _sizes(shape_of(inserted)) != _sizes(one_inserted):
        return node, 1
    if _sizes(shape_of(expanded)) != _sizes(repeated) or _sizes(shape_of(node)) != _sizes(wanted):
        return node, 1
    return source, groups


def _before_moves(node: Any) -> Any:
    """Without casts and moves that change nothing, such as ``keys.to(query.device)`` on one device."""
    return before(node, ("to", "contiguous", "clone"), lambda a, b: (a.dtype, a.device) == (b.dtype, b.device))


def _sizes(shape: tuple[object, ...]) -> list[str]:
    return [str(size) for size in shape]
