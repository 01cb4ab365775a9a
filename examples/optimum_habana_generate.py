"""A sliding-window model of optimum-habana on ring buffers, with HPU graphs: load, apply, wrap, generate.

On a Gaudi, with optimum-habana and Intel's Gaudi software:

    python examples/optimum_habana_generate.py --model google/gemma-3-1b-it
    python examples/optimum_habana_generate.py --tiny          # random weights, no download

The order matters: adapt, load, apply, wrap.
"""

from __future__ import annotations

import argparse

import habana_frameworks.torch as ht
import torch
from optimum.habana.transformers.modeling_utils import adapt_transformers_to_gaudi

adapt_transformers_to_gaudi()  # before the model classes are looked up

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig  # noqa: E402

import swa_pass  # noqa: E402


def tiny_model() -> torch.nn.Module:
    config = Gemma3TextConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=16, query_pre_attn_scalar=16, max_position_embeddings=256,
        pad_token_id=0, torch_dtype=torch.float32,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="google/gemma-3-1b-it")
    parser.add_argument("--prompt", default="A short story about a lighthouse keeper:")
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--flash", action="store_true", help="FusedSDPA instead of matrix products")
    parser.add_argument("--tiny", action="store_true", help="a small model of random weights")
    options = parser.parse_args()
    device = "hpu" if ht.hpu.is_available() else "cpu"

    if options.tiny:
        model, tokenizer = tiny_model(), None
        inputs = {"input_ids": torch.randint(1, 128, (2, 40))}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        dtype = AutoConfig.from_pretrained(options.model).torch_dtype or torch.bfloat16
        model = AutoModelForCausalLM.from_pretrained(options.model, torch_dtype=dtype)
        inputs = tokenizer(options.prompt, return_tensors="pt")

    model = swa_pass.apply(model.eval().to(device))
    model = ht.hpu.wrap_in_hpu_graph(model)

    output = model.generate(
        **{name: tensor.to(device) for name, tensor in inputs.items() if name != "token_type_ids"},
        max_new_tokens=options.new_tokens, do_sample=False, reuse_cache=True, static_shapes=True,
        use_flash_attention=options.flash, hpu_graphs=True, lazy_mode=True, ignore_eos=True,
    )  # fmt: skip
    new = output[0, inputs["input_ids"].shape[1] :].cpu()
    print(tokenizer.decode(new) if tokenizer else new.tolist())
    report = swa_pass.explain(model)
    print(report)
    rows, length = output.shape
    print(f"KV of this run: {report.kv_bytes(length, rows):,} bytes, stock {report.stock_kv_bytes(length, rows):,}")


if __name__ == "__main__":
    main()
