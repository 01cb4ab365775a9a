"""What a cache must keep of a prefix, so that it can be continued many times without reading the prefix again.

    cache = model(prefix).cache                 3,000 tokens read once
    prefix = cache.snapshot()                   rings: their last W - 1 + slack tokens; global layers: all 3,000
    for suffix in suffixes:
        cache.restore(prefix)                   a copy of some MB instead of 3,000 tokens of prefill
        model.generate(..., past_key_values=cache)

A ring that has gone on cannot be rolled back past its slack; a snapshot can be restored at any time, into any cache of
the same model, also with more rows than it was taken from. `save` and `load_snapshot` keep it on disk.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .store import Tokens

FORMAT, VERSION = "swa_pass snapshot", 2


@dataclass(frozen=True)
class LayerState:
    """One layer's tokens first..seen-1: keys (B, kv_heads, n, head_dim) and values, in time order, copies, in the form
    in which the cache keeps them."""

    first: int
    keys: Tokens
    values: Tokens

    @property
    def tokens(self) -> dict[str, Tokens]:
        return {"keys": self.keys, "values": self.values}


@dataclass(frozen=True)
class Snapshot:
    """State of a `HybridCache`: see the top of this file.

    seen: tokens of the prefix.  windows: per layer, None for a global one, "state" for a layer without keys.  owner:
    the model it was made by (empty: unknown).  layers: by index.  states: the transformers layers that hold a
    convolution or recurrence state, instead of keys or beside them, by index.
    """

    seen: int
    windows: tuple[int | str | None, ...]
    slack: int
    owner: str
    layers: dict[int, LayerState]
    states: dict[int, Any]

    @property
    def rows(self) -> int:
        return next(iter(self.layers.values())).keys.data.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        return sum(tokens.nbytes for state in self.layers.values() for tokens in state.tokens.values())

    def save(self, path: str | Path) -> None:
        """Writes one safetensors file. ValueError for a hybrid model, whose states have no file format here."""
        from safetensors.torch import save_file

        if self.states:
            raise ValueError(
                f"layers {sorted(self.states)} hold a convolution or recurrence state, which cannot be written to a "
                "file; keep this snapshot in memory"
            )
        tensors, dtypes = {}, {}
        for index, state in self.layers.items():
            for name, tokens in state.tokens.items():
                tensors[f"{index}.{name}"] = tokens.data.contiguous()
                if tokens.scale is not None:
                    tensors[f"{index}.{name}.scale"] = tokens.scale.contiguous()
                dtypes[f"{index}.{name}"] = str(tokens.dtype).removeprefix("torch.")
        about = {
            "seen": self.seen,
            "windows": self.windows,
            "slack": self.slack,
            "owner": self.owner,
            "first": {index: state.first for index, state in self.layers.items()},
            "dtypes": dtypes,
        }
        save_file(tensors, path, {"format": FORMAT, "version": str(VERSION), "about": json.dumps(about)})


def load_snapshot(path: str | Path) -> Snapshot:
    """Reads what `Snapshot.save` wrote, to the CPU. ValueError: another kind of file, or another version of it."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} is no snapshot of swa_pass (its format is {metadata.get('format')!r})")
        if metadata.get("version") != str(VERSION):
            raise ValueError(
                f"{path} is a snapshot of version {metadata.get('version')}, and this swa_pass reads version "
                f"{VERSION}. Make the snapshot again."
            )
        about = json.loads(metadata["about"])
        stored = set(file.keys())

        def tokens(name: str) -> Tokens:
            scale = file.get_tensor(f"{name}.scale") if f"{name}.scale" in stored else None
            return Tokens(file.get_tensor(name), scale, getattr(torch, about["dtypes"][name]))

        layers = {
            int(index): LayerState(first, tokens(f"{index}.keys"), tokens(f"{index}.values"))
            for index, first in about["first"].items()
        }
    return Snapshot(about["seen"], tuple(about["windows"]), about["slack"], about["owner"], layers, {})


def check_fits(snapshot: Snapshot, windows: Sequence[Any], owner: str, states: Collection[int]) -> None:
    """Raises ValueError for a snapshot of another model than a cache with these windows and this owner belongs to."""
    if snapshot.owner and owner and snapshot.owner != owner:
        raise ValueError(f"this snapshot was made by {snapshot.owner}, and the cache belongs to {owner}")
    if snapshot.windows != tuple(windows):
        raise ValueError(
            f"the snapshot's layers have the windows {list(snapshot.windows)}, and the cache's {list(windows)}"
        )
    if set(snapshot.states) != set(states):
        raise ValueError(
            f"the snapshot has convolution or recurrence states in layers {sorted(snapshot.states)}, and the cache in "
            f"layers {sorted(states)}"
        )


def joined(states: Sequence[tuple[LayerState, int]], seen: int) -> LayerState:
    """The rows of several (state, tokens seen) in one, each moved so that its last token is token seen - 1.

    Before a row's first token come pads: zeros, which no query sees.
    """
    # What a state does not hold is either evicted (then no row can have it) or lies before the row's first token.
    first = max((state.first + seen - n if state.first else 0) for state, n in states)

    def together(name: str) -> Tokens:
        parts = [state.tokens[name].map(lambda tensor: _at_the_end(tensor, seen - first)) for state, _ in states]
        scales = [part.scale for part in parts if part.scale is not None]
        data = torch.cat([part.data for part in parts])
        return Tokens(data, torch.cat(scales) if scales else None, parts[0].dtype)

    return LayerState(first, together("keys"), together("values"))


def _at_the_end(tensor: Tensor, count: int) -> Tensor:
    """(B, kv_heads, n, ...) -> (B, kv_heads, count, ...): the last tokens, after zeros where there are fewer."""
    kept = tensor[:, :, max(tensor.shape[2] - count, 0) :]
    missing = count - kept.shape[2]
    return torch.cat([kept.new_zeros(*kept.shape[:2], missing, *kept.shape[3:]), kept], 2) if missing else kept


def repeated(tensor: Tensor, rows: int) -> Tensor:
    """One row as `rows` equal ones; any other tensor must have `rows` rows already."""
    return tensor.expand(rows, *tensor.shape[1:]) if tensor.shape[0] == 1 else tensor
