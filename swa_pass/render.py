"""A report as a table that a person can read."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from .spec import LayerSpec, Report


def render(report: Report, context: int = 32768) -> str:
    """The table behind ``print(report)``: one line per run of equal layers, and the KV memory at `context` tokens."""
    table = Table(title=f"swa_pass: {report.model}")
    for column in ("layers", "kind", "window", "action", "heads/kv", "head_dim", "why"):
        table.add_column(column, overflow="fold")
    for first, last, spec in _runs(report):
        layers = str(first) if first == last else f"{first}-{last}"
        table.add_row(
            layers,
            spec.kind,
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


def _runs(report: Report) -> list[tuple[int, int, LayerSpec]]:
    """Consecutive layers that differ in nothing but their index."""
    from dataclasses import replace

    runs: list[tuple[int, int, LayerSpec]] = []
    for spec in report.layers:
        if runs and replace(spec, index=runs[-1][2].index) == runs[-1][2]:
            runs[-1] = (runs[-1][0], spec.index, runs[-1][2])
        else:
            runs.append((spec.index, spec.index, spec))
    return runs
