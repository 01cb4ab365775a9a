"""The operators on CUDA tensors: checks, then the Triton kernels of `kernels/cuda`.

Registered by the first operator on a CUDA tensor, where Triton is installed (it comes with torch's CUDA builds).
float64 goes to the torch twin. Lengths stay on the device: a ring of at least W - 1 slots needs no check of them; for a
linear store, which may be full, an asynchronous one stops the device's stream before anything is written.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from . import checks
from .takeover import Takeover


def _needs_twin(*tensors: Tensor) -> bool:
    """What the kernels were not written for: float64, and heads whose numbers do not lie side by side."""
    return any(t.dtype == torch.float64 or (t.shape[-1] > 1 and t.stride(-1) != 1) for t in tensors)


def _check_lengths(op: str, k_new: Tensor, k_store: Tensor, lengths: Tensor, counts: Any, window: int) -> None:
    tokens, capacity = k_new.shape[2], k_store.shape[2]
    if window == 0 or capacity < window - 1:
        checks.assert_rows_async(op, lengths, counts, tokens, capacity, window, writes=op != "attend")


def _run(op: str, write: bool, args: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    q, k_new, v_new, k_store, v_store, lengths, *rest = args
    paged = options.get("block_table") is not None and not write
    if _needs_twin(q, k_new, v_new) or paged:
        return getattr(torch.ops.swa_pass, "_" + op)(*args, **options)
    from .kernels.cuda import launch

    given = {"softcap": 0.0, "sinks": None, "new_lengths": None, "k_scale": None, "v_scale": None, **options}
    window, scale, softcap = given.pop("window"), given.pop("scale"), given.pop("softcap")
    sinks, new_lengths = given.pop("sinks"), given.pop("new_lengths")
    starts = rest[0] if rest else given.pop("starts", None)
    k_scale, v_scale = given.pop("k_scale"), given.pop("v_scale")
    checks.refuse_unsupported(op, **given)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    checks.check_static(op, k_new, v_new, k_store, v_store, lengths, window, q, starts, sinks, new_lengths, **scales)
    _check_lengths(op, k_new, k_store, lengths, new_lengths, window)
    with torch.cuda.device_of(q):  # Triton starts kernels on the current device
        return launch.attend(
            q, k_new, v_new, k_store, v_store, lengths, starts, window, scale, softcap, sinks, new_lengths, write,
            **scales,
        )  # fmt: skip


def attend(*args: Any, **options: Any) -> Tensor:
    return _run("attend", False, args, options)


def attend_append(*args: Any, **options: Any) -> Tensor:
    return _run("attend_append", True, args, options)


def append(
    k_new: Tensor,
    v_new: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    lengths: Tensor,
    *,
    window: int,
    new_lengths: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    **extras: Any,
) -> None:
    if _needs_twin(k_new, v_new):
        torch.ops.swa_pass._append(
            k_new, v_new, k_store, v_store, lengths, window=window, new_lengths=new_lengths,
            k_scale=k_scale, v_scale=v_scale, **extras,
        )  # fmt: skip
        return
    from .kernels.cuda import launch

    checks.refuse_unsupported("append", **extras)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    checks.check_static("append", k_new, v_new, k_store, v_store, lengths, window, new_lengths=new_lengths, **scales)
    _check_lengths("append", k_new, k_store, lengths, new_lengths, window)
    with torch.cuda.device_of(k_store):
        launch.append(k_new, v_new, k_store, v_store, lengths, window, new_lengths, **scales)


def _ready() -> bool:
    return os.environ.get("SWA_PASS_KERNEL") != "torch" and importlib.util.find_spec("triton") is not None


take_over = Takeover("cuda", {"append": append, "attend": attend, "attend_append": attend_append}, _ready)
