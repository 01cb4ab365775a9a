"""Prefill: sliding attention over L new tokens, and the whole prefill of the real Gemma 3 270M.

    python benchmarks/prefill.py                       # attention at several L, then the model at 8,192 tokens
    python benchmarks/prefill.py --length 0            # attention only

Attention, from an empty cache, in bfloat16: SDPA with the window as a boolean mask (what transformers runs; its mask is
made once and not timed), SDPA with is_causal and no mask (wrong beyond W: it is the price of not having a window), and
swa_pass.attend_append, the write into the ring included. Medians, interleaved.

The model: stock `generate` of one token (its DynamicCache) against the same after apply, each in a process of its own,
so that the peak of resident memory is its own. Applied is compiled before, on a short prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import swa_pass
from swa_pass.demo import gemma, measure, prompts
from swa_pass.demo.runner import machine
from swa_pass.ops.build import ensure_kernels

#: heads, kv_heads, head_dim, window
SHAPES = {
    "gemma-3-270m": (4, 1, 256, 512),
    "8 heads of Mistral 7B": (8, 2, 128, 4096),
    "the same, W 512": (8, 2, 128, 512),
}
LENGTHS = (128, 512, 2048, 8192)


def variants(shape: tuple[int, int, int, int], length: int) -> dict[str, Callable[[], Tensor]]:
    heads, kv_heads, dim, window = shape
    q = torch.randn(1, heads, length, dim, dtype=torch.bfloat16)
    k, v = (torch.randn(1, kv_heads, length, dim, dtype=torch.bfloat16) for _ in "kv")
    stores = [torch.zeros(1, kv_heads, window + 16, dim, dtype=torch.bfloat16) for _ in "kv"]
    nothing = torch.zeros(1, dtype=torch.int64)
    i = torch.arange(length)
    mask = (i <= i[:, None]) & (i > i[:, None] - window)

    def repeated() -> list[Tensor]:
        return [t.repeat_interleave(heads // kv_heads, 1) for t in (k, v)]

    return {
        "SDPA, mask": lambda: F.scaled_dot_product_attention(q, *repeated(), attn_mask=mask),
        "SDPA, causal": lambda: F.scaled_dot_product_attention(q, *repeated(), is_causal=True),
        "swa_pass": lambda: torch.ops.swa_pass.attend_append(
            q, k, v, *stores, nothing, window=window, scale=dim**-0.5
        ),
    }  # fmt: skip


def attention(samples: int) -> list[dict[str, Any]]:
    """Milliseconds of every variant, shape and length."""
    results = []
    for name, shape in SHAPES.items():
        for length in LENGTHS:
            run = variants(shape, length)
            times: dict[str, list[float]] = {variant: [] for variant in run}
            for number in range(samples + 1):
                for variant, call in run.items():
                    started = time.perf_counter()
                    call()
                    if number > 0:
                        times[variant].append(1e3 * (time.perf_counter() - started))
            medians = {variant: statistics.median(ms) for variant, ms in times.items()}
            results.append({"shape": name, "window": shape[3], "length": length, "ms": medians})
    return results


def whole(variant: str, length: int) -> dict[str, Any]:
    """One prefill of the model in this process."""
    model, tokenizer = gemma()
    text = prompts(tokenizer, 1).full[0]
    ids = text.repeat(-(-length // len(text)))[None, :length]
    if variant == "applied":
        swa_pass.apply(model)
        swa_pass.warmup(model, 1, 32)
    else:
        measure.greedy(model, ids[:, :32], 2)
    before = measure.peak_rss()
    measure.reset_peak_rss()
    run = measure.greedy(model, ids, 1)
    return {
        "variant": variant,
        "seconds": run.first_token_s,
        "peak_rss": measure.peak_rss(),
        "peak_before": before,
        "kv_bytes": measure.kv_bytes(run.cache),
        "token": run.tokens[0],
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192, help="tokens of the model's prompt; 0: attention only")
    parser.add_argument("--samples", type=int, default=5, help="of each attention call (default 5)")
    parser.add_argument("--json", type=Path, default=None, help="write all numbers to this file")
    parser.add_argument("--variant", choices=("stock", "applied"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.variant:
        print(json.dumps(whole(given.variant, given.length)))
        return
    console = Console(width=max(110, Console().width))
    ensure_kernels()
    results = attention(given.samples)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("shape", "W", "L", *results[0]["ms"], "against the mask"):
        table.add_column(column, justify="left" if column == "shape" else "right", no_wrap=True)
    for result in results:
        ms = result["ms"]
        faster = ms["SDPA, mask"] / ms["swa_pass"]
        table.add_row(
            result["shape"], str(result["window"]), str(result["length"]), *(f"{t:.2f} ms" for t in ms.values()),
            f"{faster:.1f}x",
        )  # fmt: skip
    console.print(table)
    models = []
    for variant in ("stock", "applied") if given.length else ():
        command = [sys.executable, __file__, "--variant", variant, "--length", str(given.length)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        models.append(json.loads(done.stdout.splitlines()[-1]))
        console.print(
            f"Gemma 3 270M, {given.length:,} tokens, {variant}: {models[-1]['seconds']:.1f} s to the first token "
            f"({models[-1]['token'][0]}), peak {models[-1]['peak_rss'] / 1e6:,.0f} MB, "
            f"KV {models[-1]['kv_bytes'] / 1e6:.1f} MB",
            highlight=False,
        )
    about = machine(torch.get_num_threads())
    console.print(
        f"{about['cpu']}, {about['threads']} threads, torch {about['torch']}, transformers {about['transformers']}.",
        highlight=False,
    )
    if given.json:
        given.json.write_text(json.dumps({"machine": about, "attention": results, "model": models}, indent=1))


if __name__ == "__main__":
    main()
