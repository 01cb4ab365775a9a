"""Stock models behind `swa_pass.backend` on the fake "hpu" device, in a process of its own.

Writes {(family, scenario): (logits, attentions that read rings)}.
"""

from __future__ import annotations

import sys

import fakehpu  # noqa: F401  (the device)
import torch
from gaudi_helpers import step_logits
from gaudi_stock import compiled, stock

if __name__ == "__main__":
    references = torch.load(sys.argv[1])
    torch.set_num_threads(1)
    logits = {}
    for family, scenario in (("gemma2", "short"), ("gemma3", "padded")):
        model, inner, backend = compiled(stock(family, references, device="hpu"), window_semantics=None)
        logits[family, scenario] = step_logits(model, scenario, lazy_mode=False), backend.rings.matches
        assert len(inner.graphs) == 2
    torch.save(logits, sys.argv[2])
