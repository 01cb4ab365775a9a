"""Stock flash attention without graph breaks.

The plugin tells Dynamo to skip its module `hpu`, where the context manager `sdp_kernel` lives. Stock code of Gemma,
Gemma 2, Gemma 3, Mistral and Starcoder 2 enters it around every FusedSDPA, so each layer becomes three graphs: the
write of a token in one, its attention in the next, and no pass ever sees both. All that the context manager says is
whether to recompute, which FusedSDPA also takes as an argument.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _Said:
    """What the context manager around the current call says; None outside of one."""

    def __init__(self) -> None:
        self.recompute: bool | None = None


_said = _Said()
_undo: list[tuple[Any, str, Any]] = []


class ExplicitFusedSDPA:
    """The plugin's FusedSDPA; `recompute_mode` is what the context manager around the call says, unless it is given."""

    def __init__(self, fused: Any) -> None:
        self.fused = fused
        parameters = list(inspect.signature(fused.forward).parameters.values())[1:]  # the first is autograd's ctx
        self.place = [parameter.name for parameter in parameters].index("recompute_mode")
        self.defaults = tuple(parameter.default for parameter in parameters)

    def apply(self, *args: Any) -> Any:
        if _said.recompute is None or (len(args) > self.place and args[self.place] is not None):
            return self.fused.apply(*args)
        before = (*args, *self.defaults[len(args) : self.place])[: self.place]
        return self.fused.apply(*before, _said.recompute, *args[self.place + 1 :])


@contextmanager
def sdp_kernel(enable_recompute: bool = True) -> Iterator[None]:
    """The plugin's context manager, which Dynamo cannot enter; under Dynamo only what it says is noted."""
    if not torch.compiler.is_compiling():
        with _undo[0][2](enable_recompute=enable_recompute):
            yield
        return
    before, _said.recompute = _said.recompute, enable_recompute
    try:
        yield
    finally:
        _said.recompute = before


def make_traceable() -> Callable[[], None]:
    """Makes ``use_flash_attention`` of the stock models compile without graph breaks, in this process. Call it after
    the models were imported and before they are called. Returns a function that takes it back.

    Raises:
        ImportError: no plugin.
        ValueError: the plugin's FusedSDPA takes no `recompute_mode`.
    """
    import habana_frameworks.torch.hpu as hpu
    from habana_frameworks.torch.hpex import kernels

    if not _undo:
        explicit = ExplicitFusedSDPA(kernels.FusedSDPA)
        modules = [module for name, module in list(sys.modules.items()) if name.startswith("optimum.habana.")]
        users = [module for module in modules if getattr(module, "FusedSDPA", None) is kernels.FusedSDPA]
        for owner, name, value in [(hpu, "sdp_kernel", sdp_kernel), *((user, "FusedSDPA", explicit) for user in users)]:
            _undo.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
    return _take_back


def _take_back() -> None:
    while _undo:
        setattr(*_undo.pop())
