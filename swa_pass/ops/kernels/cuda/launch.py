"""Chooses block sizes and splits from shapes alone, and starts the Triton kernels. Nothing here waits for the device,
and nothing depends on data: a call can be captured in a CUDA graph."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from ...quant import quantise
from . import attend as kernels

#: Programs wanted for each multiprocessor before a window is no longer split.
PROGRAMS_PER_PROCESSOR = 2
MAX_SPLITS = 64
#: Rows (queries times heads of a group) of one program while tokens are few; the least that tensor cores take.
FEW_ROWS = 16


def power_of_two(n: int, least: int = 16) -> int:
    return max(least, triton.next_power_of_2(n))


def keys_of_block(dim: int, item_size: int) -> int:
    """Keys of one step: 16 KiB of them, so that keys and values of three steps under way fit into shared memory."""
    return max(16, min(64, (16 << 10) // (power_of_two(dim) * item_size)))


def rows_of_block(rows: int, dim: int, item_size: int) -> int:
    """Rows of one program, of `rows` in all."""
    if rows <= FEW_ROWS:
        return FEW_ROWS
    return 64 if power_of_two(dim) * item_size < 1024 else 32


@functools.cache
def processors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def splits_for(programs: int, longest: int, block: int, device: torch.device) -> int:
    """How many parts a window of `longest` keys is cut into: enough programs for the device, no part under 4 blocks."""
    wanted = -(-PROGRAMS_PER_PROCESSOR * processors(device) // programs)
    return max(1, min(wanted, longest // (4 * block), MAX_SPLITS))


def writes_in_place(tokens: int, capacity: int, window: int) -> bool:
    """Whether the new tokens may be written while others still read: none of their slots is visible to any query.

    The oldest visible position is length - window + 1; the newest overwritten one is length + tokens - 1 - capacity.
    A linear store never overwrites.
    """
    return window == 0 or capacity >= window - 1 + tokens


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
    write: bool,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """See `swa_pass.ops`; inputs are checked already. Returns (B, H, Q, Dv)."""
    scaled = k_scale is not None
    k_new, v_new, k_store, v_store, factors, fp8 = in_bytes(k_new, v_new, k_store, v_store, k_scale, v_scale, lengths)
    batch, heads, queries, dim = q.shape
    kv_heads, tokens, value_dim = k_new.shape[1], k_new.shape[2], v_new.shape[3]
    capacity, group = k_store.shape[2], heads // kv_heads
    out = q.new_empty(batch, queries, heads, value_dim).transpose(1, 2)
    if out.numel() == 0:
        return out
    rows = rows_of_block(queries * group, dim, q.element_size())
    block_q = max(1, min(queries, rows // group))
    block_m = power_of_two(block_q * group)
    block_n = keys_of_block(dim, q.element_size())
    blocks = -(-queries // block_q)
    longest = (min(window, capacity) if window > 0 else capacity) + tokens
    splits = splits_for(batch * kv_heads * blocks, longest, block_n, q.device)
    block_dv = power_of_two(value_dim)
    fused = write and blocks == 1 and tokens <= block_m and writes_in_place(tokens, capacity, window)
    parts = batch * kv_heads * blocks * splits * block_m if splits > 1 else 0
    part_values = torch.empty(parts, block_dv, dtype=torch.float32, device=q.device)
    part_sums = torch.empty(parts, 2, dtype=torch.float32, device=q.device)
    shape = {"GROUP": group, "VALUE_DIM": value_dim, "HAS_SINKS": sinks is not None, "SPLITS": splits}
    shape |= {"BLOCK_Q": block_q, "BLOCK_M": block_m, "BLOCK_DV": block_dv}
    kernels.attend[(blocks * splits, batch * kv_heads)](
        q, k_new, v_new, k_store, v_store, out, part_values, part_sums, lengths,
        lengths if starts is None else starts,
        lengths if new_lengths is None else new_lengths,
        lengths if sinks is None else sinks, *factors,
        *q.stride()[:3], *k_new.stride()[:3], *v_new.stride()[:3], *out.stride()[:3],
        kv_heads, capacity, tokens, queries, scale, softcap if softcap > 0 else 1.0,
        DIM=dim, WINDOW=window, HAS_STARTS=starts is not None, HAS_COUNTS=new_lengths is not None,
        CAPPED=softcap > 0, WRITE=fused, FLOAT=q.device.type == "cpu", SCALED=scaled, FP8=fp8,
        BLOCK_N=block_n, BLOCK_D=power_of_two(dim), **shape,
    )  # fmt: skip
    if splits > 1:
        kernels.merge[(blocks, batch * kv_heads)](
            part_values, part_sums, out, lengths if sinks is None else sinks, *out.stride()[:3], kv_heads, queries,
            **shape,
        )  # fmt: skip
    if write and not fused:
        _append(k_new, v_new, k_store, v_store, lengths, window, new_lengths, factors, scaled)
    return out


Factors = tuple[Tensor, Tensor, Tensor, Tensor]


def in_bytes(
    k_new: Tensor, v_new: Tensor, k_store: Tensor, v_store: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    lengths: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Factors, bool]:  # fmt: skip
    """For quantised stores: new tokens quantised as well, all four as int8, the factors of stores and new tokens, and
    whether the bytes are float8. For others everything as it is (and some tensor where the kernels want a pointer)."""
    if k_scale is None or v_scale is None:
        return k_new, v_new, k_store, v_store, (lengths, lengths, lengths, lengths), False
    (k, k_new_scale), (v, v_new_scale) = quantise(k_new, k_store.dtype), quantise(v_new, v_store.dtype)
    k, v, k_bytes, v_bytes = (t.view(torch.int8) for t in (k, v, k_store, v_store))
    fp8 = k_store.dtype != torch.int8
    return k, v, k_bytes, v_bytes, (k_scale, v_scale, k_new_scale.contiguous(), v_new_scale.contiguous()), fp8


def append(
    k_new: Tensor, v_new: Tensor, k_store: Tensor, v_store: Tensor, lengths: Tensor, window: int,
    new_lengths: Tensor | None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """See `swa_pass.ops`; inputs are checked already."""
    k_new, v_new, k_store, v_store, factors, _ = in_bytes(k_new, v_new, k_store, v_store, k_scale, v_scale, lengths)
    _append(k_new, v_new, k_store, v_store, lengths, window, new_lengths, factors, k_scale is not None)


def _append(
    k_new: Tensor, v_new: Tensor, k_store: Tensor, v_store: Tensor, lengths: Tensor, window: int,
    new_lengths: Tensor | None, factors: Factors, scaled: bool,
) -> None:  # fmt: skip
    batch, kv_heads, tokens, dim = k_new.shape
    if k_new.numel() == 0:
        return
    block_n = 16
    kernels.append[(-(-tokens // block_n), batch * kv_heads)](
        k_new, v_new, k_store, v_store, lengths, lengths if new_lengths is None else new_lengths, *factors,
        *k_new.stride()[:3], *v_new.stride()[:3], kv_heads, k_store.shape[2], tokens,
        DIM=dim, VALUE_DIM=v_new.shape[3], WINDOW=window, HAS_COUNTS=new_lengths is not None,
        SCALED=scaled, BLOCK_N=block_n, BLOCK_D=power_of_two(dim), BLOCK_DV=power_of_two(v_new.shape[3]),
    )  # fmt: skip
