"""What differs between the model families of optimum-habana, in one table.

`stock_window` says what the stock Gaudi code does with the window, compared with upstream transformers, where a query
sees exactly W keys. "W+1": one key too many. "broken": wrong once the context is longer than the window. "none": the
window is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """hook: the attention's method that computes everything up to the output projection.
    fused_only: it has no option for flash attention and takes the fused kernel wherever there is one."""

    hook: str
    stock_window: str
    fused_only: bool = False


FAMILIES = {
    "GaudiGemma2ForCausalLM": Family("pre_attn_forward", "W+1"),
    "GaudiGemma3ForCausalLM": Family("pre_attn_forward", "W+1"),
    "GaudiGemma3ForConditionalGeneration": Family("pre_attn_forward", "W+1"),
    "GaudiGptOssForCausalLM": Family("forward", "W+1"),
    "GaudiMistralForCausalLM": Family("forward", "broken"),
    "GaudiMixtralForCausalLM": Family("forward", "broken", fused_only=True),
    "GaudiQwen2ForCausalLM": Family("pre_attn_forward", "none"),
    "GaudiQwen3ForCausalLM": Family("pre_attn_forward", "none"),
    "GaudiStarcoder2ForCausalLM": Family("pre_attn_forward", "none"),
}


def is_gaudi(model: Any) -> bool:
    """Whether this is a model of optimum-habana's, or of a class derived from one."""
    return any(kind.__module__.startswith("optimum.habana.") for kind in type(model).__mro__)


def family_of(model: Any) -> Family | None:
    """The supported family, or None."""
    return next((FAMILIES[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in FAMILIES), None)


def decoder_of(model: Any) -> Any:
    """The module that holds the decoder layers."""
    return getattr(model.model, "language_model", model.model)


def windows(config: Any) -> list[int | None]:
    """The window of every layer as the text config says; None for a global layer.

    Families without `layer_types` have one window for all layers, or none.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]
