"""The ring policy against a model that keeps every token in a plain list."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swa_pass.cache.ring import STEP, RingPolicy, capacity_for


class RingMachine(RuleBasedStateMachine):
    """Slots hold serial numbers of tokens, so that a token written again after a rollback is another token."""

    @initialize(
        window=st.sampled_from([None, 1, 2, 3, 8, 70]), slack=st.sampled_from([0, 1, 5, 16]), start=st.integers(0, 90)
    )
    def begin(self, window, slack, start):
        self.policy = RingPolicy(window, slack if window else 0)
        self.policy.capacity = capacity_for(start, window, self.policy.slack) if start else 0
        self.slots = [None] * self.policy.capacity
        self.tokens: list[int] = []
        self.serial = 0
        self.promised = 0  # tokens that may be taken back, by contract

    @rule(new=st.one_of(st.integers(1, 12), st.integers(1, 200)))
    def advance(self, new):
        policy = self.policy
        capacity = policy.capacity_needed(new)
        assert capacity >= policy.capacity
        if capacity != policy.capacity:
            kept = range(policy.floor, policy.high)
            old = dict(zip(kept, self.read(policy.runs(policy.floor, policy.high)), strict=True))
            policy.capacity = capacity
            self.slots = [None] * capacity
            for position, token in old.items():
                self.slots[position % capacity] = token
        fresh = list(range(self.serial, self.serial + new))
        self.serial += new
        skip, runs = policy.writes(new)
        written = [slot for first, stop in runs for slot in range(first, stop)]
        assert len(set(written)) == len(written) == new - skip, "a slot is written twice, or a token is lost"
        for slot, token in zip(written, fresh[skip:], strict=True):
            self.slots[slot] = token
        policy.advance(new)
        self.tokens += fresh
        self.promised += new
        if policy.window is not None and policy.recorded_from is None:
            self.promised = min(self.promised, policy.slack)

    @rule(data=st.data())
    def rollback(self, data):
        allowed = self.policy.max_rollback()
        tokens = data.draw(st.integers(0, min(allowed, 300)))
        self.policy.rollback(tokens)
        del self.tokens[len(self.tokens) - tokens :]
        self.promised = max(self.promised - tokens, 0)
        if self.policy.recorded_from is not None:  # a rollback settles what came before it
            assert self.policy.recorded_from == self.policy.seen
            self.promised = 0

    @precondition(lambda self: self.policy.recorded_from is None)
    @rule()
    def record(self):
        self.policy.record()
        self.promised = 0

    @rule()
    def reset(self):
        self.policy.reset()
        self.tokens, self.promised = [], 0
        assert self.policy.recorded_from is None

    def read(self, runs):
        assert len(runs) <= 2
        assert all(0 <= first < stop <= self.policy.capacity for first, stop in runs)
        return [self.slots[slot] for first, stop in runs for slot in range(first, stop)]

    def visible_after(self, rolled_back):
        """Whether the next query would find all its keys after a rollback."""
        policy, seen = self.policy, len(self.tokens) - rolled_back
        reach = seen if policy.window is None else min(seen, policy.window - 1)
        if reach > policy.capacity:
            return False
        return self.read(policy.runs(seen - reach, seen)) == self.tokens[seen - reach : seen]

    @invariant()
    def tokens_in_time_order(self):
        policy = self.policy
        assert policy.seen == len(self.tokens)
        assert policy.reach == (policy.seen if policy.window is None else min(policy.seen, policy.window - 1))
        assert self.read(policy.visible()) == self.tokens[policy.seen - policy.reach :]

    @invariant()
    def floor_is_stored(self):
        policy = self.policy
        if policy.floor < policy.seen:
            assert self.read(policy.runs(policy.floor, policy.seen)) == self.tokens[policy.floor :]

    @invariant()
    def rollback_is_exact(self):
        """Everything allowed is exact, everything promised is allowed, and nothing exact is refused needlessly."""
        allowed = self.policy.max_rollback()
        assert self.promised <= allowed <= self.policy.seen
        assert all(self.visible_after(n) for n in range(max(allowed - 3, 0), allowed + 1))
        if self.policy.window not in (None, 1) and allowed < self.policy.seen:
            assert not self.visible_after(allowed + 1)

    @invariant()
    def memory_is_bounded(self):
        policy = self.policy
        if policy.window is not None and policy.recorded_from is None and policy.high <= policy.seen:
            assert policy.capacity <= max(policy.window + policy.slack, len(self.slots))


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=70, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(("window", "slack"), [(1, 0), (8, 0), (8, 16), (512, 16)])
def test_a_ring_never_needs_more_than_window_and_slack(window, slack):
    policy = RingPolicy(window, slack)
    for _ in range(3 * (window + slack)):
        policy.capacity = policy.capacity_needed(3)
        policy.advance(3)
        assert policy.capacity <= window + slack


def test_a_long_window_costs_nothing_before_it_is_used():
    policy = RingPolicy(10**9, 16)
    policy.capacity = policy.capacity_needed(20)
    assert policy.capacity <= STEP


def test_a_linear_store_grows_geometrically():
    policy, growths = RingPolicy(None), 0
    for _ in range(4096):
        capacity = policy.capacity_needed(1)
        growths += capacity != policy.capacity
        policy.capacity = capacity
        policy.advance(1)
    assert growths <= 8


def test_worked_example_of_the_docstring():
    policy = RingPolicy(4, 2, capacity=6)
    policy.advance(9)
    assert policy.visible() == [(0, 3)]
    assert policy.writes(1) == (0, [(3, 4)])
    assert policy.max_rollback() == 3
    policy.rollback(2)
    assert policy.visible() == [(4, 6), (0, 1)]
    assert policy.max_rollback() == 1


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_below_one_is_refused(window):
    with pytest.raises(ValueError, match=f"window={window}"):
        RingPolicy(window)


def test_negative_slack_is_refused():
    with pytest.raises(ValueError, match="slack"):
        RingPolicy(8, -1)
