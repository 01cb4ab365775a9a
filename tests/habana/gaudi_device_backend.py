"""Stock Gemma 3 behind our backend on the fake "hpu" device, in a process of its own: see gaudi_device_run.py.

Writes {semantics: logits of the padded prompt}, and facts about the graphs.
"""

from __future__ import annotations

import sys

import fakehpu  # noqa: F401  (the device)
import torch
from gaudi_helpers import step_logits
from gaudi_stock import compiled, sliding_stores, stock
from torch._dynamo.utils import counters

if __name__ == "__main__":
    references = torch.load(sys.argv[1])
    torch.set_num_threads(1)
    results = {}
    for semantics in ("graph", "hf"):
        model, inner, backend = compiled(stock("gemma3", references, device="hpu"), window_semantics=semantics)
        logits = step_logits(model, "padded", lazy_mode=False)
        logits = step_logits(model, "padded", lazy_mode=False)
        assert all(backend.rings.of(store).device.type == "hpu" for store in sliding_stores(model))
        results[semantics] = {
            "logits": logits,
            "graphs": len(inner.graphs),
            "breaks": len(counters["graph_break"]),
            "matches": backend.rings.matches,
            "fused": any("rms_norm" in str(node.target) for node in inner.graphs[1].graph.nodes),
        }
    torch.save(results, sys.argv[2])
