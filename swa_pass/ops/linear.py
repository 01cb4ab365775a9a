"""`torch.ops.swa_pass.linear(x, weight, bias=None)`: `torch.nn.functional.linear`, fast for a few rows of x.

    x       (..., K)  bf16 or fp16    weight  (N, K)  as it lies in the checkpoint    bias  (N,) or None
    result  (..., N)  contiguous

One decode step multiplies each weight with as few rows as the batch has, so it should take as long as reading the
weights. The C++ kernel (kernels/cpu/linear.cpp) does that on CPU for up to 64 rows (bf16 on processors with bf16
instructions: 16); everything else, and every call that needs gradients, is `torch.nn.functional.linear`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from . import schema
from .build import take_over


def _default(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Devices without a kernel; the first CPU call tries to get one."""
    if take_over(x.device):
        return torch.ops.swa_pass.linear.default(x, weight, bias)
    return functional.linear(x, weight, bias).contiguous()


def _autograd(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As long as no kernel is loaded (which brings its own): gradients are those of `functional.linear`."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return functional.linear(x, weight, bias)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.swa_pass.linear.default(x, weight, bias)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def register() -> None:
    """Define the operator. Called once, at import of `swa_pass.ops`."""
    schema.library.define(
        "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
    )
    schema.library.impl("linear", _default, "CompositeExplicitAutograd")
    schema.library.impl("linear", _autograd, "Autograd")
    torch.library.register_fake(f"{schema.NAMESPACE}::linear", _fake)
