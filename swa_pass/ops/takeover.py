"""Implementations that are registered when the first operator meets their device, and not at import."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import schema


class Takeover:
    """Registers `functions`, by operator name, for one type of device: once, if `ready()` then.

    A call says whether it just did: the operator must be called again then, to reach what was registered.
    """

    def __init__(
        self, device_type: str, functions: Mapping[str, Callable[..., Any]], ready: Callable[[], bool] = lambda: True
    ) -> None:
        self.device_type = device_type
        self.functions = functions
        self.ready = ready
        self._lock = threading.Lock()
        self._tried = False

    def __call__(self, device: torch.device) -> bool:
        if self._tried or device.type != self.device_type:
            return False
        with self._lock:
            if self._tried:
                return False
            self._tried = True
            if not self.ready():
                return False
            key = torch._C._dispatch_key_for_device(device.type)
            for name, function in self.functions.items():
                schema.library.impl(name, function, key)
        return True
