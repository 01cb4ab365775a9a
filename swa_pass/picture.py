"""An attention in a graph as a picture, before and after the passes.

sketch      the nodes around one attention, as plain data: what it reads, its mask, what it writes
draw        two sketches side by side, as a matplotlib figure
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from .graph import example, has_side_effect, op_name, shape_of

_COLOURS = {
    "state": "#9ecae1",
    "tokens": "#c7e9c0",
    "mask": "#d9d9d9",
    "attention": "#fdae6b",
    "write": "#bcbddc",
    "step": "#ffffff",
}
#: Nodes of a sketch that are spelled out; what lies further back is one box.
_DEPTH = 20


@dataclass
class Sketch:
    """Boxes (name -> (label, kind)) and arrows (from, to) around one attention."""

    boxes: dict[str, tuple[str, str]] = field(default_factory=dict)
    arrows: set[tuple[str, str]] = field(default_factory=set)


def sketch(attention: Node, tokens: set[Node], states: set[Node], mask: Any, mask_says: str) -> Sketch:
    """What leads to `attention`, as far back as `tokens` (this step's queries, keys and values) and `states`; the mask
    is one box with its verdict."""
    result = Sketch()
    queue: list[tuple[Node, int]] = [(attention, 0)]
    for node, depth in queue:  # grows while it is walked
        if node.name in result.boxes:
            continue
        kind = "attention" if node is attention else "step"
        kind = "state" if node in states else "tokens" if node in tokens else "mask" if node is mask else kind
        result.boxes[node.name] = (mask_says if node is mask else _label(node, kind), kind)
        if kind in ("tokens", "mask") or depth >= _DEPTH:
            continue
        for source in node.all_input_nodes:
            result.arrows.add((source.name, node.name))
            queue.append((source, depth + 1))
        if kind == "state":
            for writer in node.users:
                if has_side_effect(writer) and writer.op != "output" and writer is not attention:
                    result.boxes.setdefault(writer.name, (_label(writer, "write"), "write"))
                    result.arrows |= {(source.name, writer.name) for source in writer.all_input_nodes}
                    queue += [(source, depth + 1) for source in writer.all_input_nodes]
    result.arrows = {(a, b) for a, b in result.arrows if a in result.boxes and b in result.boxes and a != b}
    return result


def _label(node: Node, kind: str) -> str:
    name = str(node.target) if kind == "state" and node.op == "get_attr" else node.name
    what = name if kind in ("state", "tokens") else op_name(node).replace("swa_pass::", "")
    shape = shape_of(node)
    if shape or hasattr(example(node), "shape"):
        return f"{what}\n({', '.join(map(str, shape))})"
    return what


def draw(title: str, before: Sketch, after: Sketch | None) -> Any:
    """A matplotlib figure: the attention before, and after (None: it was left alone).

    ImportError with what to install where matplotlib is missing.
    """
    try:
        import networkx
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib and networkx: pip install 'swa-pass[pictures]'") from error
    panels = [("before", before), *([("after", after)] if after is not None else [])]
    widths = [max(_widest(panel, networkx), 2) for _, panel in panels]
    heights = [_longest(panel, networkx) for _, panel in panels]
    figure = Figure(figsize=(1.9 * sum(widths) + 0.5, 0.9 * max(heights) + 0.8))
    for (name, panel), axes in zip(panels, figure.subplots(1, len(panels), width_ratios=widths, squeeze=False)[0]):
        axes.set_title(f"{name}: {len(panel.boxes)} nodes", fontsize=10)
        axes.axis("off")
        _draw_boxes(axes, panel, networkx)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    return figure


def _layers(panel: Sketch, networkx: Any) -> list[list[str]]:
    """Boxes from top to bottom, each below all that it comes from."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(sorted(panel.boxes))
    graph.add_edges_from(sorted(panel.arrows))
    return [sorted(layer) for layer in networkx.topological_generations(graph)]


def _widest(panel: Sketch, networkx: Any) -> int:
    return max(map(len, _layers(panel, networkx)))


def _longest(panel: Sketch, networkx: Any) -> int:
    return len(_layers(panel, networkx))


def _draw_boxes(axes: Any, panel: Sketch, networkx: Any) -> None:
    layers = _layers(panel, networkx)
    place = {}
    for row, layer in enumerate(layers):
        for column, name in enumerate(layer):
            place[name] = (column - (len(layer) - 1) / 2, -row)
    wide = max(map(len, layers))
    axes.set_xlim(-wide / 2, wide / 2)
    axes.set_ylim(-len(layers) + 0.4, 0.6)
    for source, target in sorted(panel.arrows):
        style = {"arrowstyle": "->", "color": "#666666", "shrinkA": 11, "shrinkB": 11, "lw": 0.8}
        axes.annotate("", xy=place[target], xytext=place[source], arrowprops=style)
    for name, (label, kind) in panel.boxes.items():
        box = {"boxstyle": "round,pad=0.3", "facecolor": _COLOURS[kind], "edgecolor": "#444444", "lw": 0.8}
        axes.text(*place[name], label, ha="center", va="center", fontsize=7, bbox=box)
