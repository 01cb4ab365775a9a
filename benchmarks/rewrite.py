"""`torch.compile` of a decoder that keeps its own KV cache: Inductor alone, and with the pass in front of it.

    python benchmarks/rewrite.py                                 # four idioms, 8 rows, 4,096 slots, window 512
    python benchmarks/rewrite.py --batch 1 --slots 32768

One decode step of four attention layers (16 heads, 4 kv heads, head_dim 128, bfloat16) in the middle of a long text,
with no other work around them, so that the ratio is that of the attention. Idioms, as in docs/graphs.md:

    linear   store.index_copy_(2, position, new), attention on all slots under a mask of the window
    paged    pages[table] of the whole text, blocks of 16, the same mask
    shifted  a window moved by `cat` and copied back; `rewrite` of the exported program, which owns its state
    listed   the window's slots of all rows in one list, all rows in one sequence, told apart by a mask that is an input
             (transformers' continuous batching)

Stock is what Inductor makes of the same module, with `enable_gqa` (repeated heads are slower). It is not the best code
that one could write: with a group's heads packed as queries, SDPA reads keys once (attention.py, "ring-sdpa"). So the
ratio is what the pass does for code as it is usually written, and not a measure of the kernel. Interleaved; medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import swa_pass
from swa_pass.demo.runner import machine
from swa_pass.ops.build import ensure_kernels

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 16, 4, 128, 16


class Attention(nn.Module):
    """`forward(q, k, v, position, table) -> sum of all layers' outputs`; q (B, heads, 1, head_dim)."""

    def __init__(self, idiom: str, batch: int, slots: int, window: int) -> None:
        super().__init__()
        self.idiom, self.slots, self.window = idiom, slots, window
        for layer in range(LAYERS):
            for kind in "kv":
                self.register_buffer(f"{kind}_{layer}", torch.randn(self._shape(batch), dtype=torch.bfloat16))

    def _shape(self, batch: int) -> tuple[int, ...]:
        if self.idiom == "paged":
            return batch * self.slots // BLOCK, BLOCK, KV_HEADS, HEAD_DIM
        if self.idiom == "listed":
            return batch * self.slots, KV_HEADS, HEAD_DIM
        return batch, KV_HEADS, self.window if self.idiom == "shifted" else self.slots, HEAD_DIM

    def forward(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, table: Tensor, listed: Tensor) -> Tensor:
        """`table` (B, blocks), or (S,) slots; `listed` is the mask of those, (1, 1, B, S)."""
        if self.idiom == "listed":
            q = q.permute(2, 1, 0, 3)
        total = torch.zeros_like(q)
        for layer in range(LAYERS):
            stores = getattr(self, f"k_{layer}"), getattr(self, f"v_{layer}")
            keys, values = (self._step(store, new, position, table) for store, new in zip(stores, (k, v)))
            mask = listed if self.idiom == "listed" else self._mask(position)
            total = total + self._attend(q + layer, keys, values, mask)
        return total

    def _step(self, store: Tensor, new: Tensor, position: Tensor, table: Tensor) -> Tensor:
        if self.idiom == "linear":
            store.index_copy_(2, position, new)
            return store
        if self.idiom == "shifted":
            store.copy_(torch.cat([store[:, :, 1:], new], dim=2))
            return store
        if self.idiom == "listed":
            store.index_copy_(0, position + torch.arange(new.shape[0]) * self.slots, new[:, :, 0])
            return store.index_select(0, table).transpose(0, 1)[None]
        block = table.gather(1, (position // BLOCK).expand(table.shape[0], 1))[:, 0]
        store[block, position % BLOCK] = new[:, :, 0]
        return store[table].reshape(table.shape[0], -1, KV_HEADS, HEAD_DIM).transpose(1, 2)

    def _mask(self, position: Tensor) -> Tensor:
        if self.idiom == "shifted":
            key = position - (self.window - 1) + torch.arange(self.window)
            return (key >= 0)[None, None, None]
        key = torch.arange(self.slots)
        distance = position - key
        return ((distance >= 0) & (distance < self.window))[None, None, None]

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=HEAD_DIM**-0.5, enable_gqa=True)


def steps(idiom: str, batch: int, slots: int, window: int) -> dict[str, Callable[[int], Tensor]]:
    """A decode step at a position, by variant."""
    q = torch.randn(batch, HEADS, 1, HEAD_DIM, dtype=torch.bfloat16)
    k, v = torch.randn(2, batch, KV_HEADS, 1, HEAD_DIM, dtype=torch.bfloat16)
    table = torch.randperm(batch * slots // BLOCK).reshape(batch, -1)
    torch.manual_seed(0)
    stock = Attention(idiom, batch, slots, window)
    torch.manual_seed(0)
    ours: Any = Attention(idiom, batch, slots, window)
    first = torch.tensor([0])
    listed = torch.zeros(1, 1, batch, batch * window, dtype=torch.bfloat16)
    if idiom == "listed":  # as the host makes them in the middle of a text
        last = torch.arange(slots // 2 - window + 1, slots // 2 + 1)
        table = (torch.arange(batch)[:, None] * slots + last).reshape(-1)
        rows = torch.arange(batch).repeat_interleave(window)
        hidden = rows[None, :] != torch.arange(batch)[:, None]
        listed.masked_fill_(hidden, torch.finfo(torch.bfloat16).min)
    if idiom == "shifted":
        program = torch.export.export(ours, (q, k, v, first, table, listed))
        result = swa_pass.rewrite(program)
        assert result.matches == LAYERS, result.refusals
        compiled = torch.compile(result.graph.module(), backend="inductor")
    else:
        compiled = torch.compile(ours, backend=swa_pass.backend("inductor"))
    plain = torch.compile(stock, backend="inductor")
    return {
        "Inductor": lambda p: plain(q, k, v, torch.tensor([p]), table, listed),
        "swa_pass, Inductor": lambda p: compiled(q, k, v, torch.tensor([p]), table, listed),
    }


def measure(idiom: str, options: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds by variant. A ring knows its text from the beginning, so it is read up to the middle."""
    run = steps(idiom, options.batch, options.slots, options.window)
    start = options.slots // 2
    for p in range(start) if idiom == "shifted" else (start, start + 1):
        run["swa_pass, Inductor"](p)
    run["Inductor"](start)
    times: dict[str, list[float]] = {name: [] for name in run}
    for sample in range(options.samples):
        position = start + sample + (0 if idiom == "shifted" else 2)
        for name, step in run.items():
            began = time.perf_counter()
            step(position)
            times[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--slots", type=int, default=4096, help="tokens that the stock caches hold")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--samples", type=int, default=15)
    options = parser.parse_args()
    ensure_kernels()
    console = Console()
    about = ", ".join(f"{name} {value}" for name, value in machine(torch.get_num_threads()).items())
    console.print(f"{about}; batch {options.batch}, {options.slots} slots, window {options.window}, bfloat16")
    table = Table(box=box.SIMPLE)
    for column in ("idiom", "Inductor, ms", "swa_pass, Inductor, ms", "ratio"):
        table.add_column(column, justify="right")
    with torch.no_grad():
        for idiom in ("linear", "paged", "shifted", "listed"):
            stock, ours = measure(idiom, options).values()
            table.add_row(idiom, f"{stock:.2f}", f"{ours:.2f}", f"{stock / ours:.1f}x")
    console.print(table)


if __name__ == "__main__":
    main()
