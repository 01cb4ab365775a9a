"""Ring policy: which slots to write, which to read, how far back one may go. Integers only, no tensors.

A ring with C slots keeps token ``p`` (its absolute position) in slot ``p % C``. With W = 4, slack = 2, so C = 6, after
9 tokens (positions 0..8):

    slot       0   1   2   3   4   5
    token      6   7   8   3   4   5        next write: token 9 -> slot 3
                                            the next query (9) sees W = 4 keys: 6 7 8 and itself
                                            visible runs in time order: slots [0, 3)
    crop(2): seen = 7; the next query (7) sees 4 5 6 -> slots [4, 6) + [0, 1): still there, so the crop is exact
    crop(4): seen = 5; the next query (5) would see 2 3 4, but 2 is gone -> refused before anything changes

A draft burst may be longer than slack. `record()` says that everything from now on may be taken back: until the next
rollback the ring grows instead of evicting what such a rollback needs.

C may start smaller than W + slack and grow while nothing has wrapped, so a short generation never pays for a long
window. With no window (`window = None`) the same policy describes a linear store: nothing is ever evicted.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Stores are sized in steps of this many tokens, so that small changes of length do not change a shape.
STEP = 64


def capacity_for(tokens: int, window: int | None, slack: int) -> int:
    """Slots that hold `tokens` tokens: `tokens` rounded up to `STEP`, and never more than window + slack."""
    rounded = max(STEP, -(-tokens // STEP) * STEP)
    return rounded if window is None else min(rounded, window + slack)


@dataclass
class RingPolicy:
    """State of one ring (or linear store) and the arithmetic on it.

    window: keys a query sees, its own included; None for a linear store.
    slack: tokens beyond the window that stay readable, so that a rollback of up to `slack` tokens is exact.
    capacity: slots allocated now.  seen: tokens so far.  high: the largest `seen` ever.  floor: the oldest position
    that is still stored (what a small ring evicted does not come back when it grows).
    """

    window: int | None
    slack: int = 0
    capacity: int = 0
    seen: int = 0
    high: int = 0
    floor: int = 0
    recorded_from: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window must hold at least one key (the query's own), got window={self.window}")
        if self.slack < 0:
            raise ValueError(f"slack must be >= 0 tokens, got {self.slack}")

    @property
    def reach(self) -> int:
        """Past tokens that the next query sees."""
        return self.seen if self.window is None else min(self.seen, self.window - 1)

    def capacity_needed(self, new: int, hint: int = 0) -> int:
        """Capacity that must be allocated before `new` tokens may be written.

        Growth is geometric, as in a list, unless `hint` says how many tokens there will be.
        """
        needed = self.seen + new
        if self.window is not None:
            useful = self.window + self.slack
            if self.recorded_from is not None:
                useful = max(useful, self.seen + new - self.recorded_from + self.window - 1)
            needed = min(needed, useful)
        if needed <= self.capacity:
            return self.capacity
        expected = hint if hint >= needed else max(needed, 2 * self.capacity)
        grown = capacity_for(expected, self.window, self.slack)
        if needed > grown:  # a recorded burst; bursts tend to get longer, so leave room
            grown = capacity_for(needed + needed // 2, None, 0)
        return grown

    def runs(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Slot ranges [a, b) that hold the tokens start..stop-1 in time order: at most two."""
        if stop <= start:
            return []
        if self.capacity < stop - start:
            raise ValueError(f"{stop - start} tokens do not fit into {self.capacity} slots")
        first, length = start % self.capacity, stop - start
        head = min(length, self.capacity - first)
        return [(first, first + head)] + ([(0, length - head)] if head < length else [])

    def visible(self) -> list[tuple[int, int]]:
        """Slot ranges of the past tokens that the next query sees, in time order."""
        return self.runs(self.seen - self.reach, self.seen)

    def writes(self, new: int) -> tuple[int, list[tuple[int, int]]]:
        """How many leading new tokens are not worth storing, and the slot ranges for the rest."""
        skip = max(new - self.capacity, 0)
        return skip, self.runs(self.seen + skip, self.seen + new)

    def advance(self, new: int) -> None:
        self.seen += new
        self.high = max(self.high, self.seen)
        self.floor = max(self.floor, self.high - self.capacity)

    def max_rollback(self) -> int:
        """Tokens that can be taken back exactly."""
        if self.window is None or self.floor == 0:
            return self.seen
        # after taking back n, the next query needs position seen - n - (W - 1)
        return max(self.seen - (self.window - 1) - self.floor, 0)

    def rollback(self, tokens: int) -> None:
        """Takes back `tokens`; the caller has checked `max_rollback`."""
        self.seen -= tokens
        if self.recorded_from is not None:
            self.recorded_from = self.seen

    def record(self) -> None:
        """From now on, whatever is added can be taken back."""
        self.recorded_from = self.seen

    def reset(self) -> None:
        self.seen = self.high = self.floor = 0
        self.recorded_from = None
