"""Upstream transformers on the tiny models: weights, logits of every step, beams. A program, run without the stand-in.

adapt_transformers_to_gaudi changes transformers for the whole process, so the reference is made in one of its own.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from gaudi_models import FAMILIES, NEW, SCENARIOS, W, config_of, inputs_of, positions_of

BEAMS = 3


def upstream(family: str, window: int, weights: dict[str, Any] | None) -> Any:
    module, name, _, _ = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    model = model(config_of(family, window)).eval()
    if weights is not None:
        model.load_state_dict(weights)
    return model


@torch.no_grad()
def reference(family: str) -> dict[str, Any]:
    """{"weights", "logits": {scenario: {window: (NEW, 2, vocab)}}, "beams": {scenario: tokens}}"""
    first = upstream(family, W, None)
    weights = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    logits: dict[str, dict[int, torch.Tensor]] = {scenario: {} for scenario in SCENARIOS}
    for window in (W - 1, W, W + 1):
        model = upstream(family, window, weights)
        for scenario in SCENARIOS:
            ids, mask, prompt = inputs_of(scenario)
            out = model(input_ids=ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=False).logits
            logits[scenario][window] = out[:, prompt - 1 : -1].transpose(0, 1).float().clone()
    beams = {}
    for scenario in ("short", "long"):
        ids, mask, prompt = inputs_of(scenario)
        beams[scenario] = first.generate(
            ids[:, :prompt], attention_mask=mask[:, :prompt], max_new_tokens=NEW, num_beams=BEAMS, do_sample=False,
            use_cache=False, eos_token_id=96, suppress_tokens=[96], pad_token_id=0,
        )  # fmt: skip
    return {"weights": weights, "logits": logits, "beams": beams}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.save({family: reference(family) for family in FAMILIES}, sys.argv[1])
