"""One query a row on a flat list of blocks: the softmax in steps becomes one operator that reads the blocks in place.

    before   matmuls with the mapping, gathers, maxima and sums by block and by row   (see patterns/flat_blocks.py)
    after    rows = block_rows(groups, mapping); out = attend_blocks(q, pages, v_pages, blocks, rows, bias)

The lists and the bias stay what they are. The graph says twice whose a block is, by a number and by a matrix; that the
two agree is checked when the graph runs (`block_rows`), once for all layers that share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from ..graph import erase_unread, example, is_after, shape_of, take_place
from ..masks import GIVEN
from ..patterns import AttentionSite, flat_blocks
from ..patterns.flat_blocks import BlockRead, FlatBlocks
from .placing import make_room, place
from .verdict import Verdict

aten = torch.ops.aten


@dataclass(frozen=True)
class BlockFinding(Verdict):
    """One attention on a flat list of blocks. `before`: where in the graph the fused one goes."""

    found: FlatBlocks
    before: Node

    @property
    def keys(self) -> BlockRead:
        return self.found.keys

    @property
    def values(self) -> BlockRead:
        return self.found.values

    @property
    def name(self) -> str:
        return self.keys.pages.name

    def __str__(self) -> str:
        return f"{self.name} (flat_blocks): {self.refusal or 'the bias as it is given'}"


def find_blocks(gm: GraphModule) -> list[BlockFinding]:
    findings = []
    for node in gm.graph.nodes:
        found = flat_blocks.match(node)
        if found is None:
            continue
        reads = found.keys.gather, found.values.gather
        site = AttentionSite(node, found.query, *reads, found.bias, 1.0, False, 0.0, grouped=True)
        before, problem = place(node, reads, _operands(found))
        if any(example(read.pages).dtype != example(found.query).dtype for read in (found.keys, found.values)):
            problem = "queries, keys and values differ in dtype"
        findings.append(BlockFinding(site, GIVEN, problem, found, before))
    return findings


def _operands(found: FlatBlocks) -> list[Node]:
    bias = [] if found.bias is None else [found.bias]
    return [found.query, found.keys.blocks, found.groups, found.mapping, *bias]


def read_blocks(gm: GraphModule, findings: Sequence[BlockFinding]) -> None:
    """Rewrites the findings without a refusal."""
    chosen = [finding for finding in findings if not finding.refused]
    owners: dict[tuple[Node, Node], Node] = {}  # all layers have the same lists
    for finding in chosen:
        found, key = finding.found, (finding.found.groups, finding.found.mapping)
        if key not in owners:
            with gm.graph.inserting_after(key[0] if is_after(*key) else key[1]):
                owners[key] = gm.graph.call_function(torch.ops.swa_pass.block_rows.default, key)
        make_room(_operands(found), finding.before)
        with gm.graph.inserting_before(finding.before):
            out = _call_blocks(gm.graph, found, owners[key])
        take_place(out, finding.site.node)
        finding.site.node.replace_all_uses_with(out)
    if chosen:
        erase_unread(gm)
        gm.graph.lint()
        gm.recompile()


def _call_blocks(graph: Graph, found: FlatBlocks, rows: Node) -> Node:
    pages: list[Node] = [found.keys.pages, found.values.pages]
    if not found.keys.heads_first:
        pages = [graph.call_function(aten.transpose.int, (x, 1, 2)) for x in pages]
    query = graph.call_function(aten.reshape.default, (found.query, [-1, found.heads, found.keys.head_dim]))
    bias = found.bias
    if bias is not None:
        bias = graph.call_function(aten.reshape.default, (bias, [-1, shape_of(bias)[-1]]))
    out = graph.call_function(
        torch.ops.swa_pass.attend_blocks.default, (query, *pages, found.keys.blocks, rows, bias), {"scale": 1.0}
    )
    return graph.call_function(aten.reshape.default, (out, [-1, found.heads * found.values.head_dim]))
