"""apply, revert and explain for a Gaudi model, and the hooks that they put on it."""

from __future__ import annotations

import functools
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from swa_pass.log import logger, say_once
from swa_pass.ops.hpu_kernel import FusedAttention, fused_attention
from swa_pass.render import ranges

from . import attention as attention_module
from .attention import Layer, describe
from .cache import RingKVCache, reorder
from .families import FAMILIES, Family, decoder_of, family_of, is_gaudi, windows
from .report import GaudiReport, report
from .step import Step, left_pads

_KEY = "_swa_pass_gaudi"
#: Keyword of the applied model's forward, in the key of every HPU graph: masked and unmasked steps are two graphs.
UNMASKED = "swa_pass_unmasked"


class Runtime:
    """What an applied model carries: its layers, the stock functions that were replaced, and the current step."""

    def __init__(self, model: Any, family: Family) -> None:
        self.family = family
        self.decoder = decoder_of(model)
        text = self.decoder.config
        self.attentions = [layer.self_attn for layer in self.decoder.layers]
        self.layers: list[Layer] = [
            describe(attention, index, window, family)
            for index, (attention, window) in enumerate(zip(self.attentions, windows(text), strict=True))
        ]
        self.window = max((layer.window for layer in self.layers if layer.window is not None), default=0)
        self.fused: FusedAttention | None = fused_attention()
        self.unmasked = False
        self.pads: int | None = None
        self.step: Step | None = None
        self.undo: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute of this one object, and remembers what its own attribute was."""
        own = owner._modules if isinstance(value, torch.nn.Module) else owner.__dict__
        self.undo.append((owner, name, own.get(name)))
        setattr(owner, name, value)


def apply(model: Any, *, window_semantics: str | None = None) -> Any:
    """Rings of exactly W slots for the sliding layers of an optimum-habana model. Returns the same object.

    To be called before `wrap_in_hpu_graph` and `torch.compile`. Then `generate(reuse_cache=True, ...)` as before.

    Args:
        window_semantics: ``"hf"``: every sliding layer of the config sees exactly W keys, as in upstream transformers,
            also in the families whose Gaudi code ignores the window (Qwen 2, Qwen 3, Starcoder 2). None: such a family
            is left as it is, with one warning. The other families follow upstream in any case.

    Raises:
        TypeError: not a model of optimum-habana's.
        ValueError: a family without support, training mode, a model that is wrapped already, or a plugin whose
            FusedSDPA has a signature that we do not know.
    """
    if _KEY in model.__dict__:
        return model
    if window_semantics not in (None, "hf"):
        raise ValueError(f'window_semantics={window_semantics!r}: use "hf", or None')
    name = type(model).__name__
    if not is_gaudi(model):
        raise TypeError(
            f"{name} is no model of optimum-habana's. Call adapt_transformers_to_gaudi() before the model is loaded, "
            "or use swa_pass.apply for stock transformers models."
        )
    family = family_of(model)
    if family is None:
        raise ValueError(f"{name} has no rings yet; supported are {', '.join(sorted(FAMILIES))}. Leave it as it is.")
    if model.training:
        raise ValueError(f"{name} is in training mode; call model.eval() before apply(model)")
    if "forward" in model.__dict__:
        raise ValueError(
            f"{name}.forward was replaced already (by wrap_in_hpu_graph or a hook); call apply first, then wrap"
        )
    text = decoder_of(model).config
    sliding = [i for i, window in enumerate(windows(text)) if window is not None]
    if not sliding:
        logger.warning("swa_pass: %s has no sliding layer; it is left unchanged.", name)
        return model
    if family.stock_window == "none" and window_semantics is None:
        logger.warning(
            "swa_pass: optimum-habana ignores the window of %s (layers %s); it is left unchanged. "
            'apply(model, window_semantics="hf") follows the config, which changes the logits beyond %d tokens.',
            name, ranges(sliding), text.sliding_window,
        )  # fmt: skip
        return model
    runtime = Runtime(model, family)
    if any(layer.sinks for layer in runtime.layers) and _world_size() > 1:
        raise ValueError(f"{name}: sinks that are split over {_world_size()} devices were never run; use one device")
    _install(model, runtime)
    _announce(model, runtime)
    return model


def revert(model: Any) -> Any:
    """The stock model again, with empty stock caches. HPU graphs go, too: wrap it anew."""
    runtime = model.__dict__.pop(_KEY, None)
    for owner, name, old in reversed(runtime.undo if runtime is not None else []):
        if old is not None:
            setattr(owner, name, old)
        else:
            owner.__dict__.pop(name, None)
    return model


def explain(model: Any) -> GaudiReport:
    """What is done with each layer, and the KV bytes: those of an applied model, or of one before apply."""
    runtime = model.__dict__.get(_KEY)
    if runtime is None:
        family = family_of(model) if is_gaudi(model) else None
        if family is None:
            raise ValueError(f"{type(model).__name__} has no rings; supported are {', '.join(sorted(FAMILIES))}")
        return report(model, Runtime(model, family).layers, applied=False)
    return report(model, runtime.layers, applied=True)


def runtime_of(model: Any) -> Runtime | None:
    return model.__dict__.get(_KEY)


# ------------------------------------------------------------------------------------------------ hooks on the model


def _install(model: Any, runtime: Runtime) -> None:
    model.__dict__[_KEY] = runtime
    for attention, layer in zip(runtime.attentions, runtime.layers):
        if layer.window is not None:
            runtime.replace(attention, "k_cache", RingKVCache(layer.window))
            runtime.replace(attention, "v_cache", RingKVCache(layer.window))
        runtime.replace(attention, runtime.family.hook, _attention_hook(runtime, attention, layer))
    runtime.replace(runtime.decoder, "forward", _decoder_hook(runtime, runtime.decoder.forward))
    runtime.replace(model, "forward", _model_hook(runtime, model.forward))
    stock_inputs = model.prepare_inputs_for_generation
    if model.config.model_type == "gemma3_text":
        # Its own is transformers' generic one, which knows nothing of token_idx.
        from optimum.habana.transformers.models.gemma3 import modeling_gemma3

        multimodal = modeling_gemma3.GaudiGemma3ForConditionalGeneration
        stock_inputs = MethodType(multimodal.prepare_inputs_for_generation, model)
    runtime.replace(model, "prepare_inputs_for_generation", _inputs_hook(runtime, stock_inputs))
    runtime.replace(model, "generate", _generate_hook(model, model.generate))
    for hook in (allocate_kv_cache, reorder_kv_cache):
        runtime.replace(model, hook.__name__, MethodType(hook, model))
    if not hasattr(model, "update_sincos_cache"):
        runtime.replace(model, "update_sincos_cache", getattr(runtime.decoder, "update_sincos_cache", _nothing))


def _attention_hook(runtime: Runtime, attention: Any, layer: Layer) -> Any:
    @functools.wraps(getattr(attention, runtime.family.hook))
    def attend(hidden_states: Tensor, position_embeddings: Any = None, *args: Any, **kwargs: Any) -> Any:
        assert runtime.step is not None, "a layer was called outside its decoder"
        return attention_module.forward(
            attention, layer, runtime.step, runtime.fused, hidden_states, kwargs["position_ids"], position_embeddings
        )

    return attend


def _decoder_hook(runtime: Runtime, stock: Any) -> Any:
    """Reads this forward's options, refuses what rings cannot do, and runs the stock decoder."""

    @functools.wraps(stock)
    def forward(input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        decoder = runtime.decoder
        given = input_ids if input_ids is not None else kwargs["inputs_embeds"]
        use_cache = kwargs.get("use_cache")
        use_cache = decoder.config.use_cache if use_cache is None else use_cache
        past = kwargs.get("past_key_values")
        _check(runtime, kwargs, given.shape[1], attention_mask, bool(use_cache), past)
        kwargs["use_cache"] = use_cache
        runtime.step = Step(
            attention_mask=attention_mask,
            token_idx=kwargs.get("token_idx"),
            dtype=decoder.norm.weight.dtype,
            queries=given.shape[1],
            use_cache=bool(use_cache),
            unmasked=runtime.unmasked,
            flash=runtime.family.fused_only or bool(kwargs.get("use_flash_attention")),
            recompute=bool(kwargs.get("flash_attention_recompute")),
            causal_flag=bool(kwargs.get("flash_attention_causal_mask")),
            fast_softmax=bool(kwargs.get("flash_attention_fast_softmax")),
            softmax_bf16=bool(kwargs.get("attn_softmax_bf16")),
            cache_idx=kwargs.get("cache_idx"),
        )
        if past is not None and runtime.layers[0].sinks:
            # gpt-oss's decoder takes what it is given for tensors and asks for their shape.
            kwargs["past_key_values"] = [tuple(SimpleNamespace(shape=shape) for shape in pair) for pair in past]
        # Our masks come from the 2D mask above. Without one, the stock code builds none that could be wrong or fail.
        return stock(input_ids=input_ids, attention_mask=None, **kwargs)

    return forward


def _check(runtime: Runtime, kwargs: dict[str, Any], queries: int, mask: Any, use_cache: bool, past: Any) -> None:
    name, layer = type(runtime.decoder).__name__, runtime.layers[0].index
    where = f"{name}, layer {layer} and on"
    if runtime.decoder.training:
        raise ValueError(f"{where}: in training mode; call swa_pass.revert(model) before training")
    if mask is not None and mask.dim() != 2:
        raise ValueError(f"{where}: the attention mask has {mask.dim()} dimensions; pass the 2D mask of 0 and 1")
    if kwargs.get("output_attentions"):
        raise ValueError(f"{where}: attention weights are not kept; call swa_pass.revert(model) to get them")
    if not use_cache:
        return
    if not kwargs.get("reuse_cache"):
        raise ValueError(
            f"{where}: rings live in the model, but reuse_cache is off; call generate(..., reuse_cache=True), or "
            "swa_pass.revert(model)"
        )
    if kwargs.get("token_idx") is None:
        raise ValueError(f"{where}: no token_idx; rings need static shapes: call generate(..., static_shapes=True)")
    if past is not None and queries > 1:
        raise ValueError(f"{where}: {queries} new tokens after a prompt; one token a step is what rings take here")
    if past is not None and isinstance(past[0][0], Tensor):
        raise ValueError(f"{where}: got a cache of tensors (prefix tuning?); call swa_pass.revert(model) for that")
    if runtime.attentions[layer].k_cache.get_shape() is None:
        raise ValueError(f"{where}: no store was allocated; use generate, or call model.allocate_kv_cache first")


def _model_hook(runtime: Runtime, stock: Any) -> Any:
    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("pixel_values") is not None:
            raise ValueError(
                "pixel_values: upstream lets the tokens of an image see each other in both directions and "
                "optimum-habana does not; with rings this was never run. Call swa_pass.revert(model) for images."
            )
        runtime.unmasked = bool(kwargs.pop(UNMASKED, False))
        return stock(*args, **kwargs)

    return forward


def _inputs_hook(runtime: Runtime, stock: Any) -> Any:
    """Adds what the host knows: that a prompt has no pads, or that the rings are full of tokens."""

    @functools.wraps(stock)
    def prepare(input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        tokens: Any = kwargs.get("token_idx_cpu")
        mask = kwargs.get("attention_mask")
        first = kwargs.get("past_key_values") is None
        reusing = bool(kwargs.get("reuse_cache")) and tokens is not None
        if first and reusing:
            runtime.pads = left_pads(None if mask is None else mask[:, :tokens])  # one read, at the first token
            if runtime.layers[0].sinks:  # gpt-oss's does not cut the padded prompt
                input_ids, kwargs["attention_mask"] = input_ids[:, :tokens], None if mask is None else mask[:, :tokens]
        inputs = stock(input_ids, **kwargs)
        for name in ("reuse_cache", "use_flash_attention", "flash_attention_recompute", "cache_idx") * (
            runtime.layers[0].sinks
        ):
            inputs[name] = kwargs.get(name)
        if reusing:
            inputs[UNMASKED] = _unmasked(runtime, tokens, first)
        return inputs

    return prepare


def _unmasked(runtime: Runtime, tokens: int, first: bool) -> bool:
    """Whether the host knows that a mask would hide nothing: in the prompt's own square, or in the rings."""
    if runtime.pads is None:
        return False
    if first:
        return runtime.pads == 0 and tokens > 1  # a prompt of one token reads the ring, as a decode step does
    return tokens >= runtime.window + runtime.pads


def _generate_hook(model: Any, stock: Any) -> Any:
    """optimum-habana's list of families that may reuse caches has "gemma3", but not its text-only model type."""

    @functools.wraps(stock)
    def generate(*args: Any, **kwargs: Any) -> Any:
        chosen = kwargs.get("generation_config") or model.generation_config
        if kwargs.get("static_shapes", getattr(chosen, "static_shapes", None)) is False:
            raise ValueError(
                f"{type(model).__name__}, layer 0 and on: rings need static shapes, but static_shapes is False; call "
                "generate(..., static_shapes=True)"
            )
        config = model.config
        if config.model_type != "gemma3_text":
            return stock(*args, **kwargs)
        config.__dict__["model_type"] = "gemma3"
        try:
            return stock(*args, **kwargs)
        finally:
            del config.__dict__["model_type"]

    return generate


def allocate_kv_cache(self: Any, batch_size: int, max_seq_len: int, inp_seq_len: int) -> None:
    """Rings and linear stores for `batch_size` rows (beams included) of `max_seq_len` tokens, all zeros.

    Graphs that were recorded on a store that is no more are dropped.
    """
    runtime: Runtime = self.__dict__[_KEY]
    dtype, moved = self.dtype, False
    for attention in runtime.attentions:
        kv_heads = getattr(attention, "num_key_value_heads", None) or attention.config.num_key_value_heads
        for store in (attention.k_cache, attention.v_cache):
            before = store.cache
            if before is not None:
                store.inp_seq_len = inp_seq_len  # stock insists on the same prompt length every time
            shape = torch.Size((batch_size, kv_heads, max_seq_len, attention.head_dim))
            store.allocate(inp_seq_len, dtype, attention.o_proj.weight.device, shape)
            moved |= before is not None and store.cache is not before
    if moved and hasattr(self, "clear_cache"):
        self.clear_cache()


def reorder_kv_cache(self: Any, beam_idx: Tensor) -> Any:
    """Beam search: row i of every store becomes the old row beam_idx[i]. Returns the logical shapes."""
    shapes = []
    for attention in self.__dict__[_KEY].attentions:
        reorder(attention.k_cache, beam_idx)
        reorder(attention.v_cache, beam_idx)
        shapes.append((attention.k_cache.get_shape(), attention.v_cache.get_shape()))
    return tuple(shapes)


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _announce(model: Any, runtime: Runtime) -> None:
    stock = {
        "W+1": "optimum-habana keeps W + 1",
        "broken": "optimum-habana is wrong beyond W",
        "none": "optimum-habana ignores the window",
    }[runtime.family.stock_window]
    count = sum(layer.window is not None for layer in runtime.layers)
    say_once(
        model,
        f"swa_pass: {type(model).__name__}: {count} of {len(runtime.layers)} layers on rings of W = {runtime.window} "
        f"tokens; a query sees exactly W keys, as in upstream transformers ({stock}).",
    )
    if any(layer.softcap or layer.sinks for layer in runtime.layers):
        why = "sinks" if runtime.layers[0].sinks else "a softcap"
        say_once(model, f"swa_pass: attention has {why}, so it runs as matrix products, not in FusedSDPA.")
