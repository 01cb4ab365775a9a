"""swa_pass: sliding-window attention on ring buffers, for any Hugging Face model.

model = swa_pass.apply(model)

Importing this registers the operators and needs torch only; transformers is imported with the first name that needs it.
So a process that runs an exported program has a short start: ``import swa_pass.ops``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import ops  # registers the operators

if TYPE_CHECKING:
    from .api import apply, backend, explain, revert, warmup
    from .backends import InductorPass
    from .cache import HybridCache, Snapshot, load_snapshot
    from .diary import debug
    from .exporting import export, reset_state
    from .graph_report import GraphReport
    from .rewriting import rewrite
    from .spec import LayerSpec, Report

__version__ = "0.1.0"

_MODULES = {
    "api": ("apply", "backend", "explain", "revert", "warmup"),
    "backends": ("InductorPass",),
    "cache": ("HybridCache", "Snapshot", "load_snapshot"),
    "diary": ("debug",),
    "exporting": ("export", "reset_state"),
    "graph_report": ("GraphReport",),
    "rewriting": ("rewrite",),
    "spec": ("LayerSpec", "Report"),
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "GraphReport",
    "HybridCache",
    "InductorPass",
    "LayerSpec",
    "Report",
    "Snapshot",
    "__version__",
    "apply",
    "backend",
    "debug",
    "explain",
    "export",
    "load_snapshot",
    "ops",
    "reset_state",
    "revert",
    "rewrite",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
