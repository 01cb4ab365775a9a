"""Everything that differs between the transformers versions we support, in one place.

5.17 calls the cache argument, the output field and the `generate` keyword ``past_key_values``; 5.24 calls them
``cache`` and still takes the old name. The layer protocol (`get_mask_sizes(query_length)`, `crop(-n)`,
`is_croppable`, `activate_past_recording`) is the same from 5.17 on.

optimum-habana pins an older transformers. Beside it swa_pass can be imported, for the models of `swa_pass.integrations`
alone: `check_transformers` says so when a stock model is given.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from abc import ABC
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

TRANSFORMERS = Version(transformers.__version__)
TOO_OLD = Version("5.17.0") > TRANSFORMERS


def check_transformers() -> None:
    """ImportError where transformers is too old for stock models."""
    if TOO_OLD:
        raise ImportError(
            f"swa_pass needs transformers >= 5.17, found {TRANSFORMERS}. Run: pip install -U transformers"
        )


if TOO_OLD and (find_spec("optimum") is None or find_spec("optimum.habana") is None):
    check_transformers()

CACHE_NAMES = ("cache", "past_key_values")

#: What transformers derives the cache layers from that hold a convolution or recurrence state.
StateLayerMixin: Any = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ABC)


def cache_argument(forward: Any) -> str | None:
    """Name of the argument through which a forward takes its cache, or None if it takes none."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def generate_cache_key(model: Any) -> str:
    """Key under which `generate` keeps the cache in its model_kwargs."""
    return cache_argument(model.forward) or CACHE_NAMES[0]


def _stock_layers(config: Any) -> list[Any]:
    """The layers of the model's own DynamicCache, new and empty; none where stock cannot make one."""
    try:
        return list(DynamicCache(config=config).layers)
    except Exception:
        return []


def state_layers(config: Any) -> dict[int, Any]:
    """The cache layers of a hybrid model that hold a convolution or recurrence state and no keys, new and empty.

    Which they are is the model's own business: they are what its `DynamicCache` has at these places.
    """
    return {i: layer for i, layer in enumerate(_stock_layers(config)) if _has_state(layer) and not _has_keys(layer)}


def joint_states(config: Any) -> dict[int, Any]:
    """For the cache layers that hold keys *and* such a state: the part that holds the state, new and empty."""
    layers = {i: layer for i, layer in enumerate(_stock_layers(config)) if _has_state(layer) and _has_keys(layer)}
    return {i: _state_part(type(layer))(layer.number_of_states) for i, layer in layers.items() if _is_joint(layer)}


def mixed_layers(config: Any) -> list[int]:
    """Places where the model's own cache has both in a layer of the model's own making, of which no part is known."""
    layers = enumerate(_stock_layers(config))
    return [i for i, layer in layers if _has_state(layer) and _has_keys(layer) and not _is_joint(layer)]


def _is_joint(layer: Any) -> bool:
    """Whether this is one of the layers in which transformers itself joins its state layer and its key layer, so that
    each half does what it does alone."""
    return type(layer) in vars(cache_utils).values()


def _state_part(kind: type) -> Any:
    """The half of a joint layer that holds the state: the first of its bases that knows no keys."""
    return next(base for base in kind.__mro__ if issubclass(base, StateLayerMixin) and not hasattr(base, "update"))


def _has_state(layer: Any) -> bool:
    return isinstance(layer, StateLayerMixin)


def _has_keys(layer: Any) -> bool:
    return hasattr(layer, "update")


def stock_windows(config: Any) -> list[int | None]:
    """The window that each layer of the model's own DynamicCache evicts by; None where it keeps everything."""
    layers = _stock_layers(config)
    return [getattr(layer, "sliding_window", None) if getattr(layer, "is_sliding", False) else None for layer in layers]


def own_layers(config: Any) -> dict[int, str]:
    """The layers of the model's own DynamicCache of which transformers' caches know nothing, with the name of their
    class: the model made it for itself, and its masks may ask it things."""
    kinds = {i: type(layer) for i, layer in enumerate(_stock_layers(config))}
    return {i: kind.__qualname__ for i, kind in kinds.items() if kind.__module__ != cache_utils.__name__}


def tracing(config: Any) -> AbstractContextManager[Any]:
    """For calls that Dynamo traces: with flex_attention, torch warns about an argument that transformers gives it, and
    Dynamo cannot trace a warning. Costs nothing for any other attention implementation."""
    if getattr(config, "_attn_implementation", None) != "flex_attention":
        return nullcontext()
    ignored = {*torch._dynamo.config.ignore_logging_functions, warnings.warn}
    return torch._dynamo.config.patch(ignore_logging_functions=ignored)


def is_traced() -> bool:
    """Whether the code that asks becomes part of a graph, Dynamo's or torch.export's. (`torch.compiler.is_compiling()`
    is true for every thread while one of them records a forward, see recording.py.)"""
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()


def output_cache(output: Any) -> Any:
    """The cache in a model or generate output, under either name."""
    for name in CACHE_NAMES:
        value = output.get(name) if hasattr(output, "get") else getattr(output, name, None)
        if value is not None:
            return value
    return None


def ready_for_hidden_states(model: Any) -> None:
    """Lets transformers put its recording hooks on the model now: the first call that asks for hidden states does that
    under a lock, which Dynamo cannot trace."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    for module in model.modules() if capturing is not None else ():
        if not getattr(module, "_output_capturing_hooks_installed", False) and _records(type(module), capturing):
            capturing.maybe_install_capturing_hooks(module)  # type: ignore[union-attr]


def _records(kind: type, capturing: Any) -> bool:
    """Whether this class's forward is one that collects hidden states: wrapped by a decorator of that module."""
    forward = getattr(kind, "forward", None)
    while forward is not None:
        if getattr(forward, "__globals__", None) is vars(capturing):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


__all__ = [
    "CACHE_NAMES",
    "TOO_OLD",
    "TRANSFORMERS",
    "Cache",
    "CacheLayerMixin",
    "DynamicCache",
    "StateLayerMixin",
    "cache_argument",
    "check_transformers",
    "generate_cache_key",
    "is_traced",
    "joint_states",
    "mixed_layers",
    "output_cache",
    "own_layers",
    "ready_for_hidden_states",
    "state_layers",
    "stock_windows",
    "tracing",
]
