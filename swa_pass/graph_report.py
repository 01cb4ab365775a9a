"""`explain` on a graph: what is found, what the passes would do, and a page with pictures that a person can open."""

from __future__ import annotations

import copy
import html
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from .diary import lines
from .graph import op_name
from .passes import (
    Finding,
    OtherFinding,
    Rewrite,
    StateFinding,
    find_blocks,
    find_pages,
    find_sites,
    find_states,
    find_tokens,
    rewrite_graph,
)
from .patterns import StateUse
from .patterns.kv_view import KVView
from .picture import Sketch, draw, sketch

AnyFinding: TypeAlias = Finding | OtherFinding


@dataclass(frozen=True)
class Site:
    """One attention on a cache. `after` is None where it is left alone, and `verdict` says why."""

    name: str
    verdict: str
    before: Sketch
    after: Sketch | None


@dataclass(frozen=True)
class GraphReport:
    """What the passes would do to a graph. ``print(report)`` lists it; ``report.save("page.html")`` draws it."""

    sites: tuple[Site, ...]
    summary: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.summary)

    def html(self) -> str:
        """One page: a table of all attentions and, for each, the graph around it before and after, as SVG.

        ImportError where matplotlib is missing.
        """
        rows = "".join(f"<tr><td>{html.escape(s.name)}</td><td>{html.escape(s.verdict)}</td></tr>" for s in self.sites)
        pictures = "".join(f"<h2>{html.escape(s.name)}</h2>{_svg(s)}" for s in self.sites)
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>swa_pass</title>'
            "<style>body{font-family:sans-serif;margin:2em}td{padding:.2em 1em;border-bottom:1px solid #ccc}"
            "svg{max-width:100%;height:auto}</style>"
            f"<h1>swa_pass: {html.escape(self.summary[-1])}</h1><table>{rows}</table>{pictures}</html>"
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes `html()` to a file and returns its path."""
        target = Path(path)
        target.write_text(self.html(), encoding="utf-8")
        return target


def _svg(site: Site) -> str:
    out = io.StringIO()
    draw(site.verdict, site.before, site.after).savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def explain_graph(graph: GraphModule | ExportedProgram, own_state: bool = True) -> GraphReport:
    """A report about a graph, which is left as it is. Arguments as in `rewrite`."""
    gm: Any = graph.module() if isinstance(graph, ExportedProgram) else copy.deepcopy(graph)
    found: list[Any] = [*find_sites(gm), *find_states(gm, own_state)]
    found += [*find_pages(gm), *find_tokens(gm), *find_blocks(gm)]
    before = {finding.site.node.name: _before(finding) for finding in found}
    result = rewrite_graph(gm, own_state=own_state)
    fused = {node.meta["swa_pass_replaced"]: node for node in gm.graph.nodes if "swa_pass_replaced" in node.meta}
    sites = []
    rewritten: list[AnyFinding] = [*result.findings, *result.states]
    for finding in rewritten:
        node = fused.get(finding.site.node.name)
        verdict = finding.refusal or f"{_mask_says(finding)}: rewritten"
        sites.append(Site(_name(finding), verdict, before[finding.site.node.name], _after(node)))
    return GraphReport(tuple(sites), tuple(_summary(result)))


def _summary(result: Rewrite) -> list[str]:
    found = lines(result)
    return found if len(found) > 1 else ["no attention on a KV cache was found in this graph", *found]


def _name(finding: AnyFinding) -> str:
    if isinstance(finding, Finding):
        return f"layer {finding.layer}"
    return f"{finding.name} ({finding.keys.idiom})"


def _mask_says(finding: AnyFinding) -> str:
    window = finding.window if isinstance(finding, StateFinding) else finding.mask.window or 0
    shows_all = window and finding.mask.kind == "full"  # of a store that has `window` slots
    kind = "sliding" if shows_all else finding.mask.kind
    return f"mask: {kind}, {window} keys" if window else f"mask: {kind}"


def _before(finding: AnyFinding) -> Sketch:
    tokens, states = {finding.site.query}, set()
    for read in (finding.keys, finding.values):
        if isinstance(read, (StateUse, KVView)):
            states.add(read.state if isinstance(read, StateUse) else read.store)
            tokens.add(read.new)
        else:
            states.add(read.pages)
    return sketch(finding.site.node, tokens, states, finding.site.mask, _mask_says(finding))


def _after(node: Node | None) -> Sketch | None:
    if node is None:
        return None
    given: Any = [argument for argument in node.args[:5] if isinstance(argument, Node)]
    listed = op_name(node) in ("swa_pass::attend_tokens", "swa_pass::attend_blocks")
    tokens, stores = ({given[0]}, {*given[1:3]}) if listed else ({*given[:3]}, {*given[3:]})
    return sketch(node, tokens, stores, None, "")
