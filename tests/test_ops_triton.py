"""The Triton kernels beyond what `test_ops_meaning` asks of every implementation: splits, where they write, and that
they compile for a GPU. Numbers are computed in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_ops_common import Case, check_case, implementation, make_case, one_thread

from swa_pass.ops import triton_ops

__all__ = ["one_thread"]  # a fixture

pytest.importorskip("triton")
from swa_pass.ops.kernels.cuda import launch


def long_case(tokens: int, window: int, **options: object) -> Case:
    """So long that a window is split among several programs."""
    return make_case(tokens=tokens, window=window, dim=16, kv_heads=1, slack=4, lengths=[700, 30], **options)  # type: ignore[arg-type]


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What was chosen, call by call."""
    chosen: list[int] = []
    choose = launch.splits_for

    def noted(programs: int, longest: int, block: int, device: torch.device) -> int:
        chosen.append(choose(programs, longest, block, device))
        return chosen[-1]

    monkeypatch.setattr(launch, "splits_for", noted)
    return chosen


@pytest.mark.parametrize("window", [0, 600])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("sinks", [False, True])
def test_split_windows(splits: list[int], window: int, tokens: int, sinks: bool) -> None:
    check_case(implementation("triton"), long_case(tokens, window, sinks=sinks, starts=[130, 31], softcap=20.0 * sinks))
    assert max(splits) > 1


def test_a_window_off_by_one_is_noticed_in_a_split_window(splits: list[int]) -> None:
    case = long_case(1, 600)
    for store in (case.k_store, case.v_store):
        store.nan_to_num_(3.0)
    right = triton_ops.attend(*case.args(), **case.options)
    wrong = triton_ops.attend(*case.args(), **{**case.options, "window": 599})
    assert splits == [2, 2]
    assert (right - wrong).abs().max() > 1e-4


@pytest.mark.parametrize("window", [1, 2, 5, 9])
def test_tokens_are_written_in_place_only_over_keys_that_nobody_reads(window: int) -> None:
    """Against brute force, for every place in the ring."""
    for capacity in range(max(1, window - 1), window + 6):
        for tokens in range(1, 8):
            clash = False
            for length in range(3 * capacity):
                read = {p % capacity for p in range(max(0, length - window + 1), length)}
                written = {(length + i) % capacity for i in range(tokens)}
                clash = clash or (length >= capacity and bool(read & written))
            if launch.writes_in_place(tokens, capacity, window):
                assert not clash, (capacity, tokens)


def test_splits_fill_the_device_and_no_more() -> None:
    cpu = torch.device("cpu")
    wanted = launch.PROGRAMS_PER_PROCESSOR * launch.processors(cpu)
    assert launch.splits_for(1, 1 << 20, 64, cpu) == wanted
    assert launch.splits_for(wanted, 1 << 20, 64, cpu) == 1
    assert launch.splits_for(1, 256, 64, cpu) == 1  # no part is worth less than four blocks


@pytest.mark.slow
def test_they_compile_for_a_gpu(tmp_path: Path) -> None:
    script = Path(__file__).with_name("triton_compile.py")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("attend ") == 9


@pytest.mark.slow
def test_the_gpu_script_can_be_rehearsed_without_one() -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "gpu_check.py"
    command = [sys.executable, str(script), "--device", "cpu"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "32 cases right" in done.stdout
    assert "128 tokens of applied models equal stock ones" in done.stdout
