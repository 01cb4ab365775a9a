"""Attention in plain torch for tensors on a device, where reading lengths would wait for it.

Positions stay tensors, so the call can be captured (CUDA graphs) and no shape depends on data. The price: the whole
store is read under a mask. Used where no kernel of the device is registered.
"""

from __future__ import annotations

import torch
from torch import Tensor

QUERY_BLOCK = 256


def slot_positions(lengths: Tensor, capacity: int, window: int) -> Tensor:
    """(B, C): the absolute position of the token in each slot, negative where the slot holds none yet.

    Slot s of a ring holds the newest position p < length with p % C == s.
    """
    slots = torch.arange(capacity, device=lengths.device)
    last = lengths[:, None] - 1
    if window > 0:
        return last - torch.remainder(last - slots, capacity)
    return torch.where(slots <= last, slots, torch.full_like(slots, -1))


def visible(key: Tensor, query: Tensor, starts: Tensor | None, ends: Tensor | None, window: int) -> Tensor:
    """(B, queries, keys): whether the query at a position (B, queries) sees the key at one (B or 1, keys).

    A key at a negative position is none.  starts, ends: (B,), not negative: positions before and from which on a row
    has no tokens; None: there are no such positions.
    """
    key, query = key[:, None], query[:, :, None]
    seen = (key >= (0 if starts is None else starts[:, None, None])) & (key <= query)
    if window > 0:
        seen = seen & (key > query - window)
    return seen if ends is None else seen & (query < ends[:, None, None])


def attend(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    window: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    new_lengths: Tensor | None,
    out: Tensor,
) -> None:
    batch, heads, queries, dim = q.shape
    kv_heads, tokens = k_new.shape[1:3]
    skipped = tokens - queries  # the queries are the last of the new tokens
    starts = None if starts is None else starts.clamp(min=0)
    count = torch.full_like(lengths, tokens) if new_lengths is None else new_lengths
    old = slot_positions(lengths, k_store.shape[2], window)
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    for i in range(skipped, tokens, QUERY_BLOCK):
        end = min(tokens, i + QUERY_BLOCK)
        mine = slice(i - skipped, end - skipped)
        first_new = max(0, i - window + 1) if window > 0 else 0
        fresh = torch.arange(first_new, end, device=q.device)
        key = torch.cat([old, lengths[:, None] + fresh], 1)
        query = lengths[:, None] + torch.arange(i, end, device=q.device)
        sees = visible(key, query, starts, lengths + count, window)
        # 0 * NaN is NaN: what no query sees may hold anything, so it is replaced before it is multiplied.
        seen = sees.any(1)[:, None, :, None]
        k = torch.cat([k_store, k_new[:, :, first_new:end]], 2).to(compute).masked_fill(~seen, 0)
        v = torch.cat([v_store, v_new[:, :, first_new:end]], 2).to(compute).masked_fill(~seen, 0)
        packed = q[:, :, mine].to(compute).reshape(batch, kv_heads, heads // kv_heads * (end - i), dim)
        scores = torch.matmul(packed, k.transpose(2, 3)).view(batch, heads, end - i, k.shape[2]) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~sees[:, None], float("-inf"))
        top = scores.amax(-1, keepdim=True)
        if sinks is not None:
            top = torch.maximum(top, sinks.to(compute)[:, None, None])
        top = top.masked_fill(top == float("-inf"), 0)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks.to(compute)[:, None, None] - top)
        weights = weights / total.masked_fill(total == 0, 1)
        values = torch.matmul(weights.view(batch, kv_heads, packed.shape[2], k.shape[2]), v)
        out[:, :, mine] = values.view(batch, heads, end - i, v.shape[3])
