"""Replaces proven attention sites by attention on the store in place, fused with the write of the new tokens.

    before   keys = view(k_store, k_new)   values = view(v_store, v_new)   append(k_new, v_new, k_store, v_store)
             mask = ...                    out = attention(q, repeat(keys), repeat(values), mask)
    after    out = attend_append(q, k_new, v_new, k_store, v_store, lengths, starts, window, scale, ...)

Several layers may read the same view (layers that share another layer's keys). All but the last become an ``attend``,
which reads the store as it was before this step; the last one is the ``attend_append`` that writes. (A separate append
at the end would mean the same, but Inductor may move a read past it and then has to copy the store.)

Where a model attends to its keys as values too, nothing reads the store of values: all become an ``attend`` that is
given the keys twice, and the write follows them.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch.fx import GraphModule, Node

from ..graph import erase_all_unused, erase_unused, first_write, op_name, take_place
from .find import Finding


def fuse_sites(gm: GraphModule, findings: list[Finding]) -> list[int]:
    """Fuses, layer by layer, where *every* reader of the layer's keys is proven. Returns the fused layers."""
    by_layer: dict[int, list[Finding]] = defaultdict(list)
    for finding in findings:
        by_layer[finding.layer].append(finding)
    fused = []
    for layer, group in sorted(by_layer.items()):
        append = _append_of(group[0])
        if append is None or not all(f.fusable for f in group) or not _only_readers(group, append):
            continue
        _fuse_layer(gm, group, append)
        fused.append(layer)
    if fused:
        erase_all_unused(gm)  # masks of the fused layers, once the last of their users is gone
        gm.graph.lint()
        gm.recompile()
    return fused


def _append_of(finding: Finding) -> Node | None:
    writes = [user for user in finding.keys.store.users if op_name(user) == "swa_pass::append"]
    if len(writes) != 1:
        return None
    append = writes[0]
    k_new, v_new, k_store, v_store, lengths = append.args[:5]
    found = [(finding.keys, k_new, k_store, append.kwargs.get("k_scale"))]
    if not _keys_twice(finding):
        found.append((finding.values, v_new, v_store, append.kwargs.get("v_scale")))
    same = all((view.new, view.store, view.scale) == (new, store, scale) for view, new, store, scale in found)
    return append if same and finding.keys.lengths is lengths else None


def _keys_twice(finding: Finding) -> bool:
    return finding.keys.node is finding.values.node


def _only_readers(group: list[Finding], append: Node) -> bool:
    """Whether nothing but these sites reads the stores, so that moving the write cannot be seen."""
    first = group[0]
    views = {first.keys.node, first.values.node}
    if any({f.keys.node, f.values.node} != views for f in group):
        return False
    users = {*first.keys.store.users, *first.values.store.users}
    return users <= {*views, append}


def _fuse_layer(gm: GraphModule, group: list[Finding], append: Node) -> None:
    ops = torch.ops.swa_pass
    order = {node: n for n, node in enumerate(gm.graph.nodes)}
    group = sorted(group, key=lambda finding: order[finding.site.node])
    for finding in group:
        site, keys, values = finding.site, finding.keys, finding.values
        writes = finding is group[-1] and not _keys_twice(finding)
        target = ops.attend_append.default if writes else ops.attend.default
        lengths = _lengths(gm, finding)
        with gm.graph.inserting_before(site.node):
            out = gm.graph.call_function(
                target,
                (site.query, keys.new, values.new, keys.store, values.store, lengths, keys.starts),
                {
                    "window": finding.mask.window or 0,
                    "scale": float(site.scale),
                    "softcap": site.softcap,
                    "sinks": site.sinks,
                    "k_scale": keys.scale,
                    "v_scale": values.scale,
                },
            )
        take_place(out, site.node)
        site.node.replace_all_uses_with(out)
    if _keys_twice(group[-1]):
        with gm.graph.inserting_after(out):
            args = (*append.args[:4], lengths, *append.args[5:])
            gm.graph.call_function(append.target, args, append.kwargs)  # type: ignore[arg-type]
    gm.graph.erase_node(append)
    for finding in group:
        erase_unused(gm, [finding.site.node])


def _lengths(gm: GraphModule, finding: Finding) -> Node:
    """`lengths` as they are where the keys are read: under a caller's own torch.compile the last layer counts the step
    there already, and the attention comes after that."""
    keys = finding.keys
    if first_write([keys.lengths], keys.node, finding.site.node) is None:
        return keys.lengths
    with gm.graph.inserting_before(keys.node):
        kept = gm.graph.call_function(torch.ops.aten.clone.default, (keys.lengths,))
    kept.meta.update({name: value for name, value in keys.lengths.meta.items() if name in ("example_value", "val")})
    return kept
