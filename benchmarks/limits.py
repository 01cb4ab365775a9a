"""What this machine can do at best: the rates of reading memory and of multiply-adds, by limits.cpp and by torch."""

from __future__ import annotations

import ctypes
import subprocess
import time
from pathlib import Path

import torch

from swa_pass.ops.build import find_compiler

GIB = 1 << 30


class Limits:
    """Reads memory and multiplies, as fast as this machine can. Samples are taken between the rounds."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.threads = threads
        self.block = torch.ones(GIB // 4)
        self.read: list[float] = []
        self.flops: list[float] = []
        compiler = find_compiler()
        if compiler is None:
            raise SystemExit("attention.py needs a C++ compiler to measure the limit")
        built = folder / "limits.so"
        flags = ["-O3", "-std=c++17", "-march=native", "-shared", "-fPIC", "-pthread"]
        subprocess.run([*compiler, *flags, str(Path(__file__).with_name("limits.cpp")), "-o", str(built)], check=True)
        self.library = ctypes.CDLL(str(built))
        self.library.read_once.restype = self.library.multiply_add.restype = ctypes.c_double
        self.library.read_once.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        self.library.multiply_add.argtypes = [ctypes.c_int64, ctypes.c_int]

    def sample(self) -> None:
        """Bytes and flops per second; the better of C++ and torch."""
        started = time.perf_counter()
        self.block.sum()
        by_torch = time.perf_counter() - started
        usable = GIB // (4096 * self.threads) * 4096 * self.threads
        by_loop = self.library.read_once(self.block.data_ptr(), usable, self.threads)
        self.read.append(max(GIB / by_torch, usable / by_loop))
        rounds = 2_000_000
        self.flops.append(2 * 16 * 12 * rounds * self.threads / self.library.multiply_add(rounds, self.threads))


def cache_bytes() -> int:
    """The last-level cache, as the system tells it; 32 MiB where it does not."""
    sizes = [32 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        sizes.append(int(path.read_text().strip().rstrip("K")) << 10)
    return max(sizes)
