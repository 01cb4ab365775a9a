"""Layers that hold keys and the state of a convolution or a recurrence: our store, and transformers' layer beside it.

    keys, values       ring or linear store       ours: `layers.StoreLayer`
    conv, recurrent    `beside`                   the state half of what stock has at this place (`compat.joint_states`)

What is asked of the layer about its state is answered by that half; what happens to the rows or to the length of the
layer (beams, crop, reset) happens to both.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..compat import StateLayerMixin
from .layers import Clock, StoreLayer


class BesideState(StateLayerMixin):
    """The protocol of a layer with a state, passed on to `beside`, which makes and keeps it as in stock."""

    beside: Any

    number_of_states = property(lambda self: self.beside.number_of_states)
    conv_states = property(lambda self: self.beside.conv_states)
    recurrent_states = property(lambda self: self.beside.recurrent_states)
    is_conv_states_initialized = property(lambda self: self.beside.is_conv_states_initialized)
    is_recurrent_states_initialized = property(lambda self: self.beside.is_recurrent_states_initialized)
    has_previous_state = property(lambda self: self.beside.has_previous_state)
    conv_kernel_size = property(lambda self: self.beside.conv_kernel_size)
    record_past = property(lambda self: self.beside.record_past)

    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.beside.update_conv_state(conv_states, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.beside.update_recurrent_state(recurrent_states, *args, **kwargs)


class JointLayer(StoreLayer, BesideState):
    """`StoreLayer` for the keys, and `beside`, a transformers layer that holds a state and no keys."""

    def __init__(self, index: int, window: int | None, clock: Clock, state: Any) -> None:
        super().__init__(index, window, clock)
        self.beside = state

    def __repr__(self) -> str:
        return f"{super().__repr__()}, and a state"

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return StoreLayer.is_croppable.fget(self) and self.beside.is_croppable  # type: ignore[attr-defined]

    def check_crop(self, tokens: int) -> None:
        super().check_crop(tokens)
        check_state_crop(self.beside, tokens, self.policy.seen)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.beside.crop(tokens_to_remove)

    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        self.beside.activate_past_recording()

    def reset(self) -> None:
        super().reset()
        self.beside.reset()

    def select_rows(self, rows: Tensor, in_place: bool = False) -> None:
        super().select_rows(rows, in_place)
        self.beside.reorder_cache(rows)


def check_state_crop(state: Any, tokens: int, seen: int) -> None:
    """Raises if `tokens` of `seen` cannot be taken back from a transformers state layer exactly. Changes nothing."""
    unknown = [conv is None for conv in state.conv_states.values()]
    if not state.is_croppable or not state.record_past or any(unknown):
        raise ValueError(
            "this model keeps a convolution or recurrence state that cannot be rolled back. Call "
            "activate_past_recording() before the tokens that may be taken back (convolutions only)."
        )
    for index, conv in state.conv_states.items():
        held = conv.shape[-1]
        recorded = held if held == seen else held - state.conv_kernel_size[index]
        if tokens > recorded:
            raise ValueError(
                f"cannot take back {tokens} tokens: a convolution state recorded the last {recorded}. Call "
                "activate_past_recording() before the tokens that may be taken back."
            )
