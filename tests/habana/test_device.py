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

FAMILIES = ("gemma3", "gpt_oss", "mistral")


@pytest.fixture(scope="module")
def on_device(references_file, tmp_path_factory):
    if shutil.which("g++") is None:
        warnings.warn("no g++: NOTHING ran on the fake hpu device, and gpt-oss ran without HPU graphs", stacklevel=1)
        pytest.skip("no g++ to build the fake hpu device with")
    out = tmp_path_factory.mktemp("device") / "logits.pt"
    script = Path(__file__).with_name("gaudi_device_run.py")
    done = subprocess.run(
        [sys.executable, script, str(references_file), str(out)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(out)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_is_upstream_on_the_device(family, on_device, references):
    ours = {key: logits for key, logits in on_device.items() if key[0] == family}
    assert len({mode for _, mode, _ in ours}) == 7
    for (_, mode, scenario), logits in ours.items():
        expected = references[family]["logits"][scenario]
        error = (logits - expected[W]).abs().max().item()
        assert error <= TOLERANCE, f"{mode}, {scenario}: off by {error:.2e}"
        for wrong in (W - 1, W + 1):
            assert (logits - expected[wrong]).abs().max().item() > MUTATED
