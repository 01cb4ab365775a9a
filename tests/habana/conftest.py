"""Real optimum-habana on CPU. Only Intel's plugin is stood in for: `stub/`, put on the path here and nowhere else."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gaudi_shared import made_once

HERE = Path(__file__).resolve().parent
INSTALLED = importlib.util.find_spec("optimum") is not None and importlib.util.find_spec("optimum.habana") is not None
#: `make test-habana` makes the environment; in any other one there is nothing to collect here.
collect_ignore_glob = [] if INSTALLED else ["*"]

if INSTALLED:
    sys.path.insert(0, str(HERE / "stub"))
    # optimum-habana asks `pip list` for the plugin's version.
    os.environ["PATH"] = str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE / "stub"), os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="session")
def references_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by a process that never saw the stand-in."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def make(file: Path) -> None:
        command = [sys.executable, HERE / "gaudi_reference.py", str(file)]
        subprocess.run(command, check=True, env=environment, timeout=300)

    return made_once(tmp_path_factory, "reference.pt", make)


@pytest.fixture(scope="session")
def references(references_file: Path) -> dict[str, Any]:
    """Per family: weights, logits and beams of upstream transformers."""
    return torch.load(references_file)


@pytest.fixture(autouse=True)
def _no_calls_left() -> None:
    if INSTALLED:
        from habana_frameworks.torch.hpex.kernels.FusedSDPA import calls

        calls.clear()
