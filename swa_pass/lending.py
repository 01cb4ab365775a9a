"""Rings that are lent to graphs whose stores belong to the caller: one for each store, kept from call to call.

A store has a slot for every position and stays what the prompt's graph writes to. The first decode step afterwards
copies the last positions of every store into its ring; from then on the step writes and reads the ring alone:

    prompt     store[:, :, :n].copy_(keys)                              the graph as it was
    decode     ring = the last positions of the store (once), then      ring[:, :, position % slots] = key, every step

Meanwhile the store is behind, so it is filled with NaN: whoever reads it, by whatever way, cannot take it for a
context. When somebody writes to it again (the next prompt), its version has changed, and the ring is made anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

#: What to do when a ring cannot follow; ends every message.
_WAY_OUT = (
    "This way of running knows prompts and steps of one token only; use swa_pass.apply(model) for beams and for "
    "everything that changes keys between steps."
)


@dataclass
class _Ring:
    """tensor: (B, kv_heads, slots, head_dim).  held: (slots,) int64, the position in each slot or -1; one tensor for
    all stores that are written together.  version: of the store, when the ring was made from it."""

    tensor: Tensor
    held: Tensor
    version: int


class Rings:
    """The rings of one `swa_pass.backend`. A ring lives as long as its store."""

    def __init__(self) -> None:
        self._rings = WeakTensorKeyDictionary()
        #: Attentions whose keys are in rings, over all graphs, and a sentence for each that was left alone.
        self.matches = 0
        self.refusals: list[str] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all rings; they come on top of the caller's stores."""
        return sum(ring.tensor.numel() * ring.tensor.element_size() for ring in self._rings.values())

    def of(self, store: Tensor) -> Tensor | None:
        """The ring that stands for a store at the moment; None if the store itself is up to date."""
        ring = self._rings.get(store)
        return ring.tensor if ring is not None and _version(store) == ring.version else None

    def lend(self, stores: Sequence[Tensor], slots: int, position: Tensor) -> tuple[list[Tensor], Tensor]:
        """Rings of `slots` slots for stores (B, kv_heads, S, head_dim) that are about to be written at one position.

        Args:
            position: tensor without dimensions; every position before it that the step needs is in the stores, or in
                their rings already. It is not read on the host.

        Returns:
            the rings, and the positions that their slots hold, (slots,) int64, -1 for none.

        Raises:
            RuntimeError: something else changed, or replaced, stores whose rings were ahead of them.
        """
        known = [self._rings.get(store) for store in stores]
        current = [ring for store, ring in zip(stores, known) if ring is not None and ring.version == _version(store)]
        if len(current) == len(stores):
            held = current[0].held
            if all(ring.held is held for ring in current) and held.shape[0] == slots:
                return [ring.tensor for ring in current], held
        if current:
            raise RuntimeError(f"swa_pass: two graphs keep the same keys in different rings. {_WAY_OUT}")
        behind = [store[0, 0, 0, 0] for store, ring in zip(stores, known) if ring is not None]
        if behind and bool(torch.stack(behind).isnan().any()):  # once a text, at its first step
            raise RuntimeError(
                "swa_pass: between two steps something changed stores whose keys are kept in rings (beam search does, "
                f"to reorder them). {_WAY_OUT}"
            )
        return self._fill(stores, known, slots, position)

    def _fill(
        self, stores: Sequence[Tensor], known: Sequence[_Ring | None], slots: int, position: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """Copies the last positions before `position` into rings, and leaves NaN in the stores."""
        slot = torch.arange(slots, device=position.device)
        last = position.reshape(()).to(torch.int64) - 1
        places = last - torch.remainder(last - slot, slots)
        held = places.clamp(min=-1)
        tensors = []
        for store, ring in zip(stores, known):
            kept = store.index_select(2, places.clamp(0, store.shape[2] - 1))
            if ring is not None and ring.tensor.shape == kept.shape:
                kept = ring.tensor.copy_(kept)  # at the same address as before
            store.fill_(float("nan"))
            self._rings[store] = _Ring(kept, held, _version(store))
            tensors.append(kept)
        return tensors, held

    def check_current(self, store: Tensor) -> None:
        """Raises RuntimeError if a ring is ahead of the store that a graph without a ring is about to read."""
        if self.of(store) is not None:
            raise RuntimeError(
                "swa_pass: a graph that could not be rewritten reads keys that an earlier graph keeps in a ring. "
                "backend.rings.refusals says why; compile with its inner backend alone to run without rings."
            )


def _version(store: Tensor) -> int:
    if store.is_inference():
        raise RuntimeError(
            "swa_pass: a store made under torch.inference_mode() does not count its changes, so a ring cannot follow "
            "it; use torch.no_grad() instead"
        )
    return store._version
