"""Attention on tokens and blocks that an engine hands out, read where they lie: the lists and the mask are given.

    attend_tokens   one packed sequence of queries, a list of slots, a mask for every query and slot
                    (continuous batching: rows of many texts side by side, told apart by the mask)
    attend_blocks   one query a row, a flat list of blocks, and for each block the row that it belongs to
    block_rows      that row, where an engine says it twice

    pages     . A A . B A B .        blocks = [1, 2, 5, 4, 6]   rows = [0, 0, 0, 1, 1]   (A is row 0, B is row 1)

Nothing is known here about windows: whoever made the lists left out what a query does not see. A key that the mask
hides (False, or a number at or below -1e4) is not read, and a query that sees nothing returns zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import schema
from .build import take_over
from .checks import fail, shape

#: A mask's number at or below this hides a key (`masks.ADDITIVE_HIDDEN`; operators run without the prover).
HIDDEN = -1e4

SCHEMAS = {
    "attend_tokens": (
        "(Tensor q, Tensor k_store, Tensor v_store, Tensor index, Tensor? mask=None, Tensor? k_new=None, "
        "Tensor? v_new=None, *, float scale, int sentinel=-1, float softcap=0.0, Tensor? sinks=None) -> Tensor"
    ),
    "attend_blocks": (
        "(Tensor q, Tensor k_pages, Tensor v_pages, Tensor blocks, Tensor rows, Tensor? bias=None, *, float scale) "
        "-> Tensor"
    ),
    "block_rows": "(Tensor groups, Tensor mapping) -> Tensor",
}


def attend_tokens(
    q: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    index: Tensor,
    mask: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    *,
    scale: float,
    sentinel: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q (1, heads, Q, head_dim) on ``store[index]``, index (S,), of stores (slots, kv_heads, head_dim).

    mask: (Q, S) or (1, 1, Q, S), boolean or additive.  k_new, v_new: (N, kv_heads, head_dim): the n-th place of `index`
    that holds `sentinel` is new token n.  Returns (1, heads, Q, value head_dim).
    """
    op = "attend_tokens"
    if q.dim() != 4 or q.shape[0] != 1:
        fail(op, f"q must have the shape (1, heads, queries, head_dim); it has {shape(q)}")
    _check_stores(op, q, k_store, v_store, 3)
    if index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
        fail(op, f"index must be one list of slots, int64; it is {index.dtype} {shape(index)}")
    queries, keys = q.shape[2], index.shape[0]
    if mask is not None and tuple(mask.shape) not in ((queries, keys), (1, 1, queries, keys)):
        fail(op, f"mask must have the shape ({queries} queries, {keys} slots); it has {shape(mask)}")
    if (k_new is None) != (v_new is None):
        fail(op, "new keys and new values must be given together")
    k, v = (
        _with_new(op, store[index.long().clamp(min=0)], index, new, sentinel)
        for store, new in ((k_store, k_new), (v_store, v_new))
    )
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    seen = None
    if mask is not None:
        mask = mask.reshape(queries, keys)
        seen = mask if mask.dtype == torch.bool else mask > HIDDEN
        # 0 * NaN is NaN: what no query sees may hold anything.
        unseen = ~seen.any(0)[:, None]
        k, v = k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)
    bias = None
    if mask is not None and seen is not None:
        given = torch.zeros((), dtype=q.dtype, device=q.device) if mask.dtype == torch.bool else mask.to(q.dtype)
        bias = torch.where(seen, given, float("-inf"))
    if softcap <= 0 and sinks is None and q.dtype != torch.float64:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=True)
    else:
        out = _explicit(q, k, v, bias, scale, softcap, sinks)
    if seen is not None:
        out = out.masked_fill(~seen.any(1)[:, None], 0)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _with_new(op: str, gathered: Tensor, index: Tensor, new: Tensor | None, sentinel: int) -> Tensor:
    if new is None:
        return gathered
    if new.shape[1:] != gathered.shape[1:] or new.dtype != gathered.dtype:
        fail(op, f"new tokens {new.dtype} {shape(new)} do not fit the store's, {gathered.dtype} {shape(gathered)}")
    return gathered.masked_scatter((index == sentinel)[:, None, None], new)


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    groups = q.shape[1] // k.shape[1]
    k, v = (x.to(compute).repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.matmul(q.to(compute), k.transpose(2, 3)) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if sinks is not None:
        column = sinks.to(compute)[None, :, None, None].expand(1, -1, q.shape[2], 1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return torch.matmul(weights, v).to(q.dtype)


def attend_blocks(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    blocks: Tensor,
    rows: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float,
) -> Tensor:
    """Attention of q (B, heads, head_dim), one query a row, on the blocks of pages (count, kv_heads, size, head_dim).

    blocks: (N,), which.  rows: (N,), whose; a number outside of [0, B) is nobody's.  bias: (N, size), added to the
    scores.  Returns (B, heads, value head_dim). The sums run over each row's blocks in the order of the list.
    """
    op = "attend_blocks"
    if q.dim() != 3:
        fail(op, f"q must have the shape (batch, heads, head_dim); it has {shape(q)}")
    _check_stores(op, q, k_pages, v_pages, 4)
    batch, heads, dim = q.shape
    count, (_, kv_heads, size, value_dim) = blocks.shape[0], v_pages.shape
    for name, x in (("blocks", blocks), ("rows", rows)):
        if x.shape != (count,) or x.dtype not in (torch.int32, torch.int64):
            fail(op, f"{name} must be a list of {count} integers; it is {x.dtype} {shape(x)}")
    if bias is not None and bias.shape != (count, size):
        fail(op, f"bias must have the shape ({count} blocks, {size} tokens); it has {shape(bias)}")
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    mine = (rows >= 0) & (rows < batch)
    row = torch.where(mine, rows, batch).long()  # one row more, for what is nobody's
    hidden = ~mine[:, None]
    if bias is not None:
        hidden = hidden | (bias <= HIDDEN)
    k, v = (pages[blocks.long()].to(compute).masked_fill(hidden[:, None, :, None], 0) for pages in (k_pages, v_pages))
    grouped = F.pad(q, (0, 0, 0, 0, 0, 1))[row].to(compute).reshape(count, kv_heads, heads // kv_heads, dim)
    scores = torch.matmul(grouped, k.transpose(2, 3)) * scale  # (N, kv_heads, group, size)
    if bias is not None:
        scores = scores + bias.to(compute)[:, None, None]
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    top = scores.new_full((batch + 1, *scores.shape[1:3]), float("-inf"))
    top = top.scatter_reduce(0, row[:, None, None].expand(scores.shape[:3]), scores.amax(-1), "amax")
    top = top.masked_fill(top == float("-inf"), 0)
    weights = torch.exp(scores - top[row][..., None])
    total = weights.new_zeros(top.shape).index_add(0, row, weights.sum(-1))
    out = weights.new_zeros((*top.shape, value_dim)).index_add(0, row, torch.matmul(weights, v))
    out = out / total.masked_fill(total == 0, 1)[..., None]
    return out[:batch].reshape(batch, heads, value_dim).to(q.dtype)


def block_rows(groups: Tensor, mapping: Tensor) -> Tensor:
    """(N,) int64: the row that each block belongs to, -1 if to none.

    groups: (N,), a number.  mapping: (N, B), 1 where the block belongs to the row. ValueError (on a device: an
    assertion there) where a block belongs to a row by `mapping` and to another one by `groups`.
    """
    given = mapping != 0
    same = (groups[:, None] == torch.arange(mapping.shape[1], device=mapping.device)) & (mapping == 1)
    taken = given.any(1)
    good = ((given == same) | ~taken[:, None]).all()
    message = (
        "swa_pass.block_rows: block_groups and block_mapping disagree about whose a block is, or a block is shared"
    )
    if groups.device.type == "cpu":
        if not good:
            raise ValueError(f"{message}; run this model without swa_pass")
    else:
        torch._assert_async(good, message)
    return torch.where(taken, groups.long(), -1)


def _check_stores(op: str, q: Tensor, k: Tensor, v: Tensor, dims: int) -> None:
    for name, x in (("keys", k), ("values", v)):
        if x.dim() != dims or x.dtype != q.dtype or x.device != q.device:
            seen = f"{x.dtype} {shape(x)} on {x.device}"
            fail(op, f"{name} must have {dims} dimensions, {q.dtype}, on {q.device}; they are {seen}")
    if k.shape[1:-1] != v.shape[1:-1] or k.shape[-1] != q.shape[-1]:  # views of one pool may differ in length
        fail(op, f"keys {shape(k)}, values {shape(v)} and q {shape(q)} do not fit together")
    if q.shape[1] % max(k.shape[1], 1):
        fail(op, f"{q.shape[1]} query heads cannot share {k.shape[1]} kv heads; the number must be a multiple")


def _fake_tokens(q: Tensor, k_store: Tensor, v_store: Tensor, *args: object, **kwargs: object) -> Tensor:
    batch, heads, queries, _ = q.shape
    return q.new_empty(batch, queries, heads, v_store.shape[-1]).transpose(1, 2)


def _fake_blocks(q: Tensor, k_pages: Tensor, v_pages: Tensor, *args: object, **kwargs: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v_pages.shape[-1])


def _fake_rows(groups: Tensor, mapping: Tensor) -> Tensor:
    return groups.new_empty(groups.shape, dtype=torch.int64)


def register() -> None:
    """Define the operators. Called once, at import of `swa_pass.ops`."""
    for name, plain, fake in (
        ("attend_tokens", attend_tokens, _fake_tokens),
        ("attend_blocks", attend_blocks, _fake_blocks),
        ("block_rows", block_rows, _fake_rows),
    ):
        for full_name in (name, "_" + name):
            schema.library.define(full_name + SCHEMAS[name], tags=(torch.Tag.pt2_compliant_tag,))
            torch.library.register_fake(f"{schema.NAMESPACE}::{full_name}", fake)
        schema.library.impl(name, _default(name, plain), "CompositeExplicitAutograd")
        schema.library.impl("_" + name, plain, "CompositeExplicitAutograd")


def _default(name: str, plain: Any) -> Any:
    """Devices without a kernel; the first CPU call tries to get one."""

    def run(q: Tensor, *args: Any, **kwargs: Any) -> Any:
        if take_over(q.device):
            return getattr(torch.ops.swa_pass, name)(q, *args, **kwargs)
        return plain(q, *args, **kwargs)

    return run
