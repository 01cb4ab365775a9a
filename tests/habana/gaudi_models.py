"""Tiny models of every supported family, and the inputs that they are compared on. Knows nothing of optimum-habana.

Weights are drawn with a spread of 0.2, so that a window wrong by one moves the logits by far more than rounding.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

W = 8
NEW = 3 * W
VOCAB = 97
TOLERANCE = 2e-5
MUTATED = 1e-2
S, F = "sliding_attention", "full_attention"

_TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": W,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 96,
    "torch_dtype": torch.float32,
}
_TYPES = {"layer_types": [S, F, S]}

#: Family -> (transformers module, model class, config class, its own arguments).
FAMILIES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "gemma2": ("gemma2", "Gemma2ForCausalLM", "Gemma2Config", {**_TYPES, "query_pre_attn_scalar": 12}),
    "gemma3": ("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", {**_TYPES, "query_pre_attn_scalar": 21}),
    "gemma3_vision": ("gemma3", "Gemma3ForConditionalGeneration", "Gemma3Config", _TYPES),
    "gpt_oss": (
        "gpt_oss",
        "GptOssForCausalLM",
        "GptOssConfig",
        {**_TYPES, "num_local_experts": 2, "num_experts_per_tok": 1, "rope_scaling": None, "rope_theta": 10000.0},
    ),
    "mistral": ("mistral", "MistralForCausalLM", "MistralConfig", {}),
    "mixtral": ("mixtral", "MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 2}),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", "Qwen2Config", {**_TYPES, "use_sliding_window": True}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", "Qwen3Config", {**_TYPES, "use_sliding_window": True}),
    "starcoder2": ("starcoder2", "Starcoder2ForCausalLM", "Starcoder2Config", {}),
}

#: Scenario -> (prompt length, left pads of each row).
SCENARIOS = {"short": (W - 3, (0, 0)), "long": (2 * W + 3, (0, 0)), "padded": (W + 2, (0, W - 1))}


def config_of(family: str, window: int = W) -> Any:
    module, _, name, extra = FAMILIES[family]
    configs = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    arguments = {**_TINY, **extra, "sliding_window": window}
    if family in ("qwen2", "starcoder2"):
        arguments.pop("head_dim")
    if family == "gemma3_vision":
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                  "image_size": 16, "patch_size": 8}  # fmt: skip
        config = configs.Gemma3Config(
            text_config={**arguments, "query_pre_attn_scalar": 8}, vision_config=vision, mm_tokens_per_image=4,
            image_token_index=95, boi_token_index=93, eoi_token_index=94, eos_token_id=96, torch_dtype=torch.float32,
            initializer_range=0.2,
        )  # fmt: skip
        config.text_config._attn_implementation = "eager"
    else:
        config = getattr(configs, name)(**arguments)
    config._attn_implementation = "eager"
    return config


def inputs_of(scenario: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(ids (2, prompt + NEW), attention_mask of the same shape, prompt length)."""
    prompt, pads = SCENARIOS[scenario]
    ids = torch.randint(2, 90, (2, prompt + NEW), generator=torch.Generator().manual_seed(prompt))
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row, :pad], mask[row, :pad] = 0, 0
    return ids, mask, prompt


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
