"""The memory of one layer's keys (or values): tokens in slots, as they are or as one byte a number.

    plain        data (B, kv_heads, C, head_dim) in the model's dtype, scale None
    quantised    data (B, kv_heads, C, head_dim) int8 or float8, scale (B, kv_heads, C) float32: see `ops.quant`

    slot     0    1    2    3         Gemma 3 270M, one token of one layer: 256 numbers
    data    256  256  256  256 B      int8    260 bytes
    scale     4    4    4    4 B      bf16    512 bytes

Which slots mean what is the business of `ring.RingPolicy`; here slots are ranges to read and to fill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.quant import LARGEST, dequantise, quantise

Runs = list[tuple[int, int]]

#: The names that users give, and what they stand for.
KV_DTYPES = {"int8": torch.int8, "float8": torch.float8_e4m3fn}


def kv_dtype_of(name: str | torch.dtype | None) -> torch.dtype | None:
    """A user's `kv_dtype` as a dtype. ValueError for anything but None, "int8" and "float8" (or the dtypes)."""
    dtype = KV_DTYPES.get(name, name) if isinstance(name, str) else name
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype in LARGEST):
        return dtype
    raise ValueError(
        f'kv_dtype={name!r}: use "int8", "float8", or None for the model\'s own dtype (to hold keys and values in '
        "another float dtype, load the model in that dtype)"
    )


def bytes_per_token(numbers: int, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> int:
    """Bytes of one token of one kv head with `numbers` numbers."""
    return numbers * dtype.itemsize if kv_dtype is None else numbers * kv_dtype.itemsize + torch.float32.itemsize


@dataclass(eq=False)
class Tokens:
    """Tokens in time order as a store holds them. data (B, kv_heads, n, head_dim); scale (B, kv_heads, n) or None;
    dtype: the model's, in which they are read."""

    data: Tensor
    scale: Tensor | None
    dtype: torch.dtype

    @property
    def tensors(self) -> list[Tensor]:
        return [self.data] if self.scale is None else [self.data, self.scale]

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def map(self, change: Callable[[Tensor], Tensor]) -> Tokens:
        """The same with every tensor changed (rows, device: nothing that depends on head_dim)."""
        return Tokens(change(self.data), None if self.scale is None else change(self.scale), self.dtype)

    def plain(self) -> Tensor:
        return self.data if self.scale is None else dequantise(self.data, self.scale, self.dtype)


class Store(Tokens):
    """C slots for the keys or values of one layer. Memory is uninitialised: only written slots are ever read."""

    @classmethod
    def allocate(cls, rows: int, kv_heads: int, capacity: int, head_dim: int, dtype: torch.dtype,
                 kv_dtype: torch.dtype | None, device: torch.device) -> Store:  # fmt: skip
        """Normal tensors also under inference_mode, so that a cache may be carried from one mode into the other."""
        shape = (rows, kv_heads, capacity)
        with torch.inference_mode(False):
            data = torch.empty(*shape, head_dim, dtype=dtype if kv_dtype is None else kv_dtype, device=device)
            scale = None if kv_dtype is None else torch.empty(shape, dtype=torch.float32, device=device)
        store = cls(data, scale, dtype)
        store._mark()
        return store

    @classmethod
    def like(cls, tokens: Tokens, rows: int, capacity: int) -> Store:
        """Empty slots for the same kind of tokens."""
        _, kv_heads, _, head_dim = tokens.data.shape
        kv_dtype = None if tokens.scale is None else tokens.data.dtype
        return cls.allocate(rows, kv_heads, capacity, head_dim, tokens.dtype, kv_dtype, tokens.data.device)

    def _mark(self) -> None:
        """Growth must not recompile: the capacity is a symbol in every graph. Except on Intel Gaudi, where FusedSDPA is
        for known sizes only, so there a graph is made for each."""
        for tensor in self.tensors:
            if tensor.device.type != "hpu":
                torch._dynamo.maybe_mark_dynamic(tensor, 2)

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    def read(self, runs: Runs) -> Tokens:
        """The tokens in these slots; a view where one run holds them."""
        return self.map(lambda tensor: _joined(tensor, runs))

    def fill(self, runs: Runs, tokens: Tokens) -> None:
        """Writes tokens, in time order, into slot ranges."""
        for store, given in zip(self.tensors, tokens.tensors, strict=True):
            done = 0
            for first, stop in runs:
                store[:, :, first:stop].copy_(given[:, :, done : done + stop - first])
                done += stop - first

    def stored(self, new: Tensor) -> Tokens:
        """New tokens (B, kv_heads, n, head_dim) in the form in which they are kept."""
        if self.scale is None:
            return Tokens(new, None, self.dtype)
        return Tokens(*quantise(new, self.data.dtype), self.dtype)

    def select_rows(self, rows: Tensor, in_place: bool) -> None:
        """Makes row i a copy of old row ``rows[i]``. In place keeps the addresses (same number of rows)."""
        chosen = self.map(lambda tensor: tensor.index_select(0, rows))
        if in_place:
            for store, taken in zip(self.tensors, chosen.tensors, strict=True):
                store.copy_(taken)
        else:
            self.data, self.scale = chosen.data, chosen.scale
            self._mark()


def _joined(store: Tensor, runs: Runs) -> Tensor:
    parts = [store[:, :, first:stop] for first, stop in runs]
    if not parts:
        return store[:, :, :0]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
