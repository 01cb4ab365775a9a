"""A list of slots of one packed sequence, gathered; new tokens may take marked places of it.

    keys = store[index]                                    store (slots, kv_heads, head_dim), index (S,)
    keys = store.index_select(0, index)
    keys.masked_scatter_((index == sentinel)[:, None, None], new)      new tokens in the marked places, in order
    keys.transpose(0, 1)[None]                             (1, kv_heads, S, head_dim), as an attention takes them

transformers' continuous batching: the texts of all requests lie side by side, and only the mask tells them apart. On
its sliding layers the store is read before this step's tokens are written, so those come in through marked places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Node

from ..graph import argument, op_name, shape_of, writers_of
from .reorder import before_swap


@dataclass(frozen=True)
class TokenRead:
    """Keys or values, gathered.

    pages: the store (slots, kv_heads, head_dim).  gather: the node that reads it.
    new: tokens (N, kv_heads, head_dim) for the places of `index` that hold `sentinel`.
    """

    idiom: ClassVar[str] = "token_list"
    pages: Node
    index: Node
    gather: Node
    new: Node | None = None
    sentinel: int = -1


def match(read: Node) -> TokenRead | None:
    """`read` is (1, kv_heads, S, head_dim), as an attention takes it."""
    tokens = _unpacked(read)
    if tokens is None:
        return None
    marked = _marked(tokens)
    gather, mask, new = marked if marked is not None else (tokens, None, None)
    found = _gathered(gather)
    if found is None or len(writers_of(gather)) > (1 if marked else 0):
        return None
    store, index = found
    if mask is None or new is None:
        return TokenRead(store, index, gather)
    sentinel = _sentinel(mask, index)
    return None if sentinel is None else TokenRead(store, index, gather, new, sentinel)


def _unpacked(read: Node) -> Node | None:
    """(S, kv_heads, head_dim) behind the attention's (1, kv_heads, S, head_dim)."""
    shape = shape_of(read)
    if len(shape) != 4 or shape[0] != 1:
        return None
    if _adds_first_dimension(read):
        return before_swap(read.args[0], 0, 1)
    inner = before_swap(read, 1, 2)
    return inner.args[0] if inner is not None and _adds_first_dimension(inner) else None  # type: ignore[return-value]


def _adds_first_dimension(node: Node) -> bool:
    if op_name(node) == "unsqueeze":
        return node.args[1] in (0, -len(shape_of(node)))
    return op_name(node) == "getitem" and node.args[1] in (None, (None,), (None, Ellipsis))


def _marked(tokens: Node) -> tuple[Node, Any, Any] | None:
    """(gathered, mask, new) of a masked_scatter; in place its result or what it changed may be what is read."""
    if op_name(tokens) in ("masked_scatter", "masked_scatter_"):
        gathered, mask, new = (argument(tokens, n, name, None) for n, name in enumerate(("self", "mask", "source")))
        return (gathered, mask, new) if isinstance(gathered, Node) else None
    writers = writers_of(tokens)
    return _marked(writers[0]) if len(writers) == 1 and op_name(writers[0]) == "masked_scatter_" else None


def _gathered(node: Node) -> tuple[Node, Node] | None:
    """(store, index) of ``store[index]`` with one list of slots."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or len(shape_of(source)) != 3:
        return None
    index: Any = None
    if op_name(node) == "index_select" and argument(node, 1, "dim", None) == 0:
        index = argument(node, 2, "index", None)
    elif op_name(node) in ("index", "getitem"):
        index = node.args[1]
        index = index[0] if isinstance(index, (list, tuple)) and len(index) == 1 else index
    return (source, index) if isinstance(index, Node) and len(shape_of(index)) == 1 else None


def _sentinel(mask: Any, index: Node) -> int | None:
    """The number in ``(index == number)[:, None, None]``."""
    while isinstance(mask, Node) and op_name(mask) in ("unsqueeze", "getitem", "reshape"):
        if [n for n in shape_of(mask) if n != 1] != [n for n in shape_of(mask.args[0]) if n != 1]:
            return None
        mask = mask.args[0]
    if not isinstance(mask, Node) or op_name(mask) != "eq" or mask.args[0] is not index:
        return None
    return mask.args[1] if isinstance(mask.args[1], int) else None
