"""How attention and cache reads look in graphs, one idiom a file.

An attention idiom has ``match(node) -> AttentionSite | None`` (pure and cheap) and ``validate(site) -> str`` (empty, or
one sentence that says why the site cannot be rewritten). A cache idiom has ``match(read, reader) -> StateUse | None``:
`read` is what an attention reads as its keys or values, `reader` the attention. To add one: write the file and list it.
"""

from __future__ import annotations

from types import ModuleType

from . import (
    eager,
    flat_blocks,
    flex,
    gathered_window,
    joined_tokens,
    linear_store,
    lse_sinks,
    paged_store,
    sdpa,
    shifted_window,
    sliced_store,
    token_list,
)
from .site import AttentionSite
from .state import StateUse

ATTENTION: tuple[ModuleType, ...] = (sdpa, eager, lse_sinks, flex)
CACHES: tuple[ModuleType, ...] = (linear_store, sliced_store, shifted_window, gathered_window, joined_tokens)

__all__ = ["ATTENTION", "CACHES", "AttentionSite", "StateUse", "flat_blocks", "paged_store", "token_list"]
