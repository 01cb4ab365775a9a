"""HybridCache: rings for sliding layers, linear stores for global ones, behind the transformers Cache protocol.

    layers          windows                 memory per row, 10,000 tokens seen
    0 1 2 3 4       512 512 512 512 512     5 rings of 512 + 16 slots
    5               None                    1 linear store of 10,048 slots
    6               a state layer           what transformers keeps for a convolution or a recurrence
    7               512, and a state        both: `joint.JointLayer`
    ...

It is correct on its own (`update` returns keys in time order; see `layers`). On a model that went through
`swa_pass.apply` the graph pass replaces those reads by attention on the stores in place.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat import Cache, is_traced
from ..spec import LayerSpec
from .joint import JointLayer, check_state_crop
from .layers import Clock, StoreLayer
from .ring import capacity_for
from .snapshot import Snapshot, check_fits, joined
from .store import bytes_per_token, kv_dtype_of

#: Tokens by which a ring can be rolled back. Assisted decoding asks for more through activate_past_recording().
DEFAULT_SLACK = 16


class HybridCache(Cache):
    """KV cache with one ring per sliding layer and one linear store per global layer.

    Args:
        windows: one entry per cache layer: the window in keys (the query's own included), None for a global layer, or,
            in a hybrid model, the transformers cache layer that holds a convolution or recurrence state there.
        slack: tokens that can be rolled back exactly after a ring has wrapped.
        hint: tokens the cache is expected to hold; sizes the first allocation, never a limit.
        max_length: hard limit on the tokens of global layers; None lets them grow.
        owner: names the model; a snapshot of another one is refused.
        states: for layers that hold keys *and* a convolution or recurrence state: by index, a transformers cache layer
            for the state alone.
        kv_dtype: "int8" or "float8": keys and values take one byte a number, and 4 bytes a token and head (see
            `ops.quant`). None: the model's dtype.

    Raises:
        ValueError: a window below 1, an empty list, a state beside a layer without keys, or an unknown kv_dtype.
    """

    layers: list[Any]

    def __init__(
        self,
        windows: Sequence[Any],
        *,
        slack: int = DEFAULT_SLACK,
        hint: int = 0,
        max_length: int | None = None,
        owner: str = "",
        states: Mapping[int, Any] | None = None,
        kv_dtype: str | torch.dtype | None = None,
    ) -> None:
        if not windows:
            raise ValueError(
                "windows is empty: give one entry per layer (a window in keys, or None for a global layer)"
            )
        keys = [i for i, window in enumerate(windows) if window is None or isinstance(window, int)]
        if not keys:
            raise ValueError("windows names no layer with keys: there is nothing for this cache to hold")
        beside = dict(states or {})
        if not beside.keys() <= set(keys):
            raise ValueError(f"states names layers {sorted(beside.keys() - set(keys))}, which have no keys in windows")
        self.clock = Clock(
            first=keys[0], last=keys[-1], slack=slack, hint=hint, max_length=max_length, kv_dtype=kv_dtype_of(kv_dtype)
        )
        self.owner = owner
        stores: dict[int, StoreLayer] = {i: StoreLayer(i, windows[i], self.clock) for i in keys}
        stores.update({i: JointLayer(i, windows[i], self.clock, state) for i, state in beside.items()})
        super().__init__(layers=[stores.get(i, window) for i, window in enumerate(windows)])

    @property
    def stores(self) -> list[StoreLayer]:
        """The layers that hold keys and values: all but those that hold a state."""
        return [layer for layer in self.layers if isinstance(layer, StoreLayer)]

    @property
    def states(self) -> dict[int, Any]:
        """The transformers layers that hold a state of a convolution or a recurrence, by index: instead of keys, or
        beside them."""
        halves = ((i, x.beside if isinstance(x, JointLayer) else x) for i, x in enumerate(self.layers))
        return {i: half for i, half in halves if not isinstance(half, StoreLayer)}

    def __repr__(self) -> str:
        rings, stores, states = sum(layer.is_sliding for layer in self.stores), len(self.stores), len(self.states)
        kinds = [f"{rings} rings", f"{stores - rings} linear", *([f"{states} states"] if states else [])]
        return f"HybridCache({', '.join(kinds)}, {self.stores[0].policy.seen} tokens seen, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes of KV memory allocated now."""
        return sum(layer.nbytes for layer in self.stores)

    @property
    def seen(self) -> int:
        """Tokens seen per row."""
        return self.layers[self.clock.last].get_seq_length()

    # ------------------------------------------------------------------ compiled steps

    def prepare(self, specs: Sequence[LayerSpec], batch: int, new: int, starts: Tensor | None) -> None:
        """Makes everything ready for a traced step of `new` tokens: checks, allocates, grows. Writes no key.

        starts: (batch,) int64, absolute index of each row's first real token; None means no left padding.
        """
        stores = self.stores
        for layer in stores:
            layer.take_rows(batch)
        held = stores[0].batch_size
        if held not in (-1, batch):
            raise ValueError(f"the cache holds {held} rows and {batch} were given. Use a new cache, or reset it.")
        for layer in stores:
            layer.check_limit(new)
        for layer in stores:
            spec = specs[layer.index]
            if layer.has_room(new):
                continue
            shape = (batch, spec.kv_heads, 0)
            like_k = torch.empty(*shape, spec.head_dim, dtype=spec.k_dtype, device=spec.device)
            like_v = torch.empty(*shape, spec.v_head_dim, dtype=spec.v_dtype, device=spec.device)
            layer.reserve(like_k, like_v, new)
        self.clock.ensure(batch, stores[0].policy.seen, specs[stores[0].index].device)
        assert self.clock.starts is not None
        self.clock.starts.zero_() if starts is None else self.clock.starts.copy_(starts)

    def advance(self, new: int) -> None:
        """Counts a traced step of `new` tokens."""
        for layer in self.stores:
            layer.policy.advance(new)
        if self.clock.lengths is not None:
            self.clock.lengths.add_(new)

    # ------------------------------------------------------------------ transformers protocol

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        clock = self.clock
        if layer_idx == clock.first and clock.max_length is not None and not is_traced():
            for layer in self.stores:  # before the first ring moves: a full layer further on must leave all as it was
                layer.check_limit(key_states.shape[-2])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self._keyed(layer_idx).get_seq_length()

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[Any, Any]:
        return self._keyed(layer_idx).get_mask_sizes(query_length)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        return self._keyed(layer_idx).get_query_offset()

    def _keyed(self, index: int) -> StoreLayer:
        """The layer, or for a state layer, which knows no length, the first one that does."""
        layer = self.layers[index]
        return layer if isinstance(layer, StoreLayer) else self.layers[self.clock.first]

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back ``-tokens_to_remove`` tokens in every layer, or raises before anything changes."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number of tokens to remove, got {tokens_to_remove}")
        for layer in self.stores:
            layer.check_crop(-tokens_to_remove)
        for state in self.states.values():
            check_state_crop(state, -tokens_to_remove, self.seen)
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Forgets all tokens. The memory and its addresses stay."""
        super().reset()
        self.clock.stale = False
        if self.clock.lengths is not None and self.clock.starts is not None:
            self.clock.lengths.zero_()
            self.clock.starts.zero_()

    # ------------------------------------------------------------------ snapshots

    @property
    def windows(self) -> list[int | str | None]:
        """Per layer: its window, None for a global layer, "state" for one without keys."""
        kinds = (layer.policy.window if isinstance(layer, StoreLayer) else "state" for layer in self.layers)
        return list(kinds)

    def snapshot(self) -> Snapshot:
        """A copy of everything that a continuation needs, and no more. See `swa_pass.cache.snapshot`."""
        layers = {layer.index: layer.state() for layer in self.stores}
        states = {i: copy.deepcopy(state) for i, state in self.states.items()}
        return Snapshot(self.seen, tuple(self.windows), self.clock.slack, self.owner, layers, states)

    def restore(self, snapshot: Snapshot, rows: int | None = None) -> None:
        """Becomes what the snapshot was, whatever was read since.

        rows: for a snapshot of one row, how many equal rows to make of it; None keeps its rows.

        Raises:
            ValueError: a snapshot of another model, of other shapes or of another dtype, or rows that do not fit.
                The cache is then as it was.
        """
        wanted = snapshot.rows if rows is None else rows
        if wanted != snapshot.rows and (snapshot.rows != 1 or wanted < 1):
            raise ValueError(f"a snapshot of {snapshot.rows} rows cannot be restored as {wanted}")
        check_fits(snapshot, self.windows, self.owner, self.states)
        for layer in self.stores:
            layer.check_state(snapshot.layers[layer.index])
        for layer in self.stores:
            store = layer.k_store
            state = snapshot.layers[layer.index]
            layer.load(state, snapshot.seen, wanted, state.keys.data.device if store is None else store.device)
        for index, kept in snapshot.states.items():
            state_half = copy.deepcopy(kept)
            if wanted != snapshot.rows:
                state_half.reorder_cache(torch.zeros(wanted, dtype=torch.int64))
            if isinstance(self.layers[index], JointLayer):
                self.layers[index].beside = state_half
            else:
                self.layers[index] = state_half
        store = self.stores[0].k_store
        assert store is not None
        self.clock.stale = False
        self.clock.ensure(wanted, snapshot.seen, store.device)
        assert self.clock.lengths is not None
        assert self.clock.starts is not None
        self.clock.lengths.fill_(snapshot.seen)
        self.clock.starts.zero_()

    # ------------------------------------------------------------------ rows

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select_rows(torch.arange(max(self.stores[0].batch_size, 0)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select_rows(indices.nonzero().flatten() if indices.dtype == torch.bool else torch.as_tensor(indices))

    def _select_rows(self, rows: Tensor) -> None:
        for layer in self.layers:  # transformers' state layers have the one method, which takes any number of rows
            layer.select_rows(rows) if isinstance(layer, StoreLayer) else layer.reorder_cache(rows)
        self._forget_rows()

    def join(self, other: HybridCache) -> None:
        """Appends the rows of another cache of the same model; `other` is left as it was.

        Rows advance together, so the rows of the shorter one move to the end and get left pads in front:

            self    A B C D E           after join, 5 tokens seen      A B C D E
            other       x y z           attention mask 0 0 1 1 1       . . x y z

        Give the model an attention mask with as many zeros in front of these rows from now on, as for any left-padded
        batch. Keys keep the rotary positions that they were read with, which are those of such a batch.

        Raises:
            ValueError: a cache of another model, shapes or dtype, an empty one, or a model with convolution or
                recurrence states, which know no pads. Nothing has changed then.
        """
        if self.states or other.states:
            raise ValueError(
                "rows with a convolution or recurrence state cannot be joined: such a state knows no left pads"
            )
        both = self.snapshot(), other.snapshot()
        check_fits(both[1], self.windows, self.owner, self.states)
        for layer in self.stores:
            layer.check_state(both[1].layers[layer.index])
        seen = max(snapshot.seen for snapshot in both)
        layers = {layer.index: joined([(s.layers[layer.index], s.seen) for s in both], seen) for layer in self.stores}
        whole = Snapshot(seen, both[0].windows, self.clock.slack, self.owner, layers, {})
        self.restore(whole)

    def _forget_rows(self) -> None:
        """The per-row tensors are made anew, with the new batch size, before the next traced step."""
        seen = self.seen
        for layer in self.stores:
            layer.policy.advance(seen - layer.policy.seen)
        self.clock.lengths = self.clock.starts = None
        self.clock.stale = False


def cache_bytes(
    specs: Sequence[LayerSpec], context: int, batch: int, slack: int, kv_dtype: torch.dtype | None = None
) -> int:
    """KV bytes that a `HybridCache` made for `context` tokens allocates."""
    total = 0
    for spec in specs:
        if spec.kind == "state":
            continue
        slots = capacity_for(context, spec.window, slack if spec.window is not None else 0)
        per_slot = bytes_per_token(spec.head_dim, spec.k_dtype, kv_dtype)
        per_slot += bytes_per_token(spec.v_head_dim, spec.v_dtype, kv_dtype)
        total += batch * spec.kv_heads * slots * per_slot
    return total
