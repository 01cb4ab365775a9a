"""A bare decode loop, without `generate`: the cache that the model returns goes into the next call.

A tiny Gemma 3 with random weights: five sliding layers (window 32) and one global layer.
"""

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import swa_pass

torch.manual_seed(0)
config = Gemma3TextConfig(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=32,
    sliding_window=32,
)
model = swa_pass.apply(Gemma3ForCausalLM(config).eval())
swa_pass.warmup(model, batch=1, length=100)  # optional: capture and compile now, not at the first call

tokens = torch.randint(3, 1000, (1, 100))
cache = None
written = []
with torch.no_grad():
    for _ in range(50):
        output = model(tokens, cache=cache, use_cache=True, logits_to_keep=1)
        cache = output.cache  # transformers before 5.24 call it past_key_values, here and above
        tokens = output.logits[:, -1:].argmax(-1)
        written.append(tokens.item())

print(written)
print(cache)  # tokens seen, and the bytes that the rings and the linear store take
