"""Small helpers to look at FX nodes the same way in Dynamo, AOT and export graphs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .formula import SIZE, Lin

_OPERATOR_NAMES = {
    operator.add: "add",
    operator.iadd: "add",
    operator.imul: "mul",
    operator.itruediv: "truediv",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "truediv",
    operator.floordiv: "floordiv",
    operator.mod: "mod",
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
    "_unsafe_view": "reshape",
    "_softmax": "softmax",
    "_to_copy": "to",
    "subtract": "sub",
    "bitwise_and_": "and_",
    "logical_and_": "and_",
    "bitwise_or_": "or_",
    "logical_or_": "or_",
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
    """Fake value of a node: Dynamo keeps it under ``example_value``, AOT and export under ``val``. A tensor that the
    graph's module holds is its own example."""
    if not isinstance(node, Node):
        return node
    value = node.meta.get("example_value", node.meta.get("val"))
    if value is None and node.op == "get_attr":
        value = attribute(node.graph.owning_module, str(node.target))
    return value


def attribute(module: Any, path: str) -> Any:
    """``module.a.b.0`` by its dotted name; None if there is none."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


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
            terms[(SIZE, str(symbol))] = int(coefficient)
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
            return bool(schema.is_mutable) or node.is_impure(impure_random=False)  # assertions must stay
        name = getattr(target, "__name__", "")
        return name.endswith("_") or name in _VMAP_BORDERS or node.is_impure()
    return node.op == "call_module"


#: What opens and closes a ``torch.vmap`` in Dynamo's graphs; what lies between them may need them.
_VMAP_BORDERS = {"lazy_load_decompositions", "_vmap_increment_nesting", "_vmap_decrement_nesting"}


#: Operations whose result may share memory with their first argument.
_VIEWS = {
    *("getitem", "select", "slice", "narrow", "split", "chunk", "unbind", "reshape", "flatten", "view_as"),
    *("contiguous", "unsqueeze", "squeeze", "expand", "expand_as", "transpose", "permute", "t", "alias", "detach"),
    *("detach_", "to", "broadcast_to", "unflatten", "movedim", "moveaxis", "swapaxes", "swapdims", "as_strided"),
    *("numpy_T", "diagonal", "unfold", "tensor_split", "hsplit", "vsplit", "ravel", "type_as", "float", "half"),
    *("bfloat16", "double"),
}


def may_come_earlier(node: Node) -> bool:
    """Whether `node` is the same at any place after its inputs: a view reads nothing, and a copy reads what the graph
    made and nobody changes."""
    name = op_name(node)
    if name not in _VIEWS | {"clone"}:
        return False
    casts = ("to", "type_as", "float", "half", "bfloat16", "double")
    may_copy = name in ("contiguous", "reshape", "flatten", "ravel", "clone", *casts)
    return not may_copy or (_is_made_here(_root(node)) and not writers_of(node.all_input_nodes[0]))


def changed_in_place(node: Node) -> Node | None:
    """The first operation that writes into the memory of `node`, if anything that uses the node comes after it.

    A formula or a match that was read off `node` would be about what it held before. None: there is no such operation,
    or all that use the node come before it.
    """
    writers, readers = _users_of_memory(node)
    if not writers:
        return None
    order = {other: n for n, other in enumerate(node.graph.nodes)}
    first = min(writers, key=order.__getitem__)
    return first if any(order[reader] > order[first] for reader in readers) else None


def first_writer(node: Node) -> Node | None:
    """The first operation that writes into the memory of `node`; None if there is none."""
    writers = _users_of_memory(node)[0]
    return next((other for other in node.graph.nodes if other in writers), None) if writers else None


def writers_of(node: Node) -> list[Node]:
    """All operations that write into the memory of `node`, also through views of it."""
    return _users_of_memory(node)[0]


def is_written(node: Node) -> bool:
    """Whether the graph writes into the memory of `node`, or of the attribute that it is, at any time."""
    same = [node]
    if node.op == "get_attr":
        same = [other for other in node.graph.nodes if other.op == "get_attr" and other.target == node.target]
    return any(_users_of_memory(other)[0] for other in same)


def _users_of_memory(node: Node) -> tuple[list[Node], list[Node]]:
    """What writes to the memory of `node`, and what reads it, also through views."""
    shared, writers, readers = [node], [], []
    for alias in shared:  # grows while it is walked
        for user in alias.users:
            if _writes_to(user, alias):
                writers.append(user)
                continue
            readers.append(user)
            if op_name(user) in _VIEWS and user.args and user.args[0] is alias and user not in shared:
                shared.append(user)
    return writers, readers


def first_write(memory: Sequence[Node], start: Node, end: Node) -> Node | None:
    """The first operation from `start` on, and before `end`, that may write to memory of one of these nodes.

    Tensors from outside of the graph may share memory (an engine's keys and values are often views of one pool), unless
    they had different storages when the graph was captured.
    """
    order = list(end.graph.nodes)
    sources = [_root(source) for source in memory]
    for node in order[order.index(start) : order.index(end)]:
        targets = [_root(target) for target in node.all_input_nodes if _writes_to(node, target)]
        if any(_may_share(target, source) for target in targets for source in sources):
            return node
    return None


def _may_share(a: Node, b: Node) -> bool:
    if a is b:
        return True
    if _is_made_here(a) or _is_made_here(b):
        return False
    first, second = example(a), example(b)
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return True
    return first.untyped_storage()._cdata == second.untyped_storage()._cdata


def _is_made_here(root: Node) -> bool:
    """Whether memory was made in the graph, so that nobody else has it."""
    return root.op in ("call_function", "call_method")


def is_after(node: Node, other: Node) -> bool:
    """Whether `node` comes later in its graph than `other`."""
    order = list(node.graph.nodes)
    return order.index(node) > order.index(other)


def _root(node: Node) -> Node:
    """The node whose memory this one is a view of."""
    while node.op != "placeholder" and node.args and isinstance(node.args[0], Node):
        if op_name(node) not in _VIEWS and not has_side_effect(node):
            break
        node = node.args[0]
    return node


#: Operators that write to their first operand, although they are used for their value.
_AUGMENTED = (operator.iadd, operator.imul, operator.itruediv, operator.setitem)


def _writes_to(user: Node, target: Node) -> bool:
    if user.kwargs.get("out") is target or (user.target in _AUGMENTED and user.args[0] is target):
        return True
    if not has_side_effect(user) or user.op == "output":
        return False
    schema = getattr(user.target, "_schema", None)
    if schema is None:
        return bool(user.args) and user.args[0] is target
    named = {argument.name: argument for argument in schema.arguments}
    given = [*zip(schema.arguments, user.args), *((named[k], v) for k, v in user.kwargs.items() if k in named)]
    return any(value is target and a.alias_info is not None and a.alias_info.is_write for a, value in given)


def take_place(new: Node, old: Node) -> None:
    """`new` stands for `old` from now on: the same value and origin, and the name of what it replaced."""
    new.meta.update({k: v for k, v in old.meta.items() if k in ("example_value", "val", "stack_trace")})
    new.meta["swa_pass_replaced"] = old.name


def erase_all_unused(gm: GraphModule) -> int:
    """Erases every node whose value nobody uses and that writes nothing, or writes what nobody reads."""
    erased = erase_unused(gm, [node for node in gm.graph.nodes if not node.users])
    for node in list(gm.graph.nodes):
        if node._erased or node.target is not operator.setitem or node.users:
            continue
        if _is_read_by_none(node.args[0]):
            inputs = list(node.all_input_nodes)
            gm.graph.erase_node(node)
            erased += 1 + erase_unused(gm, inputs)
    names = {op_name(node) for node in gm.graph.nodes}
    if not names & {"_add_batch_dim", "_remove_batch_dim"}:
        for node in [node for node in gm.graph.nodes if op_name(node) in _VMAP_BORDERS and not node.users]:
            gm.graph.erase_node(node)
            erased += 1
    return erased


def _is_read_by_none(node: Any) -> bool:
    """Whether a tensor is made by this graph and nothing but writes to it uses it, or what goes into these writes."""
    if not isinstance(node, Node) or op_name(node) not in ("new_zeros", "new_empty", "zeros", "empty", "zeros_like"):
        return False
    writes = {user for user in node.users if user.target is operator.setitem and user.args[0] is node}
    others = [user for user in node.users if user not in writes]
    return not any(has_side_effect(user) or not user.users or set(user.users) - writes for user in others)


def is_metadata_check(node: Node) -> bool:
    """An assertion about the dtype and layout that tracing saw, which a graph computes with or without it."""
    return op_name(node) == "_assert_tensor_metadata"


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


def erase_unread(gm: GraphModule) -> int:
    """Erases what nobody uses, writes to tensors that the graph itself made and of which nothing is read afterwards,
    and tracing's assertions about metadata, which would keep both. Returns how many nodes went."""
    checks = [node for node in gm.graph.nodes if is_metadata_check(node)]
    for check in checks:
        gm.graph.erase_node(check)
    erased = len(checks) + erase_all_unused(gm)
    for node in reversed(list(gm.graph.nodes)):
        if node._erased or node.users or not _writes_only_inside(node) or _read_later(_root(node), node):
            continue
        inputs = list(node.all_input_nodes)
        gm.graph.erase_node(node)
        erased += 1 + erase_unused(gm, inputs)
    return erased


def _writes_only_inside(node: Node) -> bool:
    targets = [target for target in node.all_input_nodes if _writes_to(node, target)]
    return bool(targets) and all(target is node.args[0] for target in targets) and _is_made_here(_root(node))


def _read_later(memory: Node, node: Node) -> bool:
    """Whether anything after `node` uses `memory`, also through views of it and results of writes to it."""
    shared = [memory]
    for alias in shared:  # grows while it is walked
        for user in alias.users:
            if user is not node and is_after(user, node):
                return True
            same = op_name(user) in _VIEWS or _writes_to(user, alias)
            if same and user.args and user.args[0] is alias and user not in shared:
                shared.append(user)
    return False
