"""A machine without a C++ compiler: torch ops instead of kernels, graphs without Inductor, the same logits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, swa_pass
from helpers import make_pair, token_ids, full_logits, distance, W
from swa_pass.api import runtime_of
pair = make_pair("mistral", backend=None)
ids = token_ids(3 * W, 2)
with torch.no_grad():
    output = pair.model(ids[:, : 2 * W])
    worst = 0.0
    cache = {runtime_of(pair.model).cache_name: swa_pass.compat.output_cache(output)}
    for n in range(2 * W, 3 * W):
        step = pair.model(ids[:, n : n + 1], **cache)
        worst = max(worst, distance(step.logits[:, 0], full_logits(pair.stock, ids)[:, n]))
print("worst", worst)
print("calls", runtime_of(pair.model).compiled_calls)
print("backends", runtime_of(pair.model).backends)
print("kernel", swa_pass.ops.kernel_status())
"""


def test_an_empty_path(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC")}
    environment |= {"PATH": "", "SWA_PASS_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    assert float(said["worst"]) < 5e-5
    assert said["calls"] == "9"
    assert said["backends"] == "{'prefill': 'eager', 'decode': 'eager'}"
    assert said["kernel"].startswith("torch ops")
    assert done.stderr.count("no C++ compiler") >= 1
