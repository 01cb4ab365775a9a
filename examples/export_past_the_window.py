"""A model as one file that decodes to any length: `swa_pass.export`, save, load, run.

A tiny Mistral with random weights; its window is 64 tokens, and the program runs to 400. What loads the file needs
torch and `swa_pass.ops` only; with ``lowering="aten"``, torch alone. docs/exporting.md has the rest, AOTInductor too.
"""

import tempfile
from pathlib import Path

import torch
from transformers import MistralConfig, MistralForCausalLM

import swa_pass

torch.manual_seed(0)
config = MistralConfig(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    sliding_window=64,
)
model = MistralForCausalLM(config).eval()
prompt = torch.randint(3, 1000, (1, 200))

program = swa_pass.export(model, logits_to_keep=1)
file = Path(tempfile.mkdtemp()) / "mistral.pt2"
torch.export.save(program, file)

# From here on the model is not needed: another process would begin with `import torch, swa_pass.ops`.
decoder = torch.export.load(file).module()
tokens = prompt
written = []
with torch.no_grad():
    for _ in range(200):
        tokens = decoder(tokens)[:, -1:].argmax(-1)  # the prompt, then one token at a time
        written.append(tokens.item())

ring = decoder.get_buffer("cache.keys_0")
print(f"{prompt.shape[1] + len(written)} tokens, in {ring.shape[2]} of {64 + 16} slots a layer")
stock = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=200, do_sample=False)
print(f"same tokens as stock: {stock[0, prompt.shape[1] :].tolist() == written}")
