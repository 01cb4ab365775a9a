"""Tiny models, oracles and mutation checks shared by the tests.

Oracle L: logits of every step against the stock model run on the whole sequence without a cache. A window that is
wrong by one moves them by far more than `MUTATED` (weights drawn with a spread of 0.2 make sure of that), rounding by
far less than `TOLERANCE`. Every check against the oracle is repeated against stock models whose window is one shorter
and one longer, and must fail there: a test that cannot fail proves nothing.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

import swa_pass
from swa_pass.api import runtime_of
from swa_pass.compat import output_cache
from swa_pass.runtime import Runtime

W = 8
VOCAB = 128
TOLERANCE = 5e-5
MUTATED = 1e-2

S, F = "sliding_attention", "full_attention"

#: Family -> (model class, config class, arguments that the family needs on top of `_TINY`).
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mistral": ("MistralForCausalLM", "MistralConfig", {}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"query_pre_attn_scalar": 16, "layer_types": [S, F, S]}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {"use_sliding_window": True, "max_window_layers": 0}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"use_sliding_window": True, "max_window_layers": 0}),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config", {"layer_types": [S, F]}),
    "olmo3": ("Olmo3ForCausalLM", "Olmo3Config", {"layer_types": [S, F]}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {"layer_types": [S, F], "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {"partial_rotary_factor": 0.5}),
}
_TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": W,
    "initializer_range": 0.2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def tiny(family: str, **overrides: Any) -> Any:
    """A random-weight model of a family, fp32, in eval mode; the same weights for the same arguments."""
    model_name, config_name, extra = _FAMILIES[family]
    arguments = {**_TINY, **extra, **overrides}
    if "layer_types" in arguments:
        arguments["num_hidden_layers"] = len(arguments["layer_types"])
    config = getattr(transformers, config_name)(**arguments)
    torch.manual_seed(0)
    return getattr(transformers, model_name)(config).eval()


def with_window(stock: Any, window: int) -> Any:
    """The same weights with another window: what a cache that is off by some keys would compute."""
    mutant = copy.deepcopy(stock)
    mutant.config.sliding_window = window
    for module in mutant.modules():  # some attention implementations read their own copy
        if getattr(module, "sliding_window", None) is not None:
            module.sliding_window = window
    return mutant


@dataclass(frozen=True)
class Pair:
    """An applied model and its untouched twin."""

    model: Any
    stock: Any

    @property
    def runtime(self) -> Runtime:
        runtime = runtime_of(self.model)
        assert runtime is not None, "apply left the model as it was"
        return runtime

    @functools.cached_property
    def mutants(self) -> dict[int, Any]:
        window = self.stock.config.sliding_window
        return {w: with_window(self.stock, w) for w in (window - 1, window + 1) if w > 0}


def make_pair(family: str, *, slack: int = 16, backend: Any = "eager", **overrides: Any) -> Pair:
    """A fresh pair, for tests that change the model or count its graphs. `shared_pair` is cheaper."""
    stock = tiny(family, **overrides)
    return Pair(swa_pass.apply(copy.deepcopy(stock), backend=backend, slack=slack), stock)


@functools.cache
def shared_pair(family: str) -> Pair:
    """One pair for all tests of a process: capturing costs seconds."""
    return make_pair(family)


# ---------------------------------------------------------------------------------------------------------- running


def token_ids(length: int, batch: int = 1, seed: int = 0) -> Tensor:
    """Random tokens, none of them the pad token 0."""
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def full_logits(stock: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    """Oracle L: logits at all positions, no cache."""
    return stock(input_ids=ids, use_cache=False, **kwargs).logits


@contextmanager
def compiled_calls(pair: Pair, expected: int) -> Iterator[None]:
    """Asserts that exactly so many calls inside went through compiled graphs in which every layer is fused."""
    before = pair.runtime.compiled_calls
    yield
    assert pair.runtime.compiled_calls - before == expected, "not every call went through a compiled graph"
    for step in pair.runtime.steps.values():
        assert not step.failed, step.failed
        assert all(not rewrite.views_left for rewrite in step.rewrites), "some layer reads its keys in time order"


@torch.no_grad()
def feed(
    pair: Pair,
    ids: Tensor,
    chunks: Iterable[int],
    *,
    cache: Any = None,
    seen: int = 0,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    bare: bool = False,
    before_step: Callable[[Any], None] | None = None,
) -> tuple[Tensor, Any]:
    """Feeds `ids` in chunks to the applied model; returns the logits at all fed positions, and the cache.

    attention_mask and position_ids are those of the whole sequence (the `seen` tokens in `cache` included) and are cut
    for each call as `generate` does. Positions are passed in any case, as `generate` passes them (another set of
    arguments is another graph), unless `bare`. before_step gets the cache before each call (from the second on).
    """
    chunks = list(chunks)
    if position_ids is None and not bare:
        everything = torch.ones(ids.shape[0], seen + ids.shape[1])
        position_ids = positions_of(everything if attention_mask is None else attention_mask)
    assert sum(chunks) == ids.shape[1], "the chunks must cover the tokens"
    parts, done = [], 0
    with compiled_calls(pair, len(chunks)):
        for new in chunks:
            kwargs: dict[str, Any] = {"input_ids": ids[:, done : done + new], "use_cache": True}
            total = seen + done + new
            if cache is not None:
                kwargs[pair.runtime.cache_name] = cache
            if attention_mask is not None:
                kwargs["attention_mask"] = attention_mask[:, :total]
            if position_ids is not None:
                kwargs["position_ids"] = position_ids[:, total - new : total]
            if before_step is not None and cache is not None:
                before_step(cache)
            output = pair.model(**kwargs)
            cache = output_cache(output)
            parts.append(output.logits)
            done += new
    assert isinstance(cache, swa_pass.HybridCache)
    assert cache.get_seq_length() == seen + ids.shape[1]
    return torch.cat(parts, dim=1), cache


def one_by_one(prompt: int, new: int) -> list[int]:
    return [prompt] + [1] * new


# --------------------------------------------------------------------------------------------------------- comparing


def distance(got: Tensor, expected: Tensor) -> float:
    """Largest absolute difference. A NaN is infinitely far from everything."""
    assert got.shape == expected.shape, f"{tuple(got.shape)} against {tuple(expected.shape)}"
    worst = (got.double() - expected.double()).abs().max().item()
    return float("inf") if worst != worst else worst


def assert_oracle(
    pair: Pair,
    got: Tensor,
    reference: Callable[[Any], Tensor],
    *,
    tolerance: float = TOLERANCE,
    mutants: Sequence[int] | None = None,
) -> None:
    """`got` equals what `reference(stock model)` computes, and not what it computes for a window wrong by one.

    mutants: windows that must be told apart; None: both neighbours. Sequences no longer than the window cannot tell.
    """
    error = distance(got, reference(pair.stock))
    assert error < tolerance, f"off by {error:.2e} from the stock model without a cache"
    for window, mutant in pair.mutants.items():
        if mutants is None or window in mutants:
            moved = distance(got, reference(mutant))
            assert moved > MUTATED, f"this test cannot tell a window of {window}: off by only {moved:.2e}"


# ----------------------------------------------------------------------------------------------------- inside a cache


def stored_keys(cache: Any, layer: int) -> Tensor:
    """The keys that the next query sees in a layer, in time order."""
    return cache.layers[layer].keys


def poison(cache: Any, value: float, starts: Tensor | None = None) -> None:
    """Fills every slot that the next query must not see: unwritten, evicted, and (with `starts`) each row's pads."""
    for layer in cache.layers:
        if layer.k_store is None:
            continue
        slots = layer.k_store.shape[2]
        positions = torch.full((slots,), -1)
        past = torch.arange(layer.policy.seen - layer.policy.reach, layer.policy.seen)
        positions[past % slots if layer.is_sliding else past] = past
        for row in range(layer.k_store.shape[0]):
            first = 0 if starts is None else int(starts[row])
            hidden = positions < first
            for store in (layer.k, layer.v):  # a quantised store cannot hold the value in a byte; its scale can
                (store.data if store.scale is None else store.scale)[row, :, hidden] = value


def left_padded(lengths: Sequence[int], total: int, seed: int = 0) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Rows of `lengths` tokens padded on the left to the longest, then grown together to `total` columns.

    Returns (each row alone (1, n), ids (B, total), attention_mask (B, total), starts (B,)).
    """
    longest = max(lengths)
    rows, ids = [], torch.zeros(len(lengths), total, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    starts = torch.tensor([longest - n for n in lengths])
    for i, start in enumerate(starts.tolist()):
        row = token_ids(total - start, seed=seed + i)
        rows.append(row)
        ids[i, start:], mask[i, start:] = row[0], 1
    return rows, ids, mask, starts


def positions_of(mask: Tensor) -> Tensor:
    """Position ids as `generate` makes them for a left-padded batch."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)
