"""One query a row on a flat list of blocks, softmax block by block, then merged per row: paged decode on Gaudi.

    M (N, B)    block n belongs to row b where M is 1    groups (N,)  the same as numbers    blocks (N,)  which pages

    queries = M @ (q * scale)                              one for every block
    scores  = queries @ pages[blocks]^T + bias             bias (N, size)
    top     = scores.amax(-1);  p = exp(scores - top);  total = p.sum(-1)
    best    = index_reduce(.., 0, groups, top, "amax")[groups]         the row's largest
    fix     = exp(top - best)
    sums    = M @ (M^T @ (total * fix))                    the row's sum, for every block
    out     = M^T @ (p @ values * (fix / sums))            sums may be maximum(sums, total * fix)

That is one softmax over all blocks of a row, whatever `best` is, as long as blocks of a row have the same. Steps that
only change a shape (they keep the order of the numbers) may stand anywhere, so shapes are compared where it matters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Node

from ..graph import argument, op_name, shape_of, writers_of
from .products import MATMUL
from .reorder import before_swap

#: Change a shape or a dtype, and keep the numbers in their order.
_RESHAPES = {
    *("reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "contiguous", "clone", "alias", "detach"),
    *("to", "float", "half", "bfloat16", "type_as"),
}


@dataclass(frozen=True)
class BlockRead:
    """Keys or values, gathered.

    pages: (count, size, kv_heads, head_dim), or (count, kv_heads, size, head_dim) if `heads_first`.
    blocks: (N,), which of them.  gather: the node that reads them.
    """

    idiom: ClassVar[str] = "flat_blocks"
    pages: Node
    blocks: Node
    gather: Node
    heads_first: bool

    @property
    def kv_heads(self) -> Any:
        return shape_of(self.gather)[1 if self.heads_first else 2]

    @property
    def head_dim(self) -> Any:
        return shape_of(self.pages)[-1]


@dataclass(frozen=True)
class FlatBlocks:
    """node: the result (B, heads * value head_dim).  query: (B, heads * head_dim).  heads: of the query.

    groups: (N,).  mapping: M.  bias: (N, 1, .., size), or None.
    """

    node: Node
    query: Node
    heads: int
    keys: BlockRead
    values: BlockRead
    groups: Node
    mapping: Node
    bias: Node | None


class _No(Exception):
    """Not this idiom."""


def match(node: Node) -> FlatBlocks | None:
    try:
        return _match(node)
    except _No:
        return None


def _match(node: Node) -> FlatBlocks:
    mapping, merged = _times_transposed(node)
    blocks, rows = shape_of(mapping)
    weighted, rescale = _call(merged, "mul")
    if op_name(_bare(weighted)) in ("div", "truediv"):
        weighted, rescale = rescale, weighted
    fix, sums = _call(rescale, "div", "truediv")
    top, best = _call(_call(fix, "exp")[0], "sub")
    groups, best_writer = _grouped_maximum(best, top, blocks)
    weights, values = _product(weighted)
    total = _check_sums(_bare(sums), mapping, _bare(fix))
    _require(op_name(total) == "sum" and _over_last(total) and _bare(total.args[0]) is _bare(weights))
    scores, subtracted = _call(_call(weights, "exp")[0], "sub")
    largest = _bare(top)
    _require(_bare(subtracted) is largest and op_name(largest) in ("amax", "max") and _over_last(largest))
    _require(_bare(largest.args[0]) is _bare(scores))
    product, bias, bias_writer = _with_bias(_bare(scores))
    queries, keys = _product(product)
    transposed = before_swap(_bare(keys), -1, -2)
    _require(transposed is not None)
    spread, query = _matmul(_bare(queries))
    _require(spread is mapping)
    key_read, value_read = _read(transposed), _read(values)
    _require(key_read.blocks is value_read.blocks and key_read.heads_first == value_read.heads_first)
    _require(str(key_read.kv_heads) == str(value_read.kv_heads))
    heads = _heads(scores, weighted, queries, key_read.kv_heads, blocks)
    if bias is not None:
        shape = shape_of(bias)
        _require(len(shape) == len(shape_of(scores)) and all(n == 1 for n in shape[1:-1]))
        _require([str(shape[0]), str(shape[-1])] == [str(blocks), str(shape_of(scores)[-1])])
    _require(str(shape_of(query)[0]) == str(rows))
    found = FlatBlocks(node, query, heads, key_read, value_read, groups, mapping, bias)
    _require(_writers_between(found) <= {*best_writer, *bias_writer})
    return found


def _require(condition: Any) -> None:
    if not condition:
        raise _No


def _bare(node: Any) -> Any:
    """Without changes of shape."""
    while isinstance(node, Node) and node.args and isinstance(node.args[0], Node):
        if op_name(node) == "getitem":  # x[:, None]
            index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
            if any(part not in (None, Ellipsis, slice(None)) for part in index):
                break
        elif op_name(node) not in _RESHAPES:
            break
        node = node.args[0]
    return node


def _call(node: Any, *names: str) -> tuple[Any, Any]:
    """The arguments of a call of one of these names, behind changes of shape."""
    node = _bare(node)
    _require(isinstance(node, Node) and op_name(node) in names and node.args)
    return node.args[0], node.args[1] if len(node.args) > 1 else None


def _matmul(node: Any) -> tuple[Node, Node]:
    """Both factors of a product of two matrices."""
    _require(isinstance(node, Node) and (op_name(node) == "mm" or op_name(node) in MATMUL))
    a, b = node.args[:2]
    _require(len(shape_of(a)) == 2 and len(shape_of(b)) == 2)
    return a, b


def _times_transposed(node: Any) -> tuple[Node, Node]:
    """(M, x) of ``M^T @ x``."""
    mapping, x = _matmul(node)
    plain = before_swap(mapping, 0, 1)
    _require(isinstance(plain, Node))
    return plain, x  # type: ignore[return-value]


def _over_last(node: Node) -> bool:
    dim: Any = argument(node, 1, "dim", None)
    dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    return isinstance(dim, int) and dim % len(shape_of(node.args[0])) == len(shape_of(node.args[0])) - 1


def _product(node: Any) -> tuple[Any, Any]:
    """The factors of a product of stacks of matrices that broadcast, also as ATen spells it (see products.py)."""
    node = node if isinstance(node, Node) and op_name(node) in MATMUL else _bare(node)
    _require(isinstance(node, Node))
    if op_name(node) in MATMUL:
        return node.args[0], node.args[1]
    _require(op_name(node) == "bmm")
    return _before_broadcast(node.args[0]), _before_broadcast(node.args[1])


def _before_broadcast(node: Any) -> Any:
    """What was expanded over the query heads and flattened to a stack for bmm."""
    for names in (("reshape",), ("clone", "contiguous"), ("expand",)):
        if isinstance(node, Node) and op_name(node) in names:
            node = node.args[0]
    return node


def _grouped_maximum(best: Any, top: Any, blocks: Any) -> tuple[Node, list[Node]]:
    """`groups`, if `best` is for every block the same within a group, and what wrote to it in place."""
    chosen = _bare(best)
    _require(isinstance(chosen, Node) and op_name(chosen) == "index_select" and argument(chosen, 1, "dim", None) == 0)
    groups = argument(chosen, 2, "index", None)
    reduced = _bare(chosen.args[0])
    _require(isinstance(reduced, Node) and op_name(reduced) in ("index_reduce", "index_reduce_"))
    dim, index, source, how = reduced.args[1:5] if len(reduced.args) > 4 else (None,) * 4
    _require((dim, how) == (0, "amax") and index is groups and _bare(source) is _bare(top))
    _require(op_name(_bare(reduced.args[0])) in ("full", "new_full", "full_like"))  # a floor, the same for everybody
    _require(str(shape_of(source)[0]) == str(blocks) and len(shape_of(groups)) == 1)
    return groups, [reduced] if op_name(reduced) == "index_reduce_" else []


def _check_sums(sums: Any, mapping: Node, fix: Any) -> Any:
    """`total`, the sum of every block's weights before they are moved to the row's maximum."""
    if isinstance(sums, Node) and op_name(sums) in ("maximum", "max"):
        a, b = (_bare(x) for x in sums.args[:2])
        sums, own = (a, b) if op_name(a) == "mm" or op_name(a) in MATMUL else (b, a)
    else:
        own = None
    spread, per_row = _matmul(sums)
    again, moved = _times_transposed(_bare(per_row))
    _require(spread is mapping and again is mapping)
    moved = _bare(moved)
    _require(own is None or own is moved)
    a, b = _call(moved, "mul")
    _require(fix in (_bare(a), _bare(b)))
    return _bare(b if _bare(a) is fix else a)


def _writers_between(found: FlatBlocks) -> set[Node]:
    """What writes to anything between the operands and the result: nothing but the steps that are known may."""
    operands = {found.query, found.mapping, found.groups, found.keys.gather, found.values.gather, found.bias}
    steps, writers = [found.node], set()
    for step in steps:  # grows while it is walked
        writers.update(writers_of(step))
        steps += [source for source in step.all_input_nodes if source not in operands and source not in steps]
    return writers


def _with_bias(scores: Any) -> tuple[Any, Node | None, list[Node]]:
    """(product, bias, what added it in place)."""
    added = [user for user in scores.users if op_name(user) == "add_" and user.args[0] is scores]
    _require(len(added) <= 1)
    if op_name(scores) in ("add", "add_"):
        added.append(scores)
    if not added:
        return scores, None, []
    _require(len(added) == 1 and isinstance(added[0].args[1], Node) and not added[0].kwargs)
    return added[0].args[0], added[0].args[1], added


def _read(node: Any) -> BlockRead:
    """The gather behind blocks (N, kv_heads, [1,] size, head_dim)."""
    node = _bare(node)
    moved = before_swap(node, 1, 2) if len(shape_of(node)) == 4 else None
    gather = _bare(moved) if moved is not None else node
    _require(isinstance(gather, Node) and gather.args and len(shape_of(gather)) == 4)
    if op_name(gather) == "index_select":
        _require(argument(gather, 1, "dim", None) == 0)
        blocks = argument(gather, 2, "index", None)
    else:
        _require(op_name(gather) in ("index", "getitem"))
        blocks = gather.args[1]
        blocks = blocks[0] if isinstance(blocks, (list, tuple)) and len(blocks) == 1 else blocks
    _require(isinstance(blocks, Node) and len(shape_of(blocks)) == 1 and isinstance(gather.args[0], Node))
    return BlockRead(gather.args[0], blocks, gather, heads_first=moved is None)


def _heads(scores: Any, weighted: Any, queries: Any, kv_heads: Any, blocks: Any) -> int:
    """The number of query heads, if numbers lie as (block, kv head, query head of its group, ..) wherever shapes were
    let through."""
    shape, factor = shape_of(scores), shape_of(queries)
    _require(len(shape) >= 3 and str(shape[0]) == str(blocks) and str(shape[1]) == str(kv_heads))
    _require([str(n) for n in shape[:-1]] == [str(n) for n in factor[:-1]])
    _require([str(n) for n in shape_of(weighted)[:-1]] == [str(n) for n in shape[:-1]])
    _require(all(isinstance(n, int) for n in shape[1:-1]))
    return math.prod(shape[1:-1])
