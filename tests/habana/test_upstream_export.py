"""The gather idiom as transformers 4.55 really writes it: this environment is the one that has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

W, SLACK = 8, 4


def test_a_gathered_window_becomes_a_ring():
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = Path(__file__).parent / "upstream_export.py"
    run = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    facts = json.loads(run.stdout.splitlines()[-1])
    assert (facts["matches"], facts["refusals"]) == (3, [])
    assert facts["idioms"] == ["gathered_window", "linear_store", "gathered_window"]
    # 4.55's recipe shows the global layer through the window too, and the graph is what counts.
    assert facts["slots"] == [W, W, W + SLACK, W + SLACK, W, W]
    assert facts["before"]
    assert facts["after"] == ["swa_pass::attend_append"]
    assert facts["errors"][str(W)] < 5e-5
    assert min(facts["errors"][str(W - 1)], facts["errors"][str(W + 1)]) > 1e-2
