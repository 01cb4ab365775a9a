"""Every example runs as a reader would run it, and prints what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def run_example(name: str, folder: Path) -> str:
    """Runs it in another folder, so that only the installed package can be imported. Returns its output."""
    script = ROOT / "examples" / name
    # The tests' own processes keep to one thread; a reader's example would not.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_example_is_tested_here() -> None:
    elsewhere = ["gaudi_check.py", "optimum_habana_generate.py"]  # tests/habana: they need that environment
    here = ["decode_loop.py", "export_past_the_window.py", "mistral_window.py", "quickstart.py"]
    assert sorted(EXAMPLES) == sorted([*here, *elsewhere])


@pytest.mark.weights
def test_quickstart(tmp_path: Path) -> None:
    output = run_example("quickstart.py", tmp_path)
    assert "15 of 15 sliding layers rewritten" in output


def test_mistral_window(tmp_path: Path) -> None:
    output = run_example("mistral_window.py", tmp_path)
    assert "same tokens as stock: True" in output
    assert "4 of 4 sliding layers rewritten" in output
    # 4 layers x keys and values x 2 rows x 2 KV heads x 80 slots x head_dim 16 x 4 bytes
    assert f"cache: {4 * 2 * 2 * 2 * 80 * 16 * 4:,} bytes for 239 tokens" in output


def test_decode_loop(tmp_path: Path) -> None:
    written, cache = run_example("decode_loop.py", tmp_path).splitlines()
    assert len(written.split(",")) == 50
    assert cache.startswith("HybridCache(5 rings, 1 linear, 149 tokens seen")


def test_export_past_the_window(tmp_path: Path) -> None:
    output = run_example("export_past_the_window.py", tmp_path)
    assert "400 tokens, in 80 of 80 slots a layer" in output
    assert "same tokens as stock: True" in output
