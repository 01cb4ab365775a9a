"""What is known about one attention in a graph, whatever its keys are kept in."""

from __future__ import annotations

from dataclasses import dataclass

from ..masks import Mask
from ..patterns import AttentionSite


@dataclass(frozen=True)
class Verdict:
    """site: where it is.  mask: what was proven about its mask.  problem: what else stands against a rewrite, or empty.

    The sentence about a mask is put together when somebody reads it: most graphs are rewritten without anybody asking.
    """

    site: AttentionSite
    mask: Mask
    problem: str

    @property
    def refused(self) -> bool:
        return bool(self.problem) or self.mask.refused

    @property
    def refusal(self) -> str:
        """Why the site is left alone; empty if nothing stands against it."""
        return self.problem or self.mask.reason
