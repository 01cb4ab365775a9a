"""An applied model of stock transformers on the fake "hpu" device of tests/habana/stub, in a process of its own.

Prints how many FusedSDPA and index_copy each compiled graph has, after the logits were compared.
"""

from __future__ import annotations

import copy
from collections import Counter

import fakehpu  # noqa: F401  (the device)
import torch
from helpers import MUTATED, TOLERANCE, W, tiny, with_window
from hpu_compiler import Inner
from test_lower_hpu import logits_of

import swa_pass
from swa_pass.api import runtime_of


@torch.no_grad()
def main() -> None:
    stock, inner = tiny("gemma3", layer_types=["sliding_attention", "full_attention"]), Inner()
    model = swa_pass.apply(copy.deepcopy(stock).to("hpu"), backend=inner, slack=4)
    ids = torch.randint(1, 128, (2, 3 * W), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    got = logits_of(model, ids.to("hpu"), W + 3, mask.to("hpu")).cpu()
    assert not any(step.failed for step in runtime_of(model).steps.values())
    for window in (W - 1, W, W + 1):
        want = with_window(stock, window)(ids, attention_mask=mask, use_cache=False).logits
        error = max((got[0] - want[0]).abs().max(), (got[1, 5:] - want[1, 5:]).abs().max())
        assert error < TOLERANCE if window == W else error > MUTATED, (window, error)
    inner.check()
    for graph in inner.lowered:
        done = Counter(str(node.target) for node in graph.graph.nodes)
        print(done["hpu.sdpa_recomp_fwd.default"], done["aten.index_copy.default"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
