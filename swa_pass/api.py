"""The public functions. Thin: each checks its input, then calls the part that does the work."""

from __future__ import annotations

import functools
import sysconfig
import time
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any, overload

import torch

from .backends import compile_after, for_gaudi, inner_compiler
from .cache import DEFAULT_SLACK, HybridCache
from .cache.store import kv_dtype_of
from .capture import first_line
from .compat import cache_argument, check_transformers
from .discover import discover
from .graph_report import GraphReport, explain_graph
from .hooks import forward_slot
from .lending import Rings
from .log import logger, say_once
from .notes import contradictions
from .ops.build import find_compiler
from .passes import Rewrite
from .render import ranges
from .runtime import Runtime
from .spec import LayerSpec, Report

_KEY = "_swa_pass"
_HOOKS = ("_prepare_cache_for_generation",)


def apply(
    model: Any,
    *,
    backend: Any = None,
    strict: bool = False,
    slack: int = DEFAULT_SLACK,
    decode_linear: bool = True,
    kv_dtype: str | torch.dtype | None = None,
) -> Any:
    """Makes a Hugging Face decoder run its sliding-window layers on ring buffers. Returns the same object.

    Nothing is captured yet: that happens at the first call, or in `warmup`. Weights, config, dtype and state_dict stay
    as they are; `revert` takes everything back.

    Args:
        backend: compiler behind the pass for prefill and decode: ``"inductor"``, ``"eager"``, any Dynamo backend name,
            or a callable ``(graph_module, example_inputs) -> callable``. None: Inductor for decode where a C++ compiler
            is found, the graph as it is for prefill.
        strict: raise when a layer could not be rewritten, instead of one warning.
        slack: tokens by which a ring can be rolled back exactly.
        decode_linear: half-precision linears of a decode step on CPU run in our kernel (see `passes.decode_linear`).
            False leaves them to torch; to measure what the rings alone bring.
        kv_dtype: ``"int8"`` or ``"float8"``: keys and values take one byte a number, half of bfloat16, and are not
            exactly the model's any more (docs/benchmarks.md has the perplexity). None: the model's dtype.

    Raises:
        TypeError: not a model with a config and a forward.
        ValueError: an unknown backend or kv_dtype, a negative slack, or a model that this cannot work for
            (encoder-decoder, not causal, training mode, window <= 0).
    """
    if runtime_of(model) is not None:
        return model
    gaudi = _optimum_habana(model)
    if gaudi is not None:
        if backend is not None or kv_dtype is not None:
            raise ValueError(
                f"{type(model).__name__} is a model of optimum-habana's: backend and kv_dtype have no meaning there. "
                "Call apply without them; HPU graphs or torch.compile come afterwards, docs/gaudi.md says how."
            )
        return gaudi.apply(model)
    check_model(model)
    if slack < 0:
        raise ValueError(f"slack must be >= 0 tokens, got {slack}")
    store_dtype = kv_dtype_of(kv_dtype)
    if not _may_slide(model):
        logger.warning("swa_pass: %s has no sliding layer; it is left unchanged.", type(model).__name__)
        return model
    runtime = Runtime(model, resolve_backends(backend), strict, slack, decode_linear, store_dtype)
    model.__dict__[_KEY] = runtime
    setattr(model, forward_slot(model), MethodType(_wrapped_forward(type(model).forward), model))
    if hasattr(model, "_prepare_cache_for_generation"):
        model._prepare_cache_for_generation = MethodType(_prepare_cache_for_generation, model)
    return model


def revert(model: Any) -> Any:
    """The stock model again. Graphs and caches are dropped."""
    gaudi = _optimum_habana(model)
    if gaudi is not None:
        return gaudi.revert(model)
    runtime = model.__dict__.pop(_KEY, None)
    if runtime is not None:
        slot = forward_slot(model)  # accelerate may have put a hook around ours, or taken one off
        for name in (slot, *_HOOKS):
            model.__dict__.pop(name, None)
        if slot != "forward" or getattr(runtime.stock, "__func__", None) is not type(model).forward:
            setattr(model, slot, runtime.stock)  # somebody else's forward was there before us
    return model


@overload
def explain(model: torch.fx.GraphModule | torch.export.ExportedProgram) -> GraphReport: ...
@overload
def explain(model: Any) -> Report: ...
def explain(model: Any) -> Any:
    """What each layer's attention is, what is done with it and why, and the KV bytes. ``print(report)`` is a table.

    For a captured graph or an exported program: what `rewrite` would do to it, as a `GraphReport`, whose ``save`` draws
    every attention before and after on a page.
    """
    if isinstance(model, (torch.fx.GraphModule, torch.export.ExportedProgram)):
        return explain_graph(model)
    gaudi = _optimum_habana(model)
    if gaudi is not None:
        return gaudi.explain(model)
    runtime = runtime_of(model)
    if runtime is None:
        check_model(model)
        specs: tuple[LayerSpec, ...] = discover(model, model.forward)
        return Report(type(model).__name__, specs, DEFAULT_SLACK, tuple(contradictions(model.config, specs)))
    specs = tuple(_as_compiled(spec, runtime) for spec in runtime.specs)
    failure = runtime.proof.failure
    notes = [failure] if failure else contradictions(model.config, specs)
    for step in runtime.steps.values():
        notes += [f"a {step.kind} step runs eager: {why}" for why in step.failed.values()]
    notes += _prefill_notes(specs, runtime)
    return Report(type(model).__name__, specs, runtime.slack, tuple(notes), runtime.kv_dtype)


def warmup(model: Any, batch: int = 1, length: int = 32) -> None:
    """Captures and compiles now: one prefill of `length` tokens and two decode steps for `batch` rows."""
    runtime = runtime_of(model)
    if runtime is None:
        raise ValueError("warmup needs an applied model: call swa_pass.apply(model) first")
    if batch < 1 or length < 1:
        raise ValueError(f"warmup needs batch >= 1 and length >= 1, got batch={batch}, length={length}")
    started = time.perf_counter()
    if not runtime.active:
        return  # said already: the model runs its stock path
    device = next(model.parameters()).device
    ids = torch.zeros(batch, length + 2, dtype=torch.int64, device=device)
    positions = torch.arange(length + 2, device=device).expand(batch, -1)
    cache = runtime.make_cache(hint=length + 2)
    with torch.no_grad():
        for first, stop in ((0, length), (length, length + 1), (length + 1, length + 2)):
            kwargs: dict[str, Any] = {"input_ids": ids[:, first:stop], runtime.cache_name: cache}
            for name, value in (("position_ids", positions[:, first:stop]), ("logits_to_keep", 1)):
                if name in runtime.parameters:  # the arguments that `generate` passes
                    kwargs[name] = value
            model(**kwargs)
    logger.info("swa_pass: captured and compiled in %.1f s", time.perf_counter() - started)


def backend(inner: Any = "inductor", *, window_semantics: str | None = None) -> Any:
    """A Dynamo backend: the passes, then `inner`. For ``torch.compile(model, backend=swa_pass.backend(...))``.

    On Gaudi, decode steps of stock optimum-habana code read rings that this backend keeps (docs/gaudi.md); its
    attribute `rings` says how many bytes they take (`nbytes`), how many attentions read them (`matches`), and why
    others do not (`refusals`).

    Args:
        inner: the compiler behind the passes: the name of a registered Dynamo backend (``"inductor"``, ``"eager"``,
            ``"aot_eager"``, ``"hpu_backend"``) or a callable ``(graph_module, example_inputs) -> callable``.
            `options` of torch.compile go on to it.
        window_semantics: for stock optimum-habana code. ``"graph"`` (what None means on Gaudi): a query sees exactly
            the keys that the masks in the graph show, which are window + 1 there. ``"hf"``: one key fewer, in prompts
            and afterwards, which is what upstream transformers shows. Elsewhere None leaves stores without rings: while
            a ring is ahead of a store, the store holds NaN.

    What is not proven stays as it is, and a graph that needs gradients is left alone. Raises ValueError for a name that
    no backend has, or an unknown window_semantics.
    """
    _check_backend(inner)
    if window_semantics not in (None, "graph", "hf"):
        raise ValueError(f'window_semantics={window_semantics!r}: use "graph" or "hf"')
    rings = Rings()

    @functools.wraps(dynamo_backend)
    def compile_graph(gm: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        passed = {} if inner == "inductor" else options  # torch.compile gives Inductor its options by other ways
        lends = window_semantics is not None or for_gaudi(inner, gm)
        return compile_after(inner, gm, inputs, rings if lends else None, window_semantics == "hf", **passed)

    compile_graph.rings = rings  # type: ignore[attr-defined]
    return compile_graph


def dynamo_backend(gm: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
    """Registered as the Dynamo backend ``"swa_pass"``."""
    return compile_after("inductor", gm, inputs)


# ------------------------------------------------------------------------------------------------ hooks on the model


def runtime_of(model: Any) -> Runtime | None:
    return getattr(model, "__dict__", {}).get(_KEY)


def _wrapped_forward(stock: Any) -> Any:
    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        runtime = self.__dict__.get(_KEY)
        # Without a runtime: reverted, but somebody's wrapper still calls us.
        return stock(self, *args, **kwargs) if runtime is None else runtime(args, kwargs)

    return forward


def _prepare_cache_for_generation(
    self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Gives `generate` a HybridCache, unless the caller chose a cache, an implementation, or none."""
    runtime: Runtime = self.__dict__[_KEY]
    original = type(self)._prepare_cache_for_generation
    key = runtime.cache_name
    chosen = generation_config.cache_implementation
    given = any(model_kwargs.get(name) is not None for name in (key, "cache", "past_key_values"))
    if chosen is not None:
        say_once(self, f"swa_pass: stock path: cache_implementation={chosen!r} was asked for and is used")
    max_length = kwargs.get("max_cache_length", args[-1] if args and isinstance(args[-1], int) else 0)
    ours = model_kwargs.get(key)
    if given and isinstance(ours, HybridCache):
        _check_something_new(ours, model_kwargs, generation_config)
        ours.clock.hint = max_length  # it goes on to this length: grow once
    if given or chosen is not None or generation_config.use_cache is False or self.training or not runtime.active:
        return original(self, generation_config, model_kwargs, *args, **kwargs)
    model_kwargs[key] = runtime.make_cache(hint=max_length)
    return None


def _check_something_new(cache: HybridCache, model_kwargs: dict[str, Any], generation_config: Any) -> None:
    """When the cache holds all of a prompt, stock reads the prompt once more, behind itself: no text of the caller's.

    `generate` does not say here how long the prompt is; it has added that to max_length, and dropped a mask of ones.
    """
    mask, new = model_kwargs.get("attention_mask"), generation_config.max_new_tokens
    if model_kwargs.get("inputs_embeds") is not None or (mask is None and new is None):
        return
    prompt = generation_config.max_length - new if mask is None else mask.shape[-1]
    if 0 < prompt <= cache.seen:
        raise ValueError(
            f"the cache holds {cache.seen} tokens already and the prompt has {prompt}, so there is nothing new to "
            "read. Give the whole text, with at least one token more, or crop the cache, or use a new one."
        )


# ------------------------------------------------------------------------------------------------ checks


def _optimum_habana(model: Any) -> Any:
    """The integration for models of optimum-habana's, imported for these only; None for any other model."""
    if not any(kind.__module__.startswith("optimum.habana.") for kind in type(model).__mro__):
        return None
    from .integrations import optimum_habana

    return optimum_habana


def check_model(model: Any) -> None:
    check_transformers()
    config = getattr(model, "config", None)
    if not isinstance(model, torch.nn.Module) or config is None or not hasattr(config, "get_text_config"):
        raise TypeError(f"swa_pass works on transformers models; got {type(model).__name__}")
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model; swa_pass works on decoder-only models")
    text = config.get_text_config(decoder=True)
    if getattr(text, "is_decoder", True) is False or getattr(text, "is_causal", True) is False:
        raise ValueError(f"{name} is not causal (its config says so); there is no decoding to speed up")
    if cache_argument(model.forward) is None:
        raise ValueError(f"{name}.forward takes no KV cache, so it is no decoder that swa_pass can work on")
    if model.training:
        raise ValueError(f"{name} is in training mode; call model.eval() before swa_pass.apply(model)")
    window = getattr(text, "sliding_window", None)
    if isinstance(window, int) and window < 1:
        raise ValueError(f"{name} has sliding_window={window}; a window holds at least one key, the query's own")


def _may_slide(model: Any) -> bool:
    """A shortcut to decline, never a proof: a config without any word of a window belongs to a global model."""
    config = model.config.get_text_config(decoder=True).to_dict()
    for name, value in config.items():
        if ("window" in name or "sliding" in name or "local" in name) and isinstance(value, int) and value:
            return True
        if isinstance(value, (list, tuple)) and any("sliding" in str(v) for v in value):
            return True
    return False


def resolve_backends(backend: Any) -> dict[str, Any]:
    """The inner compiler of each kind of step.

    By default Inductor compiles decode, where launching many small operations is what costs time. Prefill is spent in
    large matrix products that Inductor leaves to the same library, so its graph runs as it is and compiles in seconds.
    """
    if backend is not None:
        _check_backend(backend)
        return {"prefill": backend, "decode": backend}
    missing = missing_for_inductor()
    if missing:
        logger.warning("swa_pass: no %s found, which Inductor needs; graphs run without it.", missing)
    return {"prefill": "eager", "decode": "eager" if missing else "inductor"}


def _check_backend(backend: Any) -> None:
    try:
        inner_compiler(backend)
    except Exception as error:  # Dynamo's InvalidBackend, or an import that the backend needs
        raise ValueError(f"backend={backend!r} is no Dynamo backend: {first_line(error)}") from error


def missing_for_inductor() -> str:
    """What Inductor's generated C++ needs and this machine lacks; empty if nothing."""
    if find_compiler() is None:
        return "C++ compiler (g++ or clang++)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python headers (python3-dev)"
    return ""


def _as_compiled(spec: LayerSpec, runtime: Runtime) -> LayerSpec:
    """What was proven, corrected by what the compiled decode graphs really hold."""
    why = _unfused(spec.index, runtime.steps["decode"].rewrites)
    if spec.action == "rewritten" and why:
        return replace(spec, action="refused", reason=f"in the decode graph: {why}")
    return spec


def _prefill_notes(specs: tuple[LayerSpec, ...], runtime: Runtime) -> list[str]:
    """Layers that are fused in decode only, by reason."""
    reasons: dict[str, list[int]] = {}
    for spec in specs:
        why = _unfused(spec.index, runtime.steps["prefill"].rewrites)
        if spec.action == "rewritten" and why:
            reasons.setdefault(why, []).append(spec.index)
    return [f"prefill of layers {ranges(layers)} reads keys in time order: {why}" for why, layers in reasons.items()]


def _unfused(layer: int, rewrites: list[Rewrite]) -> str:
    """Why some graph does not have this layer fused, nor in time order as was said; empty if all do."""
    for rewritten in rewrites:
        findings = [f for f in rewritten.findings if f.layer == layer]
        if layer not in rewritten.fused and not (layer in rewritten.padded and any(f.extra for f in findings)):
            refusals = [f.refusal for f in findings if f.refusal]
            return refusals[0] if refusals else "its cache access did not match"
    return ""
