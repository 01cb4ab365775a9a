"""Attention on gathered pages, one query a row: reads the blocks of the window instead of gathering all of them.

    before   keys = pages[table] ...; out = attention(q, keys, values, mask)
    after    out = attend(q, k at the query's position, v, pages, v_pages, positions, window, block_table=table)

The pages are the engine's. Nothing is written here, and the engine's own writes stay where they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..formula import INDEXES, Field, Lin
from ..graph import changed_in_place, erase_all_unused, example, first_writer, op_name, shape_of, take_place
from ..masks import Mask, prove_around, unknown
from ..patterns import AttentionSite, paged_store
from ..patterns.kv_view import ungrouped
from ..patterns.paged_store import PagedRead
from .adopt import ALL, Caller
from .verdict import Verdict, attentions, operands_problem, outermost

aten = torch.ops.aten


@dataclass(frozen=True)
class PageFinding(Verdict):
    """One attention on gathered pages. `position`: the query's, per row, in terms of the graph's inputs."""

    keys: PagedRead
    values: PagedRead
    position: Lin

    @property
    def name(self) -> str:
        return self.keys.pages.name

    def __str__(self) -> str:
        what = f"window {self.mask.window}" if self.mask.window else "all keys"
        return f"{self.name} (paged_store): {self.refusal or what}"


def find_pages(gm: GraphModule) -> list[PageFinding]:
    memo: dict[Node, Field] = {}
    findings = []
    for idiom, site in attentions(gm):
        (key, key_groups), (value, value_groups) = ungrouped(site.key), ungrouped(site.value)
        keys, values = paged_store.match(key), paged_store.match(value)
        if keys is None or values is None:
            continue
        groups = key_groups, value_groups
        problem = idiom.validate(site) or _mismatch(site, keys, values, shape_of(key)[1], groups)
        mask, position = (unknown(problem), Lin(0)) if problem else _prove(site, memo)
        if not problem and mask.kind == "chunked":
            problem = "the mask is chunked"
        findings.append(PageFinding(site, mask, problem, keys, values, position))
    return outermost(findings)


def _mismatch(site: AttentionSite, keys: PagedRead, values: PagedRead, kv_heads: Any, groups: tuple[int, int]) -> str:
    if keys.table is not values.table or keys.axes != values.axes or keys.block != values.block:
        return "keys and values are gathered from different blocks"
    if str(shape_of(site.query)[2]) != "1":
        return f"{shape_of(site.query)[2]} queries a row: pages are read in place for one"
    problem = operands_problem(site, kv_heads, groups, (keys.pages, values.pages))
    if problem:
        return problem
    changed = next((n for n in (site.query, keys.table) if changed_in_place(n)), None)
    if changed is not None:
        return f"{changed.name} is changed in place"
    late = next((read for read in (keys, values) if _written_after(read)), None)
    return f"{late.pages.name} is written after it was gathered" if late is not None else ""


def _written_after(read: PagedRead) -> bool:
    """Whether the pages may hold something else at the attention than at the gather."""
    writer = first_writer(read.pages)
    if writer is None:
        return False
    order = {node: n for n, node in enumerate(read.pages.graph.nodes)}
    writers = [user for user in read.pages.users if op_name(user).endswith("_") or op_name(user) == "setitem"]
    return any(order[w] > order[read.gather] for w in {writer, *writers})


def _prove(site: AttentionSite, memo: dict[Node, Field]) -> tuple[Mask, Lin]:
    mask, position = prove_around(site.mask, shape_of(site.key)[2], memo)
    for symbol, _ in position.terms:
        per_row = isinstance(symbol, tuple) and len(symbol) == 2 and symbol[1] in (Lin(0), Lin.symbol(INDEXES[0]))
        if not per_row and not mask.refused:
            return unknown(f"the query's position is {position}, which is no element of an input"), position
    return mask, position


def read_pages(gm: GraphModule, findings: list[PageFinding]) -> None:
    """Rewrites the findings without a refusal."""
    chosen = [finding for finding in findings if not finding.refused]
    call = Caller(gm)
    for finding in chosen:
        site, keys, values = finding.site, finding.keys, finding.values
        with gm.graph.inserting_before(site.node):
            batch = shape_of(site.query)[0]
            rows = batch if isinstance(batch, int) else call(aten.sym_size.int, site.query, 0)
            position = _positions(call, finding.position, site.query, rows)
            news, stores = zip(*(_token_and_store(call, read, position, rows) for read in (keys, values)))
            out = gm.graph.call_function(
                torch.ops.swa_pass.attend.default,
                (site.query, *news, *stores, position),
                {
                    "window": finding.mask.window or ALL,
                    "scale": float(site.scale),
                    "softcap": site.softcap,
                    "sinks": site.sinks,
                    "block_table": keys.table,
                },
            )
        take_place(out, site.node)
        site.node.replace_all_uses_with(out)
    if chosen:
        erase_all_unused(gm)
        gm.graph.lint()
        gm.recompile()


def _positions(call: Caller, form: Lin, query: Node, rows: Any) -> Node:
    """(B,) int64: the position of each row's query."""
    total = call(aten.full.default, [rows], form.const, dtype=torch.int64, device=example(query).device)
    for (name, _), factor in form.terms:
        source = next(node for node in query.graph.nodes if node.name == name)
        total = call(aten.add.Tensor, total, source, alpha=factor)  # (B,), or one number for all rows
    return total


def _token_and_store(call: Caller, read: PagedRead, position: Node, rows: Any) -> tuple[Node, Node]:
    """The token at each row's own position, (B, kv_heads, 1, head_dim), and the pages as the operator takes them."""
    size = read.block
    at = call(aten.unsqueeze.default, call(aten.floor_divide.default, position, size), 1)
    block = call(aten.squeeze.dim, call(aten.gather.default, read.table, 1, at), 1)
    if read.axes is None:
        token = call(aten.index.Tensor, read.pages, [block])
        return call(aten.unsqueeze.default, token, 2), call(aten.unsqueeze.default, read.pages, 2)
    pages = read.pages if read.axes[1] == 1 else call(aten.transpose.int, read.pages, 1, 2)
    row = call(aten.index.Tensor, pages, [block])  # (B, kv_heads, size, head_dim)
    inside = call(aten.reshape.default, call(aten.remainder.Scalar, position, size), [-1, 1, 1, 1])
    shape = shape_of(read.pages)
    wide = call(aten.expand.default, inside, [-1, shape[read.axes[1]], 1, shape[3]])
    return call(aten.gather.default, row, 2, wide), pages
