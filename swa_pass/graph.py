"""Small helpers to look at FX nodes the same way in Dynamo, AOT and export graphs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .formula import Lin

_OPERATOR_NAMES = {
    operator.add: "add",
    operator.iadd: "add",
    operator.imul: "mul",
    operator.itruediv: "truediv",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "truediv",
    operator.floordiv: "floordiv",
    operator.matmul: "matmul",
    operator.neg: "neg",
    operator.and_: "and",
    operator.or_: "or",
    operator.invert: "not",
    operator.ge: "ge",
    operator.gt: "gt",
    operator.le: "le",
    operator.lt: "lt",
    operator.eq: "eq",
    operator.ne: "ne",
    operator.getitem: "getitem",
}
_ALIASES = {
    "bitwise_and": "and",
    "logical_and": "and",
    "__and__": "and",
    "bitwise_or": "or",
    "logical_or": "or",
    "__or__": "or",
    "bitwise_not": "not",
    "logical_not": "not",
    "view": "reshape",
    "_to_copy": "to",
    "subtract": "sub",
}


def op_name(node: Node) -> str:
    """Canonical name of what a node does, the same for functions, methods and ATen overloads."""
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        target: Any = node.target
        if target in _OPERATOR_NAMES:
            return _OPERATOR_NAMES[target]
        if isinstance(target, torch._ops.OpOverload):
            if target.namespace != "aten":
                return f"{target.namespace}::{target.overloadpacket.__name__}"
            name = target.overloadpacket.__name__
        elif isinstance(target, torch._ops.OpOverloadPacket):
            name = target.__name__
        else:
            name = getattr(target, "__name__", str(target))
    else:
        return node.op
    return _ALIASES.get(name, name)


def example(node: Any) -> Any:
    """Fake value of a node: Dynamo keeps it under ``example_value``, AOT and export under ``val``."""
    if isinstance(node, Node):
        return node.meta.get("example_value", node.meta.get("val"))
    return node


def shape_of(node: Any) -> tuple[Any, ...]:
    value = example(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def integer(value: Any) -> Lin | None:
    """A Python int, a SymInt or a node that holds one, as a linear form; None if it is not linear."""
    value = example(value)
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        return None
    if isinstance(value, int):
        return Lin(value)
    terms: dict[Any, int] = {}
    const = 0
    for symbol, coefficient in value.node.expr.as_coefficients_dict().items():
        if not coefficient.is_Integer:
            return None
        if symbol.is_Number:
            const += int(symbol) * int(coefficient)
        else:
            terms[("size", str(symbol))] = int(coefficient)
    return Lin.build(const, terms)


def argument(node: Node, position: int, name: str, default: Any) -> Any:
    """Argument of a call by position or by name."""
    if name in node.kwargs:
        return node.kwargs[name]
    return node.args[position] if position < len(node.args) else default


def before(node: Any, names: Collection[str], same: Callable[[Any, Any], bool]) -> Any:
    """Back through operations of these names, as far as ``same(value before, value after)`` holds."""
    while isinstance(node, Node) and op_name(node) in names and isinstance(node.args[0], Node):
        if not same(example(node.args[0]), example(node)):
            break
        node = node.args[0]
    return node


def has_side_effect(node: Node) -> bool:
    """Whether a node must stay although nobody uses its value: it writes, or it is the graph's border."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op == "call_function":
        target: Any = node.target
        if target is operator.setitem:
            return True
        if target in _OPERATOR_NAMES:  # and_, or_, ... end in an underscore and write nothing
            return False
        schema = getattr(target, "_schema", None)
        if schema is not None:
            return bool(schema.is_mutable)
        return getattr(target, "__name__", "").endswith("_") or node.is_impure()
    return node.op == "call_module"


_IN_PLACE = (operator.iadd, operator.imul, operator.itruediv, operator.setitem)
#: Results that may share memory with their first argument.
_SHARING = {"getitem", "select", "slice", "unsqueeze", "squeeze", "reshape", "expand", "expand_as", "broadcast_to",
            "transpose", "permute", "t", "alias", "detach", "to", "contiguous"}  # fmt: skip


def changed_in_place(node: Node) -> Node | None:
    """Something that writes into this tensor, or into a view of it, and after which the tensor is used again."""
    aliases, queue = {node}, [node]
    while queue:
        for user in queue.pop().users:
            if user.args and user.args[0] in aliases and op_name(user) in _SHARING and user not in aliases:
                aliases.add(user)
                queue.append(user)
    uses = [user for alias in aliases for user in alias.users]
    for user in uses:
        if any(_writes(user, alias) for alias in aliases) and any(later is not user and user < later for later in uses):
            return user
    return None


def _writes(user: Node, tensor: Node) -> bool:
    if user.kwargs.get("out") is tensor:
        return True
    schema = getattr(user.target, "_schema", None) if user.op == "call_function" else None
    if schema is not None:
        named = [(argument.name, argument.alias_info) for argument in schema.arguments]
        written = {name for name, alias in named if alias is not None and alias.is_write}
        given = {**dict(zip([name for name, _ in named], user.args)), **user.kwargs}
        return any(given.get(name) is tensor for name in written)
    if not user.args or user.args[0] is not tensor:
        return False
    return user.target in _IN_PLACE if user.target in (*_OPERATOR_NAMES, *_IN_PLACE) else has_side_effect(user)


def erase_all_unused(gm: GraphModule) -> int:
    """Erases every node whose value nobody uses and that writes nothing."""
    return erase_unused(gm, [node for node in gm.graph.nodes if not node.users])


def erase_unused(gm: GraphModule, candidates: list[Node]) -> int:
    """Erases `candidates` and, backwards, their inputs, as far as nothing uses them. Returns how many went."""
    queue, erased = list(candidates), 0
    while queue:
        node = queue.pop()
        if node._erased or node.users or has_side_effect(node):
            continue
        inputs = list(node.all_input_nodes)
        gm.graph.erase_node(node)
        erased += 1
        queue.extend(inputs)
    return erased
