"""Writes down what the passes do to every graph: its code before and after, and a line for every attention.

Off unless ``SWA_PASS_DEBUG`` is set (``1``: into ``./swa_pass_debug``; anything else names the folder) or inside
``with swa_pass.debug("folder")``:

    0001.before.py     the graph as it came          0001.matches.txt   what was found, and why not
    0001.after.py      the graph as it went on
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from torch.fx import GraphModule

if TYPE_CHECKING:
    from .passes import Rewrite

_folder: ContextVar[Path | None] = ContextVar("swa_pass_debug", default=None)
_numbers = itertools.count(1)


@contextmanager
def debug(folder: str | os.PathLike[str] = "swa_pass_debug") -> Iterator[Path]:
    """Within this context, every graph that the passes see is written into `folder`, which is made if need be."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    token = _folder.set(path)
    try:
        yield path
    finally:
        _folder.reset(token)


def folder() -> Path | None:
    """Where to write; None if nobody asked."""
    inside = _folder.get()
    if inside is not None:
        return inside
    named = os.environ.get("SWA_PASS_DEBUG", "")
    if named in ("", "0"):
        return None
    path = Path("swa_pass_debug" if named == "1" else named)
    path.mkdir(parents=True, exist_ok=True)
    return path


class Diary:
    """What one graph went through, written as it happens; does nothing while debugging is off."""

    def __init__(self, gm: GraphModule) -> None:
        self.path = folder()
        if self.path is not None:
            self.number = next(_numbers)
            self._write("before.py", code(gm))

    def finish(self, result: Rewrite) -> None:
        if self.path is not None:
            self._write("after.py", code(result.graph))
            self._write("matches.txt", "\n".join(lines(result)) + "\n")

    def _write(self, ending: str, text: str) -> None:
        assert self.path is not None
        (self.path / f"{self.number:04d}.{ending}").write_text(text)


def code(gm: GraphModule) -> str:
    """The graph as Python, with shapes where they are known."""
    return gm.print_readable(print_output=False)


def lines(result: Rewrite) -> list[str]:
    """One line for every attention on a cache, and one for the whole graph."""
    found = []
    for finding in result.findings:
        what = finding.refusal or f"{finding.mask.kind}, window {finding.mask.window or 'none'}"
        state = "rewritten" if finding.layer in result.fused else "left alone"
        found.append(f"layer {finding.layer}: {state}: {what} ({finding.site.node.name})")
    for use in result.states:
        found.append(f"{'left alone' if use.refusal else 'rewritten'}: {use} ({use.site.node.name})")
    before, after = len(result.ops_before), len(result.ops_after)
    return [*found, f"{result.matches} rewritten, {result.left_alone} left alone; {before} -> {after} nodes"]
