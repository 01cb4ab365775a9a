"""Decode linears: `swa_pass::linear` against `F.linear`, in turns, on the layer shapes of Gemma 3 270M in bfloat16.

    python benchmarks/linear.py                    # 1, 4 and 16 rows
    python benchmarks/linear.py --rows 1 --seconds 10

Each shape gets so many different weights that they do not fit a cache; the calls go round them, and the two
implementations take turns. GB/s counts the weights, which are read once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from swa_pass import ops

SHAPES = [(262144, 640), (2048, 640), (640, 2048), (1024, 640), (256, 640), (640, 1024)]  # (N, K)
BYTES = 128 << 20  # of weights


def measure(functions: list[Callable[..., Tensor]], x: Tensor, weights: list[Tensor], seconds: float) -> list[float]:
    """Median seconds of one call, for each function."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function(x, weights[0])
    end = time.perf_counter() + seconds
    turn = 0
    while time.perf_counter() < end or turn < 10:
        for i, function in enumerate(functions):
            weight = weights[(turn + i * len(weights) // len(functions)) % len(weights)]  # not what the other just read
            start = time.perf_counter()
            function(x, weight)
            times[i].append(time.perf_counter() - start)
        turn += 1
    return [statistics.median(own) for own in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,4,16", help="rows of x, separated by commas")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each line of the table")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ops.ensure_kernels()
    print(f"torch {torch.__version__}, {options.threads} threads, kernels: {ops.kernel_status()}, bfloat16, medians")
    print(f"{'N':>7} {'K':>5} {'rows':>4} {'F.linear ms':>12} {'GB/s':>6} {'swa_pass ms':>12} {'GB/s':>6} {'ratio':>6}")
    for n, k in SHAPES:
        weights = [torch.randn(n, k, dtype=torch.bfloat16) for _ in range(max(1, BYTES // (2 * n * k)))]
        for rows in map(int, options.rows.split(",")):
            x = torch.randn(rows, k).bfloat16()
            functions = [torch.nn.functional.linear, torch.ops.swa_pass.linear.default]
            theirs, ours = measure(functions, x, weights, options.seconds)
            speeds = [2 * n * k / t / 1e9 for t in (theirs, ours)]
            print(
                f"{n:7} {k:5} {rows:4} {theirs * 1e3:12.3f} {speeds[0]:6.1f} {ours * 1e3:12.3f} {speeds[1]:6.1f} "
                f"{theirs / ours:6.2f}"
            )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
