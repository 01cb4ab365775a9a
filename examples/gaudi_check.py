"""What was never run on a Gaudi, run on a Gaudi: correctness, memory bandwidth, decode speed. Minutes, and a report.

    python examples/gaudi_check.py > report.md         # on one Gaudi, with optimum-habana and Intel's Gaudi software
    python examples/gaudi_check.py --tiny              # the same steps at toy sizes, also beside a stand-in plugin

Please send the report back, with whatever else it printed. Every section stands alone: one that fails says why, and the
others still run. Random weights, nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import inspect
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import habana_frameworks.torch as ht
import habana_frameworks.torch.core as htcore
import torch
from habana_frameworks.torch.hpex.kernels import FusedSDPA
from optimum.habana.transformers.generation import GaudiGenerationConfig
from optimum.habana.transformers.modeling_utils import adapt_transformers_to_gaudi

adapt_transformers_to_gaudi()

import transformers  # noqa: E402
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList  # noqa: E402

import swa_pass  # noqa: E402
from swa_pass.integrations import optimum_habana  # noqa: E402
from swa_pass.integrations.optimum_habana.cache import RingKVCache  # noqa: E402
from swa_pass.ops.hpu_kernel import FusedAttention  # noqa: E402

DEVICE = "hpu" if ht.hpu.is_available() else "cpu"
W = 8
#: Way of generating -> options of `generate`.
WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "HPU graphs": {"graphs": True},
    "FusedSDPA": {"use_flash_attention": True},
    "FusedSDPA, HPU graphs": {"use_flash_attention": True, "graphs": True},
    "FusedSDPA, HPU graphs, buckets": {
        "use_flash_attention": True, "graphs": True, "bucket_size": 16, "bucket_internal": True,
    },
}  # fmt: skip


def environment(options: argparse.Namespace) -> Iterator[str]:
    for name in ("torch", "transformers", "optimum-habana", "habana-torch-plugin", "swa-pass"):
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{name}: not installed"
    yield f"python {platform.python_version()}, device {DEVICE} ({ht.hpu.get_device_name()})"
    yield f"FusedSDPA.forward{inspect.signature(FusedSDPA.forward)}"
    yield f"what we pass it positionally: {FusedAttention(FusedSDPA).names[: FusedAttention(FusedSDPA).last + 1]}"


# ------------------------------------------------------------------------------------------------------ correctness


def tiny(family: str) -> Any:
    """A model of random weights, fp32, with a window of 8; spread so that one key more or less is seen."""
    shape: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "sliding_window": W, "initializer_range": 0.2, "pad_token_id": 0,
        "max_position_embeddings": 256, "torch_dtype": torch.float32,
    }  # fmt: skip
    types = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    config = {
        "gemma2": lambda: transformers.Gemma2Config(**shape, **types, query_pre_attn_scalar=12),
        "gemma3": lambda: transformers.Gemma3TextConfig(**shape, **types, query_pre_attn_scalar=21),
        "mistral": lambda: transformers.MistralConfig(**shape),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **shape, **types, num_local_experts=2, num_experts_per_tok=1, rope_scaling=None
        ),
    }[family]()
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


class Forced(LogitsProcessor):
    """Keeps the logits and makes `generate` take the given tokens."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens, self.logits = tokens, []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.logits.append(scores.detach().cpu().float().clone())
        forced = torch.full_like(scores, -1e9)
        return forced.scatter_(1, self.tokens[:, len(self.logits) - 1].to(scores.device)[:, None], 0.0)


@torch.no_grad()
def correctness(options: argparse.Namespace) -> Iterator[str]:
    """Decode on rings on the device against prompt attention over the whole text on the CPU, in fp32."""
    yield "| model | way | off by | a ring of one slot less: off by | verdict |"
    yield "|---|---|---|---|---|"
    prompt, new = 2 * W + 3, 3 * W
    ids = torch.randint(2, 90, (2, prompt + new), generator=torch.Generator().manual_seed(0))
    pads = torch.ones_like(ids)
    pads[1, : W - 1] = 0  # one row is padded
    ids = ids * pads
    positions = (pads.cumsum(1) - 1).masked_fill(pads == 0, 1)
    for family in ("mistral", "gemma3", "gemma2", "gpt_oss"):
        base = tiny(family)
        oracle = swa_pass.apply(copy.deepcopy(base))
        expected = oracle(input_ids=ids, attention_mask=pads, position_ids=positions, use_cache=False).logits
        expected = expected[:, prompt - 1 : -1].transpose(0, 1)
        for way, chosen in WAYS.items():
            if family == "gpt_oss" and DEVICE == "cpu" and "graphs" in chosen:
                continue  # its experts loop over what a tensor says there
            errors = []
            for window in (W, W - 1):
                model = swa_pass.apply(copy.deepcopy(base).to(DEVICE))
                for attention in optimum_habana.runtime_of(model).attentions:
                    for store in (attention.k_cache, attention.v_cache):
                        if isinstance(store, RingKVCache):
                            store.window = window
                got = _steps(model, ids, pads, prompt, new, dict(chosen))
                errors.append((got - expected).abs().max().item())
            off, mutant = errors
            verdict = "ok" if off < 0.05 * mutant else "WRONG"
            yield f"| {family} | {way} | {off:.1e} | {mutant:.1e} | {verdict} |"


def _steps(model: Any, ids: torch.Tensor, mask: torch.Tensor, prompt: int, new: int, chosen: dict[str, Any]) -> Any:
    wrapped = chosen.pop("graphs", False)
    model = ht.hpu.wrap_in_hpu_graph(model) if wrapped else model
    forced = Forced(ids[:, prompt:])
    config = GaudiGenerationConfig(max_new_tokens=new, do_sample=False, use_cache=True, pad_token_id=0,
                                   eos_token_id=None, static_shapes=True, reuse_cache=True, **chosen)  # fmt: skip
    model.generate(
        input_ids=ids[:, :prompt].to(DEVICE), attention_mask=mask[:, :prompt].to(DEVICE), generation_config=config,
        lazy_mode=True, hpu_graphs=wrapped, ignore_eos=True, logits_processor=LogitsProcessorList([forced]),
    )  # fmt: skip
    return torch.stack(forced.logits)


# ------------------------------------------------------------------------------------------------------ bandwidth


class RingRead(torch.nn.Module):
    """One decode step of a sliding layer whose ring is full: the ring as it lies, no mask."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.fused, self.scale = FusedAttention(FusedSDPA), scale

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.fused(q, k, v, None, scale=self.scale, causal=False, recompute=False, fast_softmax=False)


class PagedRead(RingRead):
    """The same from pages: the last W tokens' blocks are gathered, then attended."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        rows, blocks = table.shape
        picked = [pages.index_select(0, table.reshape(-1)).unflatten(0, (rows, blocks)) for pages in (k, v)]
        flat = [pages.permute(0, 2, 1, 3, 4).flatten(2, 3) for pages in picked]  # (rows, kv_heads, W, head_dim)
        return super().forward(q, *flat)


def bandwidth(options: argparse.Namespace) -> Iterator[str]:
    """Sliding attention at batch 56: useful bytes per second, against a plain read of the same device."""
    rows, kv_heads, heads, window, dim, block = (2, 2, 4, 64, 16, 16) if options.tiny else (56, 16, 32, 1024, 256, 128)
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    q = torch.randn(rows, heads, 1, dim, dtype=dtype, device=DEVICE)
    ring = [torch.randn(rows, kv_heads, window, dim, dtype=dtype, device=DEVICE) for _ in range(2)]
    per_row = window // block
    pages = [torch.randn(rows * per_row * 2, kv_heads, block, dim, dtype=dtype, device=DEVICE) for _ in range(2)]
    table = torch.randperm(rows * per_row * 2)[: rows * per_row].view(rows, per_row).to(DEVICE)
    useful = 2 * ring[0].numel() * ring[0].element_size()
    read = _seconds(lambda: (ring[0].float().sum(), ring[1].float().sum()), options)
    yield f"shape: batch {rows}, kv_heads {kv_heads}, heads {heads}, W {window}, head_dim {dim}, {dtype}"
    yield f"useful bytes a step: {useful:,} (keys and values of the window, once)"
    yield "| what | ms | useful GB/s |"
    yield "|---|---|---|"
    yield f"| plain read (sum) | {read * 1e3:.3f} | {useful / read / 1e9:.1f} |"
    cases = (("ring, no mask", RingRead, (q, *ring)), (f"pages of {block}, gathered", PagedRead, (q, *pages, table)))
    for name, kind, arguments in cases:
        module = ht.hpu.wrap_in_hpu_graph(kind(dim**-0.5).to(DEVICE))
        taken = _seconds(lambda module=module, arguments=arguments: module(*arguments), options)
        yield f"| {name} | {taken * 1e3:.3f} | {useful / taken / 1e9:.1f} |"
    yield "MBU is useful GB/s over the card's peak (Gaudi 3: 3,700 GB/s, Gaudi 2: 2,450 GB/s)."


def _seconds(call: Callable[[], Any], options: argparse.Namespace) -> float:
    """Median time of one call."""
    with torch.no_grad():
        times = []
        for i in range(5 if options.tiny else 60):
            ht.hpu.synchronize()
            started = time.perf_counter()
            call()
            htcore.mark_step()
            ht.hpu.synchronize()
            if i >= 2:
                times.append(time.perf_counter() - started)
    return statistics.median(times)


# ------------------------------------------------------------------------------------------------------ decode


@torch.no_grad()
def decode(options: argparse.Namespace) -> Iterator[str]:
    """Tokens per second of a Qwen 3 of random weights whose layers all slide. Stock ignores the window."""
    if options.tiny:
        shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16, "vocab_size": 128}  # fmt: skip
        sizes, prompt, new = (2,), 40, 6
    else:
        shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16,
                 "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 1024, "vocab_size": 32000}  # fmt: skip
        sizes, prompt, new = (8, 56), 4096, 128
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    config = transformers.Qwen3Config(**shape, use_sliding_window=True, max_window_layers=0, pad_token_id=0,
                                      max_position_embeddings=8192, torch_dtype=dtype)  # fmt: skip
    yield f"prompt {prompt}, new {new}, W {shape['sliding_window']}, {shape['num_hidden_layers']} layers, {dtype}"
    yield "| batch | what | decode tokens/s | KV bytes |"
    yield "|---|---|---|---|"
    for rows in sizes:
        for what in ("stock", "rings"):
            model = AutoModelForCausalLM.from_config(config, torch_dtype=dtype).eval().to(DEVICE)
            report = swa_pass.explain(model)
            model = ht.hpu.wrap_in_hpu_graph(
                optimum_habana.apply(model, window_semantics="hf") if what == "rings" else model
            )
            ids = torch.randint(1, 128, (rows, prompt), device=DEVICE)
            steps = new - 1
            taken = []
            for _ in range(3):  # the first one captures the graphs; each is timed from its second step on
                clock = Clock()
                _generate(model, ids, new, clock)
                taken.append(clock.times[-1] - clock.times[0])
            rate = rows * steps / min(taken[1:])
            counted = report.kv_bytes if what == "rings" else report.stock_kv_bytes
            yield f"| {rows} | {what} | {rate:,.0f} | {counted(prompt + new, rows):,} |"
            del model


class Clock(LogitsProcessor):
    """Notes when each step's logits were there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ht.hpu.synchronize()
        self.times.append(time.perf_counter())
        return scores


def _generate(model: Any, ids: torch.Tensor, new: int, clock: Clock) -> None:
    model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, reuse_cache=True,
        static_shapes=True, use_flash_attention=True, hpu_graphs=True, lazy_mode=True, ignore_eos=True,
        logits_processor=LogitsProcessorList([clock]),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="toy sizes; the numbers mean nothing")
    options = parser.parse_args()
    started, failed = time.perf_counter(), 0
    print("# swa_pass on Gaudi\n")
    for section in (environment, correctness, bandwidth, decode):
        print(f"## {section.__name__}\n")
        try:
            for line in section(options):
                print(line if line.startswith("|") else f"{line}  ")
                failed += "WRONG" in line
        except Exception:
            failed += 1
            print(f"\nFAILED:\n```\n{traceback.format_exc()}```")
        print()
    print(f"{failed} failed; {time.perf_counter() - started:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
