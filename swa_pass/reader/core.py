"""The walk itself: from a node to its `Field`, and the table of operations that the other files fill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ..formula import Datum, Field, Lin, Opaque, constant
from ..graph import attribute, changed_in_place, example, first_writer, integer, is_written, op_name, shape_of

Reader = Callable[[Node, dict[Node, Field]], Field]
READERS: dict[str, Reader] = {}


def read(value: Any, memo: dict[Node, Field] | None = None) -> Field:
    """The `Field` of a node, or of a Python scalar. Never raises for an unknown operation: it reads as `Opaque`."""
    memo = {} if memo is None else memo
    if not isinstance(value, Node):
        if isinstance(value, (bool, float)):
            return constant(value)
        lin = integer(value)
        return constant(lin if lin is not None else Opaque(f"the constant {value!r}"))
    if value not in memo:
        memo[value] = _read_node(value, memo)
    return memo[value]


def _read_node(node: Node, memo: dict[Node, Field]) -> Field:
    fake = example(node)
    if not isinstance(fake, torch.Tensor):
        lin = integer(node)
        return constant(lin if lin is not None else Opaque(f"the value {node.name}"))
    writer = changed_in_place(node)
    if writer is not None:
        return Field(tuple(fake.shape), lambda index: Opaque(f"{node.name}, which {op_name(writer)} changes in place"))
    reader = READERS.get(operation(node)) if node.op in ("call_function", "call_method") else None
    if reader is None:
        return leaf(node, fake)
    return reader(node, memo)


#: Operations that also exist in a form which writes to their first argument; the result is the same.
_IN_PLACE = {"add_", "sub_", "mul_", "and_", "or_", "masked_fill_"}


def operation(node: Node) -> str:
    """Name of the operation that made a value, without the underscore of its form in place."""
    name = op_name(node)
    if name in _IN_PLACE and isinstance(node.args[0], Node) and first_writer(node.args[0]) is node:
        return name[:-1]
    return name


def leaf(node: Node, fake: torch.Tensor) -> Field:
    """A tensor the graph does not make: its integer elements are symbols, anything else is opaque."""
    if node.op == "get_attr" and _is_constant(node):
        return literal(node)
    if node.op in ("placeholder", "get_attr") and not fake.is_floating_point() and fake.dtype != torch.bool:
        return Field(tuple(fake.shape), lambda index: Lin.symbol((node.name, *index)))
    what = f"the graph input {node.name}" if node.op == "placeholder" else f"the operation {op_name(node)}"
    if node.op in ("call_function", "call_method") and fake.is_floating_point() and _is_of_kept_things(node):
        return Field(tuple(fake.shape), lambda index: Datum(what, node.name, index))
    return Field(tuple(fake.shape), lambda index: Opaque(what))


#: Operations that a number computed from kept keys may have behind it; more of them are not looked at.
_FEW = 64


def _is_of_kept_things(node: Node) -> bool:
    """Whether a tensor is computed from the cache's keys or values and from weights, and from nothing that knows a
    position: no integers (lengths, indices, sizes that change), nothing that is written to."""
    queue, seen, keeps = [node], {node}, False
    while queue:
        current = queue.pop()
        if op_name(current) == "swa_pass::view":
            keeps = True
            continue
        fake = example(current)
        if not isinstance(fake, torch.Tensor) or not fake.is_floating_point() or len(seen) > _FEW:
            return False
        given = current.op not in ("call_function", "call_method")
        if is_written(current) or (given and not isinstance(fake, torch.nn.Parameter)):
            return False
        new = [other for other in current.all_input_nodes if other not in seen]
        seen.update(new)
        queue += new
    return keeps


def _is_constant(node: Node) -> bool:
    """A number of the program text, which torch.export lifts out under this name."""
    return str(node.target).rsplit(".", 1)[-1].startswith("lifted_tensor") and not is_written(node)


def reads(*names: str) -> Callable[[Reader], Reader]:
    def register(fn: Reader) -> Reader:
        for name in names:
            READERS[name] = fn
        return fn

    return register


def literal(node: Node) -> Field:
    """A tensor whose numbers stand in the graph: of one number, or of equal ones."""
    shape = shape_of(node)
    values = attribute(node.graph.owning_module, str(node.target))
    if type(values) is not torch.Tensor or values.is_floating_point() or not 0 < values.numel() <= 4096:
        return Field(shape, lambda index: Opaque("a constant tensor"))
    first = values.flatten()[0].item()
    if not bool((values == first).all()):
        return Field(shape, lambda index: Opaque("a constant tensor of several numbers"))
    return Field(shape, lambda index: bool(first) if values.dtype == torch.bool else Lin(int(first)))
