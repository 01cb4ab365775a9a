"""The product of two stacks of matrices, as ``matmul`` or as ATen spells it.

matmul(a, b)                                                          a (B, H, m, k), b (B, H, k, n)
reshape(bmm(reshape(expand(a)), reshape(expand(b))), (B, H, m, n))    what it decomposes into
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..graph import op_name, shape_of

MATMUL = {"matmul", "__matmul__"}


def factors(node: Any) -> tuple[Any, Any] | None:
    """The two factors of a product of 4-dimensional stacks that `node` is the result of; None if it is none.

    With ``matmul`` also of five dimensions, (B, kv_heads, group, m, n): grouped heads.
    """
    if not isinstance(node, Node) or len(shape_of(node)) not in (4, 5):
        return None
    name = op_name(node)
    if name in MATMUL:
        return node.args[0], node.args[1]
    if len(shape_of(node)) != 4:
        return None
    if name != "reshape" or not isinstance(node.args[0], Node) or op_name(node.args[0]) != "bmm":
        return None
    lead = [str(size) for size in shape_of(node)[:2]]
    both = [_stack(factor, lead) for factor in node.args[0].args[:2]]
    return None if None in both else (both[0], both[1])


def _stack(node: Any, lead: list[str]) -> Node | None:
    """(B, H, m, n) behind its flat form (B * H, m, n)."""
    if not isinstance(node, Node) or op_name(node) != "reshape" or not isinstance(node.args[0], Node):
        return None
    stack = node.args[0]
    while op_name(stack) in ("expand", "clone", "contiguous") and isinstance(stack.args[0], Node):
        if [str(s) for s in shape_of(stack)] != [str(s) for s in shape_of(stack.args[0])]:
            break
        stack = stack.args[0]
    shape = shape_of(stack)
    if len(shape) != 4 or [str(size) for size in shape[:2]] != lead:
        return None
    return stack if [str(s) for s in shape[2:]] == [str(s) for s in shape_of(node)[1:]] else None
