"""Changes of the order of dimensions: ``permute``, ``transpose`` and ``t``."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..graph import op_name, shape_of


def before_order(node: Any, order: list[int]) -> Node | None:
    """x, if `node` is x with its dimensions in this order (copies may lie in between)."""
    if not isinstance(node, Node) or not node.args or not isinstance(node.args[0], Node):
        return None
    name, count = op_name(node), len(shape_of(node))
    if name in ("clone", "contiguous"):
        return before_order(node.args[0], order)
    if name == "permute":
        dims: Any = node.args[1] if isinstance(node.args[1], (list, tuple)) else node.args[1:]
        return node.args[0] if [d % count for d in dims] == order else None
    if len(order) != count or name not in ("transpose", "t"):
        return None
    a, b = (0, count - 1) if name == "t" else (int(d) % count for d in node.args[1:3])  # type: ignore[arg-type]
    swapped = list(range(count))
    swapped[a], swapped[b] = swapped[b], swapped[a]
    return node.args[0] if swapped == order else None


def before_swap(node: Any, a: int, b: int) -> Node | None:
    """x, if `node` is x with two dimensions swapped."""
    order = list(range(len(shape_of(node))))
    if not order:
        return None
    order[a], order[b] = order[b], order[a]
    return before_order(node, order)
