"""Gaudi models under the stand-in: building, generating with forced tokens, comparing."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import habana_frameworks.torch as ht
import torch
from gaudi_models import FAMILIES, NEW, TOLERANCE, VOCAB, W, config_of, inputs_of
from optimum.habana.transformers.generation import GaudiGenerationConfig
from optimum.habana.transformers.modeling_utils import adapt_transformers_to_gaudi
from transformers import LogitsProcessor, LogitsProcessorList

from swa_pass.integrations import optimum_habana

adapt_transformers_to_gaudi()

#: Way of generating -> options; "graphs" is not optimum-habana's but ours: wrap in HPU graphs.
MODES: dict[str, dict[str, Any]] = {
    "reuse": {},
    "bucket": {"bucket_size": 8, "bucket_internal": True},
    "flash": {"use_flash_attention": True},
    "flash_causal": {
        "use_flash_attention": True,
        "flash_attention_recompute": True,
        "flash_attention_causal_mask": True,
    },
    "graphs": {"graphs": True},
    "graphs_limit": {"graphs": True, "limit_hpu_graphs": True},
    "everything": {"graphs": True, "use_flash_attention": True, "bucket_size": 8, "bucket_internal": True},
}


def gaudi(family: str, references: dict[str, Any], *, apply: bool = True, device: str = "cpu", window: int = W) -> Any:
    """The Gaudi class of a family with the reference's weights, applied unless told otherwise."""
    module, name, _, _ = FAMILIES[family]
    models = importlib.import_module(f"optimum.habana.transformers.models.{module}.modeling_{module}")
    model = getattr(models, f"Gaudi{name}")(config_of(family, window))
    model.load_state_dict(references[family]["weights"])
    model = model.eval().to(device)
    return optimum_habana.apply(model, window_semantics="hf") if apply else model


class Forced(LogitsProcessor):
    """Keeps the logits of every step and makes `generate` take the given tokens (rows, steps)."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens, self.logits = tokens, []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step = len(self.logits)
        self.logits.append(scores.detach().cpu().clone())
        forced = torch.full_like(scores, -1e9)
        return forced.scatter_(1, self.tokens[:, step : step + 1].to(scores.device), 0.0)


def graphs(model: Any, max_graphs: int | None = None) -> Any:
    return ht.hpu.wrap_in_hpu_graph(model, max_graphs=max_graphs)


@torch.no_grad()
def generate(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, *, wrapped: bool = False, new: int = NEW,
             processors: list[Any] | None = None, lazy_mode: bool = True, **options: Any) -> Any:  # fmt: skip
    config = GaudiGenerationConfig(
        **{"max_new_tokens": new, "do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None,
           "static_shapes": True, "reuse_cache": True, **options}
    )  # fmt: skip
    return model.generate(
        input_ids=ids, attention_mask=mask, generation_config=config, lazy_mode=lazy_mode, hpu_graphs=wrapped,
        ignore_eos=True, logits_processor=LogitsProcessorList(processors or []),
    )  # fmt: skip


def step_logits(model: Any, scenario: str, *, wrapped: bool = False, before_step: Any = None, **options: Any) -> Any:
    """Logits (NEW, 2, vocab) along the reference's tokens."""
    ids, mask, prompt = inputs_of(scenario)
    device = next(model.parameters()).device
    forced = Forced(ids[:, prompt:])
    processors = [forced] if before_step is None else [forced, before_step]
    generate(model, ids[:, :prompt].to(device), mask[:, :prompt].to(device), wrapped=wrapped, processors=processors,
             **options)  # fmt: skip
    logits = torch.stack(forced.logits)
    assert logits.shape == (NEW, 2, logits.shape[-1])
    assert logits.shape[-1] >= VOCAB
    return logits


def run(model: Any, scenario: str, mode: str) -> torch.Tensor:
    options = dict(MODES[mode])
    wrapped = options.pop("graphs", False)
    return step_logits(graphs(model) if wrapped else model, scenario, wrapped=wrapped, **options)


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    worst = (got.double() - expected.double()).abs().max().item()
    return float("inf") if worst != worst else worst


def assert_upstream(got: torch.Tensor, references: dict[str, Any], family: str, scenario: str) -> None:
    error = distance(got, references[family]["logits"][scenario][W])
    assert error <= TOLERANCE, f"off by {error:.2e} from upstream transformers"


def attentions(model: Any) -> list[Any]:
    return optimum_habana.runtime_of(model).attentions


def kernel_calls() -> list[Any]:
    return sys.modules["habana_frameworks.torch.hpex.kernels.FusedSDPA"].calls
