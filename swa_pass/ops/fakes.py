"""Shapes and strides of the operators' results, for tracing. No data is read and no size is made a constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .schema import NAMESPACE, SCHEMAS


def _view(store: Tensor, new: Tensor, lengths: Tensor, window: int, *args: object, **kwargs: object) -> Tensor:
    width = window - 1 + new.shape[2] if window > 0 else store.shape[2]
    return new.new_empty(new.shape[0], new.shape[1], width, new.shape[3])


def _append(k_new: Tensor, v_new: Tensor, *args: object, **kwargs: object) -> None:
    return None


def _attend(q: Tensor, k_new: Tensor, v_new: Tensor, *args: object, **kwargs: object) -> Tensor:
    batch, heads, tokens, _ = q.shape
    return q.new_empty(batch, tokens, heads, v_new.shape[3]).transpose(1, 2)


_FAKES: dict[str, Callable[..., Any]] = {"view": _view, "append": _append, "attend": _attend, "attend_append": _attend}


def register() -> None:
    for name in SCHEMAS:
        for full_name in (name, "_" + name):
            torch.library.register_fake(f"{NAMESPACE}::{full_name}", _FAKES[name])
