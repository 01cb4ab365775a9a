"""Mistral with its sliding window in every layer. A tiny model with random weights, so that it runs anywhere.

The same with the real one, whose window is 4,096 tokens (Mistral 7B v0.1):

    model = AutoModelForCausalLM.from_pretrained("mistralai/Mistral-7B-v0.1", dtype=torch.bfloat16)
    model = swa_pass.apply(model)
    model.generate(...)
"""

import torch
from transformers import MistralConfig, MistralForCausalLM

import swa_pass

torch.manual_seed(0)
config = MistralConfig(
    vocab_size=1000,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    sliding_window=64,
)
model = MistralForCausalLM(config).eval()
prompt = torch.randint(3, 1000, (2, 200))  # two rows of 200 tokens: three windows
asked = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}

stock = model.generate(prompt, attention_mask=torch.ones_like(prompt), **asked)
model = swa_pass.apply(model)
ours = model.generate(prompt, attention_mask=torch.ones_like(prompt), **asked)

print(swa_pass.explain(model))
cache = ours.cache  # transformers before 5.24 call it past_key_values
print(f"same tokens as stock: {torch.equal(stock.sequences, ours.sequences)}")
print(f"cache: {cache.nbytes:,} bytes for {cache.get_seq_length()} tokens a row, in rings of 64 + 16 slots")
