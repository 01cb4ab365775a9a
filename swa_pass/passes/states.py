"""Finds attention on states that a graph keeps itself (see `patterns.state`), proves its masks, and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node

from ..formula import Field, Lin
from ..graph import changed_in_place, has_side_effect, is_metadata_check, op_name, shape_of
from ..masks import Mask, prove, unknown
from ..patterns import CACHES, AttentionSite
from ..patterns.kv_view import ungrouped
from ..patterns.positions import assume
from ..patterns.state import StateUse, same_tensor
from .verdict import Verdict, attentions, operands_problem, outermost


@dataclass(frozen=True)
class StateFinding(Verdict):
    """One attention on keys and values that are kept in states of the graph.

    owned: nobody but this graph can see the states, so their layout may change.
    """

    keys: StateUse
    values: StateUse
    owned: bool

    @property
    def window(self) -> int:
        """Keys that a query sees, its own included; 0 for all of them."""
        if self.keys.layout == "window":
            return min(self.mask.window or self.keys.slots, self.keys.slots)
        return self.mask.window or 0

    @property
    def name(self) -> str:
        return str(self.keys.state.target) if self.keys.state.op == "get_attr" else self.keys.state.name

    def __str__(self) -> str:
        what = f"window {self.window}" if self.window else "all keys"
        return f"{self.name} ({self.keys.idiom}): {self.refusal or what}"


def find_states(gm: GraphModule, own_state: bool) -> list[StateFinding]:
    memo: dict[Node, Field] = {}
    findings = []
    for idiom, site in attentions(gm):
        keys, values = (_use(source, site.node) for source in (site.key, site.value))
        if keys is None or values is None:
            continue
        (keys_use, key_groups), (values_use, value_groups) = keys, values
        owned = own_state and all(use.state.op == "get_attr" for use in (keys_use, values_use))
        shape = _mismatch(site, keys_use, values_use, (key_groups, value_groups))
        if _needs_no_mask(site, keys_use):
            problem, mask = shape, Mask("full")
        else:
            problem = idiom.validate(site) or shape or _not_ours(keys_use, owned)
            mask = unknown(problem) if problem else _prove(site, keys_use, memo)
        if not problem and not mask.refused:
            problem = f"the mask is {mask.kind}" if mask.kind == "chunked" else _no_position(keys_use, mask)
        findings.append(StateFinding(site, mask, problem, keys_use, values_use, owned))
    return [_alone(finding) for finding in outermost(findings)]


def _use(node: Node, reader: Node) -> tuple[StateUse, int] | None:
    source, groups = ungrouped(node)
    for idiom in CACHES:
        use = idiom.match(source, reader)
        if use is not None:
            return use, groups
    return None


def _prove(site: AttentionSite, keys: StateUse, memo: dict[Node, Field]) -> Mask:
    new, queries = shape_of(keys.new)[2], shape_of(site.query)[2]
    if str(new) != str(queries):
        return unknown(f"{queries} queries of {new} new tokens: which ones is not known")
    if keys.positions is not None:
        assume(keys.positions, memo)
    width = shape_of(site.key)[2]
    return prove(site.mask, keys.query_offset, keys.key_offset, queries, width, memo, fills=keys.fills)


def _mismatch(site: AttentionSite, keys: StateUse, values: StateUse, groups: tuple[int, int]) -> str:
    if (keys.idiom, keys.query_offset, keys.key_offset) != (values.idiom, values.query_offset, values.key_offset):
        return f"keys are kept as {keys.idiom} and values as {values.idiom}, or at other positions"
    if same_tensor(keys.state, values.state):
        return "keys and values are kept in one tensor"
    problem = operands_problem(site, shape_of(keys.new)[1], groups, (keys.new, values.new))
    if problem:
        return problem
    width = shape_of(site.key)[2]
    if keys.layout == "linear" and not isinstance(width, int) and str(width) != str(keys.slots):
        return f"the attention reads the first {width} slots, a number that changes from call to call"
    return ""


def _needs_no_mask(site: AttentionSite, keys: StateUse) -> bool:
    """One query that comes after all that is read sees all of it."""
    plain = site.mask is None and not site.is_causal and not (site.problem or site.extra) and site.dropout == 0.0
    return plain and keys.layout == "joined" and str(shape_of(site.query)[2]) == "1"


def _no_position(keys: StateUse, mask: Mask) -> str:
    """Why the position of the first new token could not be computed, where only a formula knows it."""
    if keys.layout == "joined" or (keys.index is not None and keys.layout == "linear"):
        return ""
    position = mask.seen if keys.fills else keys.query_offset
    names = {node.name for node in keys.state.graph.nodes if node.op in ("placeholder", "get_attr")}
    for symbol, _ in position.terms if position is not None else ():
        element = isinstance(symbol, tuple) and symbol[0] in names
        if not element or not all(isinstance(place, Lin) and place.is_const for place in symbol[1:]):
            return f"the position of the new token is {position}, which is no element of an input"
    return ""


def _not_ours(keys: StateUse, owned: bool) -> str:
    if keys.layout == "window" and not owned:
        return (
            "its state belongs to the caller, who may read it in order of time, and a ring keeps another order. "
            "Rewrite a graph that holds its state (torch.export), or use swa_pass.apply on the model"
        )
    return ""


def _alone(finding: StateFinding) -> StateFinding:
    """Refuses a site whose states, after this step's write, something else reads too."""
    if finding.refused:
        return finding
    for use in (finding.keys, finding.values):
        read_late = (finding.site.query, use.new, *((use.state,) if use.layout == "joined" else ()))
        changed = next((node for node in read_late if changed_in_place(node)), None)
        if changed is not None:
            return replace(finding, problem=f"{changed.name} is changed in place")
    if finding.keys.layout == "joined":
        return finding
    replaced = {finding.site.node}
    for use in (finding.keys, finding.values):
        same = {node for node in use.state.graph.nodes if same_tensor(node, use.state)}
        reader = reader_beyond({use.value, *use.writes} | same, replaced | set(use.writes))
        if reader:
            return replace(finding, problem=f"its keys or values are also read by {reader}")
    return finding


def reader_beyond(start: set[Node], allowed: set[Node]) -> str:
    """Name of something beyond `allowed` that depends on the nodes of `start`; empty if there is none."""
    queue: list[Node] = list(start)
    seen = set(start)
    while queue:
        node = queue.pop()
        for user in node.users:
            if user in allowed or user in seen or is_metadata_check(user):
                continue
            if has_side_effect(user):
                return op_name(user) if user.op != "output" else f"the output, through {op_name(node)}"
            seen.add(user)
            queue.append(user)
    return ""
