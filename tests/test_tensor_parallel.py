"""Tensor parallelism: every rank holds its own heads, so a ring is as wide as the keys that come, not as the config."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import tiny


@pytest.mark.extended
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")
def test_two_ranks_on_gloo(tmp_path):
    tiny("mistral").save_pretrained(tmp_path)
    script = Path(__file__).with_name("tensor_parallel.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count(": right") == 2
