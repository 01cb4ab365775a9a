"""Hides left pads from attention that goes on to read its keys in time order.

    before   keys = view(store, new, lengths, window, layer, starts)       out = attention(q, keys, values, mask)
    after                                                     out = attention(q, keys, values, hide_pads(mask, ...))

A fused attention knows where each row starts; a mask that the model makes in a graph without the 2D attention mask does
not. The proof says what the rest of such a mask is: distances of query and key, which pads do not change.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..graph import example
from .find import Finding


def hide_pads(mask: Tensor, lengths: Tensor, starts: Tensor, window: int) -> Tensor:
    """`mask` (..., q, K), boolean or additive, of keys as `swa_pass::view` gives them, with all before `starts` hidden.

    Returns (B, 1 or heads, q, K). lengths, starts: (B,) int64.  window: of the ring; 0: a linear store.
    """
    first = (lengths - (window - 1)).clamp(min=0) if window else torch.zeros_like(lengths)
    positions = first[:, None] + torch.arange(mask.shape[-1], device=lengths.device)
    real = (positions >= starts[:, None])[:, None, None]
    return mask & real if mask.dtype == torch.bool else torch.where(real, mask, torch.finfo(mask.dtype).min)


def pad_sites(gm: GraphModule, findings: Sequence[Finding], fused: Collection[int]) -> list[int]:
    """Changes the masks of proven sites that were not fused. Returns the layers that know their pads now."""
    unable = {finding.layer for finding in findings if not _can(finding)}
    order = {node: n for n, node in enumerate(gm.graph.nodes)}
    left = [finding for finding in findings if finding.layer not in {*fused, *unable}]
    made: dict[tuple[Node, Node, Node, int], Node] = {}  # one mask per layer type, before the first that takes it
    for finding in sorted(left, key=lambda finding: order[finding.site.mask_at]):
        _pad(gm, finding, made)
    done = sorted({finding.layer for finding in left})
    if done:
        gm.graph.lint()
        gm.recompile()
    return done


def _can(finding: Finding) -> bool:
    # In a chunk, what a query sees depends on more than a distance: stock counts chunks from each row's first token.
    plain = not finding.refused and finding.mask.kind in ("full", "sliding")
    return plain and finding.keys.starts is not None and finding.site.mask_at is not None


def _pad(gm: GraphModule, finding: Finding, made: dict[tuple[Node, Node, Node, int], Node]) -> None:
    mask, at, view = finding.site.mask, finding.site.mask_at, finding.keys
    assert at is not None
    assert view.starts is not None
    what = (mask, view.lengths, view.starts, view.window)
    if what not in made:
        with gm.graph.inserting_before(at):
            made[what] = gm.graph.call_function(hide_pads, what)
        values = [example(value) for value in what]
        mode = getattr(values[0], "fake_mode", None)
        if mode is not None:
            with mode:
                made[what].meta["example_value"] = hide_pads(*values)
    at.replace_input_with(mask, made[what])
