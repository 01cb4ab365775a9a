"""Attention on a list of slots, with the mask as it is given: reads the slots where they lie.

    before   keys = store[index] ...; out = attention(q, keys, values, mask)
    after    out = attend_tokens(q, store, v_store, index, mask)

The mask and the list stay what they are, so nothing about windows has to be proven, and none is assumed: what the
engine left out of its list is not read, and what its mask hides is not read. The engine's writes stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..graph import erase_unread, shape_of, take_place
from ..masks import GIVEN
from ..patterns import AttentionSite, token_list
from ..patterns.kv_view import ungrouped
from ..patterns.token_list import TokenRead
from .placing import make_room, place
from .verdict import Verdict, attentions, operands_problem, outermost


@dataclass(frozen=True)
class TokenFinding(Verdict):
    """One attention on listed tokens. `before`: where in the graph the fused one goes."""

    keys: TokenRead
    values: TokenRead
    before: Node

    @property
    def name(self) -> str:
        return self.keys.pages.name

    def __str__(self) -> str:
        return f"{self.name} (token_list): {self.refusal or 'the mask as it is given'}"


def find_tokens(gm: GraphModule) -> list[TokenFinding]:
    findings = []
    for idiom, site in attentions(gm):
        (key, key_groups), (value, value_groups) = ungrouped(site.key), ungrouped(site.value)
        keys, values = token_list.match(key), token_list.match(value)
        if keys is None or values is None:
            continue
        problem = idiom.validate(site) or _problem(site, keys, values, shape_of(key)[1], (key_groups, value_groups))
        before, late = place(site.node, [keys.gather, values.gather], _operands(site, keys, values))
        findings.append(TokenFinding(site, GIVEN, problem or late, keys, values, before))
    return outermost(findings)


def _operands(site: AttentionSite, keys: TokenRead, values: TokenRead) -> list[Node]:
    given = (site.query, site.mask, site.sinks, keys.index, keys.new, values.new)
    return [node for node in given if isinstance(node, Node)]


def _problem(site: AttentionSite, keys: TokenRead, values: TokenRead, kv_heads: Any, groups: tuple[int, int]) -> str:
    if keys.index is not values.index or keys.sentinel != values.sentinel or (keys.new is None) != (values.new is None):
        return "keys and values are gathered from different places"
    if site.is_causal not in (False, None) or site.dropout != 0.0:
        return f"is_causal={site.is_causal}, dropout={site.dropout}: only a mask says what a query sees here"
    queries, slots = shape_of(site.query)[2], shape_of(keys.index)[0]
    wanted = [str(n) for n in (1, 1, queries, slots)]
    if site.mask is not None and [str(n) for n in shape_of(site.mask)] not in (wanted, wanted[2:]):
        return f"the mask has the shape {shape_of(site.mask)} and not (1, 1, {queries} queries, {slots} slots)"
    return operands_problem(site, kv_heads, groups, (keys.pages, values.pages))


def read_tokens(gm: GraphModule, findings: Sequence[TokenFinding]) -> None:
    """Rewrites the findings without a refusal."""
    chosen = [finding for finding in findings if not finding.refused]
    for finding in chosen:
        site, keys, values = finding.site, finding.keys, finding.values
        make_room(_operands(site, keys, values), finding.before)
        with gm.graph.inserting_before(finding.before):
            out = gm.graph.call_function(
                torch.ops.swa_pass.attend_tokens.default,
                (site.query, keys.pages, values.pages, keys.index, site.mask, keys.new, values.new),
                {
                    "scale": float(site.scale),
                    "sentinel": keys.sentinel,
                    "softcap": site.softcap,
                    "sinks": site.sinks,
                },
            )
        take_place(out, site.node)
        site.node.replace_all_uses_with(out)
    if chosen:
        erase_unread(gm)
        gm.graph.lint()
        gm.recompile()
