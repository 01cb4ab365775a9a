"""The same comparison on tensors whose device type is "hpu"."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from gaudi_models import MUTATED, TOLERANCE, W


def on_the_device(program, references_file, folder):
    """What the program saves."""
    if shutil.which("g++") is None:
        warnings.warn("no g++: NOTHING ran on the fake hpu device, and gpt-oss ran without HPU graphs", stacklevel=1)
        pytest.skip("no g++ to build the fake hpu device with")
    file, script = folder / "logits.pt", Path(__file__).with_name(program)
    command = [sys.executable, script, str(references_file), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(file)


def test_stock_behind_our_backend(references_file, references, tmp_path):
    """With the plugin's fused RMSNorm and RoPE in the graphs, which stock code takes on this device only."""
    results = on_the_device("gaudi_device_backend.py", references_file, tmp_path)
    for semantics, shown in (("graph", W + 1), ("hf", W)):
        facts = results[semantics]
        for window, expected in references["gemma3"]["logits"]["padded"].items():
            error = (facts["logits"] - expected).abs().max().item()
            assert error <= TOLERANCE if window == shown else error > MUTATED
        assert (facts["graphs"], facts["breaks"], facts["matches"], facts["fused"]) == (2, 0, 2, True)


def test_every_step_is_upstream_on_the_device(references_file, references, tmp_path):
    ours = on_the_device("gaudi_device_run.py", references_file, tmp_path)
    assert {family for family, _, _ in ours} == {"gemma3", "gpt_oss", "mistral"}
    assert len({mode for _, mode, _ in ours}) == 7
    for (family, mode, scenario), logits in ours.items():
        expected = references[family]["logits"][scenario]
        error = (logits - expected[W]).abs().max().item()
        assert error <= TOLERANCE, f"{family}, {mode}, {scenario}: off by {error:.2e}"
        for wrong in (W - 1, W + 1):
            assert (logits - expected[wrong]).abs().max().item() > MUTATED
