"""The operators in plain torch: the default on every device, and the fallback where no kernel could be built.

Same arguments as the operators (see `swa_pass.ops`). Everything is checked before anything is written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks, torch_masked, torch_runs
from .paged import window_of
from .quant import dequantise, quantise, rounded


def view(
    store: Tensor,
    new: Tensor,
    lengths: Tensor,
    window: int,
    layer: int = -1,
    starts: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Keys (or values) in order of time; see `reference.view` for the meaning."""
    op = "view" if layer < 0 else f"view (layer {layer})"
    if scale is not None:
        checks.check_scales(op, {"store": (store, scale, new)})
        store, new = dequantise(store, scale, new.dtype), rounded(new, store.dtype)
    checks.check_static(op, new, new, store, store, lengths, window, starts=starts)
    batch, kv_heads, tokens, dim = new.shape
    capacity = store.shape[2]
    width = window - 1 + tokens if window > 0 else capacity
    if lengths.device.type != "cpu":
        checks.assert_rows_async(op, lengths, None, tokens, capacity, window)
        return _view_on_device(store, new, lengths, window, width)
    out = store.new_zeros(batch, kv_heads, width, dim)
    rows = checks.read_rows(op, lengths, None, None, tokens, capacity, window)
    for selected, (length, _, _) in _groups(rows):
        first = max(length - (window - 1), 0) if window > 0 else 0
        group = torch_runs.RowGroup(new[selected], new[selected], store[selected], store[selected], length, window)
        at = 0
        for run, _ in group.runs(first, length + tokens):
            out[selected, :, at : at + run.shape[2]] = run
            at += run.shape[2]
    return out


def _view_on_device(store: Tensor, new: Tensor, lengths: Tensor, window: int, width: int) -> Tensor:
    batch, tokens = new.shape[0], new.shape[2]
    length = lengths[:, None]
    first = torch.clamp(length - (window - 1), min=0) if window > 0 else torch.zeros_like(length)
    position = first + torch.arange(width, device=store.device)
    slot = torch.remainder(position, store.shape[2]) if window > 0 else position
    rows = torch.arange(batch, device=store.device)[:, None]
    # indexing around the heads gives (B, width, KV, D)
    old = store[rows, :, slot]
    fresh = new[rows, :, torch.clamp(position - length, 0, tokens - 1)]
    zero = torch.zeros((), dtype=store.dtype, device=store.device)
    exists = (position < length + tokens)[:, :, None, None]
    tokens_in_order = torch.where((position < length)[:, :, None, None], old, torch.where(exists, fresh, zero))
    return tokens_in_order.transpose(1, 2).contiguous()


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
) -> None:
    """Write the new tokens into their slots; of more than C tokens the last C."""
    op = "append"
    checks.refuse_unsupported(op, block_table=block_table, valid=valid)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    checks.check_static(op, k_new, v_new, k_store, v_store, lengths, window, new_lengths=new_lengths, **scales)
    tokens, capacity = k_new.shape[2], k_store.shape[2]
    if lengths.device.type == "cpu":
        rows = checks.read_rows(op, lengths, None, new_lengths, tokens, capacity, window, writes=True)
    else:
        checks.assert_rows_async(op, lengths, new_lengths, tokens, capacity, window, writes=True)
    writes = _stored(k_new, k_store, k_scale)[1] + _stored(v_new, v_store, v_scale)[1]
    if lengths.device.type == "cpu":
        _write_rows(writes, rows, window)
    else:
        _write_on_device(writes, lengths, new_lengths, window)


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
) -> Tensor:
    """Attention of the new tokens over the store as it was before this step, and over one another."""
    checks.refuse_unsupported(_op, block_table=block_table if _write else None, valid=valid)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    if block_table is not None:
        checks.check_pages(_op, k_new, v_new, k_store, v_store, lengths, block_table, scales)
        stores = window_of(k_store, v_store, block_table, lengths, starts, window)
        return torch.ops.swa_pass.attend.default(  # dense from here on, by whatever kernel there is
            q, k_new, v_new, *stores, window=window, scale=scale, softcap=softcap, sinks=sinks, new_lengths=new_lengths
        )
    checks.check_static(_op, k_new, v_new, k_store, v_store, lengths, window, q, starts, sinks, new_lengths, **scales)
    k_new, k_writes = _stored(k_new, k_store, k_scale)
    v_new, v_writes = _stored(v_new, v_store, v_scale)
    if k_scale is not None and v_scale is not None:
        k_store, v_store = dequantise(k_store, k_scale, q.dtype), dequantise(v_store, v_scale, q.dtype)
    batch, heads, queries, _ = q.shape
    tokens, capacity = k_new.shape[2], k_store.shape[2]
    out = q.new_zeros(batch, queries, heads, v_new.shape[3]).transpose(1, 2)
    if lengths.device.type != "cpu":
        checks.assert_rows_async(_op, lengths, new_lengths, tokens, capacity, window, _write)
        torch_masked.attend(
            q, k_new, v_new, k_store, v_store, lengths, starts, window, scale, softcap, sinks, new_lengths, out
        )
        if _write:
            _write_on_device(k_writes + v_writes, lengths, new_lengths, window)
        return out
    rows = checks.read_rows(_op, lengths, starts, new_lengths, tokens, capacity, window, _write)
    for selected, (length, start, count) in _groups(rows):
        group = torch_runs.RowGroup(
            k_new[selected], v_new[selected], k_store[selected], v_store[selected], length, window
        )
        torch_runs.attend_rows(q[selected], group, start, count, out[selected], scale, softcap, sinks)
    if _write:
        _write_rows(k_writes + v_writes, rows, window)
    return out


def attend_append(*args: Tensor, **kwargs: object) -> Tensor:
    """`attend`, then `append`; same arguments as `attend`."""
    return attend(*args, **kwargs, _op="attend_append", _write=True)  # type: ignore[arg-type]


#: Tokens (B, KV, N, width), and the store (B, KV, C, width) that they go into as they are.
Writes = list[tuple[Tensor, Tensor]]


def _stored(new: Tensor, store: Tensor, scale: Tensor | None) -> tuple[Tensor, Writes]:
    """New tokens as they will be read back, and what to write: for a quantised store bytes and their scales."""
    if scale is None:
        return new, [(new, store)]
    data, factor = quantise(new, store.dtype)
    data_bytes = data.view(torch.int8), store.view(torch.int8)  # the one byte type that every operation knows
    return dequantise(data, factor, new.dtype), [data_bytes, (factor[..., None], scale[..., None])]


def _groups(rows: list[tuple[int, int, int]]) -> list[tuple[slice, tuple[int, int, int]]]:
    """Neighbouring rows with the same numbers, as slices of the batch."""
    out: list[tuple[slice, tuple[int, int, int]]] = []
    for b, row in enumerate(rows):
        if out and out[-1][1] == row:
            out[-1] = (slice(out[-1][0].start, b + 1), row)
        else:
            out.append((slice(b, b + 1), row))
    return out


def _write_rows(writes: Writes, rows: list[tuple[int, int, int]], window: int) -> None:
    capacity = writes[0][1].shape[2]
    for selected, (length, _, count) in _groups(rows):
        i = max(0, count - capacity)
        while i < count:
            slot = (length + i) % capacity if window > 0 else length + i
            n = min(count - i, capacity - slot)
            for new, store in writes:
                store[selected, :, slot : slot + n] = new[selected, :, i : i + n]
            i += n


def _write_on_device(writes: Writes, lengths: Tensor, new_lengths: Tensor | None, window: int) -> None:
    batch, _, tokens, _ = writes[0][0].shape
    capacity = writes[0][1].shape[2]
    first = max(0, tokens - capacity)
    if new_lengths is not None and (first > 0 or tokens > 1):
        # Rows differ in which tokens remain. Gather per slot instead of scattering: no slot is written twice.
        slots = torch.arange(capacity, device=lengths.device)
        last = (lengths + new_lengths)[:, None] - 1  # position of the row's newest token
        position = last - torch.remainder(last - slots, capacity) if window > 0 else slots.expand(batch, -1)
        index = position - lengths[:, None]
        fresh = ((index >= 0) & (index < new_lengths[:, None]))[:, None, :, None]
        pick = index.clamp(0, tokens - 1)[:, None, :, None]
        for new, store in writes:
            chosen = torch.gather(new, 2, pick.expand(-1, store.shape[1], -1, store.shape[3]))
            store.copy_(torch.where(fresh, chosen, store))
        return
    position = lengths[:, None] + torch.arange(first, tokens, device=lengths.device)
    slot = torch.remainder(position, capacity) if window > 0 else position
    index = slot[:, None, :, None]
    for new, store in writes:
        fresh_tokens = new[:, :, first:]
        wide = index.expand(-1, store.shape[1], -1, store.shape[3])
        if new_lengths is not None:  # one token a row: rows without one rewrite what is there
            keep = torch.gather(store, 2, wide)
            fresh_tokens = torch.where((new_lengths > 0)[:, None, None, None], fresh_tokens, keep)
        store.scatter_(2, wide, fresh_tokens)
