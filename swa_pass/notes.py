"""Where a model's config, or its stock cache, says something else than the masks in its graph. The graph wins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .compat import own_layers, stock_windows
from .render import ranges
from .spec import LayerSpec


def contradictions(config: Any, specs: Sequence[LayerSpec]) -> list[str]:
    """One sentence for each way in which layers differ from what was announced."""
    text = config.get_text_config(decoder=True)
    types = list(getattr(text, "layer_types", None) or [])
    windows, own = stock_windows(config), own_layers(config)
    announced: dict[tuple[str, str], list[int]] = {}
    evicted: dict[tuple[int, str], list[int]] = {}
    for spec in specs:
        if spec.kind not in ("sliding", "full"):
            continue
        said = types[spec.index] if spec.index < len(types) else ""
        if said and ("sliding" in said) != (spec.kind == "sliding") and "chunk" not in said:
            announced.setdefault((said, spec.kind), []).append(spec.index)
        window = windows[spec.index] if spec.index < len(windows) else None
        if window is not None and spec.kind == "full":
            evicted.setdefault((window, own.get(spec.index, "")), []).append(spec.index)
    notes = [
        f"config.layer_types says {said} for {_layers(indexes)}, but the mask in the graph is {kind}: the graph wins."
        for (said, kind), indexes in announced.items()
    ]
    for (window, kind), indexes in evicted.items():
        if kind:
            why = (
                f"with any cache but the model's own no mask hides old keys. Its own layers ({kind}) hold a window of "
                f"{window} and may show more, such as a prompt that is never evicted: no ring can stand in for them, "
                "and the model keeps them."
            )
        else:
            why = (
                f"no mask hides old keys; a window of {window} exists only because the stock cache evicts them, so "
                "prefill and decode of the stock model disagree. Such a layer is not sliding here."
            )
        notes.append(f"{_layers(indexes)}: {why}")
    return notes


def _layers(indexes: list[int]) -> str:
    return f"layer{'s' * (len(indexes) > 1)} {ranges(indexes)}"
