"""One decode step of sliding attention: what caches do today, against rings, next to what the memory allows.

    python benchmarks/attention.py                          # every shape, every row
    python benchmarks/attention.py --shapes mistral-7b --samples 15 --json attention.json

Each row does what a cache does at a decode step once the window is full - write the new token, put the window where
the kernel wants it, attend - and is timed per call:

    static      transformers' StaticSlidingWindowLayer (roll, write, copy back) + SDPA
    dynamic     transformers' DynamicSlidingWindowLayer (cat) + SDPA
    gather455   the index gather of transformers 4.55's SlidingWindowCache + SDPA
    paged       pages of 128 tokens, gathered by a block table + SDPA
    drifting    a buffer of two windows, written at the end, moved back when full + SDPA on a slice
    ring-sdpa   a ring of W slots + SDPA on it (order does not matter to softmax)
    flex        the same ring + flex_attention, compiled
    ours        swa_pass.attend_append
    int8        the same on int8 stores (other numbers, half the bytes; its useful GB/s count the bytes of the dtype)

SDPA always gets its best form here: no mask, and the query heads of a group packed as queries of one head.

Every call works on the next of several stores, together at least four times the last-level cache, so that keys and
values come from memory. Useful GB/s: bytes of keys and values in the window, divided by the time. The limit is measured
in the same process: reading 1 GiB with a C++ loop and with torch (the faster counts) between the rounds, and the rate
of multiply-adds. The bound of a shape is the slower of reading its keys and values and doing its arithmetic.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from limits import Limits, cache_bytes
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticSlidingWindowLayer

import swa_pass
from swa_pass.demo.runner import machine
from swa_pass.ops.build import ensure_kernels, kernel_status
from swa_pass.ops.quant import quantise

PAGE = 128
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """One layer's decode step: B rows, `kv_heads` of `group` query heads each, a window of W tokens."""

    batch: int
    kv_heads: int
    group: int
    head_dim: int
    window: int
    softcap: float = 0.0

    def kv_bytes(self, dtype: torch.dtype) -> int:
        return 2 * self.batch * self.kv_heads * self.window * self.head_dim * dtype.itemsize

    @property
    def flops(self) -> int:
        """Two products of a query and a window: scores and values."""
        return 4 * self.batch * self.kv_heads * self.group * self.window * self.head_dim


SHAPES = {
    "gemma-4-31b": Shape(8, 16, 2, 256, 1024),
    "mistral-7b": Shape(8, 8, 4, 128, 4096),
    "gpt-oss": Shape(56, 8, 8, 64, 128),
    "gemma-3-270m": Shape(16, 1, 4, 256, 512),
    "gemma-2-9b": Shape(8, 8, 2, 256, 4096, softcap=50.0),
    "gemma-3-1b": Shape(1, 1, 4, 256, 512),
}

# ---------------------------------------------------------------------------------------------- rows


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (B, H, 1, D), k and v (B, KV, W, D): the group's heads packed as queries, so that keys are read once."""
    batch, heads, _, dim = q.shape
    return F.scaled_dot_product_attention(q.reshape(batch, k.shape[1], -1, dim), k, v).view(batch, heads, 1, dim)


def eager_softcap(softcap: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What models with a softcap run, since SDPA has none; heads packed as in `sdpa`."""
    batch, heads, _, dim = q.shape
    scores = torch.matmul(q.reshape(batch, k.shape[1], -1, dim), k.transpose(2, 3)) * dim**-0.5
    weights = torch.softmax(torch.tanh(scores / softcap) * softcap, -1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v).view(batch, heads, 1, dim)


class Step:
    """A row of the table: a layer that holds a full window, and goes on. Calls are (q, k, v) -> attention."""

    def __init__(self, shape: Shape, dtype: torch.dtype, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self.shape, self.dtype, self.attend = shape, dtype, attend
        self.seen = shape.window

    def filled(self, slots: int) -> Tensor:
        s = self.shape
        return torch.randn(s.batch, s.kv_heads, slots, s.head_dim, dtype=self.dtype)


class Transformers(Step):
    """A layer of transformers' own caches."""

    def __init__(self, layer: Any, *args: Any) -> None:
        super().__init__(*args)
        self.layer = layer
        layer.update(self.filled(self.shape.window), self.filled(self.shape.window))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, *self.layer.update(k, v))


class Gather455(Step):
    """StaticCache's sliding layer as it was in 4.55: index by a shifted arange, zero, add."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stores = [self.filled(self.shape.window) for _ in "kv"]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        window = self.shape.window
        slicing = torch.ones(window, dtype=torch.long).cumsum(0) - 1
        indices = (slicing + 1) % window
        position = torch.tensor([window - 1])
        for store, new in zip(self.stores, (k, v)):
            shifted = store[:, :, indices]
            shifted[:, :, position] = new
            store.zero_()
            store += shifted
        return self.attend(q, *self.stores)


class Paged(Step):
    """Pages (N, PAGE, KV, D) in any order; the step gathers a window's pages by a block table."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        s = self.shape
        pages = s.batch * s.window // PAGE
        self.table = torch.randperm(pages).view(s.batch, -1)
        self.stores = [torch.randn(pages, PAGE, s.kv_heads, s.head_dim, dtype=self.dtype) for _ in "kv"]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = self.shape
        slot = self.seen % s.window
        page = self.table[:, slot // PAGE]
        found = []
        for store, new in zip(self.stores, (k, v)):
            store[page, slot % PAGE] = new[:, :, 0]
            window = store.index_select(0, self.table.flatten()).view(s.batch, s.window, s.kv_heads, s.head_dim)
            found.append(window.transpose(1, 2))
        self.seen += 1
        return self.attend(q, *found)


class Drifting(Step):
    """A buffer of 2 W slots: new tokens go to its end, and the last W - 1 move to the front when it is full."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stores = [self.filled(2 * self.shape.window) for _ in "kv"]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        window = self.shape.window
        found = []
        if self.seen == 2 * window:
            for store in self.stores:
                store[:, :, : window - 1] = store[:, :, window + 1 :]
            self.seen = window - 1
        for store, new in zip(self.stores, (k, v)):
            store[:, :, self.seen : self.seen + 1] = new
            found.append(store[:, :, self.seen - window + 1 : self.seen + 1])
        self.seen += 1
        return self.attend(q, *found)


class Ring(Step):
    """W slots, the new token over the oldest one, attention over all of them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stores = [self.filled(self.shape.window) for _ in "kv"]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slot = self.seen % self.shape.window
        for store, new in zip(self.stores, (k, v)):
            store[:, :, slot : slot + 1] = new
        self.seen += 1
        return self.attend(q, *self.stores)


class Ours(Step):
    """`attend_append` on a ring with the default slack."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stores = [self.filled(self.shape.window + 16) for _ in "kv"]
        self.scales: dict[str, Tensor] = {}
        self.lengths = torch.full((self.shape.batch,), self.seen + 3)  # one step, again and again: a wrapped ring

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = self.shape
        return torch.ops.swa_pass.attend_append(
            q, k, v, *self.stores, self.lengths, window=s.window, scale=s.head_dim**-0.5, softcap=s.softcap,
            **self.scales,
        )  # fmt: skip


class Int8(Ours):
    """The same on quantised stores."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        (k, k_scale), (v, v_scale) = (quantise(store, torch.int8) for store in self.stores)
        self.stores, self.scales = [k, v], {"k_scale": k_scale, "v_scale": v_scale}


def flex(shape: Shape) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """flex_attention, compiled for one shape."""

    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(score / shape.softcap) * shape.softcap

    compiled = torch.compile(flex_attention, dynamic=False)
    return partial(compiled, score_mod=capped if shape.softcap else None, enable_gqa=shape.group > 1)


def makers(shape: Shape, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """row -> makes one layer with its store."""
    attend = partial(eager_softcap, shape.softcap) if shape.softcap else sdpa
    plain, window = (shape, dtype, attend), shape.window
    compiled = flex(shape)
    return {
        "static": lambda: Transformers(StaticSlidingWindowLayer(window, window), *plain),
        "dynamic": lambda: Transformers(DynamicSlidingWindowLayer(sliding_window=window), *plain),
        "gather455": lambda: Gather455(*plain),
        "paged": lambda: Paged(*plain),
        "drifting": lambda: Drifting(*plain),
        "ring-sdpa": lambda: Ring(*plain),
        "flex": lambda: Ring(shape, dtype, compiled),
        "ours": lambda: Ours(*plain),
        "int8": lambda: Int8(*plain),
    }


ROWS = ("static", "dynamic", "gather455", "paged", "drifting", "ring-sdpa", "flex", "ours", "int8")

# ---------------------------------------------------------------------------------------------- the run


def measure(name: str, dtype_name: str, given: argparse.Namespace, limits: Limits) -> dict[str, Any]:
    """All rows of one shape, interleaved: in each round every row makes calls for `--milliseconds` at least."""
    shape, dtype = SHAPES[name], DTYPES[dtype_name]
    torch.manual_seed(0)
    stores = max(2, -(-4 * cache_bytes() // shape.kv_bytes(dtype)))
    new = [torch.randn(shape.batch, shape.kv_heads, 1, shape.head_dim, dtype=dtype) for _ in "kv"]
    q = torch.randn(shape.batch, shape.kv_heads * shape.group, 1, shape.head_dim, dtype=dtype)
    make = makers(shape, dtype)
    rows = given.rows.split(",")
    # Of int8 stores twice as many: they must not fit into the cache either.
    layers = {row: [make[row]() for _ in range(stores * (2 if row == "int8" else 1))] for row in rows}
    turns: dict[str, Iterator[Any]] = {row: cycle(layers[row]) for row in rows}
    calls = {}
    for row in rows:  # warms up, compiles, and finds how many calls make a sample
        for _ in range(2):
            next(turns[row])(q, *new)
        started = time.perf_counter()
        next(turns[row])(q, *new)
        calls[row] = max(1, int(given.milliseconds / 1e3 / (time.perf_counter() - started)))
    times: dict[str, list[float]] = {row: [] for row in rows}
    limits.read.clear()
    limits.flops.clear()
    for number in range(given.samples):
        limits.sample()
        at = number % len(rows)
        for row in rows[at:] + rows[:at]:
            started = time.perf_counter()
            for _ in range(calls[row]):
                next(turns[row])(q, *new)
            times[row].append((time.perf_counter() - started) / calls[row])
    read, flops = statistics.median(limits.read), statistics.median(limits.flops)
    least = max(shape.kv_bytes(dtype) / read, shape.flops / flops)
    return {
        "shape": name,
        "dtype": dtype_name,
        "stores": stores,
        "kv_bytes": shape.kv_bytes(dtype),
        "read_gbs": read / 1e9,
        "gflops": flops / 1e9,
        "bound_ms": least * 1e3,
        "rows": {
            row: {"ms": 1e3 * statistics.median(times[row]), "all_ms": [1e3 * t for t in times[row]]} for row in rows
        },
    }


def cycle(layers: list[Any]) -> Iterator[Any]:
    while True:
        yield from layers


def table(found: dict[str, Any], given: argparse.Namespace) -> Table:
    """One shape. bound: the row's time against the least that memory and arithmetic allow."""
    s = SHAPES[found["shape"]]
    title = (
        f"{found['shape']}, {found['dtype']}: B {s.batch}, kv_heads {s.kv_heads}, group {s.group}, head_dim "
        f"{s.head_dim}, W {s.window}{f', softcap {s.softcap:g}' if s.softcap else ''}; {found['stores']} stores of "
        f"{found['kv_bytes'] / 1e6:.1f} MB; reading {found['read_gbs']:.1f} GB/s, {found['gflops']:.0f} GFLOP/s"
    )
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    shown.add_column("row")
    for column in ("ms", "quartiles", "useful GB/s", "of the bound", "ours is faster by"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row, result in found["rows"].items():
        low, _, high = statistics.quantiles(result["all_ms"], n=4)
        ours = found["rows"].get("ours", result)["ms"]
        shown.add_row(
            row,
            f"{result['ms']:.3f}",
            f"{low:.3f}-{high:.3f}",
            f"{found['kv_bytes'] / result['ms'] / 1e6:.1f}",
            f"{found['bound_ms'] / result['ms']:.0%}",
            f"{result['ms'] / ours:.1f}x",
            style="bold" if row == "ours" else None,
        )
    return shown


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="which of: " + ", ".join(SHAPES))
    parser.add_argument("--rows", default=",".join(ROWS), help="which of: " + ", ".join(ROWS))
    parser.add_argument("--dtypes", default="bf16", help="which of: " + ", ".join(DTYPES))
    parser.add_argument("--samples", type=int, default=15, help="rounds (default 15)")
    parser.add_argument("--milliseconds", type=float, default=20, help="least length of a sample (default 20)")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0: torch decides")
    parser.add_argument("--json", type=Path, default=None, help="write all numbers to this file")
    given = parser.parse_args()
    for what, known in (("shapes", SHAPES), ("rows", ROWS), ("dtypes", DTYPES)):
        unknown = set(getattr(given, what).split(",")) - set(known)
        if unknown:
            parser.error(f"unknown {what}: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return given


@torch.no_grad()
def main() -> None:
    given = options()
    if given.threads:
        torch.set_num_threads(given.threads)
    ensure_kernels()
    console = Console(width=max(110, Console().width))
    results = []
    with tempfile.TemporaryDirectory() as folder:
        limits = Limits(Path(folder), torch.get_num_threads())
        for dtype in given.dtypes.split(","):
            for name in given.shapes.split(","):
                results.append(measure(name, dtype, given, limits))
                console.print(table(results[-1], given))
    about = machine(torch.get_num_threads())
    console.print(
        f"{about['cpu']}, {about['cores']} cores, {about['threads']} threads. torch {about['torch']}, transformers "
        f"{about['transformers']}, swa_pass {swa_pass.__version__} ({kernel_status()}). Medians of {given.samples}.\n"
        f"Reproduce: python {shlex.join(sys.argv)}",
        highlight=False,
    )
    if given.json:
        given.json.write_text(json.dumps({"machine": about, "arguments": sys.argv[1:], "results": results}, indent=1))


if __name__ == "__main__":
    main()
