"""The operators on Intel Gaudi: `index_copy` on whole stores, then FusedSDPA or matrix products (hpu_kernel.py).

Core operators only, besides FusedSDPA's. Shapes follow from shapes, and nothing is read on the host, so one recorded
graph is right at every length:

    one token     store[:, :, length % C] = k, then attention(q, whole store, mask of its slots (B, 1, 1, C))
    a prompt      in blocks of queries, each with the keys that it can see; the ring is written behind them

A mask is added to the scores and 0 * NaN is NaN, so what no query sees is replaced by zeros first. Where other devices
raise (a store that is full, a negative length), the rows in question are NaN: an assertion would need an operator that
the plugin may not have, a look at the numbers would wait for the device.

`passes/lower_hpu.py` traces these functions into graphs, with `_together`: rows that advance together are written by
one index, as `hpu_backend` wants it to work in place; rows that do not have one length are NaN then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import aten, checks, torch_ops
from .hpu_kernel import FusedAttention, fused_attention, matmul_attention
from .paged import window_of
from .quant import dequantise, rounded
from .takeover import Takeover
from .torch_masked import slot_positions, visible

#: Queries that go through attention at a time. No mask is ever longer than this on the query side.
QUERY_BLOCK = 4096


def view(
    store: Tensor,
    new: Tensor,
    lengths: Tensor,
    window: int,
    layer: int = -1,
    starts: Tensor | None = None,
    scale: Tensor | None = None,
    _together: bool = False,
) -> Tensor:
    """Keys (or values) in order of time; see `reference.view` for the meaning."""
    op = "view" if layer < 0 else f"view (layer {layer})"
    if scale is not None:
        checks.check_scales(op, {"store": (store, scale, new)})
        store, new = dequantise(store, scale, new.dtype), rounded(new, store.dtype)
    checks.check_static(op, new, new, store, store, lengths, window, starts=starts)
    tokens, capacity = new.shape[2], store.shape[2]
    out = torch_ops._view_on_device(store, new, lengths, window, window - 1 + tokens if window > 0 else capacity)
    return _spoilt(out, lengths, None, tokens, capacity, window, False, _together)


def append(
    k_new: Tensor,
    v_new: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    lengths: Tensor,
    *,
    window: int,
    new_lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    valid: Tensor | None = None,
    _together: bool = False,
) -> None:
    """Write the new tokens into their slots; of more than C tokens the last C."""
    checks.refuse_unsupported("append", block_table=block_table, valid=valid)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    checks.check_static("append", k_new, v_new, k_store, v_store, lengths, window, new_lengths=new_lengths, **scales)
    writes = torch_ops._stored(k_new, k_store, k_scale)[1] + torch_ops._stored(v_new, v_store, v_scale)[1]
    _write_all(writes, lengths, new_lengths, _together)


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
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    valid: Tensor | None = None,
    _op: str = "attend",
    _write: bool = False,
    _together: bool = False,
) -> Tensor:
    """Attention of the new tokens over the store as it was before this step, and over one another."""
    checks.refuse_unsupported(_op, block_table=block_table if _write else None, valid=valid)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    if block_table is not None:
        checks.check_pages(_op, k_new, v_new, k_store, v_store, lengths, block_table, scales)
        stores = window_of(k_store, v_store, block_table, lengths, starts, window)
        return attend(
            q, k_new, v_new, *stores, window=window, scale=scale, softcap=softcap, sinks=sinks, new_lengths=new_lengths
        )
    checks.check_static(_op, k_new, v_new, k_store, v_store, lengths, window, q, starts, sinks, new_lengths, **scales)
    tokens, capacity = k_new.shape[2], k_store.shape[2]
    k_new, k_writes = torch_ops._stored(k_new, k_store, k_scale)
    v_new, v_writes = torch_ops._stored(v_new, v_store, v_scale)
    # Written first, the store is all there is to read, if nothing is overwritten that the first query still sees.
    first = _write and (window == 0 or _known(capacity >= window - 1 + tokens))
    if first:
        _write_all(k_writes + v_writes, lengths, new_lengths, _together)
    keys, values = k_store, v_store
    if k_scale is not None and v_scale is not None:
        keys, values = dequantise(k_store, k_scale, q.dtype), dequantise(v_store, v_scale, q.dtype)
    count = tokens if new_lengths is None else new_lengths
    held = slot_positions(lengths + count if first else lengths, capacity, window)
    skipped, parts = tokens - q.shape[2], []
    for begin, end in _spans(skipped, tokens):
        k, v, key = keys, values, held
        if not first:
            k, v, key = _with_new((k, v, key), k_new, v_new, lengths, begin, end, window)
        query = lengths[:, None] + torch.arange(begin, end, device=q.device)
        sees = visible(key, query, starts, None if new_lengths is None else lengths + new_lengths, window)
        parts.append(_attention(q[:, :, begin - skipped : end - skipped], k, v, sees, scale, softcap, sinks))
    out = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    out = _spoilt(out, lengths, new_lengths, tokens, capacity, window, _write, _together)
    if _write and not first:
        _write_all(k_writes + v_writes, lengths, new_lengths, _together)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def attend_append(*args: Tensor, **kwargs: Any) -> Tensor:
    """`attend`, and the write; same arguments as `attend`."""
    return attend(*args, **kwargs, _op="attend_append", _write=True)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "view": view,
    "append": append,
    "attend": attend,
    "attend_append": attend_append,
}

take_over = Takeover("hpu", FUNCTIONS)


def _known(condition: Any) -> bool:
    """Whether it holds for every size that the graph may see; no guard is made to find out."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def _spans(first: Any, stop: Any) -> list[tuple[Any, Any]]:
    """New tokens [first, stop) in blocks; in one if their number is a symbol."""
    if not isinstance(first, int) or not isinstance(stop, int):
        return [(first, stop)]
    starts = range(first, stop, QUERY_BLOCK) or [first]
    return [(begin, min(begin + QUERY_BLOCK, stop)) for begin in starts]


def _with_new(
    old: tuple[Tensor, Tensor, Tensor],
    k_new: Tensor,
    v_new: Tensor,
    lengths: Tensor,
    begin: Any,
    end: Any,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and their positions (B, keys) for the new tokens [begin, end): those of the store, `old`, and the
    new ones, as far as the window may reach."""
    oldest = max(0, begin - window + 1) if window > 0 and isinstance(begin, int) else 0
    at = lengths[:, None] + torch.arange(oldest, end, device=lengths.device)
    k_new, v_new = k_new[:, :, oldest:end], v_new[:, :, oldest:end]
    if window > 0 and _known(begin >= window - 1):
        return k_new, v_new, at
    return torch.cat([old[0], k_new], 2), torch.cat([old[1], v_new], 2), torch.cat([old[2], at], 1)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, sees: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Zeros for a query that sees nothing; what no query sees may hold anything."""
    unseen = sees.any(1).logical_not()[:, None, :, None]
    k, v = k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)
    bias = torch.zeros(sees.shape, dtype=q.dtype, device=q.device)
    bias = bias.masked_fill(sees.logical_not(), torch.finfo(q.dtype).min)[:, None]
    fused = _fused()
    # The plugin says that FusedSDPA is not for graphs of unknown sizes.
    fits = q.dtype != torch.float64 and all(isinstance(n, int) for n in (*q.shape, *k.shape))
    if fused is not None and fits and fused.takes(softcap, sinks is not None, q.shape[3], v.shape[3]):
        out = fused(q, k, v, bias, scale=scale, causal=False, fast_softmax=False, recompute=True)
    else:
        out = matmul_attention(None, q, k, v, bias, scale=scale, softcap=softcap or None, sinks=sinks)
    return out.masked_fill(sees.any(2).logical_not()[:, None, :, None], 0)


@functools.cache
def _fused() -> FusedAttention | None:
    return fused_attention()


def _write_all(writes: torch_ops.Writes, lengths: Tensor, new_lengths: Tensor | None, together: bool) -> None:
    """A linear store that is full is wrapped like a ring, which keeps the index in range; its rows are spoilt."""
    if new_lengths is None and (together or _known(lengths.shape[0] == 1)):
        for new, store in writes:
            aten.write(new, store, lengths)
    else:
        torch_ops._write_on_device(writes, lengths, new_lengths, window=1)


def _spoilt(
    out: Tensor,
    lengths: Tensor,
    new_lengths: Tensor | None,
    tokens: Any,
    capacity: Any,
    window: int,
    writes: bool,
    together: bool,
) -> Tensor:
    """NaN in the rows for which `checks.assert_rows_async` would stop, and in those that do not advance together."""
    count = tokens if new_lengths is None else new_lengths
    bad = lengths < 0
    if together and new_lengths is None and not _known(lengths.shape[0] == 1):
        bad = bad | (lengths != lengths[0])
    if window == 0:
        bad = bad | (lengths + count > capacity)
    elif capacity < window - 1:
        bad = bad | ((lengths + count if writes else lengths) > capacity)
    return out.masked_fill(bad[:, None, None, None], float("nan"))
