"""How attention and cache reads look in graphs, one idiom a file.

An attention idiom has ``match(node) -> AttentionSite | None`` (pure and cheap) and ``validate(site) -> str`` (empty, or
one sentence that says why the site cannot be rewritten). To add one: write the file, list it in `ATTENTION`.
"""

from __future__ import annotations

from types import ModuleType

from . import eager, lse_sinks, sdpa
from .site import AttentionSite

ATTENTION: tuple[ModuleType, ...] = (sdpa, eager, lse_sinks)

__all__ = ["ATTENTION", "AttentionSite"]
