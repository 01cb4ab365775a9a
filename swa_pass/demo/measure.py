"""Measuring `generate` as a user calls it: per-step times, logit margins, KV bytes, peak memory.

Used by the demo and by `benchmarks/`. A decode step here is everything between two tokens: the forward, the choice of
the token and generate's own bookkeeping.
"""

from __future__ import annotations

import copy
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from ..cache import HybridCache
from ..compat import generate_cache_key, output_cache


class StepClock(LogitsProcessor):
    """Sits where a logits processor sits, changes nothing, and notes when each step's logits arrive.

    Its own work (two largest logits per row) is not counted: the clock stops on entry and runs again from the exit.
    """

    def __init__(self, margins: bool = True) -> None:
        self.margins: list[list[float]] | None = [] if margins else None
        self._entered: list[float] = []
        self._left: list[float] = [time.perf_counter()]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """scores: (batch, vocabulary), returned unchanged."""
        self._entered.append(time.perf_counter())
        if self.margins is not None:
            best = scores.topk(2, dim=-1).values
            self.margins.append((best[:, 0] - best[:, 1]).tolist())
        self._left.append(time.perf_counter())
        return scores

    @property
    def seconds(self) -> list[float]:
        """Seconds up to each token: the first is the prefill (time to first token), the others are decode steps."""
        return [entered - left for entered, left in zip(self._entered, self._left)]


class Goal(StoppingCriteria):
    """Ends a run that is slower than another one was, once that is clear.

    step_ms: median decode step to beat, in milliseconds.
    """

    #: Steps to look at before judging.
    ENOUGH = 15

    def __init__(self, clock: StepClock, step_ms: float) -> None:
        self.clock = clock
        self.step_ms = step_ms

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        """(batch,) bool: whether each row is done; all rows agree."""
        steps = self.clock.seconds[1:]
        behind = len(steps) >= self.ENOUGH and 1e3 * statistics.median(steps) > self.step_ms
        return torch.full((input_ids.shape[0],), behind, device=input_ids.device)


@dataclass(frozen=True)
class Run:
    """One `generate` call.

    tokens: new tokens per row; margins: per row and step, the distance between the two largest logits; seconds: see
    `StepClock.seconds`; cache: what the model holds afterwards.
    """

    tokens: list[list[int]]
    margins: list[list[float]]
    seconds: list[float]
    cache: Any = field(repr=False)

    @property
    def first_token_s(self) -> float:
        return self.seconds[0]

    @property
    def step_ms(self) -> float:
        """Median decode step."""
        return 1e3 * statistics.median(self.seconds[1:])

    @property
    def tokens_per_s(self) -> float:
        """Decode only, all rows together, all steps (a slow outlier counts)."""
        return len(self.tokens) * len(self.seconds[1:]) / sum(self.seconds[1:])


def greedy(
    model: Any,
    ids: torch.Tensor,
    new_tokens: int,
    *,
    cache: Any = None,
    margins: bool = True,
    goal_ms: float | None = None,
    **options: Any,
) -> Run:
    """Greedy `generate` of exactly `new_tokens` tokens per row (the end token does not stop it; `Goal` may).

    ids: (batch, tokens), without padding; cache: what the model has read of them already, or None; goal_ms: see `Goal`;
    options: further `GenerationConfig` fields, such as ``cache_implementation="static"``.
    """
    config = copy.deepcopy(model.generation_config)
    config.update(do_sample=False, max_new_tokens=new_tokens, return_dict_in_generate=True, **options)
    config.eos_token_id = None  # all variants do the same number of steps
    given = {} if cache is None else {generate_cache_key(model): cache}
    clock = StepClock(margins)
    if goal_ms is not None:
        given["stopping_criteria"] = [Goal(clock, goal_ms)]
    # Not passed as an argument: `generate` fills what an argument leaves None from the model's own configuration.
    own_config, model.generation_config = model.generation_config, config
    try:
        output = model.generate(ids, attention_mask=torch.ones_like(ids), logits_processor=[clock], **given)
    finally:
        model.generation_config = own_config
    by_row = [] if clock.margins is None else [list(row) for row in zip(*clock.margins)]
    return Run(output.sequences[:, ids.shape[1] :].tolist(), by_row, clock.seconds, output_cache(output))


@contextmanager
def copy_of_first_cache(model: Any) -> Iterator[list[Any]]:
    """Within, the model's first call leaves a copy of its cache in the list: what had been read when it returned."""
    copies: list[Any] = []

    def keep(_: Any, __: Any, output: Any) -> None:
        if not copies:
            copies.append(copy.deepcopy(output_cache(output)))

    handle = model.register_forward_hook(keep)
    try:
        yield copies
    finally:
        handle.remove()


def repeat_rows(cache: Any, rows: int) -> Any:
    """A cache that read one row, made to hold `rows` equal ones, in place. Returns it."""
    if isinstance(cache, HybridCache) or all(hasattr(layer, "batch_repeat_interleave") for layer in cache.layers):
        cache.batch_repeat_interleave(rows)
    else:  # static layers know only the protocol of beam search
        cache.reorder_cache(torch.zeros(rows, dtype=torch.int64))
    return cache


def kv_bytes(cache: Any) -> int:
    """Bytes of memory behind the keys and values of any cache, also where only a part of a buffer is in view."""
    if isinstance(cache, HybridCache):
        return cache.nbytes
    buffers = {}
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            storage = tensor.untyped_storage()
            buffers[storage.data_ptr()] = storage.nbytes()
    return sum(buffers.values())


def peak_rss() -> int:
    """Largest resident memory of this process so far (or since `reset_peak_rss`), in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_rss() -> bool:
    """Starts `peak_rss` anew from the current size. False where the system cannot do that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
