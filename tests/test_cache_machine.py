"""A HybridCache against a plain list of tokens, under any order of everything that may be done to it.

Every token is one number per row, and a key is that number (plus the layer), so what `update` returns can be read off.
Nothing is compared within a tolerance. Unseen slots are poisoned with NaN before every step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import swa_pass
from swa_pass.ops.quant import rounded

WINDOWS = st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=4)
KINDS = [None, torch.int8, torch.float8_e4m3fn]
MAX_TOKENS, MAX_ROWS = 120, 4


class CacheMachine(RuleBasedStateMachine):
    """tokens: (rows, seen) float64, what has been read; kept: how much of it a rollback may still need, per layer."""

    @initialize(windows=WINDOWS, slack=st.integers(0, 4), rows=st.integers(1, 3), kind=st.sampled_from(KINDS))
    def start(self, windows: list[int | None], slack: int, rows: int, kind: torch.dtype | None) -> None:
        self.windows, self.slack, self.kind = windows, slack, kind
        self.cache = swa_pass.HybridCache(windows, slack=slack, kv_dtype=kind)
        self.tokens = torch.empty(rows, 0, dtype=torch.float64)
        self.next = 1.0
        self.snapshots: list[tuple[Any, torch.Tensor]] = []
        self.newest = 0  # the most tokens ever seen since the last reset or restore
        self.recording = False

    @property
    def seen(self) -> int:
        return self.tokens.shape[1]

    def poison(self) -> None:
        for layer in self.cache.stores:
            if layer.k_store is None:
                continue
            policy, slots = layer.policy, layer.k_store.shape[2]
            readable = {p % slots for p in range(policy.floor, policy.high)}
            hidden = [slot for slot in range(slots) if slot not in readable]
            for store in (layer.k, layer.v):  # bytes cannot be NaN, their scales can
                (store.data if store.scale is None else store.scale)[:, :, hidden] = float("nan")

    def shown(self, tokens: torch.Tensor, layer: int) -> torch.Tensor:
        """(rows, n) numbers as the keys of a layer show them."""
        keys = tokens + 1e6 * layer
        return keys if self.kind is None else rounded(keys[..., None], self.kind)[..., 0]

    @precondition(lambda self: self.seen < MAX_TOKENS)
    @rule(new=st.integers(1, 25))
    def update(self, new: int) -> None:
        self.poison()
        rows = self.tokens.shape[0]
        more = self.next + torch.arange(rows * new, dtype=torch.float64).reshape(rows, new)
        self.next += rows * new
        for layer, window in enumerate(self.windows):
            keys, values = self.cache.update(
                (more + 1e6 * layer)[:, None, :, None], -(more + 1e6 * layer)[:, None, :, None], layer
            )
            past = self.seen if window is None else min(self.seen, window - 1)
            shown = self.shown(torch.cat([self.tokens[:, self.seen - past :], more], 1), layer)
            assert torch.equal(keys[:, 0, :, 0], shown)
            assert torch.equal(values[:, 0, :, 0], -shown)
        self.tokens = torch.cat([self.tokens, more], 1)
        self.newest = max(self.newest, self.seen)

    @rule(tokens=st.integers(0, 30))
    def crop(self, tokens: int) -> None:
        before = [(layer.policy.seen, layer.policy.floor, layer.policy.high) for layer in self.cache.stores]
        if tokens > self.seen:
            with pytest.raises(ValueError, match="cannot take back"):
                self.cache.crop(-tokens)
        else:
            # What the contract promises; more is allowed where the tokens happen to be there still.
            promised = self.newest - self.seen + tokens <= self.slack or all(w is None for w in self.windows)
            try:
                self.cache.crop(-tokens)
            except ValueError:
                assert not promised
                assert not self.recording, "whatever came after activate_past_recording can be taken back"
            else:
                self.tokens = self.tokens[:, : self.seen - tokens]
                return
        assert before == [(layer.policy.seen, layer.policy.floor, layer.policy.high) for layer in self.cache.stores]

    @precondition(lambda self: self.seen > 0)
    @rule(bursts=st.lists(st.integers(1, 12), min_size=1, max_size=4), data=st.data())
    def draft(self, bursts: list[int], data: st.DataObject) -> None:
        """What assisted decoding does: several updates, then any part of them is taken back."""
        self.cache.activate_past_recording()
        start = self.seen
        for burst in bursts:
            self.update(burst)
        self.recording = True
        self.crop(data.draw(st.integers(0, self.seen - start)))
        self.recording = False

    @precondition(lambda self: self.seen > 0)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        rows = self.tokens.shape[0]
        index = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows)))
        places = [layer.k_store.data_ptr() for layer in self.cache.stores]
        self.cache.reorder_cache(index)
        self.tokens = self.tokens[index]
        assert places == [layer.k_store.data_ptr() for layer in self.cache.stores], "addresses moved"

    @precondition(lambda self: self.seen > 0 and self.tokens.shape[0] < MAX_ROWS)
    @rule(times=st.integers(1, 2))
    def repeat(self, times: int) -> None:
        self.cache.batch_repeat_interleave(times)
        self.tokens = self.tokens.repeat_interleave(times, dim=0)

    @precondition(lambda self: self.seen > 0)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        rows = self.tokens.shape[0]
        index = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows, unique=True)))
        self.cache.batch_select_indices(index)
        self.tokens = self.tokens[index]

    @rule(rows=st.integers(1, 3))
    def reset(self, rows: int) -> None:
        self.cache.reset()
        self.tokens, self.newest = torch.empty(rows, 0, dtype=torch.float64), 0

    @precondition(lambda self: self.seen > 0)
    @rule()
    def snapshot(self) -> None:
        self.snapshots.append((self.cache.snapshot(), self.tokens.clone()))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        snapshot, tokens = data.draw(st.sampled_from(self.snapshots))
        rows = data.draw(st.integers(1, 3)) if snapshot.rows == 1 else None
        self.cache.restore(snapshot, rows)
        self.tokens = tokens.expand(rows, -1).clone() if rows else tokens.clone()
        self.newest = self.seen

    @invariant()
    def lengths_and_memory(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert [self.cache.get_seq_length(i) for i in range(len(self.windows))] == [self.seen] * len(self.windows)
        assert self.cache.seen == self.seen
        for layer, window in zip(self.cache.stores, self.windows, strict=True):
            if layer.keys is not None and self.seen:
                past = self.seen if window is None else min(self.seen, window - 1)
                assert torch.equal(layer.keys[:, 0, :, 0], self.shown(self.tokens[:, self.seen - past :], layer.index))


CacheMachine.TestCase.settings = settings(
    max_examples=250, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCacheMachine = CacheMachine.TestCase


def test_the_machine_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that shows one key too few is found."""
    from hypothesis.stateful import run_state_machine_as_test

    from swa_pass.cache.ring import RingPolicy

    right = RingPolicy.reach.fget
    assert right is not None
    monkeypatch.setattr(RingPolicy, "reach", property(lambda self: max(right(self) - ((self.window or 0) > 2), 0)))
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            CacheMachine, settings=settings(max_examples=200, deadline=None, database=None, derandomize=True)
        )
