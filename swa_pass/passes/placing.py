"""Where attention that reads an engine's memory may stand for a gather and the attention on what was gathered."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from ..graph import first_write, is_after, may_come_earlier


def place(site: Node, reads: Sequence[Node], operands: Sequence[Node]) -> tuple[Node, str]:
    """The node before which attention on memory itself may stand, and why there is none, if there is none.

    site: the attention on what `reads` gathered.  operands: what the new attention needs besides. Between a gather and
    the new place nothing may write to what the gather reads; an engine often writes this step's tokens there.
    """
    written = [writer for read in reads if (writer := first_write(read.all_input_nodes, read, site)) is not None]
    before = site
    for writer in written:
        before = writer if is_after(before, writer) else before
    moved = [read for read in reads if is_after(read, before)]  # these would read earlier than they did
    missed = next(
        (writer for read in moved if (writer := first_write(read.all_input_nodes, before, read)) is not None), None
    )
    if missed is not None:
        return before, f"{missed.name} writes to the store between the gathers of keys and values"
    late = next((node for node in operands if late_views(node, before) is None), None)
    if late is not None:
        return before, f"{before.name} writes to the store before {late.name}, which the attention needs, is there"
    changed = first_write(operands, before, site)
    return before, "" if changed is None else f"{changed.name} changes what the attention needs before it is there"


def late_views(node: Node, before: Node) -> list[Node] | None:
    """Views and copies that must come before `before` so that `node` is there too, in their order; None if there is
    more to compute than those."""
    if node is not before and not is_after(node, before):
        return []
    if node is before or not may_come_earlier(node):
        return None
    moved: list[Node] = []
    for source in node.all_input_nodes:
        more = late_views(source, before)
        if more is None:
            return None
        moved += [view for view in more if view not in moved]
    return [*moved, node]


def make_room(operands: Sequence[Node], before: Node) -> None:
    """Moves the views that `late_views` names."""
    for node in operands:
        for view in late_views(node, before) or []:
            before.prepend(view)
