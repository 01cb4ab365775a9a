"""Attention in plain torch where the rows' lengths are known on the host (CPU tensors).

Softmax attention over a set of keys can be computed over its parts and merged with the parts' log-sum-exp (the
identity behind flash attention, Dao et al. 2022). So nothing is gathered and no L x L mask exists: the visible keys
are at most two contiguous runs of the ring and the new tokens, each run is read in place, and only the edge of the
window, one block of queries wide, needs a (small) mask. L new tokens cost O(L * window).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_BLOCK = 128  # queries of one block once the window moves; 128 beat 64 and 256 for windows of 128 to 1024
MANUAL_SCORES = 1 << 24  # scores (numbers, fp32) that the explicit path may hold at a time
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

Part = tuple[Tensor, Tensor]  # (out, log-sum-exp): (B, H, Q, Dv) and (B, H, Q) float32


class RowGroup:
    """Rows that share one (length, start, number of new tokens): their runs are the same slices."""

    def __init__(self, k_new: Tensor, v_new: Tensor, k_store: Tensor, v_store: Tensor, length: int, window: int):
        self.k_new, self.v_new, self.k_store, self.v_store = k_new, v_new, k_store, v_store
        self.length, self.window, self.capacity = length, window, k_store.shape[2]

    def runs(self, first: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """The tokens at positions [first, end) as contiguous slices (views), in order of time."""
        out = []
        position = first
        while position < min(end, self.length):
            slot = position % self.capacity if self.window > 0 else position
            count = min(self.capacity - slot, min(end, self.length) - position)
            out.append((self.k_store[:, :, slot : slot + count], self.v_store[:, :, slot : slot + count]))
            position += count
        if end > max(first, self.length):
            a, b = max(first, self.length) - self.length, end - self.length
            out.append((self.k_new[:, :, a:b], self.v_new[:, :, a:b]))
        return out

    def joined(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """The same in one piece. Copies when there are several runs: for ranges of about a block only."""
        runs = self.runs(first, end)
        if len(runs) == 1:
            return runs[0]
        return torch.cat([k for k, _ in runs], 2), torch.cat([v for _, v in runs], 2)


def _merge(parts: list[Part], sinks: Tensor | None) -> Tensor:
    """Combine parts over disjoint sets of keys; a sink is a part with one logit and no value."""
    if len(parts) == 1 and sinks is None:
        return parts[0][0]
    logits = torch.stack([lse for _, lse in parts])
    top = logits.amax(0)
    if sinks is not None:
        sinks = sinks.float()[None, :, None].expand_as(top)
        top = torch.maximum(top, sinks)
    weights = torch.exp(logits - top)
    total = weights.sum(0)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    weights = weights / total
    out = parts[0][0].float() * weights[0, ..., None]
    for (part, _), weight in zip(parts[1:], weights[1:]):
        out.addcmul_(part.float(), weight[..., None])
    return out


def _explicit_part(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, visible: Tensor | None) -> Part:
    """scores, softcap, mask, softmax, values; in float32. For what the fused kernel lacks (softcap, Dv != D)."""
    batch, heads, tokens, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    packed = q.float().reshape(batch, kv_heads, -1, dim)
    scores = torch.matmul(packed, k.float().transpose(2, 3)).view(batch, heads, tokens, keys).mul_(scale)
    if softcap > 0:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if visible is not None:
        scores.masked_fill_(~visible, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = scores.sub_(lse[..., None]).exp_().view(batch, kv_heads, -1, keys)
    out = torch.matmul(weights, v.float()).view(batch, heads, tokens, v.shape[3])
    return out, lse


def _fused_part(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, visible: Tensor | None) -> Part:
    batch, heads, tokens, dim = q.shape
    value_dim = v.shape[3]
    if value_dim < dim:  # the fused kernel wants one head_dim
        v = F.pad(v, (0, dim - value_dim))
    mask = None
    if visible is not None:
        mask = torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, float("-inf"))
    if mask is None and not causal and heads != k.shape[1]:
        # all queries of a group see all keys: pack the group's heads as queries, so that keys are read once
        out, lse = FLASH(q.reshape(batch, k.shape[1], -1, dim), k, v, 0.0, False, scale=scale)
        out, lse = out.reshape(batch, heads, tokens, -1), lse.reshape(batch, heads, tokens)
    else:
        out, lse = FLASH(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out[..., :value_dim], lse


def _band(first_query: int, end_query: int, first_key: int, end_key: int, start: int, window: int) -> Tensor:
    """(queries, keys) bool: start <= key, query - window < key <= query, all absolute positions."""
    query = torch.arange(first_query, end_query)[:, None]
    key = torch.arange(first_key, end_key)[None, :]
    visible = (key <= query) & (key >= start)
    return visible & (key > query - window) if window > 0 else visible


def attend_rows(
    q: Tensor,
    rows: RowGroup,
    start: int,
    count: int,
    out: Tensor,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> None:
    """Fill `out` (B, H, Q, Dv, zeros before) for a group of rows; `count` of the new tokens are real.

    The queries are the last Q of the new tokens.
    """
    batch, heads, queries, dim = q.shape
    skipped = rows.k_new.shape[2] - queries
    length, window, value_dim = rows.length, rows.window, out.shape[3]
    fused = softcap <= 0 and q.dtype != torch.float64
    fused = fused and (value_dim == dim or (value_dim < dim and count > 16))
    max_keys = 1 << 62 if fused else 4096
    explicit_block = max(1, MANUAL_SCORES // max(1, batch * heads * min(max_keys, length + count)))

    def part(qb: Tensor, k: Tensor, v: Tensor, causal: bool = False, visible: Tensor | None = None) -> Part:
        if fused:
            return _fused_part(qb, k, v, scale, causal, visible)
        if causal:
            visible = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool).tril_()
        return _explicit_part(qb, k, v, scale, softcap, visible)

    i = max(skipped, start - length)  # queries before are pads and see nothing
    while i < count:
        # Until the window moves (its first key is `start`) causal attention needs no mask, whatever the block's size.
        still = count if window == 0 else min(count, start + window - length)
        block_end = still if i < still else min(count, i + QUERY_BLOCK)
        if not fused:
            block_end = min(block_end, i + explicit_block)
        mine = slice(i - skipped, block_end - skipped)
        qb = q[:, :, mine]
        first_query, end_query = length + i, length + block_end
        low = max(start, first_query - window + 1) if window > 0 else start  # first key of the first query
        high = max(start, end_query - window) if window > 0 else start  # first key of the last query
        parts: list[Part] = []
        if high > low and high >= first_query:  # a window shorter than the block
            k, v = rows.joined(low, end_query)
            visible = _band(first_query, end_query, low, end_query, start, window)
            parts.append(part(qb, k, v, visible=visible))
        else:
            if high > low:  # edge of the window; one key more, so that each query sees at least one
                k, v = rows.joined(low, high + 1)
                parts.append(part(qb, k, v, visible=_band(first_query, end_query, low, high + 1, start, window)))
                low = high + 1
            for k, v in rows.runs(low, first_query):  # the store, and new tokens before this block
                for a in range(0, k.shape[2], max_keys):
                    parts.append(part(qb, k[:, :, a : a + max_keys], v[:, :, a : a + max_keys]))
            parts.append(part(qb, rows.k_new[:, :, i:block_end], rows.v_new[:, :, i:block_end], causal=True))
        out[:, :, mine] = _merge(parts, sinks)
        i = block_end
