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


def test_every_step_is_upstream_on_the_device(references_file, references, tmp_path):
    if shutil.which("g++") is None:
        warnings.warn("no g++: NOTHING ran on the fake hpu device, and gpt-oss ran without HPU graphs", stacklevel=1)
        pytest.skip("no g++ to build the fake hpu device with")
    file, script = tmp_path / "logits.pt", Path(__file__).with_name("gaudi_device_run.py")
    command = [sys.executable, script, str(references_file), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    ours = torch.load(file)
    assert {family for family, _, _ in ours} == {"gemma3", "gpt_oss", "mistral"}
    assert len({mode for _, mode, _ in ours}) == 7
    for (family, mode, scenario), logits in ours.items():
        expected = references[family]["logits"][scenario]
        error = (logits - expected[W]).abs().max().item()
        assert error <= TOLERANCE, f"{family}, {mode}, {scenario}: off by {error:.2e}"
        for wrong in (W - 1, W + 1):
            assert (logits - expected[wrong]).abs().max().item() > MUTATED
