"""The table in docs/gaudi.md, and the real allocation behind it, at the real sizes, on the meta device."""

from __future__ import annotations

import importlib
from pathlib import Path

import gaudi_helpers  # noqa: F401  (adapts transformers)
import pytest
import torch

from swa_pass.integrations import optimum_habana
from swa_pass.integrations.optimum_habana.memory import CONTEXTS, MODELS, table

ROOT = Path(__file__).resolve().parents[2]
CLASSES = {
    "gemma-3-27b": ("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig"),
    "gemma-2-9b": ("gemma2", "Gemma2ForCausalLM", "Gemma2Config"),
    "mistral-7b-v0.1": ("mistral", "MistralForCausalLM", "MistralConfig"),
    "gpt-oss-20b": ("gpt_oss", "GptOssForCausalLM", "GptOssConfig"),
}


def test_the_table_is_in_the_docs():
    command = "python -m swa_pass.integrations.optimum_habana.memory"
    assert table() in Path(ROOT, "docs", "gaudi.md").read_text(), f"put in what this prints: {command}"


@pytest.mark.parametrize("name", MODELS)
def test_allocated_bytes_at_real_sizes(name):
    """A model of that shape (narrow where KV bytes do not depend on it), applied, allocates what the table says."""
    shape = MODELS[name]
    module, model_class, config_class = CLASSES[name]
    configs = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    config = getattr(configs, config_class)(
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, sliding_window=shape.window, hidden_size=64, intermediate_size=64, vocab_size=128,
        torch_dtype=torch.bfloat16, max_position_embeddings=128, pad_token_id=0,
        **({"num_local_experts": 2} if module == "gpt_oss" else {}),
    )  # fmt: skip
    models = importlib.import_module(f"optimum.habana.transformers.models.{module}.modeling_{module}")
    with torch.device("meta"):
        model = getattr(models, f"Gaudi{model_class}")(config).eval().to(torch.bfloat16)
    optimum_habana.apply(model)
    assert [layer.window for layer in optimum_habana.explain(model).layers] == shape.windows()
    for context in CONTEXTS:
        model.allocate_kv_cache(1, context, context // 2)
        stores = [store.cache for a in optimum_habana.runtime_of(model).attentions for store in (a.k_cache, a.v_cache)]
        assert all(store.dtype == torch.bfloat16 for store in stores)
        allocated = sum(store.numel() * store.element_size() for store in stores)
        assert allocated == optimum_habana.explain(model).kv_bytes(context) == shape.report(name).kv_bytes(context)
