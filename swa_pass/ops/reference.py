"""What the operators mean, in plain torch: short, slow, and the thing every kernel is tested against.

Terms: a row is one sequence of the batch. `lengths[b]` counts the tokens that row has put into its store before this
step. The token at absolute position p lives in slot `p % capacity` of a ring (window > 0) and in slot p of a linear
store (window == 0). `starts[b]` is the position of the row's first real token; left pads lie before it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def slot_of(position: int, capacity: int, window: int) -> int:
    return position % capacity if window > 0 else position


def _row_keys(store: Tensor, new: Tensor, length: int, positions: range, window: int) -> Tensor:
    """One row's tokens at `positions`, (kv_heads, len(positions), dim): old ones from the store, others from `new`."""
    slots = [slot_of(p, store.shape[1], window) for p in positions if p < length]
    fresh = [p - length for p in positions if p >= length]
    return torch.cat([store[:, slots], new[:, fresh]], dim=1)


def attend(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    lengths: Tensor,
    starts: Tensor | None = None,
    *,
    window: int,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    new_lengths: Tensor | None = None,
) -> Tensor:
    """Attention of the last Q of the new tokens over their window, in float64; returns (B, H, Q, Dv) in q's dtype."""
    batch, heads, queries, _ = q.shape
    skipped = k_new.shape[2] - queries
    group = heads // k_new.shape[1]
    out = q.new_zeros(batch, queries, heads, v_new.shape[3]).transpose(1, 2)
    for b in range(batch):
        length = int(lengths[b])
        start = 0 if starts is None else int(starts[b])
        for i in range(queries if new_lengths is None else int(new_lengths[b])):
            position = length + skipped + i
            first = max(start, position - window + 1) if window > 0 else start
            seen = range(first, position + 1)
            if len(seen) == 0:
                continue  # a pad: zeros
            keys = _row_keys(k_store[b], k_new[b], length, seen, window).double().repeat_interleave(group, 0)
            values = _row_keys(v_store[b], v_new[b], length, seen, window).double().repeat_interleave(group, 0)
            scores = torch.einsum("hd,hkd->hk", q[b, :, i].double(), keys) * scale
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:  # one more logit in the denominator, without a value
                scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
            weights = torch.softmax(scores, dim=1)[:, : len(seen)]
            out[b, :, i] = torch.einsum("hk,hkd->hd", weights, values).to(q.dtype)
    return out


def append(
    k_new: Tensor,
    v_new: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    lengths: Tensor,
    *,
    window: int,
    new_lengths: Tensor | None = None,
) -> None:
    """Write each row's new tokens into their slots, in order of time (so of more than C tokens the last C remain)."""
    batch, _, tokens, _ = k_new.shape
    for b in range(batch):
        for i in range(tokens if new_lengths is None else int(new_lengths[b])):
            slot = slot_of(int(lengths[b]) + i, k_store.shape[2], window)
            k_store[b, :, slot] = k_new[b, :, i]
            v_store[b, :, slot] = v_new[b, :, i]


def view(store: Tensor, new: Tensor, lengths: Tensor, window: int) -> Tensor:
    """Tokens in order of time. window > 0: (B, KV, window-1+Q, D), element j is position max(length-(window-1), 0)+j.

    window == 0: (B, KV, C, D), element j is position j. Positions that do not exist yet are zeros. (The operator's
    `layer` and `starts` change nothing here: they tell the graph pass which layer this is and where rows start.)
    """
    batch, kv_heads, tokens, dim = new.shape
    width = window - 1 + tokens if window > 0 else store.shape[2]
    out = store.new_zeros(batch, kv_heads, width, dim)
    for b in range(batch):
        length = int(lengths[b])
        first = max(length - (window - 1), 0) if window > 0 else 0
        last = min(first + width, length + tokens)
        out[b, :, : last - first] = _row_keys(store[b], new[b], length, range(first, last), window)
    return out
