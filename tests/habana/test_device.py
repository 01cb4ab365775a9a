"""The same comparison on tensors whose device type is "hpu"."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from gaudi_models import MUTATED, TOLERANCE, W


def run_on_device(script: str, *arguments: str) -> str:
    if shutil.which("g++") is None:
        warnings.warn("no g++: NOTHING ran on the fake hpu device, and gpt-oss ran without HPU graphs", stacklevel=1)
        pytest.skip("no g++ to build the fake hpu device with")
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(here), str(here.parent)])}
    command = [sys.executable, str(here / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_our_operators_on_the_device():
    """Eager and compiled, over all lengths, against the reference; FusedSDPA where it can do it."""
    printed = run_on_device("gaudi_device_ops.py").splitlines()
    assert printed[-2:] == ["fused calls 6", "index_copy 2"]


def test_our_backend_on_the_device(references_file, references, tmp_path):
    """Stock code behind `swa_pass.backend`, as test_backend.py runs it on CPU tensors."""
    file = tmp_path / "logits.pt"
    run_on_device("gaudi_device_backend.py", str(references_file), str(file))
    for (family, scenario), (logits, matches) in torch.load(file).items():
        expected = references[family]["logits"][scenario]
        assert (logits - expected[W + 1]).abs().max() <= TOLERANCE
        for wrong in (W - 1, W):
            assert (logits - expected[wrong]).abs().max() > MUTATED
        assert matches == 2


def test_every_step_is_upstream_on_the_device(references_file, references, tmp_path):
    file = tmp_path / "logits.pt"
    run_on_device("gaudi_device_run.py", str(references_file), str(file))
    ours = torch.load(file)
    assert {family for family, _, _ in ours} == {"gemma3", "gpt_oss", "mistral"}
    assert len({mode for _, mode, _ in ours}) == 7
    for (family, mode, scenario), logits in ours.items():
        expected = references[family]["logits"][scenario]
        error = (logits - expected[W]).abs().max().item()
        assert error <= TOLERANCE, f"{family}, {mode}, {scenario}: off by {error:.2e}"
        for wrong in (W - 1, W + 1):
            assert (logits - expected[wrong]).abs().max().item() > MUTATED
