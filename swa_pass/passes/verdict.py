"""What is known about one attention in a graph, whatever its keys are kept in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from torch.fx import GraphModule, Node

from ..graph import example, shape_of
from ..masks import Mask
from ..patterns import ATTENTION, AttentionSite


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


AnyVerdict = TypeVar("AnyVerdict", bound=Verdict)


def attentions(gm: GraphModule) -> Iterator[tuple[ModuleType, AttentionSite]]:
    """Every attention in the graph, with the idiom that found it."""
    for node in gm.graph.nodes:
        for idiom in ATTENTION:
            site = idiom.match(node)
            if site is not None:
                yield idiom, site


def outermost(findings: Sequence[AnyVerdict]) -> list[AnyVerdict]:
    """Without those that are part of another: an idiom may hold one that matches by itself."""
    inner = {finding.site.inner for finding in findings}
    return [finding for finding in findings if finding.site.node not in inner]


def operands_problem(site: AttentionSite, kv_heads: Any, groups: tuple[int, int], kept: Sequence[Node]) -> str:
    """What about heads, dtypes and scale does not fit a fused attention on keys and values that a graph keeps itself.

    groups: how often the heads of keys and values are repeated.  kept: what must have the dtype of the queries.
    """
    heads = shape_of(site.query)[1]
    if groups[0] != groups[1] or (not site.grouped and groups[0] * kv_heads != heads) or heads % kv_heads:
        return f"{heads} query heads do not match {kv_heads} kv heads repeated {groups[0]} times"
    if any(example(node).dtype != example(site.query).dtype for node in kept):
        return "queries, keys and values differ in dtype"
    if not isinstance(site.scale, (int, float)):
        return f"the scale is computed in the graph ({site.scale}), not a number"
    return ""
