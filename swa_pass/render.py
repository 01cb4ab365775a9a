"""A report as a table that a person can read."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from .spec import LayerSpec, Report


def render(report: Report, context: int = 32768) -> str:
    """The table behind ``print(report)``: one line per kind of layer, and the KV memory at `context` tokens."""
    table = Table(title=f"swa_pass: {report.model}")
    for column in ("layers", "kind", "window", "action", "heads/kv", "head_dim", "why"):
        table.add_column(column, overflow="fold")
    for indexes, spec in _equal_layers(report):
        table.add_row(
            ranges(indexes),
            f"{spec.kind} + state" if spec.state else spec.kind,
            str(spec.window or "-"),
            spec.action,
            f"{spec.heads}/{spec.kv_heads}",
            str(spec.head_dim),
            spec.reason or "mask proven, ring and fused attention",
        )
    out = io.StringIO()
    console = Console(file=out, width=120)
    console.print(table)
    ours, stock = report.kv_bytes(context), report.stock_kv_bytes(context)
    console.print(
        f"{len(report.rewritten)} of {len(report.sliding)} sliding layers rewritten, "
        f"{len(report.layers)} layers in all. "
        f"KV at {context:,} tokens, one row: {ours / 2**20:.1f} MiB "
        f"(full context in every layer: {stock / 2**20:.1f} MiB)."
    )
    for note in report.notes:
        console.print(note)
    return out.getvalue().rstrip()


def _equal_layers(report: Report) -> list[tuple[list[int], LayerSpec]]:
    """Layers that differ in nothing but their index, in the order of the first of each kind."""
    groups: dict[LayerSpec, list[int]] = {}
    for spec in report.layers:
        groups.setdefault(replace(spec, index=0), []).append(spec.index)
    return [(indexes, spec) for spec, indexes in groups.items()]


def ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"
