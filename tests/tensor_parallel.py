"""One rank of test_tensor_parallel.py: python -m torch.distributed.run --nproc-per-node 2 tensor_parallel.py FOLDER"""

from __future__ import annotations

import sys

import torch
import torch.distributed
from helpers import W, tiny, token_ids, with_window
from transformers import MistralForCausalLM

import swa_pass
from swa_pass.api import runtime_of
from swa_pass.compat import output_cache

GREEDY = {"max_new_tokens": 2 * W, "do_sample": False}


def main() -> None:
    torch.distributed.init_process_group("gloo")
    model = MistralForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto", dtype=torch.float32).eval()
    stock, ids = tiny("mistral"), token_ids(2 * W)
    expected = stock.generate(ids, use_cache=False, **GREEDY)
    assert torch.equal(model.generate(ids, **GREEDY), expected), "stock alone is wrong under tensor parallelism"
    swa_pass.apply(model, backend="eager")
    output = model.generate(ids, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(output.sequences, expected)
    assert not torch.equal(expected, with_window(stock, W + 1).generate(ids, use_cache=False, **GREEDY))
    assert runtime_of(model).compiled_calls == 2 * W
    heads = {layer.k_store.shape[1] for layer in output_cache(output).stores}
    assert heads == {1}, f"2 heads on 2 ranks are one each, and the rings hold {heads}"
    print(f"rank {torch.distributed.get_rank()}: right", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
