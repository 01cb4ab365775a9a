"""The custom operators: sliding-window attention over a ring store, and the writes into it.

`torch.ops.swa_pass.{view, append, attend, attend_append}`. With B rows, H query heads, KV kv heads (H a multiple of
KV), N new tokens, C slots, D / Dv key and value head_dim:

    q        (B, H, Q, D)      any strides, last one 1; the queries are the last Q <= N of the new tokens
    k_new    (B, KV, N, D)     any strides, last one 1;  v_new  (B, KV, N, Dv)
    k_store  (B, KV, C, D)     contiguous;               v_store (B, KV, C, Dv)
    lengths  (B,) int64        tokens in the store before this step (all that were ever written, not clipped to C)
    starts   (B,) int64        position of the row's first real token (left pads lie before it); None: zeros
    window   keys a query sees, itself included; 0: all of them, and the store is linear (slot p holds position p)

The query at position p sees the keys in [max(start, p - window + 1), p]. `attend` reads the store as it was before
the step, `append` writes, `attend_append` does both. A query that sees nothing (a pad) returns zeros.
`reference.py` is the exact meaning. (`attend_tokens` and `attend_blocks`, on what an engine gathers: gathered.py.)

Importing this module registers the operators and compiles nothing. `ensure_kernels()` compiles the C++ kernels once
(cached for later processes); it is called by the first operator that runs on CPU tensors. The first operator on CUDA
tensors brings in the Triton kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import build, fakes, gathered, hpu_ops, linear, reference, schema, torch_ops, triton_ops
from .build import ensure_kernels, kernel_status

__all__ = ["append", "attend", "attend_append", "ensure_kernels", "kernel_status", "reference", "torch_ops", "view"]


def _default(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation for every device without a kernel; its first call on a device tries to get one."""

    def run(*args: Any, **kwargs: Any) -> Any:
        device = args[0].device
        if build.take_over(device) or triton_ops.take_over(device) or hpu_ops.take_over(device):
            return getattr(torch.ops.swa_pass, name)(*args, **kwargs)
        return plain(*args, **kwargs)

    return run


def _register() -> None:
    schema.define()
    for name in schema.SCHEMAS:
        plain = getattr(torch_ops, name)
        schema.library.impl(name, _default(name, plain), "CompositeExplicitAutograd")
        schema.library.impl("_" + name, plain, "CompositeExplicitAutograd")
    fakes.register()
    linear.register()
    gathered.register()


_register()

view = torch.ops.swa_pass.view.default
append = torch.ops.swa_pass.append.default
attend = torch.ops.swa_pass.attend.default
attend_append = torch.ops.swa_pass.attend_append.default
