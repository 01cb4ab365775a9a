"""Checks and times the Triton kernels on a GPU, in a few minutes and without a network.

    python benchmarks/gpu_check.py                    # on cuda:0; prints a report, exit status 1 if anything is wrong
    python benchmarks/gpu_check.py --json gpu.json --minutes 6
    TRITON_INTERPRET=1 python benchmarks/gpu_check.py --device cpu    # a rehearsal: tiny, no CUDA graph

1. Numbers: attend_append against the reference in float64, over dtypes, head_dims, groups, windows, softcap, sinks,
   left padding and prefill, and what it wrote, bit by bit; int8 and float8 stores for one of them.
2. A CUDA graph of one decode step, replayed across the wrap of a ring, against eager calls.
3. A tiny Mistral and a tiny Gemma 2 (softcap) with random weights in float32: greedy tokens of `generate` after
   `swa_pass.apply`, past five windows and with left padding, against the stock model.
4. Speed: the shapes of attention.py and the same with B = 64, against a ring with SDPA, compiled flex_attention and a
   paged gather with SDPA, interleaved, next to the rate at which this device reads memory, measured in between.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attention
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig

import swa_pass
from swa_pass import ops
from swa_pass.ops import quant, reference, triton_ops

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
ROWS = ("paged", "ring-sdpa", "flex", "ours")
SAMPLES = 15


def step(
    device: str, dtype: torch.dtype, dim: int, group: int, window: int, tokens: int, special: bool
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of attend_append for two rows: one whose ring has wrapped, one that has just begun."""
    capacity = window + 5 if window else 1000
    lengths = [600, 3]

    def made(*shape: int) -> Tensor:
        return torch.randn(2, *shape, dtype=torch.float32).to(device, dtype)

    arguments = [made(2 * group, tokens, dim), *(made(2, tokens, dim) for _ in "kv")]
    arguments += [made(2, capacity, dim) for _ in "kv"]
    arguments += [torch.tensor(lengths, device=device), torch.tensor([250, 2], device=device) if special else None]
    sinks = torch.randn(2 * group, device=device) if special else None
    options = {"window": window, "scale": dim**-0.5, "softcap": 20.0 if special else 0.0, "sinks": sinks}
    return arguments, options


def numbers(device: str, tiny: bool) -> tuple[int, float]:
    """(cases, largest error as a fraction of what is allowed). SystemExit at the first case beyond it."""
    # Every case is a kernel to compile, so not the whole product.
    heads = [(64, 2)] if tiny else [(64, 8), (80, 1), (128, 4), (192, 16), (256, 2)]
    kinds = [(torch.bfloat16, *pair) for pair in heads]
    kinds += [(dtype, *heads[len(heads) // 2]) for dtype in (torch.float16, torch.float32)]
    grid = itertools.product(kinds, (0, 128), (1, 5) if tiny else (1, 300), (False, True))
    worst, cases = 0.0, 0
    call = triton_ops.attend_append if device == "cpu" else ops.attend_append
    for (dtype, dim, group), window, tokens, special in grid:
        torch.manual_seed(cases)
        arguments, options = step(device, dtype, dim, group, window, tokens, special)
        host = [None if t is None else t.cpu().clone() for t in arguments]
        on_host = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in options.items()}
        want = reference.attend(*host, **on_host)
        reference.append(*host[1:6], window=window)
        got = call(*arguments, **options).cpu()
        error = (got.double() - want.double()).abs().max().item() / TOLERANCE[dtype]
        written = all(torch.equal(a.cpu(), b) for a, b in zip(arguments[3:5], host[3:5]))
        if not error <= 1 or not written:  # NaN too
            sys.exit(
                f"WRONG: {dtype}, head_dim {dim}, group {group}, window {window}, {tokens} new tokens, starts, softcap "
                f"and sinks {special}: error {error:.2f} of what is allowed, stores {'right' if written else 'wrong'}"
            )
        worst, cases = max(worst, error), cases + 1
    return cases, worst


def quantised(device: str) -> int:
    """The same for int8 and float8 stores: close to the reference on what they read back as. Returns the cases."""
    cases = 0
    call = triton_ops.attend_append if device == "cpu" else ops.attend_append
    for store, window, tokens in itertools.product(quant.LARGEST, (0, 128), (1, 40)):
        torch.manual_seed(cases)
        arguments, options = step(device, torch.bfloat16, 64, 4, window, tokens, True)
        q, k_new, v_new, k_store, v_store, lengths, starts = arguments
        (k, k_scale), (v, v_scale) = quant.quantise(k_store, store), quant.quantise(v_store, store)
        plain = [q, *(quant.rounded(t, store) for t in (k_new, v_new))]
        plain += [quant.dequantise(*pair, torch.float64) for pair in ((k, k_scale), (v, v_scale))]
        on_host = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in options.items()}
        want = reference.attend(*(t.cpu() for t in (*plain, lengths, starts)), **on_host)
        fresh = quant.quantise(k_new, store)[1].cpu()
        got = call(q, k_new, v_new, k, v, lengths, starts, **options, k_scale=k_scale, v_scale=v_scale).cpu()
        error = (got.double() - want.double()).abs().max().item() / TOLERANCE[torch.bfloat16]
        slots = torch.arange(int(lengths[0]), int(lengths[0]) + tokens) % k.shape[2]
        if not error <= 1 or not torch.equal(k_scale[0, :, slots.to(device)].cpu(), fresh[0]):
            sys.exit(
                f"WRONG: stores of {store}, window {window}, {tokens} new tokens: error {error:.2f} of the allowed"
            )
        cases += 1
    return cases


def graph_replay(device: str) -> int:
    """Replays one captured decode step 3W + 2 times, against eager calls on a copy. Returns the number of steps."""
    window = 64
    arguments, options = step(device, torch.bfloat16, 128, 4, window, 1, False)
    arguments[5].zero_()
    eager = [None if t is None else t.clone() for t in arguments]
    ops.attend_append(*[None if t is None else t.clone() for t in arguments], **options)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.attend_append(*arguments, **options)
        arguments[5] += 1
    for number in range(3 * window + 2):
        for at in range(3):
            fresh = torch.randn_like(arguments[at])
            arguments[at].copy_(fresh)
            eager[at].copy_(fresh)
        graph.replay()
        want = ops.attend_append(*eager, **options)
        eager[5] += 1
        if not torch.equal(out, want):
            sys.exit(f"WRONG: the CUDA graph gives other numbers than eager calls at step {number}")
    return 3 * window + 2


def whole_models(device: str) -> int:
    """Generates with applied models and with stock ones. Returns the number of tokens that were compared."""
    window, compared = 16, 0
    small = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 32}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": window, "initializer_range": 0.2}
    small |= {"eos_token_id": None, "pad_token_id": 0}
    for config in (MistralConfig(**small), Gemma2Config(**small, query_pre_attn_scalar=32)):
        torch.manual_seed(0)
        stock = AutoModelForCausalLM.from_config(config).eval().to(device)
        ids = torch.randint(1, 128, (2, 3 * window), device=device)
        mask = torch.ones_like(ids)
        mask[1, :7], ids[1, :7] = 0, 0
        wanted = stock.generate(ids, attention_mask=mask, max_new_tokens=2 * window, do_sample=False)
        model = swa_pass.apply(stock, strict=True, backend="eager" if device == "cpu" else None)
        got = model.generate(ids, attention_mask=mask, max_new_tokens=2 * window, do_sample=False)
        if not torch.equal(got, wanted):
            sys.exit(f"WRONG: {type(stock).__name__} gives other tokens:\n{got}\nstock:\n{wanted}")
        compared += got[:, ids.shape[1] :].numel()
    return compared


# ---------------------------------------------------------------------------------------------- speed


def milliseconds(device: str, call: Callable[[], Any], calls: int) -> float:
    """Per call, by the device's clock."""
    if device == "cpu":
        started = time.perf_counter()
        for _ in range(calls):
            call()
        return 1e3 * (time.perf_counter() - started) / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def speed(device: str, name: str, shape: attention.Shape, read: list[float], block: Tensor) -> dict[str, Any]:
    """Medians of every row, and of reading `block`, in one interleaved run."""
    dtype = torch.bfloat16
    new = [torch.randn(shape.batch, shape.kv_heads, 1, shape.head_dim, dtype=dtype) for _ in "kv"]
    q = torch.randn(shape.batch, shape.kv_heads * shape.group, 1, shape.head_dim, dtype=dtype)
    stores = max(2, -(-(256 << 20) // shape.kv_bytes(dtype))) if device != "cpu" else 2
    make = attention.makers(shape, dtype)
    rows = [row for row in ROWS if device != "cpu" or row != "flex"]
    turns = {row: attention.cycle([make[row]() for _ in range(stores)]) for row in rows}
    call = {row: lambda row=row: next(turns[row])(q, *new) for row in rows}
    for row in rows:
        milliseconds(device, call[row], stores + 1)
    calls = 20 if device != "cpu" else 1
    times: dict[str, list[float]] = {row: [] for row in rows}
    reads = []
    for number in range(SAMPLES):
        reads.append(block.nbytes / milliseconds(device, block.sum, 3) / 1e6)
        at = number % len(rows)
        for row in rows[at:] + rows[:at]:
            times[row].append(milliseconds(device, call[row], calls))
    read += reads
    return {
        "shape": name,
        "batch": shape.batch,
        "kv_bytes": shape.kv_bytes(dtype),
        "read_gbs": statistics.median(reads),
        "ms": {row: statistics.median(ms) for row, ms in times.items()},
    }


def shapes(tiny: bool) -> dict[str, attention.Shape]:
    if tiny:
        return {"tiny": attention.Shape(2, 2, 2, 64, 128)}
    large = {f"{name}, B 64": dataclasses.replace(shape, batch=64) for name, shape in attention.SHAPES.items()}
    return {**attention.SHAPES, **large}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=6, help="start no further shape after this (default 6)")
    parser.add_argument("--json", type=Path, default=None, help="write all numbers to this file")
    given = parser.parse_args()
    started = time.perf_counter()
    tiny = given.device == "cpu"
    console = Console(width=max(110, Console().width))
    import triton

    device_name = "cpu (a rehearsal)" if tiny else torch.cuda.get_device_name()
    console.print(f"{device_name}, torch {torch.__version__}, triton {triton.__version__}", highlight=False)
    cases, worst = numbers(given.device, tiny)
    cases += quantised(given.device)
    console.print(f"Numbers: {cases} cases right, largest error {worst:.2f} of what is allowed", highlight=False)
    if not tiny:
        console.print(f"CUDA graph: {graph_replay(given.device)} replayed steps equal eager ones", highlight=False)
    compared = whole_models(given.device)
    console.print(f"Models: {compared} tokens of applied models equal stock ones", highlight=False)
    table = Table("shape", "KV, MB", *(f"{row}, us" for row in ROWS), "ours, GB/s", "of reading")
    results: list[dict[str, Any]] = []
    read: list[float] = []
    with torch.device(given.device):
        block = torch.ones((1 << 20) if tiny else (1 << 30))
        for name, shape in shapes(tiny).items():
            if time.perf_counter() - started > 60 * given.minutes:
                console.print(f"No time left for {name}")
                continue
            results.append(speed(given.device, name, shape, read, block))
            ms = results[-1]["ms"]
            rate = results[-1]["kv_bytes"] / ms["ours"] / 1e6
            table.add_row(
                name, f"{results[-1]['kv_bytes'] / 1e6:.1f}",
                *(f"{1e3 * ms[row]:.1f}" if row in ms else "-" for row in ROWS),
                f"{rate:.0f}", f"{rate / results[-1]['read_gbs']:.0%}",
            )  # fmt: skip
    console.print(table)
    console.print(f"Reading: {statistics.median(read):.0f} GB/s. {time.perf_counter() - started:.0f} s in all.")
    if given.json:
        given.json.write_text(json.dumps({"device": device_name, "results": results}, indent=1))


if __name__ == "__main__":
    main()
