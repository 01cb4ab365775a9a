"""Are two greedy continuations the same, and if not, how close was the choice where they part?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """First difference of one row. margin: distance of the reference's two largest logits at that step."""

    row: int
    step: int
    margin: float


def first_differences(
    reference: Sequence[Sequence[int]], margins: Sequence[Sequence[float]], other: Sequence[Sequence[int]]
) -> list[Difference]:
    """One entry per row that differs. Behind the first difference two continuations are no longer comparable."""
    found = []
    for row, (wanted, got) in enumerate(zip(reference, other, strict=True)):
        step = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=True)) if a != b), None)
        if step is not None:
            found.append(Difference(row, step, margins[row][step]))
    return found


def describe(differences: Sequence[Difference], rows: int, steps: int) -> str:
    """One sentence for the demo's table."""
    if not differences:
        return f"identical: {rows} x {steps} tokens"
    first = max(differences, key=lambda difference: difference.margin)
    return (
        f"{rows - len(differences)} of {rows} rows identical; {len(differences)} part, the clearest in row {first.row} "
        f"at token {first.step}, where the reference's two best logits are {first.margin:.3g} apart"
    )
