"""The real Gemma 3 270M on ring buffers: load, apply, generate.

The first run prepares the weights (about a minute). With any other model, replace the second line of code by
``AutoModelForCausalLM.from_pretrained(...)`` and ``AutoTokenizer.from_pretrained(...)``.
"""

import swa_pass
from swa_pass.demo import document, gemma

model, tokenizer = gemma()
model = swa_pass.apply(model)

inputs = tokenizer(document()[:3000] + "\n\nMarch 5. Wind", return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=30, do_sample=False, return_dict_in_generate=True)

print(tokenizer.decode(output.sequences[0, inputs.input_ids.shape[1] :]))
print(swa_pass.explain(model))
