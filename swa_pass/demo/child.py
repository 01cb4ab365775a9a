"""One variant of the demo in a process of its own, so that its peak memory is its own.

    python -m swa_pass.demo.child --variant applied --prompts prompts.json --batches 1,8

writes JSON lines on stdout: ``{"event": "phase", ...}`` while it works, ``{"event": "result", ...}`` per batch size,
``{"event": "applied", ...}`` with the layers and the one-time costs. Everything else goes to stderr.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..api import apply, explain, warmup
from . import measure
from .text import Prompts
from .weights import gemma_model

VARIANTS = ("static", "dynamic", "applied")
# Tokens. The compiled prefill takes prompts of any length, so a short one is enough.
WARMUP_LENGTH = 32


@dataclass(frozen=True)
class Setting:
    """variant: one of VARIANTS; prompts: for as many rows as the largest batch has; new_tokens: per row; separate: read
    every row's text by itself; backend: see apply; goals: milliseconds a step, by batch size: a run that is slower
    stops early."""

    variant: str
    prompts: Prompts
    batches: tuple[int, ...]
    new_tokens: int
    separate: bool
    backend: str | None
    goals: dict[int, float] = field(default_factory=dict)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--variant", choices=VARIANTS, required=True)
    arguments.add_argument("--prompts", type=Path, required=True, help="see Prompts.save")
    arguments.add_argument("--batches", default="1,8")
    arguments.add_argument("--tokens", type=int, default=64)
    arguments.add_argument("--threads", type=int, default=0)
    arguments.add_argument("--separate", action="store_true")
    arguments.add_argument("--backend")
    arguments.add_argument("--goals", help="a number for each batch size")
    given = arguments.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    batches = tuple(int(batch) for batch in given.batches.split(","))
    goals = dict(zip(batches, map(float, given.goals.split(",")))) if given.goals else {}
    texts = Prompts.load(given.prompts)
    run(Setting(given.variant, texts, batches, given.tokens, given.separate, given.backend, goals))


def run(setting: Setting) -> None:
    """Loads the model, prepares the variant, and measures it at each batch size."""
    say("phase", text="loading the model")
    model = gemma_model()
    full_peak = 0
    read: Any = None
    if setting.variant == "applied":
        prepare(model, setting)
    else:
        say("phase", text="warming up")
        measure.greedy(model, torch.full((1, WARMUP_LENGTH), 100), 3, **cache_options(setting.variant, 64))
    for batch in setting.batches:
        texts = setting.prompts.first(batch)
        full_peak = max(full_peak, measure.peak_rss())
        measure.reset_peak_rss()
        result, read = one_batch(model, setting, texts, read)
        full_peak = max(full_peak, measure.peak_rss())
        say(
            "result",
            variant=setting.variant,
            batch=batch,
            prompt_tokens=texts.document.shape[1],
            tokens=result.tokens,
            margins=result.margins,
            first_token_s=result.first_token_s,
            step_ms=result.step_ms,
            tokens_per_s=result.tokens_per_s,
            kv_bytes=measure.kv_bytes(result.cache),
            peak_rss=measure.peak_rss(),
            process_peak_rss=full_peak,
            threads=torch.get_num_threads(),
        )


def prepare(model: Any, setting: Setting) -> None:
    """Applies the pass and warms up, noting what each part of the one-time cost took, in seconds."""
    cost: dict[str, float] = {}
    started = time.perf_counter()
    apply(model, backend=setting.backend)
    cost["apply"] = time.perf_counter() - started
    say("phase", text="capturing the forward and proving its masks")
    started = time.perf_counter()
    explain(model)
    cost["capture and proof"] = time.perf_counter() - started
    for batch in setting.batches:
        say("phase", text=f"compiling for batch {batch} (the very first time also the C++ kernel)")
        started = time.perf_counter()
        warmup(model, batch, WARMUP_LENGTH)
        cost[f"compile and warm up, batch {batch}"] = time.perf_counter() - started
    say("applied", report=explain(model).to_dict(), cost_s=cost)


def one_batch(model: Any, setting: Setting, texts: Prompts, read: Any) -> tuple[measure.Run, Any]:
    """Greedy continuation of every row, and a cache that has read the text and nothing else.

    One row is a plain `generate` on the text. With more rows the text, which they share, is read once (`read`, if a
    batch before did that) and its cache copied to every row; each then reads its own ending. `separate` has each row
    read everything.
    """
    batch = len(texts.endings)
    options = cache_options(setting.variant, texts.full.shape[1] + setting.new_tokens)
    goal = setting.goals.get(batch)
    name, length = f"batch {batch}", texts.document.shape[1]
    if setting.separate:
        say("phase", text=f"{name}: reading {texts.full.shape[1]:,} tokens a row, then writing {setting.new_tokens}")
        return measure.greedy(model, texts.full, setting.new_tokens, goal_ms=goal, **options), None
    if batch == 1:
        say("phase", text=f"{name}: reading the text, {length:,} tokens, then writing {setting.new_tokens}")
        with measure.copy_of_first_cache(model) as copies:
            return measure.greedy(model, texts.document, setting.new_tokens, goal_ms=goal, **options), copies
    if read is None:
        say("phase", text=f"{name}: reading the text once, {length:,} tokens")
        read = [measure.greedy(model, texts.document, 1, margins=False, **options).cache]
    cache = measure.repeat_rows(copy.deepcopy(read[0]), batch)
    say("phase", text=f"{name}: reading {batch} endings, then writing {setting.new_tokens} tokens a row")
    return measure.greedy(model, texts.full, setting.new_tokens, cache=cache, goal_ms=goal), read


def cache_options(variant: str, length: int) -> dict[str, Any]:
    """GenerationConfig fields that choose the variant's cache. `length` sizes a static one, in tokens."""
    return {"cache_implementation": "static", "max_cache_len": length} if variant == "static" else {}


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


if __name__ == "__main__":
    main()
