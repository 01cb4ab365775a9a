"""Everything that differs between the transformers versions we support, in one place.

5.17 calls the cache argument, the output field and the `generate` keyword ``past_key_values``; 5.24 calls them
``cache`` and still takes the old name. The layer protocol (`get_mask_sizes(query_length)`, `crop(-n)`,
`is_croppable`, `activate_past_recording`) is the same from 5.17 on.
"""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from packaging.version import Version
from transformers.cache_utils import Cache, CacheLayerMixin

TRANSFORMERS = Version(transformers.__version__)
if Version("5.17.0") > TRANSFORMERS:
    raise ImportError(f"swa_pass needs transformers >= 5.17, found {TRANSFORMERS}. Run: pip install -U transformers")

CACHE_NAMES = ("cache", "past_key_values")


def cache_argument(forward: Any) -> str | None:
    """Name of the argument through which a forward takes its cache, or None if it takes none."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def generate_cache_key(model: Any) -> str:
    """Key under which `generate` keeps the cache in its model_kwargs."""
    return cache_argument(model.forward) or CACHE_NAMES[0]


def output_cache(output: Any) -> Any:
    """The cache in a model or generate output, under either name."""
    for name in CACHE_NAMES:
        value = output.get(name) if hasattr(output, "get") else getattr(output, name, None)
        if value is not None:
            return value
    return None


__all__ = [
    "CACHE_NAMES",
    "TRANSFORMERS",
    "Cache",
    "CacheLayerMixin",
    "cache_argument",
    "generate_cache_key",
    "output_cache",
]
