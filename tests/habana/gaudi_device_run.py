"""Some families on the fake "hpu" device, in a process of its own: the device cannot be taken out of one again.

Writes {(family, mode, scenario): logits} and how many steps were replayed. On this device optimum-habana takes its
fused branches (RMSNorm, RoPE, gpt-oss's dense experts), which need x.device.type == "hpu".
"""

from __future__ import annotations

import sys

import fakehpu  # noqa: F401  (the device)
import torch
from gaudi_helpers import MODES, gaudi, ht, run
from gaudi_models import SCENARIOS

FAMILIES = ("gemma3", "gpt_oss", "mistral")

if __name__ == "__main__":
    references = torch.load(sys.argv[1])
    torch.set_num_threads(1)
    logits = {}
    for family in FAMILIES:
        for mode in MODES:
            for scenario in SCENARIOS if family == "gpt_oss" or mode == "everything" else ("padded",):
                model = gaudi(family, references, device="hpu")
                assert next(model.parameters()).device.type == "hpu"
                before = ht.hpu.graphs.stats["replays"]
                logits[family, mode, scenario] = run(model, scenario, mode)
                assert all(store.cache.device.type == "hpu" for store in (model.model.layers[0].self_attn.k_cache,))
                if "graphs" in MODES[mode]:
                    assert ht.hpu.graphs.stats["replays"] > before, "nothing was replayed"
    torch.save(logits, sys.argv[2])
