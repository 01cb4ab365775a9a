"""One layer's keys and values behind the transformers cache-layer protocol: a ring, or a linear store.

Used without the graph pass, `update` returns keys in time order and `get_mask_sizes` describes them, so any model
computes the right thing with its own masks:

    eager   lengths are Python ints and slices are exact: (past the next query sees) + (new tokens)
    traced  lengths are tensors and widths are constant. A ring of W gives W - 1 + q keys that begin at position
            ``max(seen - (W - 1), 0)``; while the ring fills, what lies beyond the newest token is zeros, and the
            causal part of the model's mask hides it. A linear store gives its whole capacity, zeros past the end.

Traced calls never read a Python length, so a graph does not depend on where it was captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..compat import CacheLayerMixin, is_traced
from .ring import RingPolicy, capacity_for
from .snapshot import LayerState, repeated
from .store import Store, Tokens


@dataclass
class Clock:
    """What all layers of one cache share.

    first, last: index of the first and the last layer that holds keys.
    lengths: (B,) int64, tokens seen before this step; rows advance together.  starts: (B,) int64, first real token of
    each row (left pads before it are invisible to fused attention).  hint: tokens the cache is expected to hold.
    max_length: hard limit on tokens of linear stores set by the user.  managed: the caller advances `lengths` after
    the step; otherwise the last layer does, inside the graph.  from_first: see `StoreLayer.get_query_offset`.
    """

    first: int
    last: int
    slack: int
    hint: int = 0
    max_length: int | None = None
    lengths: Tensor | None = None
    starts: Tensor | None = None
    kv_dtype: torch.dtype | None = None  # of quantised stores; None: the model's own
    managed: bool = False
    from_first: bool = False
    stale: bool = False  # a traced step moved `lengths`; Python lengths follow at the next eager access

    def ensure(self, batch: int, seen: int, device: torch.device) -> None:
        """Makes the per-row tensors for `batch` rows. Normal tensors also under inference_mode."""
        if self.lengths is None or self.lengths.shape[0] != batch:
            with torch.inference_mode(False):
                self.lengths = torch.full((batch,), seen, dtype=torch.int64, device=device)
                self.starts = torch.zeros(batch, dtype=torch.int64, device=device)


class StoreLayer(CacheLayerMixin):
    """Keys and values of one layer. `k_store` (B, kv_heads, C, head_dim) and `v_store` are written in place.

    window: keys a query sees, self included, or None for a linear store that keeps everything.
    """

    is_compileable = False

    def __init__(self, index: int, window: int | None, clock: Clock) -> None:
        self.index = index
        self.window = window or 0
        self.is_sliding = window is not None
        self.clock = clock
        self.policy = RingPolicy(window, clock.slack if window is not None else 0)
        self.k: Store | None = None
        self.v: Store | None = None

    @property
    def k_store(self) -> Tensor | None:
        return None if self.k is None else self.k.data

    @property
    def v_store(self) -> Tensor | None:
        return None if self.v is None else self.v.data

    def __repr__(self) -> str:
        kind = f"ring of {self.window}+{self.policy.slack}" if self.is_sliding else "linear"
        return f"layer {self.index}: {kind}, {self.policy.seen} tokens seen, {self.policy.capacity} slots"

    # ------------------------------------------------------------------ storage

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self.k is not None

    @property
    def batch_size(self) -> int:
        return -1 if self.k is None else self.k.rows

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in (self.k, self.v) if store is not None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the stores for tokens shaped like these; `Cache.early_initialization` calls it with none."""
        self.reserve(key_states, value_states, key_states.shape[-2])

    def check_limit(self, new: int) -> None:
        """Raises if a hard limit of the user's does not allow `new` more tokens. Changes nothing."""
        limit = self.clock.max_length
        if not self.is_sliding and limit is not None and self.policy.seen + new > limit:
            raise ValueError(
                f"layer {self.index}: cache full: it holds {self.policy.seen} tokens of a maximum of {limit} and "
                f"{new} more were given. Use a larger max_length, or none (the store then grows)."
            )

    def has_room(self, new: int) -> bool:
        """Whether `new` tokens fit as things are."""
        limit = self.clock.max_length
        if self.k is None or (limit is not None and not self.is_sliding and self.policy.seen + new > limit):
            return False
        return self.policy.capacity_needed(new) == self.policy.capacity

    def reserve(self, like_k: Tensor, like_v: Tensor, new: int) -> None:
        """Makes room for `new` tokens shaped like (B, kv_heads, any, head_dim). Checks everything, then allocates."""
        self.take_rows(like_k.shape[0])
        if self.k is not None and self.v is not None:
            self._check(like_k, self.k, "keys")
            self._check(like_v, self.v, "values")
        self.check_limit(new)
        limit = self.clock.max_length
        capacity = self.policy.capacity_needed(new, self.clock.hint)
        if self.k is None:
            expected = self.clock.hint if limit is None or self.is_sliding else limit
            capacity = max(capacity, capacity_for(expected, self.policy.window, self.policy.slack))
        self.clock.ensure(like_k.shape[0], self.policy.seen, like_k.device)
        if self.k is None or self.v is None:
            self.k, self.v = self._allocate(like_k, capacity), self._allocate(like_v, capacity)
        elif capacity != self.policy.capacity:
            self.k, self.v = self._grown(self.k, capacity), self._grown(self.v, capacity)
        self.policy.capacity = capacity

    def _allocate(self, like: Tensor, capacity: int) -> Store:
        rows, kv_heads, _, head_dim = like.shape
        return Store.allocate(rows, kv_heads, capacity, head_dim, like.dtype, self.clock.kv_dtype, like.device)

    def _grown(self, store: Store, capacity: int) -> Store:
        before, kept = self.policy, (self.policy.floor, self.policy.high)
        grown = Store.like(store, store.rows, capacity)
        grown.fill(replace(before, capacity=capacity).runs(*kept), store.read(before.runs(*kept)))
        return grown

    def take_rows(self, rows: int) -> None:
        """An empty store is dropped when another number of rows comes: after a reset the batch may differ."""
        if self.k is not None and self.policy.seen == 0 and self.batch_size != rows:
            self.k = self.v = None
            self.policy.capacity = 0

    def _check(self, new: Tensor, store: Store, what: str) -> None:
        wrong = _differences(_facts(new, new.dtype), _facts(store.data, store.dtype))
        if wrong:
            found = "; ".join(f"{name} {given} given, {held} stored" for name, given, held in wrong)
            raise ValueError(f"layer {self.index}: {what} do not fit the cache: {found}. Use a new cache, or reset it.")

    # ------------------------------------------------------------------ transformers protocol

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes new keys (B, kv_heads, q, head_dim) and values; returns what the queries may see, in time order."""
        if is_traced():
            return self._update_traced(key_states, value_states)
        return self._update_eager(key_states, value_states)

    def _update_eager(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self._catch_up()
        new, policy = k.shape[-2], self.policy
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise RuntimeError(
                f"layer {self.index}: this cache writes in place and cannot carry gradients. Call the model under "
                "torch.no_grad(), or pass a stock DynamicCache for training."
            )
        self.reserve(k, v, new)
        assert self.k is not None
        assert self.v is not None
        kept = [(self.k, self.k.stored(k)), (self.v, self.v.stored(v))]
        if not self.is_sliding:
            for store, tokens in kept:
                _write(store, tokens, policy, new)
            policy.advance(new)
            self._tick(new)
            keys, values = (store.read([(0, policy.seen)]).plain() for store, _ in kept)
            return keys, values
        past = [store.read(policy.visible()).plain() for store, _ in kept]
        keys, values = (torch.cat([old, tokens.plain()], 2) for old, (_, tokens) in zip(past, kept, strict=True))
        for store, tokens in kept:
            _write(store, tokens, policy, new)
        policy.advance(new)
        self._tick(new)
        return keys, values

    def _update_traced(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        clock = self.clock
        if self.k is None or self.v is None or clock.lengths is None:
            raise RuntimeError(
                f"layer {self.index}: a compiled call needs allocated stores. Call cache.early_initialization(...) "
                "first, or run the prompt eagerly."
            )
        ops, place = torch.ops.swa_pass, (clock.lengths, self.window, self.index, clock.starts)
        keys = ops.view.default(self.k.data, k, *place, self.k.scale)
        values = ops.view.default(self.v.data, v, *place, self.v.scale)
        scales = {"k_scale": self.k.scale, "v_scale": self.v.scale}
        ops.append.default(k, v, self.k.data, self.v.data, clock.lengths, window=self.window, **scales)
        if self.index == clock.last and not clock.managed:
            clock.lengths.add_(k.shape[-2])
            clock.stale = True
        return keys, values

    def _tick(self, new: int) -> None:
        """The last layer moves the shared tensor of lengths."""
        if self.index == self.clock.last and self.clock.lengths is not None:
            self.clock.lengths.fill_(self.policy.seen)

    def _catch_up(self) -> None:
        """Python lengths after traced steps that nobody counted (a user's own torch.compile)."""
        if self.clock.stale and self.clock.lengths is not None:
            seen = int(self.clock.lengths[0])
            self.policy.advance(max(seen - self.policy.seen, 0))

    def get_seq_length(self) -> Any:
        """Tokens *seen*, not tokens stored: an int, or a 0-dim tensor inside a graph."""
        if is_traced() and self.clock.lengths is not None:
            return self.clock.lengths[0]
        self._catch_up()
        return self.policy.seen

    def get_query_offset(self) -> Any:
        """Position of the first query, for masks; `get_mask_sizes` has that of the first key.

        Both count from the first token, or, while `Clock.from_first` is set, in rings from the first key: some models
        branch on the number of the last key, which no graph can if it is a tensor's. Only their difference says what a
        window shows. What else is made of the position would be wrong: whoever sets it must see that nothing is.
        """
        if self._counts_from_first():
            assert self.clock.lengths is not None
            return self.clock.lengths[0] - self._first_key()
        return self.get_seq_length()

    def _counts_from_first(self) -> bool:
        clock = self.clock
        return is_traced() and clock.from_first and self.is_sliding and clock.lengths is not None

    def _first_key(self) -> Tensor:
        assert self.clock.lengths is not None
        return torch.clamp(self.clock.lengths[0] - (self.window - 1), min=0)

    def get_mask_sizes(self, query_length: Any) -> tuple[Any, Any]:
        """(number of keys that `update` returns, position of the first)."""
        if is_traced() and self.clock.lengths is not None and self.k is not None:
            if not self.is_sliding:
                return self.k.data.shape[2], 0
            return self.window - 1 + query_length, 0 if self._counts_from_first() else self._first_key()
        self._catch_up()
        reach = self.policy.reach
        return reach + query_length, self.policy.seen - reach

    def get_max_length(self) -> int:
        if self.is_sliding:
            return self.window
        return self.clock.max_length if self.clock.max_length is not None else -1

    # ------------------------------------------------------------------ life cycle

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        self._catch_up()
        if self.policy.recorded_from is not None:
            return True
        return self.policy.max_rollback() >= min(self.policy.seen, max(self.clock.slack, 1))

    def check_crop(self, tokens: int) -> None:
        """Raises if `tokens` cannot be taken back exactly. Changes nothing."""
        self._catch_up()
        if tokens > self.policy.max_rollback():
            raise ValueError(
                f"layer {self.index}: cannot take back {tokens} tokens: {self.policy.seen} were seen and the ring of "
                f"window {self.window} + slack {self.policy.slack} allows {self.policy.max_rollback()}. Use a larger "
                "slack, or call activate_past_recording() before the tokens that may be taken back."
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back ``-tokens_to_remove`` tokens; negative, as in transformers."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number of tokens to remove, got {tokens_to_remove}")
        self.check_crop(-tokens_to_remove)
        self.policy.rollback(-tokens_to_remove)
        if self.clock.lengths is not None:
            self.clock.lengths.fill_(self.policy.seen)

    def activate_past_recording(self) -> None:
        """From now on (and after every crop) nothing that a crop may need is evicted: the ring grows instead."""
        self._catch_up()
        self.policy.record()

    def reset(self) -> None:
        """Forgets all tokens; the memory stays."""
        self.policy.reset()

    def select_rows(self, rows: Tensor, in_place: bool = False) -> None:
        """Makes row i a copy of old row ``rows[i]``. In place keeps the addresses (same batch size)."""
        for store in (self.k, self.v):
            if store is not None:
                store.select_rows(rows.to(store.data.device), in_place)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select_rows(beam_idx, in_place=beam_idx.numel() == self.batch_size)

    # ------------------------------------------------------------------ snapshots

    def state(self) -> LayerState:
        """Copies of the tokens that a continuation may need: all of a linear store, W - 1 + slack of a ring."""
        self._catch_up()
        policy = self.policy
        if self.k is None or self.v is None:
            raise ValueError(f"layer {self.index}: there is nothing to take a snapshot of: no token was read yet")
        first = 0 if policy.window is None else max(policy.floor, policy.seen - (policy.window - 1) - policy.slack)
        runs = policy.runs(first, policy.seen)
        keys, values = (store.read(runs).map(torch.clone) for store in (self.k, self.v))
        return LayerState(first, keys, values)

    def check_state(self, state: LayerState) -> None:
        """Raises if the stores cannot take this state, whatever its rows and device. Changes nothing."""
        for kept, store in ((state.keys, self.k), (state.values, self.v)):
            held = self.clock.kv_dtype if store is None or store.scale is not None else None
            kind = (kept.data.dtype if kept.scale is not None else None, held)
            wrong = [("kv_dtype", *kind)] if kind[0] != kind[1] else []
            if store is not None:
                ours, theirs = _facts(store.data, store.dtype), _facts(kept.data, kept.dtype)
                wrong += _differences(theirs, ours, but=("batch", "device"))
            if wrong:
                found = "; ".join(f"{name} {theirs} in the snapshot, {ours} here" for name, theirs, ours in wrong)
                raise ValueError(f"layer {self.index}: the snapshot does not fit this cache: {found}")

    def load(self, state: LayerState, seen: int, rows: int, device: torch.device) -> None:
        """Becomes what `state` was. Stores that are large enough and have `rows` rows keep their addresses."""
        keys, values = (
            tokens.map(lambda tensor: repeated(tensor.to(device), rows)) for tokens in (state.keys, state.values)
        )
        capacity = capacity_for(max(seen, self.clock.hint), self.policy.window, self.policy.slack)
        if self.k is None or self.v is None or self.batch_size != rows or self.policy.capacity < capacity:
            self.k, self.v = (Store.like(tokens, rows, capacity) for tokens in (keys, values))
            self.policy.capacity = capacity
        self.policy.reset()
        self.policy.seen = self.policy.high = seen
        self.policy.floor = state.first
        runs = self.policy.runs(state.first, seen)
        self.k.fill(runs, keys)
        self.v.fill(runs, values)

    # ------------------------------------------------------------------ looking inside

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """Keys that the next query sees, in time order (a copy for a ring)."""
        return None if self.k is None else self.k.read(self.policy.visible()).plain()

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return None if self.v is None else self.v.read(self.policy.visible()).plain()


def _facts(data: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """What must be the same for tokens (batch, kv_heads, tokens, head_dim) to go into one store."""
    dims = {"batch": data.shape[0], "kv_heads": data.shape[1], "head_dim": data.shape[3]}
    return {**dims, "dtype": dtype, "device": data.device}


def _differences(given: dict[str, Any], held: dict[str, Any], but: Sequence[str] = ()) -> list[tuple[str, Any, Any]]:
    """(name, given, held) for what is not the same."""
    return [(name, given[name], held[name]) for name in given if name not in but and given[name] != held[name]]


def _write(store: Store, tokens: Tokens, policy: RingPolicy, new: int) -> None:
    skip, runs = policy.writes(new)
    store.fill(runs, tokens.map(lambda tensor: tensor[:, :, skip:]))
