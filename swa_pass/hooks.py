"""Models whose submodules carry accelerate's hooks: a device_map over several devices, or weights that are offloaded.

accelerate puts a function in place of a module's `forward` and keeps the old one as `_old_forward`. The function moves
inputs to the module's device, and offloaded weights in and out; Dynamo is told not to look into it. So such a model
has no graph: its attention is proven on a twin without hooks and weights, and it runs eager on a HybridCache, every
ring on its layer's device.

A hook on the model itself is another matter: it stays outside, around our forward, and nothing changes for it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def forward_slot(model: Any) -> str:
    """The attribute that holds the model's own forward: what a hook of accelerate's calls, if it has one."""
    return "_old_forward" if "_old_forward" in model.__dict__ else "forward"


def hooked(model: Any) -> bool:
    """Whether some submodule's forward is accelerate's."""
    return any("_old_forward" in module.__dict__ for module in model.modules() if module is not model)


def unhooked_twin(model: Any, forward: Any, ours: Any) -> tuple[Any, Any]:
    """A copy of `model` without hooks and without weights, which costs no memory, and `forward` bound to it.

    To be traced, not to be run. ours: our own state on the model, which the copy does not get.
    """
    memo: dict[int, Any] = {id(ours): None}
    for module in model.modules():
        if "_old_forward" in module.__dict__:  # a hook may hold all weights: not to be copied
            memo.update({id(module.__dict__[name]): None for name in ("_hf_hook", "forward")})
    for tensor in (*model.parameters(), *model.buffers()):
        # One element seen everywhere. Offloaded weights are on no device ("meta"), so all move to one.
        empty = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        if "_old_forward" in module.__dict__:
            module.forward = module.__dict__.pop("_old_forward")
            module.__dict__.pop("_hf_hook")
    return twin, copy.deepcopy(forward, memo)
