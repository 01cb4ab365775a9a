"""Attention in plain torch where the rows' lengths are known on the host (CPU tensors).

Softmax attention over a set of keys can be computed over its parts and merged with the parts' log-sum-exp (the
identity behind flash attention, Dao et al. 2022). So nothing is gathered and no L x L mask exists: the visible keys
are at most two contiguous runs of the ring and the new tokens, and each run is read in place. Once the window moves,
queries go by bands (bands.py), or, where the kernel under SDPA lacks something, by blocks of which only the edge of the
window needs a (small) mask. L new tokens cost O(L * window).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .bands import FLASH, attend_bands, band

QUERY_BLOCK = 128  # queries of one block once the window moves; 128 beat 64 and 256 for windows of 128 to 1024
MANUAL_SCORES = 1 << 24  # scores (numbers, fp32) that the explicit path may hold at a time
MAX_KEYS = 4096  # keys of one product there

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


def _fused_part(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Part:
    batch, heads, tokens, dim = q.shape
    value_dim, v = v.shape[3], _widened(v, dim)
    if not causal and heads != k.shape[1]:
        # all queries of a group see all keys: pack the group's heads as queries, so that keys are read once
        out, lse = FLASH(q.reshape(batch, k.shape[1], -1, dim), k, v, 0.0, False, scale=scale)
        out, lse = out.reshape(batch, heads, tokens, -1), lse.reshape(batch, heads, tokens)
    else:
        out, lse = FLASH(q, k, v, 0.0, causal, scale=scale)
    return out[..., :value_dim], lse


def _widened(v: Tensor, dim: int) -> Tensor:
    """The kernel under SDPA wants one head_dim."""
    return F.pad(v, (0, dim - v.shape[3])) if v.shape[3] < dim else v


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
    skipped, value_dim, dim = rows.k_new.shape[2] - q.shape[2], out.shape[3], q.shape[3]
    first = max(skipped, start - rows.length)  # queries before are pads and see nothing
    takes = value_dim == dim or (value_dim < dim and count > 16)
    q, out = q[:, :, first - skipped :], out[:, :, first - skipped :]
    if takes and softcap <= 0 and q.dtype != torch.float64:
        _attend_fused(q, rows, start, first, count, out, scale, sinks)
    else:
        _attend_explicit(q, rows, start, first, count, out, scale, softcap, sinks)


def _attend_fused(
    q: Tensor, rows: RowGroup, start: int, first: int, count: int, out: Tensor, scale: float, sinks: Tensor | None
) -> None:
    """By the kernel under SDPA. Queries are the new tokens from `first` on; `count` and later are none."""
    length, window = rows.length, rows.window
    # Until the window moves (its first key is `start`) causal attention needs no mask.
    still = count if window == 0 else max(first, min(count, start + window - length))
    if first < still:
        mine = q[:, :, : still - first]
        parts = [_fused_part(mine, k, v, scale, causal=False) for k, v in rows.runs(start, length + first)]
        new = rows.k_new[:, :, first:still], rows.v_new[:, :, first:still]
        parts.append(_fused_part(mine, *new, scale, causal=True))
        out[:, :, : still - first] = _merge(parts, sinks)
    # Then every window is whole. The first of them reach into the store.
    inside = min(count, max(still, window - 1))
    for a, b in ((still, inside), (inside, count)):
        if a < b:
            k, v = rows.joined(length + a - window + 1, length + b)
            queries, place = q[:, :, a - first : b - first], out[:, :, a - first : b - first]
            attend_bands(queries, k, _widened(v, q.shape[3]), window, scale, sinks, place)


def _attend_explicit(
    q: Tensor,
    rows: RowGroup,
    start: int,
    first: int,
    count: int,
    out: Tensor,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> None:
    """The same by products and a softmax in float32, blocks of queries at a time."""
    batch, heads = q.shape[:2]
    length, window = rows.length, rows.window
    most = max(1, MANUAL_SCORES // max(1, batch * heads * min(MAX_KEYS, length + count)))
    i = first
    while i < count:
        still = count if window == 0 else min(count, start + window - length)
        block_end = min(still if i < still else min(count, i + QUERY_BLOCK), i + most)
        mine = slice(i - first, block_end - first)
        qb = q[:, :, mine]
        first_query, end_query = length + i, length + block_end
        low = max(start, first_query - window + 1) if window > 0 else start  # first key of the first query
        high = max(start, end_query - window) if window > 0 else start  # first key of the last query
        parts: list[Part] = []
        if high > low and high >= first_query:  # a window shorter than the block
            k, v = rows.joined(low, end_query)
            visible = band(first_query, end_query, low, end_query, start, window)
            parts.append(_explicit_part(qb, k, v, scale, softcap, visible))
        else:
            if high > low:  # edge of the window; one key more, so that each query sees at least one
                k, v = rows.joined(low, high + 1)
                visible = band(first_query, end_query, low, high + 1, start, window)
                parts.append(_explicit_part(qb, k, v, scale, softcap, visible))
                low = high + 1
            for k, v in rows.runs(low, first_query):  # the store, and new tokens before this block
                for a in range(0, k.shape[2], MAX_KEYS):
                    few = slice(a, a + MAX_KEYS)
                    parts.append(_explicit_part(qb, k[:, :, few], v[:, :, few], scale, softcap, None))
            new = rows.k_new[:, :, i:block_end], rows.v_new[:, :, i:block_end]
            causal = torch.ones(block_end - i, block_end - i, dtype=torch.bool).tril_()
            parts.append(_explicit_part(qb, *new, scale, softcap, causal))
        out[:, :, mine] = _merge(parts, sinks)
        i = block_end
