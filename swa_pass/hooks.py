"""Hooks on submodules: functions of others that run in the middle of a forward. Such a model runs eager, on rings.

torch's own hooks (`register_forward_hook`) could be traced, but Dynamo does not notice one that comes or goes after a
graph was made, and compiles again for every element that one appends to a list. `Watch` notices.

accelerate's come with a device_map over several devices, or with offloaded weights. accelerate puts a function in place
of a module's `forward` and keeps the old one as `_old_forward`. The function moves inputs to the module's device, and
weights in and out; Dynamo is told not to look into it. So attention is proven on a twin without hooks and weights, and
every ring is on its layer's device.

A hook on the model itself is another matter: it stays outside, around our forward, and nothing changes for it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils.hooks import RemovableHandle


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


class Watch:
    """Knows whether a submodule has a forward hook now, without looking at all of them at every call."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._registered = -1
        self._suspects: list[nn.Module] = []

    def sees(self) -> bool:
        if nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks:
            return True
        if self._registered != RemovableHandle.next_id:  # some hook was registered somewhere since
            self._registered = RemovableHandle.next_id
            self._suspects = [module for module in self.model.modules() if module is not self.model and _has(module)]
        return any(map(_has, self._suspects))


def _has(module: nn.Module) -> bool:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    # Those by which transformers records hidden states are made to be traced.
    return any(getattr(hook, "__module__", "") != "transformers.utils.output_capturing" for hook in hooks)
