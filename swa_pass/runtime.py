"""What an applied model does when it is called.

    call --> stock      gradients, training, use_cache=False, a cache of the user's, output_attentions without our cache
        \\-> eager      the stock forward on a HybridCache: correct for any mask, not fast (holes in the mask, images)
         \\-> compiled  Dynamo's graph of the forward after our passes: one for prefill (q > 1), one for decode (q = 1)

The 2D attention mask never enters a compiled graph: left padding becomes one integer per row (`starts`), which the
fused attention takes; every other mask runs eager. So one graph serves padded and unpadded batches alike.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .backends import inner_compiler, prepare
from .cache import HybridCache
from .capture import call, first_line, own_code
from .compat import (
    CACHE_NAMES,
    cache_argument,
    is_traced,
    joint_states,
    ready_for_hidden_states,
    state_layers,
    tracing,
)
from .discover import discover
from .hooks import Watch, forward_slot, hooked, unhooked_twin
from .log import logger, say_once
from .passes import Rewrite, counts_from_first, rewrite_graph
from .pieces import compile_in_pieces
from .probe import CaptureError
from .spec import LayerSpec

#: Arguments that a compiled step takes as they are. Anything else that is set (images, labels, ...) runs eager.
_COMPILED_ARGUMENTS = {
    "input_ids",
    "inputs_embeds",
    "position_ids",
    "attention_mask",
    "use_cache",
    "logits_to_keep",
    "output_hidden_states",
    "return_dict",
    *CACHE_NAMES,
}


#: Everything by which Dynamo says that it cannot compile, its recompile limit included.
_DYNAMO_ERRORS = (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit)


#: Whether the call that this thread is in has left padding.
_padded: ContextVar[bool] = ContextVar("swa_pass_padded", default=False)


class NeedsTimeOrder(Exception):
    """A padded call met a graph in which some layer still reads its keys with a mask that knows no padding."""


@dataclass(frozen=True)
class Proof:
    """What is known about a model in one dtype, device, attention implementation and autocast.

    failure: why nothing is (empty: `specs` says it all).  owner: see `owner_of`.  hooked: see `hooks`.
    """

    specs: tuple[LayerSpec, ...]
    failure: str
    owner: str
    hooked: bool


class Runtime:
    """State of one applied model: what was proven about it, and its compiled steps."""

    def __init__(
        self,
        model: Any,
        backends: dict[str, Any],
        strict: bool,
        slack: int,
        decode_linear: bool = True,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.backends = backends
        self.strict = strict
        self.slack = slack
        self.decode_linear = decode_linear
        self.kv_dtype = kv_dtype
        self.stock: Callable[..., Any] = getattr(model, forward_slot(model))
        self.parameters = list(inspect.signature(self.stock).parameters)
        self.cache_name = cache_argument(self.stock) or CACHE_NAMES[0]
        self.steps = {kind: Step(self, kind) for kind in ("prefill", "decode")}
        self.compiled_calls = 0
        self.watch = Watch(model)
        self._proofs: dict[Hashable, Proof] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        """A copied model gets a runtime of its own: graphs belong to the weights they were captured with."""
        twin = Runtime.__new__(Runtime)
        memo[id(self)] = twin
        model = copy.deepcopy(self.model, memo)
        vars(twin).update(vars(self), model=model, stock=copy.deepcopy(self.stock, memo), compiled_calls=0)
        twin.steps = {kind: Step(twin, kind) for kind in self.steps}
        twin.watch = Watch(model)
        twin._proofs = {}
        return twin

    def __reduce__(self) -> Any:
        """Graphs cannot be pickled: a model that was pickled while applied is a stock one when it is loaded."""
        return _nothing, ()

    # ------------------------------------------------------------------ what was proven

    @property
    def proof(self) -> Proof:
        """Made at the first call, and once more for every other dtype, device, attention implementation or autocast
        (which may leave keys in float32 and values not)."""
        parameter = next(self.model.parameters())
        kind = parameter.device.type if parameter.device.type != "meta" else "cpu"  # meta: offloaded by accelerate
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        state = (parameter.dtype, parameter.device, getattr(self.model.config, "_attn_implementation", None), autocast)
        if state not in self._proofs:
            specs: tuple[LayerSpec, ...] = ()
            has_hooks, failure = hooked(self.model), ""
            try:
                traced = unhooked_twin(self.model, self.stock, self) if has_hooks else (self.model, self.stock)
                specs = discover(*traced)
            except CaptureError as error:
                failure = str(error)
            self._proofs[state] = Proof(specs, failure, owner_of(self.model), has_hooks)
            self._announce(self._proofs[state])
        return self._proofs[state]

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return self.proof.specs

    @property
    def active(self) -> bool:
        """Whether rings are used at all: something slides, and every mask of the model is understood."""
        specs = self.specs
        return any(s.action == "rewritten" for s in specs) and all(s.kind != "other" for s in specs)

    def _announce(self, proof: Proof) -> None:
        specs = proof.specs
        refused = [s for s in specs if s.action == "refused"]
        if proof.failure or refused:
            what = proof.failure
            if not what:
                first = refused[0]
                what = f"{len(refused)} of {len(specs)} layers refused, first layer {first.index}: {first.reason}"
            if self.strict:
                raise RuntimeError(f"swa_pass (strict): {what}")
            logger.warning(
                "swa_pass: %s. The model runs its stock path; swa_pass.explain(model) lists every layer.", what
            )
        elif not any(s.kind == "sliding" for s in specs):
            logger.warning("swa_pass: no layer of this model slides (proven from its masks); it runs its stock path.")
        else:
            rings = sum(s.action == "rewritten" for s in specs)
            logger.info("swa_pass: %d of %d layers slide and run on rings", rings, len(specs))
            if proof.hooked:
                logger.warning(
                    "swa_pass: accelerate's hooks are on this model's submodules, so it runs eager, on rings. "
                    "A model on one device without offloading needs no hooks and is compiled."
                )

    # ------------------------------------------------------------------ a call

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_traced():
            return self.stock(*args, **kwargs)
        kwargs = {**dict(zip(self.parameters, args)), **kwargs}
        why_stock = self._why_stock(kwargs)
        if why_stock is not None:
            if why_stock:
                say_once(self.model, f"swa_pass: stock path: {why_stock}")
            return self.stock(**kwargs)
        tokens = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
        batch, new = tokens.shape[:2]
        cache = self._cache_of(kwargs)
        if cache is None:
            cache = kwargs[self.cache_name] = self.make_cache()
        ok, starts = left_padding(kwargs.get("attention_mask"), cache.seen, new, tokens.device)
        step = self.steps["decode" if new == 1 else "prefill"]
        plain = canonical({**kwargs, "attention_mask": None}, decode=new == 1)
        form = spelling(plain, batch)
        # A hybrid model's first call makes its states, its scans over many tokens are no graph for every length, and a
        # state that records its past is another tensor after every step.
        states = cache.states.values()
        stateful = bool(states) and (new > 1 or cache.seen == 0 or any(state.record_past for state in states))
        if not ok or form in step.failed or not self._compilable(kwargs) or stateful:
            return self.stock(**kwargs)
        if cache.clock.managed:
            raise RuntimeError(
                "this cache is in use by another call, in another thread. Each thread needs a cache of its own."
            )
        if kwargs.get("output_hidden_states") or getattr(self.model.config, "output_hidden_states", False):
            ready_for_hidden_states(self.model)
        cache.prepare(self.specs, batch, new, starts)
        _padded.set(starts is not None)
        try:
            output = step.run(form, plain, cache)
        except NeedsTimeOrder:
            return self.stock(**kwargs)
        except _DYNAMO_ERRORS as error:
            if self.strict:
                raise
            output = self.stock(**kwargs)  # a caller's mistake raises here, and does not count against the step
            step.failed[form] = first_line(error)
            logger.warning(
                "swa_pass: a %s step could not be compiled and runs eager from now on: %s", step.kind, step.failed[form]
            )
            return output
        self.compiled_calls += 1
        cache.advance(new)
        return output

    def _cache_of(self, kwargs: dict[str, Any]) -> Any:
        given = [kwargs.pop(name) for name in CACHE_NAMES if kwargs.get(name) is not None]
        if len(given) > 1:
            say_once(self.model, "swa_pass: `cache` and `past_key_values` were given; the first is used, as in stock")
        if given:
            kwargs[self.cache_name] = given[0]
        return kwargs.get(self.cache_name)

    def _why_stock(self, kwargs: dict[str, Any]) -> str | None:
        """None: our path. Otherwise the stock path, with a sentence to say once (empty: nothing to say)."""
        cache = self._cache_of(kwargs)
        if cache is not None and not isinstance(cache, HybridCache):
            return f"the caller's {type(cache).__name__} is used as it is"
        if self.model.training:
            return "the model is in training mode; call model.eval() for the fast path"
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.model.parameters()):
            return "gradients are on; call the model under torch.no_grad() for the fast path"
        if cache is None:
            use_cache = kwargs.get("use_cache")
            if use_cache is None:
                use_cache = getattr(self.model.config.get_text_config(decoder=True), "use_cache", True)
            if not use_cache:
                return ""
            if isinstance(kwargs.get("attention_mask"), dict) or getattr(kwargs.get("attention_mask"), "ndim", 2) != 2:
                return "a mask that the caller made is used as it is"
        if kwargs.get("input_ids") is None and kwargs.get("inputs_embeds") is None:
            return ""
        return None if self.active else ""

    def _compilable(self, kwargs: dict[str, Any]) -> bool:
        if self.proof.hooked:
            return False
        if self.watch.sees():
            say_once(self.model, "swa_pass: while submodules have forward hooks, the model runs eager, on rings")
            return False
        extra = {k for k, v in kwargs.items() if k not in _COMPILED_ARGUMENTS and v is not None and v is not False}
        return not extra and not getattr(self.model.config, "output_attentions", False)

    def make_cache(self, hint: int = 0) -> HybridCache:
        """A cache for this model: rings where sliding was proven, linear stores elsewhere.

        RuntimeError if the model runs its stock path: its masks may be made for another cache than ours.
        """
        if not self.active:
            raise RuntimeError("this model runs its stock path; swa_pass.explain(model) says why. Use a stock cache.")
        proof = self.proof
        alone = state_layers(self.model.config) if any(s.kind == "state" for s in proof.specs) else {}
        beside = joint_states(self.model.config) if any(s.state for s in proof.specs) else {}
        windows = [alone.get(s.index, s.window) for s in proof.specs]
        return HybridCache(
            windows, slack=self.slack, hint=hint, owner=proof.owner, states=beside, kv_dtype=self.kv_dtype
        )


def _nothing() -> None:
    return None


class Step:
    """One kind of call, prefill or decode, compiled once for each form in which callers make it.

    rewrites: what the passes did to each graph that was compiled.
    failed: forms that Dynamo could not compile, and why.
    from_first: forms in which rings count from their first key (`StoreLayer.get_query_offset`): what Dynamo cannot
        trace otherwise.
    """

    def __init__(self, runtime: Runtime, kind: str) -> None:
        self.runtime = runtime
        self.kind = kind
        self.failed: dict[Hashable, str] = {}
        self.rewrites: list[Rewrite] = []
        self.from_first: set[Hashable] = set()
        self._compiled: dict[Hashable, Any] = {}

    def run(self, form: Hashable, kwargs: dict[str, Any], cache: HybridCache) -> Any:
        try:
            return self._run(form, kwargs, cache)
        except torch._dynamo.exc.Unsupported as error:
            if form in self.from_first:
                raise
            self.from_first.add(form)
            del self._compiled[form]
            try:
                return self._run(form, kwargs, cache)
            except _DYNAMO_ERRORS:
                raise error from None  # what the model itself does is the better reason

    def _run(self, form: Hashable, kwargs: dict[str, Any], cache: HybridCache) -> Any:
        from_first = form in self.from_first
        if form not in self._compiled:
            backend = self._compile_from_first if from_first else self._compile
            self._compiled[form] = torch.compile(own_code(call), backend=backend, fullgraph=True)
        for name, dim in (("input_ids", 1), ("inputs_embeds", 1), ("position_ids", -1)):
            if isinstance(kwargs.get(name), Tensor):
                kwargs[name] = plain_copy(kwargs[name])
                if self.kind == "prefill" and kwargs[name].device.type != "hpu":  # known sizes: see cache/store.py
                    torch._dynamo.maybe_mark_dynamic(kwargs[name], dim % kwargs[name].ndim)
        cache.clock.managed, cache.clock.from_first = True, from_first
        try:
            with tracing(self.runtime.model.config):
                return self._compiled[form](self.runtime.stock, kwargs)
        finally:
            cache.clock.managed = cache.clock.from_first = False

    def _compile_from_first(self, gm: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        return self._compile(gm, inputs, from_first=True)

    def _compile(self, gm: torch.fx.GraphModule, inputs: list[Any], from_first: bool = False, **options: Any) -> Any:
        rewrite = rewrite_graph(gm, lower=self.runtime.decode_linear, states=False)
        if from_first and counts_from_first(gm):
            raise RuntimeError("something but proven attention uses positions that are counted from a ring's first key")
        self.rewrites.append(rewrite)
        compiled = _compile_with(self.runtime.backends[self.kind], gm, inputs)
        if set(rewrite.views_left) <= set(rewrite.padded):
            return compiled

        def guarded(*args: Any) -> Any:
            if _padded.get():
                raise NeedsTimeOrder
            return compiled(*args)

        return guarded


def _compile_with(backend: Any, gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Inductor takes a second per layer and more, so equal layers share the work; others get the graph whole."""
    compiler = inner_compiler(backend)
    prepare(backend, gm)
    return compile_in_pieces(gm, inputs, compiler) if backend == "inductor" else compiler(gm, inputs)


def canonical(kwargs: dict[str, Any], decode: bool) -> dict[str, Any]:
    """The same call in one spelling: a graph belongs to a set of keywords, and callers differ in which defaults they
    write out. With one query, all logits are the last logits."""
    kept = {name: value for name, value in sorted(kwargs.items()) if value is not None}
    kept["use_cache"] = True
    if kept.get("return_dict") is True:
        del kept["return_dict"]
    keep = kept.get("logits_to_keep", 0)
    if isinstance(keep, int) and (keep == 0 or (decode and keep == 1)):
        kept.pop("logits_to_keep", None)
    return kept


def spelling(kwargs: dict[str, Any], batch: int) -> Hashable:
    """What a graph is specialised on before any tensor is looked at. Each form has graphs and a recompile limit of its
    own, so that many ways of calling do not use up one limit."""
    values = ((name, value) for name, value in kwargs.items() if name not in CACHE_NAMES)
    return (batch == 1, *((name, None if isinstance(value, Tensor) else repr(value)) for name, value in values))


def plain_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy: Dynamo would compile anew for every stride that a caller's slice happens to have, and marks on
    the caller's own tensors would outlive the call."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def owner_of(model: Any) -> str:
    """A name for a model and its shapes: its class, dtype and a hash of its configuration."""
    settings = {k: v for k, v in model.config.to_dict().items() if k not in ("transformers_version", "_name_or_path")}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return f"{type(model).__name__} ({str(model.dtype).removeprefix('torch.')}, configuration {digest})"


def left_padding(mask: Any, seen: int, new: int, device: torch.device) -> tuple[bool, Tensor | None]:
    """Reads a 2D attention mask (B, seen + new).

    Returns (True, None) without padding, (True, starts) if every row is zeros followed by ones (starts (B,) int64: the
    number of zeros), and (False, None) for any other mask.
    """
    if mask is None:
        return True, None
    total = seen + new
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < total:
        return False, None
    visible = mask[:, :total].to(torch.bool)
    if visible.all():
        return True, None
    if not (visible[:, 1:] >= visible[:, :-1]).all():
        return False, None
    return True, (total - visible.sum(1)).to(device=device, dtype=torch.int64)
