"""Keys in pages that an engine hands out, gathered before every attention.

    keys = pages[table]            pages (blocks, size, kv_heads, head_dim) or (blocks, kv_heads, size, head_dim)
    keys = keys.reshape(B, -1, kv_heads, head_dim).transpose(1, 2)       all blocks of a row, in order of time

    keys = tokens[index].transpose(1, 2)    tokens (slots, kv_heads, head_dim): pages of one token each

Place k of what is read is position k. The engine's writes stay as they are, wherever they are; only the gather goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Node

from ..graph import argument, op_name, shape_of
from .reorder import before_order


@dataclass(frozen=True)
class PagedRead:
    """Keys or values, gathered.

    pages: the store.  table: (B, blocks of a row), integer.  gather: the node that reads it.
    axes: where in `pages` its (blocks, kv_heads, tokens of a block, head_dim) are; None for tokens without blocks.
    """

    idiom: ClassVar[str] = "paged_store"
    pages: Node
    table: Node
    gather: Node
    axes: tuple[int, int, int, int] | None

    @property
    def block(self) -> int:
        return 1 if self.axes is None else int(shape_of(self.pages)[self.axes[2]])


def match(read: Node) -> PagedRead | None:
    """`read` is (B, kv_heads, slots, head_dim), as an attention takes it."""
    if len(shape_of(read)) != 4:
        return None
    return _heads_moved_last(read) or _heads_moved_first(read)


def _heads_moved_last(read: Node) -> PagedRead | None:
    """reshape, then transpose(1, 2): blocks (.., size, kv_heads, head_dim), or single tokens."""
    flat = before_order(read, [0, 2, 1, 3])
    if flat is None:
        return None
    found = _gathered(flat)
    if found is not None and len(shape_of(found[0])) == 3:
        return PagedRead(*found, flat, None)
    if op_name(flat) != "reshape" or not isinstance(flat.args[0], Node):
        return None
    return _blocks(flat.args[0], flat, heads=3, size=2)


def _heads_moved_first(read: Node) -> PagedRead | None:
    """permute, then reshape."""
    while op_name(read) in ("clone", "contiguous") and isinstance(read.args[0], Node):
        read = read.args[0]
    if op_name(read) != "reshape" or not isinstance(read.args[0], Node):
        return None
    moved: Any = read.args[0]
    while op_name(moved) in ("clone", "contiguous"):
        moved = moved.args[0]
    for order, heads, size in (([0, 3, 1, 2, 4], 3, 2), ([0, 2, 1, 3, 4], 2, 3)):
        source = before_order(moved, order)
        if source is not None:
            found = _blocks(source, read, heads, size)
            if found is not None:
                return found
    return None


def _blocks(gather: Node, flat: Node, heads: int, size: int) -> PagedRead | None:
    """`gather` is (B, blocks, ...) with kv_heads and block size at these dimensions, and `flat` merges the blocks."""
    found = _gathered(gather)
    shape = shape_of(gather)
    if found is None or len(shape) != 5 or len(shape_of(found[0])) != 4:
        return None
    kept = [str(n) for n in (shape[0], shape[heads], shape[4])]
    merged = shape_of(flat)
    at = (0, 1, 3) if heads == 2 or str(merged[1]) == str(shape[heads]) else (0, 2, 3)
    if kept != [str(merged[d]) for d in at]:
        return None
    return PagedRead(*found, gather, (0, heads - 1, size - 1, 3))


def _gathered(node: Node) -> tuple[Node, Node] | None:
    """(pages, table) of ``pages[table]`` with a table of two dimensions."""
    name, source = op_name(node), node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    if name in ("index", "getitem"):
        index: Any = node.args[1]
        index = index[0] if isinstance(index, (list, tuple)) and len(index) == 1 else index
        is_table = isinstance(index, Node) and len(shape_of(index)) == 2
        return (source, index) if is_table else None
    if name == "reshape" and op_name(source) == "index_select" and argument(source, 1, "dim", None) == 0:
        flat_index, pages = argument(source, 2, "index", None), source.args[0]
        if isinstance(flat_index, Node) and op_name(flat_index) == "reshape" and isinstance(pages, Node):
            table = flat_index.args[0]
            rows = isinstance(table, Node) and len(shape_of(table)) == 2
            if rows and [str(n) for n in shape_of(node)[:2]] == [str(n) for n in shape_of(table)]:
                return pages, table  # type: ignore[return-value]
    return None
