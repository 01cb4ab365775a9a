"""The passes, in order, and what they did.

    find      attention sites, what their masks are, where their keys come from      (passes/find.py)
    fuse      sites that are proven -> attention on the store + write of the new token (passes/fuse.py)
    lower     linears with half-precision CPU weights -> a kernel for a few rows        (passes/decode_linear.py)

`rewrite_graph` runs them on a graph that Dynamo captured from a model with a HybridCache. `lower` is for graphs that
will run as they are (an applied model's); a graph that is only looked at, or saved, does without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from .decode_linear import use_decode_linear
from .find import Finding, find_sites
from .fuse import fuse_sites


@dataclass(frozen=True)
class Rewrite:
    """What one graph went through. `views_left`: layers whose keys are still read in time order (not fused)."""

    findings: tuple[Finding, ...]
    fused: tuple[int, ...]
    views_left: tuple[int, ...]
    linears: int
    ops_before: tuple[str, ...]
    ops_after: tuple[str, ...]


def rewrite_graph(gm: GraphModule, lower: bool = False) -> Rewrite:
    """Rewrites `gm` in place. What is not proven stays as it is."""
    from ..graph import op_name
    from ..patterns.kv_view import is_view

    before = tuple(op_name(node) for node in gm.graph.nodes)
    findings = find_sites(gm)
    fused = fuse_sites(gm, findings)
    linears = use_decode_linear(gm) if lower else 0
    left: list[Any] = sorted({node.args[4] for node in gm.graph.nodes if is_view(node)})
    after = tuple(op_name(node) for node in gm.graph.nodes)
    return Rewrite(tuple(findings), tuple(fused), tuple(left), linears, before, after)


__all__ = ["Finding", "Rewrite", "find_sites", "fuse_sites", "rewrite_graph", "use_decode_linear"]
