"""The passes, in order, and what they did.

    find      attention sites, what their masks are, where their keys come from      (passes/find.py)
    fuse      sites that are proven -> attention on the store + write of the new token (passes/fuse.py)
    pads      proven sites that stay -> pads hidden in their masks                  (passes/pads.py)
    states    the same for graphs that keep keys in tensors of their own: what idiom, what mask  (passes/states.py)
    adopt     proven states -> rings where the graph owns them, attention in place elsewhere     (passes/adopt.py)
    pages     attention on gathered pages -> the blocks of the window                           (passes/pages.py)
    tokens    attention on listed tokens, with the mask as it is given -> without the gather  (passes/tokens.py)
    blocks    softmax over a flat list of blocks, in steps -> one operator              (passes/blocks.py)
    lower     linears with half-precision CPU weights -> a kernel for a few rows        (passes/decode_linear.py)

`find` and `fuse` are for graphs captured with a HybridCache, `states` and `adopt` for every other graph, and `lower` is
for graphs that will run as they are (an applied model's); a graph that is only looked at, or saved, does without.

A Dynamo backend has one more, which needs something that outlives the graph: `loans` finds decode steps on stores that
are the caller's, and `lend` puts rings in their place (with `narrow` for their prompts, if asked). In front of
a compiler for Gaudi, `lower_hpu` puts core operators and FusedSDPA in the place of ours, last of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor
from torch.fx import GraphModule

from ..diary import Diary
from ..graph import op_name
from ..patterns.kv_view import is_view
from .adopt import adopt_states
from .blocks import BlockFinding, find_blocks, read_blocks
from .decode_linear import use_decode_linear
from .find import Finding, find_sites
from .first_key import counts_from_first
from .fuse import fuse_sites
from .pads import pad_sites
from .pages import PageFinding, find_pages, read_pages
from .states import StateFinding, find_states
from .tokens import TokenFinding, find_tokens, read_tokens

#: Attention on keys that are in no HybridCache.
OtherFinding: TypeAlias = StateFinding | PageFinding | TokenFinding | BlockFinding


@dataclass(frozen=True)
class Rewrite:
    """What one graph went through.

    graph: the rewritten graph (the one that was given, changed in place; an ExportedProgram for an ExportedProgram).
    findings: attention on a HybridCache;  fused: its layers that were rewritten;  views_left: its layers whose keys are
        still read in time order;  padded: those of them whose masks hide left pads all the same.
    states: attention on states that the graph keeps itself, each with the reason if it was left alone.
    owned: buffers that the graph got from us, by name: rings, and the number of tokens seen.
    """

    graph: Any
    findings: tuple[Finding, ...]
    fused: tuple[int, ...]
    views_left: tuple[int, ...]
    padded: tuple[int, ...]
    states: tuple[OtherFinding, ...]
    owned: dict[str, Tensor]
    linears: int
    ops_before: tuple[str, ...]
    ops_after: tuple[str, ...]

    @property
    def matches(self) -> int:
        """Attention sites that were rewritten."""
        return len([f for f in self.findings if f.layer in self.fused]) + len([f for f in self.states if not f.refused])

    @property
    def left_alone(self) -> int:
        """Attention sites that were refused; `refusals` puts their sentences together."""
        return sum(f.refused for f in (*self.findings, *self.states))

    @property
    def refusals(self) -> list[str]:
        """One sentence for every attention on a cache that was left as it is."""
        kept = [f"layer {f.layer}: {f.refusal}" for f in self.findings if f.refused]
        return kept + [str(f) for f in self.states if f.refused]

    @property
    def changed(self) -> bool:
        return bool(self.fused or self.linears or any(not f.refused for f in self.states))


def rewrite_graph(
    gm: GraphModule, lower: bool = False, states: bool = True, own_state: bool = False, slack: int = 0
) -> Rewrite:
    """Rewrites `gm` in place. What is not proven stays as it is.

    states: look for states that the graph keeps itself.  own_state: the buffers of `gm` are its alone.
    slack: tokens by which positions may go back in a ring that replaces a linear store.
    """
    diary = Diary(gm)
    before = tuple(op_name(node) for node in gm.graph.nodes)
    findings = find_sites(gm)
    fused = fuse_sites(gm, findings)
    padded = pad_sites(gm, findings, fused)
    kept = find_states(gm, own_state) if states else []
    owned = adopt_states(gm, kept, slack)
    pages = find_pages(gm) if states else []
    read_pages(gm, pages)
    tokens = find_tokens(gm) if states else []
    read_tokens(gm, tokens)
    blocks = find_blocks(gm) if states else []
    read_blocks(gm, blocks)
    linears = use_decode_linear(gm) if lower else 0
    left: list[Any] = sorted({node.args[4] for node in gm.graph.nodes if is_view(node)})
    after = tuple(op_name(node) for node in gm.graph.nodes)
    others: tuple[OtherFinding, ...] = (*kept, *pages, *tokens, *blocks)
    layers = tuple(fused), tuple(left), tuple(padded)
    result = Rewrite(gm, tuple(findings), *layers, others, owned, linears, before, after)
    diary.finish(result)
    return result


__all__ = [
    "BlockFinding",
    "Finding",
    "OtherFinding",
    "PageFinding",
    "Rewrite",
    "StateFinding",
    "TokenFinding",
    "counts_from_first",
    "find_blocks",
    "find_pages",
    "find_sites",
    "find_states",
    "find_tokens",
    "fuse_sites",
    "rewrite_graph",
    "use_decode_linear",
]
