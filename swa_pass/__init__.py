"""swa_pass: sliding-window attention on ring buffers, for any Hugging Face model.

model = swa_pass.apply(model)
"""

from __future__ import annotations

from . import ops  # registers the operators
from .api import apply, backend, explain, revert, warmup
from .backends import InductorPass
from .cache import HybridCache, Snapshot, load_snapshot
from .diary import debug
from .graph_report import GraphReport
from .rewriting import rewrite
from .spec import LayerSpec, Report

__version__ = "0.1.0"

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
    "load_snapshot",
    "ops",
    "revert",
    "rewrite",
    "warmup",
]
