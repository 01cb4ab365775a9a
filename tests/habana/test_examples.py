"""The scripts for people with a Gaudi, at toy sizes beside the stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(name: str, folder: Path, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_generate(tmp_path):
    output = run("optimum_habana_generate.py", tmp_path, "--tiny", "--new-tokens", "20")
    assert "5 of 5 sliding layers rewritten" in output
    # 2 rows x keys and values x 2 KV heads x head_dim 16 x 4 bytes x (5 rings of 16, one layer of 40 + 20)
    assert f"KV of this run: {2 * 2 * 2 * 16 * 4 * (5 * 16 + 60):,} bytes" in output


def test_check(tmp_path):
    output = run("gaudi_check.py", tmp_path, "--tiny")
    assert output.count("| ok |") == 17
    assert "| 2 | rings |" in output
    assert "ring, no mask" in output
    assert output.splitlines()[-1].startswith("0 failed")
