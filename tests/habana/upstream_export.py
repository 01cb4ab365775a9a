"""transformers 4.55's own exported program, whose SlidingWindowLayer gathers its window by an index tensor, on rings.

A program, run without the stand-in: adapt_transformers_to_gaudi changes transformers for the whole process.
"""

from __future__ import annotations

import copy
import json

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.integrations import executorch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import swa_pass

W, SLACK, LENGTH = 8, 4, 41
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


def tiny() -> Gemma3ForCausalLM:
    config = Gemma3TextConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=W, layer_types=KINDS, initializer_range=0.2,
        query_pre_attn_scalar=16, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return Gemma3ForCausalLM(config).eval()


@torch.no_grad()
def main() -> None:
    # The recipe's own mask function: the usual one is vmapped, which torch.export does not trace here.
    ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa_without_vmap", executorch.sdpa_mask_without_vmap)
    ALL_ATTENTION_FUNCTIONS.register("sdpa_without_vmap", ALL_ATTENTION_FUNCTIONS["sdpa"])
    model = tiny()
    model.config._attn_implementation = "sdpa_without_vmap"
    ids = torch.randint(1, 128, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    recipe = executorch.TorchExportableModuleWithHybridCache(model, max_batch_size=2, max_cache_len=64)
    module = torch.export.export(recipe, (ids[:, :1], torch.tensor([0])), strict=False).module()
    result = swa_pass.rewrite(module, slack=SLACK)
    for buffer in module.buffers():
        if buffer.dim() == 4:
            buffer.zero_()
    steps = [module(ids[:, t : t + 1], torch.tensor([t])) for t in range(LENGTH)]
    got = torch.cat([step[0] if isinstance(step, (tuple, list)) else step for step in steps], dim=1)
    errors = {}
    for window in (W - 1, W, W + 1):
        other = copy.deepcopy(model)
        other.config.sliding_window = window
        errors[window] = (got - other(ids, use_cache=False).logits).abs().max().item()
    facts = {
        "idioms": [finding.keys.idiom for finding in result.states],
        "matches": result.matches,
        "refusals": result.refusals,
        "slots": [ring.shape[2] for name, ring in result.owned.items() if "ring" in name],
        "before": "index" in result.ops_before,
        "after": sorted({"swa_pass::attend_append", "scaled_dot_product_attention"} & set(result.ops_after)),
        "errors": errors,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
