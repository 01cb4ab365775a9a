"""Finds attention sites that read a HybridCache and proves what their masks are. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node

from ..formula import Field, Lin, is_one
from ..graph import example, has_side_effect, integer, op_name, shape_of
from ..masks import Mask, prove, unknown
from ..patterns import AttentionSite, kv_view
from ..patterns.kv_view import KVView
from .bias import Extras
from .verdict import Verdict, attentions, outermost


@dataclass(frozen=True)
class Finding(Verdict):
    """One attention site on a cache layer of ours.

    extra: why fused attention cannot stand for it although its mask is proven (see `AttentionSite.extra`): it goes on
    to read its keys in time order, also those of a ring.
    """

    layer: int
    keys: KVView
    values: KVView
    extra: str = ""

    @property
    def fusable(self) -> bool:
        """Whether the fused attention computes the same: no mask, only a window (or none)."""
        return not self.refused and not self.extra and self.mask.kind in ("full", "sliding")

    @property
    def heads(self) -> int:
        return int(shape_of(self.site.query)[1])


def find_sites(gm: GraphModule) -> list[Finding]:
    memo: dict[Node, Field] = {}  # one mask per layer type: read once, not once per layer
    verdicts: dict[tuple[object, ...], Mask] = {}
    findings = []
    found = [(idiom, site, kv_view.find(site.key), kv_view.find(site.value)) for idiom, site in attentions(gm)]
    extras = Extras({site.node for _, site, keys, values in found if keys and values}, memo)
    for idiom, site, keys, values in found:
        if keys is None or values is None:
            continue  # not an attention on our cache (a vision tower, cross attention)
        extra, in_mask = site.extra, False
        problem = idiom.validate(replace(site, extra="")) or _mismatch(site, keys, values)
        mask = unknown(problem) if problem else _prove_once(site, keys, memo, verdicts)
        if not problem and mask.kind == "unknown":
            biased = _prove_once(site, keys, memo, verdicts, biased=True)
            if not biased.refused:
                mask, extra, in_mask = biased, "a position bias is part of the mask", True
        if not mask.refused:
            problem = (
                problem or _wrong_window(mask, keys) or (extra and extras.problem(site, in_mask, _distance(site, keys)))
            )
        findings.append(Finding(site, mask, problem, keys.layer, keys, values, extra))
    return _without_other_readers(outermost(findings))


def _without_other_readers(findings: list[Finding]) -> list[Finding]:
    """Refuses sites whose keys something else reads too: it would go on reading in time order."""
    sites = {f.site.node for f in findings}
    checked = []
    for finding in findings:
        reader = _reader_past(sites, finding.keys.node) or _reader_past(sites, finding.values.node)
        if reader and not finding.refused:
            finding = replace(finding, problem=f"its keys or values are also read by {reader}")
        checked.append(finding)
    return checked


def _reader_past(sites: set[Node], view: Node) -> str:
    """Name of something that depends on `view` on a way that passes no attention site; empty if there is none."""
    queue, seen = [view], {view}
    while queue:
        node = queue.pop()
        for user in node.users:
            if user in sites or user in seen:
                continue
            if has_side_effect(user):
                return op_name(node)
            seen.add(user)
            queue.append(user)
    return ""


def _prove_once(
    site: AttentionSite,
    keys: KVView,
    memo: dict[Node, Field],
    verdicts: dict[tuple[object, ...], Mask],
    biased: bool = False,
) -> Mask:
    queries = shape_of(site.query)[2]
    skipped = integer(shape_of(keys.new)[2] - queries)  # a model may ask only for the last tokens of a prompt
    if skipped is None:
        return unknown(f"{queries} queries of {shape_of(keys.new)[2]} new tokens: which ones is not known")
    where = (site.mask, keys.query_offset + skipped, keys.key_offset)
    known = (*where, biased)
    if known not in verdicts:
        verdicts[known] = prove(*where, queries, shape_of(keys.node)[2], memo, biased=biased)
    return verdicts[known]


def _distance(site: AttentionSite, keys: KVView) -> Lin:
    """Absolute position of query "q" minus that of key "k"; an axis of size 1 has only the index 0."""
    skipped = integer(shape_of(keys.new)[2] - shape_of(site.query)[2])
    assert skipped is not None  # the mask was proven
    sizes = {"q": shape_of(site.query)[2], "k": shape_of(keys.node)[2]}
    query, key = (Lin(0) if is_one(size) else Lin.symbol(name) for name, size in sizes.items())
    return keys.query_offset + skipped + query - keys.key_offset - key


def _mismatch(site: AttentionSite, keys: KVView, values: KVView) -> str:
    """What about the operands does not fit a fused attention."""
    if (keys.layer, keys.lengths, keys.window, keys.groups) != (
        values.layer,
        values.lengths,
        values.window,
        values.groups,
    ):
        return f"keys come from cache layer {keys.layer} and values from cache layer {values.layer}"
    heads, kv_heads = shape_of(site.query)[1], shape_of(keys.new)[1]
    if not site.grouped and keys.groups * kv_heads != heads:
        return f"{heads} query heads do not match {kv_heads} kv heads repeated {keys.groups} times"
    if site.grouped and heads % kv_heads:
        return f"{heads} query heads are not a multiple of {kv_heads} kv heads"
    if example(keys.new).dtype != example(values.new).dtype:
        return f"keys are {example(keys.new).dtype} and values are {example(values.new).dtype}"
    if example(site.query).dtype != example(keys.new).dtype:
        return f"queries are {example(site.query).dtype} and keys are {example(keys.new).dtype}"
    return ""


def _wrong_window(mask: Mask, keys: KVView) -> str:
    """A ring may only serve the window that it was made for; a linear store serves every mask."""
    if keys.window and mask.window != keys.window:
        return f"the cache keeps a window of {keys.window} keys, but the mask shows {mask.window or 'all'} of them"
    return ""


@dataclass(frozen=True)
class UnmatchedView:
    """A cache layer whose keys are used by something that is no known attention idiom."""

    layer: int
    keys: Node
    values: Node
    reason: str


def unmatched_views(gm: GraphModule, findings: list[Finding]) -> list[UnmatchedView]:
    known = {f.layer for f in findings}
    views: dict[int, list[Node]] = {}
    for node in gm.graph.nodes:
        if kv_view.is_view(node) and node.args[4] not in known:
            views.setdefault(node.args[4], []).append(node)
    result = []
    for layer, nodes in views.items():
        users = sorted({op_name(user) for node in nodes for user in node.users})
        reason = (
            f"the keys and values go into {', '.join(users) or 'nothing'}, which is no attention idiom that is known"
        )
        result.append(UnmatchedView(layer, nodes[0], nodes[-1], reason))
    return result
