"""Stock Gaudi models behind torch.compile: what has to be put right before they run, and a compiler that counts."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from gaudi_helpers import gaudi
from gaudi_models import FAMILIES, W
from hpu_compiler import Inner
from torch._dynamo.utils import counters

import swa_pass


def stock(family: str, references: dict[str, Any], *, window: int = W, device: str = "cpu") -> Any:
    """A stock model that can run `reuse_cache`. The window, masks, stores and attention are those of optimum-habana."""
    model = gaudi(family, references, apply=False, window=window, device=device)
    module = importlib.import_module(type(model).__module__)
    if family == "gemma3":  # the text class has no method of its own for this, and the list of names misses its type
        prepare = module.GaudiGemma3ForConditionalGeneration.prepare_inputs_for_generation
        model.prepare_inputs_for_generation = prepare.__get__(model)
        model.config.model_type = "gemma3"
    for layer in model.modules():  # transformers 4.55 took this attribute away from the attentions
        if hasattr(layer, "k_cache") and not hasattr(layer, "num_key_value_heads"):
            layer.num_key_value_heads = layer.config.num_key_value_heads
    if FAMILIES[family][0] == "mistral" and device == "cpu":  # off the device it forgets position_ids
        module.apply_customized_rope = module.apply_customized_rope_module
    return model


def compiled(model: Any, **options: Any) -> tuple[Any, Inner, Any]:
    """(model, inner compiler, our backend): the decoder behind our backend."""
    torch._dynamo.reset()
    counters.clear()
    inner = Inner()
    backend = swa_pass.backend(inner, **{"window_semantics": "graph", **options})  # as if on the device
    model.model = torch.compile(model.model, backend=backend)
    return model, inner, backend


def operators(graph: Any) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def sliding_stores(model: Any) -> list[torch.Tensor]:
    layers = [layer for layer in model.modules() if hasattr(layer, "k_cache")]
    return [store.cache for i in (0, 2) for store in (layers[i].k_cache, layers[i].v_cache)]
