"""Decode speed: stock transformers against swa_pass, interleaved, on the real Gemma 3 270M in bfloat16.

    python benchmarks/decode.py                       # batch 1, 4 and 16 at a context of 2,048 tokens
    python benchmarks/decode.py --batches 1 --rounds 3 --json results.json

Variants, all through `generate`, which makes one token per row and step:

    dynamic    stock, DynamicCache
    static     stock, StaticCache
    compiled   stock, StaticCache, decode forward compiled as `generate` does it on a GPU (CompileConfig, here for CPU)
    rings      swa_pass.apply(decode_linear=False): rings and fused attention, linears left to torch
    applied    swa_pass.apply, as it comes

Each batch size runs in a process of its own. There, every variant reads the context once (as one row, then copied to
all rows: the context is the same for every row, its content does not change the work) and compiles. Then rounds: in
each, every variant writes `--steps` tokens, one variant after another, so that a slow minute of the machine hits all
of them. A step counts from one token's logits to the next, generate's bookkeeping included. Medians are over all
rounds. The order of the variants rotates with the rounds.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import CompileConfig, DynamicCache, StaticCache

import swa_pass
from swa_pass.demo import gemma, measure, prompts
from swa_pass.demo.runner import machine

VARIANTS = ("dynamic", "static", "compiled", "rings", "applied")
TITLES = {
    "dynamic": "stock dynamic",
    "static": "stock static",
    "compiled": "stock compiled",
    "rings": "swa_pass, rings only",
    "applied": "swa_pass",
}


def options() -> argparse.Namespace:
    """The command line, as --help shows it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,4,16", help="batch sizes, with commas between (default 1,4,16)")
    parser.add_argument("--context", type=int, default=2048, help="tokens read before the first step (default 2048)")
    parser.add_argument("--steps", type=int, default=12, help="decode steps per round and variant (default 12)")
    parser.add_argument("--rounds", type=int, default=6, help="rounds (default 6)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="which of: " + ", ".join(VARIANTS))
    parser.add_argument("--backend", default=None, help="compiler behind swa_pass (default: swa_pass decides)")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0: torch decides")
    parser.add_argument("--json", type=Path, default=None, help="write all numbers, every step included, to this file")
    parser.add_argument("--one-batch", type=int, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    unknown = set(given.variants.split(",")) - set(VARIANTS)
    if unknown:
        parser.error(f"unknown variants {sorted(unknown)}; there are {', '.join(VARIANTS)}")
    if given.steps < 2 or given.rounds < 1:
        parser.error("--steps must be at least 2 and --rounds at least 1")
    return given


def main() -> None:
    """Starts one process per batch size and prints one table."""
    given = options()
    if given.one_batch is not None:
        run_batch(given, given.one_batch)
        return
    console = Console()
    results: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for batch in (int(text) for text in given.batches.split(",")):
        command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--one-batch", str(batch)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith('{"variant"'):
                    results.append(json.loads(line))
                elif line.startswith('{"cpu"'):
                    about = json.loads(line)
                else:
                    console.print(f"  batch {batch}: {line.rstrip()}", highlight=False)
        if process.returncode != 0:
            sys.exit(f"batch {batch} stopped with exit status {process.returncode}; see its messages above")
    console.print(table(results, given))
    console.print(
        f"{about['cpu']}, {about['cores']} cores, {about['threads']} threads. Python {about['python']}, "
        f"torch {about['torch']}, transformers {about['transformers']}, swa_pass {about['swa_pass']}. Gemma 3 270M, "
        f"bfloat16.\nReproduce: python {shlex.join(sys.argv)}",
        highlight=False,
    )
    if given.json:
        given.json.write_text(json.dumps({"machine": about, "arguments": sys.argv[1:], "results": results}, indent=1))


def run_batch(given: argparse.Namespace, batch: int) -> None:
    """Prepares every variant for one batch size, then runs the rounds. Prints JSON lines."""
    if given.threads:
        torch.set_num_threads(given.threads)
    names = given.variants.split(",")
    stock, tokenizer = gemma()
    models = dict.fromkeys(names, stock)
    for name in set(names) & {"rings", "applied"}:
        models[name] = swa_pass.apply(gemma()[0], backend=given.backend, decode_linear=name == "applied")
    ids = context_ids(tokenizer, given.context, batch)
    # One generate call per round writes steps + 1 tokens, and one more round warms up.
    length = given.context + (given.rounds + 1) * (given.steps + 1)
    runners = {}
    for name in names:
        started = time.perf_counter()
        runners[name] = Runner(models[name], name, ids, length)
        runners[name].round(given.steps)
        print(f"{name}: read the context and warmed up in {time.perf_counter() - started:.0f} s", flush=True)
        runners[name].seconds.clear()
    for number in range(given.rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            runners[name].round(given.steps)
    print(json.dumps(machine(torch.get_num_threads())))
    for name in names:
        print(json.dumps({"variant": name, "batch": batch, **runners[name].result()}), flush=True)


def context_ids(tokenizer: Any, context: int, batch: int) -> torch.Tensor:
    """ids (batch, context): the demo's text, repeated as far as needed; every row the same."""
    text = prompts(tokenizer, 1).full[0]
    repeats = -(-context // len(text))
    return text.repeat(repeats)[:context].expand(batch, -1)


class Runner:
    """One variant with its cache, which grows from round to round.

    length: tokens that a static cache has to hold in the end.
    """

    def __init__(self, model: Any, variant: str, ids: torch.Tensor, length: int) -> None:
        self.model = model
        self.variant = variant
        self.ids = ids
        self.seconds: list[float] = []
        self.options: dict[str, Any] = {"disable_compile": True}
        if variant == "compiled":
            compile_config = CompileConfig()
            compile_config._compile_all_devices = True  # `generate` compiles on accelerators only, unless told so
            self.options = {"compile_config": compile_config}
        self.cache = self._empty_cache(length)
        first = measure.greedy(model, ids[:1], 1, cache=self.cache, margins=False, disable_compile=True)
        self.cache = measure.repeat_rows(first.cache, len(ids))

    def _empty_cache(self, length: int) -> Any:
        if self.variant in ("rings", "applied"):
            return None  # the model brings its own
        if self.variant == "dynamic":
            return DynamicCache(config=self.model.config)
        return StaticCache(config=self.model.config, max_cache_len=length)

    def round(self, steps: int) -> None:
        """Writes steps + 1 tokens per row; the step that reads the last token of the round before is not counted."""
        run = measure.greedy(self.model, self._continue(), steps + 1, cache=self.cache, margins=False, **self.options)
        self.cache = run.cache
        self.ids = torch.cat([self.ids, torch.tensor(run.tokens)], dim=1)
        self.seconds += run.seconds[1:]

    def _continue(self) -> torch.Tensor:
        """What generate wants: everything read so far and at least one token that the cache has not seen."""
        if self.ids.shape[1] == int(self.cache.get_seq_length()):  # only after the context was read
            self.ids = torch.cat([self.ids, self.ids[:, :1]], dim=1)
        return self.ids

    def result(self) -> dict[str, Any]:
        """step_ms: median; every step in `steps_ms`."""
        milliseconds = [1e3 * seconds for seconds in self.seconds]
        quartiles = statistics.quantiles(milliseconds, n=4)
        return {
            "step_ms": statistics.median(milliseconds),
            "quartiles_ms": [quartiles[0], quartiles[2]],
            "kv_bytes": measure.kv_bytes(self.cache),
            "steps_ms": copy.copy(milliseconds),
        }


def table(results: list[dict[str, Any]], given: argparse.Namespace) -> Table:
    """One line per batch size and variant; speed-up: against the fastest stock variant of this run."""
    rounds = f"{given.rounds} rounds of {given.steps} steps, interleaved"
    shown = Table(
        title=f"decode at a context of {given.context:,} tokens: {rounds}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    shown.add_column("batch", justify="right", no_wrap=True)
    shown.add_column("variant", no_wrap=True)
    for name in ("ms/step", "quartiles", "tokens/s", "speed-up", "KV, MB"):
        shown.add_column(name, justify="right", no_wrap=True)
    for batch in dict.fromkeys(result["batch"] for result in results):
        rows = [result for result in results if result["batch"] == batch]
        best = min((r["step_ms"] for r in rows if r["variant"] not in ("rings", "applied")), default=None)
        for row in rows:
            low, high = row["quartiles_ms"]
            shown.add_row(
                str(batch),
                TITLES[row["variant"]],
                f"{row['step_ms']:.1f}",
                f"{low:.1f}-{high:.1f}",
                f"{1e3 * batch / row['step_ms']:.1f}",
                "-" if best is None else f"{best / row['step_ms']:.2f}x",
                f"{row['kv_bytes'] / 1e6:.1f}",
                style="bold" if row["variant"] == "applied" else None,
            )
        shown.add_section()
    return shown


if __name__ == "__main__":
    main()
