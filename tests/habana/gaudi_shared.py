"""What several test processes share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The file that `make` writes, made by one process also where xdist runs the tests in several."""
    shared = "PYTEST_XDIST_WORKER" in os.environ
    file = (tmp_path_factory.getbasetemp().parent if shared else tmp_path_factory.mktemp("shared")) / name
    try:
        file.with_suffix(".claimed").touch(exist_ok=False)
    except FileExistsError:
        give_up = time.monotonic() + 500
        while not file.exists():
            assert time.monotonic() < give_up, f"the process that makes {name} did not finish"
            time.sleep(0.5)
        return file
    part = file.with_suffix(".part")
    make(part)
    os.replace(part, file)
    return file
