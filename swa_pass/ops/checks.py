"""Checks of the operators' inputs. All of them run before anything is written.

Every message says which operator, what was seen, and what to do.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from .quant import LARGEST

STORE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def fail(op: str, text: str) -> NoReturn:
    if op.startswith("view"):  # it has one store; the checks know two
        text = text.replace("k_store", "store").replace("k_new", "new")
    raise ValueError(f"swa_pass.{op}: {text}")


def shape(t: Tensor) -> str:
    return "(" + ", ".join(str(s) for s in t.shape) + ")"


def refuse_unsupported(op: str, **given: Tensor | None) -> None:
    """Arguments that the schema already holds, and that no implementation reads yet."""
    names = {
        "block_table": "writes to paged stores (block_table)",
        "valid": "a validity bitmap (valid)",
    }
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(
                f"swa_pass.{op}: {names[name]}: in the schema, not implemented yet; pass {name}=None"
            )


def _about(name: str, store: Tensor) -> str:
    return f"{name} {shape(store)} of {store.dtype}"


def check_scales(op: str, stores: dict[str, tuple[Tensor, Tensor | None, Tensor]]) -> None:
    """What only quantised stores have: by name, (the store, its scales, the new tokens)."""
    for name, (store, scale, new) in stores.items():
        if store.dtype not in LARGEST:
            fail(
                op,
                f"{_about(name, store)} has scales, which only stores of {', '.join(map(str, LARGEST))} "
                "have; pass none",
            )
        if scale is None:
            fail(op, f"{_about(name, store)} has no scales; keys and values must both have them")
        if scale.dtype != torch.float32 or scale.shape != store.shape[:3] or not scale.is_contiguous():
            fail(
                op,
                f"{_about(name, store)} needs one float32 scale for each token and head, {shape(store[..., 0])}, "
                f"contiguous; its scales are {scale.dtype} {shape(scale)}",
            )
        if scale.device != store.device:
            fail(op, f"{name} is on {store.device} and its scales on {scale.device}; move them to one device")
        if new.dtype not in STORE_DTYPES:
            fail(op, f"new tokens of {new.dtype} cannot be quantised; give them in the model's own dtype")


def check_pages(
    op: str,
    k_new: Tensor,
    v_new: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    lengths: Tensor,
    table: Tensor,
    scales: dict[str, Tensor | None],
) -> None:
    """What only paged stores have: pages (blocks, kv_heads, size, head_dim), block_table (batch, blocks of a row)."""
    if any(scale is not None for scale in scales.values()):
        fail(op, "paged stores (block_table) of quantised keys are not supported; pass no scales")
    if table.dim() != 2 or table.shape[0] != k_new.shape[0] or table.dtype not in (torch.int32, torch.int64):
        fail(
            op,
            f"paged stores need an integer block_table of shape ({k_new.shape[0]}, blocks of a row); it is "
            f"{table.dtype} {shape(table)}",
        )
    if k_pages.dim() != 4 or k_pages.shape[:3] != v_pages.shape[:3] or k_pages.shape[1] != k_new.shape[1]:
        fail(
            op,
            f"paged stores must have the shape (blocks, {k_new.shape[1]} kv_heads, block size, head_dim); k_store has "
            f"{shape(k_pages)} and v_store {shape(v_pages)}",
        )
    if lengths.shape != (k_new.shape[0],):
        fail(op, f"lengths must have shape ({k_new.shape[0]},), one number a row; it has {shape(lengths)}")


def check_static(
    op: str,
    k_new: Tensor,
    v_new: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    lengths: Tensor,
    window: int,
    q: Tensor | None = None,
    starts: Tensor | None = None,
    sinks: Tensor | None = None,
    new_lengths: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Shapes, dtypes, devices and layouts: everything that can be checked without reading data."""
    quantised = k_scale is not None or v_scale is not None
    if quantised:
        check_scales(op, {"k_store": (k_store, k_scale, k_new), "v_store": (v_store, v_scale, v_new)})
    elif k_store.dtype in LARGEST:
        fail(op, f"stores of {k_store.dtype} need their scales: pass k_scale and v_scale")
    named = {"k_new": k_new, "v_new": v_new, "k_store": k_store, "v_store": v_store}
    if q is not None:
        named["q"] = q
    for name, t in named.items():
        if t.dim() != 4:
            fail(op, f"{name} must have 4 dimensions (batch, heads, tokens, head_dim); it has shape {shape(t)}")
        like = "k_new" if quantised and name != "v_store" else "k_store"
        if t.dtype != named[like].dtype and name != "k_store":
            fail(
                op,
                f"{name} is {t.dtype} and {like} is {named[like].dtype}; all of q, k, v and the stores must have one "
                f"dtype (quantised stores one of their own): create the stores in the model's dtype, or cast {name}",
            )
        if t.device != k_store.device:
            fail(op, f"{name} is on {t.device} and k_store is on {k_store.device}; move them to one device")
    if k_store.dtype not in STORE_DTYPES and not quantised:
        fail(op, f"stores of {k_store.dtype} are not supported; use one of {', '.join(map(str, STORE_DTYPES))}")
    batch, kv_heads, tokens, head_dim = k_new.shape
    capacity = k_store.shape[2]
    if v_new.shape[:3] != k_new.shape[:3]:
        fail(op, f"v_new {shape(v_new)} and k_new {shape(k_new)} must agree in batch, kv_heads and tokens")
    if k_store.shape[0] != batch or k_store.shape[1] != kv_heads or k_store.shape[3] != head_dim:
        fail(
            op,
            f"k_store {shape(k_store)} does not fit k_new {shape(k_new)}: batch, kv_heads and head_dim must agree; "
            "create the store for this batch size",
        )
    if v_store.shape[:3] != k_store.shape[:3] or v_store.shape[3] != v_new.shape[3]:
        fail(
            op,
            f"v_store {shape(v_store)} does not fit k_store {shape(k_store)} and v_new {shape(v_new)}: batch, "
            "kv_heads, capacity and the value head_dim must agree",
        )
    for name, store in (("k_store", k_store), ("v_store", v_store)):
        if not store.is_contiguous():
            fail(op, f"{name} must be contiguous; its strides are {store.stride()}. Allocate it with torch.empty")
    if window < 0:
        fail(op, f"window is {window}; use a positive window, or 0 for full attention over a linear store")
    if window > 0 and capacity == 0:
        fail(op, "the ring has no slots; allocate at least one")
    for name, vector in (("lengths", lengths), ("starts", starts), ("new_lengths", new_lengths)):
        if vector is None:
            continue
        if vector.dim() != 1 or vector.shape[0] != batch:
            fail(op, f"{name} must have shape ({batch},), one number a row; it has {shape(vector)}")
        if vector.dtype != torch.int64:
            fail(op, f"{name} is {vector.dtype}; use torch.int64")
        if vector.device != k_store.device:
            fail(op, f"{name} is on {vector.device} and k_store is on {k_store.device}; move it there")
    if q is None:
        return
    heads = q.shape[1]
    if q.shape[0] != batch or q.shape[2] > tokens or q.shape[3] != head_dim:
        fail(op, f"q {shape(q)} does not fit k_new {shape(k_new)}: batch, tokens and head_dim must agree")
    if q.shape[2] != tokens and new_lengths is not None:
        fail(op, f"q has {q.shape[2]} of {tokens} new tokens; with new_lengths it must have all of them")
    if kv_heads == 0 or heads % kv_heads != 0:
        fail(op, f"{heads} query heads cannot share {kv_heads} kv heads; the number must be a multiple")
    if sinks is not None:
        if sinks.dim() != 1 or sinks.shape[0] != heads:
            fail(op, f"sinks must have shape ({heads},), one logit a query head; it has {shape(sinks)}")
        if sinks.device != k_store.device:
            fail(op, f"sinks is on {sinks.device} and k_store is on {k_store.device}; move it there")
        if not sinks.is_floating_point():
            fail(op, f"sinks is {sinks.dtype}; use a floating point dtype")


def read_rows(
    op: str,
    lengths: Tensor,
    starts: Tensor | None,
    new_lengths: Tensor | None,
    tokens: int,
    capacity: int,
    window: int,
    writes: bool = False,
) -> list[tuple[int, int, int]]:
    """Read (length, start, number of new tokens) of each row to the host, and check them.

    A ring may hold less than its window only until it wraps. `writes`: the check includes the new tokens, so that no
    key is overwritten that the next step needs.

    Copies three small tensors to the host: for CPU tensors only (elsewhere it would wait for the device).
    """
    length_list = lengths.tolist()
    start_list = [0] * len(length_list) if starts is None else starts.tolist()
    count_list = [tokens] * len(length_list) if new_lengths is None else new_lengths.tolist()
    for row, (length, start, count) in enumerate(zip(length_list, start_list, count_list)):
        if length < 0 or start < 0:
            fail(op, f"row {row}: length {length} and start {start}: both count tokens and cannot be negative")
        if not 0 <= count <= tokens:
            fail(op, f"row {row}: new_lengths says {count} of {tokens} new tokens; it must lie between 0 and {tokens}")
        if window == 0 and length + count > capacity:
            fail(
                op,
                f"row {row}: the linear store is full: {length} tokens + {count} new ones, capacity {capacity}; "
                "grow the store before this step",
            )
        total = length + count if writes else length
        if window > 0 and capacity < min(window - 1, total):
            fail(
                op,
                f"row {row}: the ring holds {capacity} tokens, but of {total} tokens a window of {window} needs the "
                f"last {min(window - 1, total)}; grow the store before it wraps",
            )
    return list(zip(length_list, start_list, count_list))


def assert_rows_async(
    op: str,
    lengths: Tensor,
    new_lengths: Tensor | None,
    tokens: int,
    capacity: int,
    window: int,
    writes: bool = False,
) -> None:
    """The same checks for tensors on a device, without waiting for it (they stop the device's stream)."""
    count = tokens if new_lengths is None else new_lengths
    good = lengths >= 0
    if window == 0:
        good = good & (lengths + count <= capacity)
    elif capacity < window - 1:
        good = good & ((lengths + count if writes else lengths) <= capacity)
    message = f"swa_pass.{op}: a row's length is negative or does not fit its store (capacity {capacity})"
    torch._assert_async(good.all(), message)
