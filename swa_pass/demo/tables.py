"""The demo's tables: layers, speed and memory, whether the tokens are the same, what it costs once."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..render import ranges
from .compare import describe, first_differences

TITLES = {"dynamic": "stock dynamic", "static": "stock static", "applied": "swa_pass"}
LEGEND = """first: seconds to the first token. One row reads the whole text; more rows share
one reading of it, and each reads an ending of its own.
ms/step: median decode step. tokens/s: decode, all rows together.
speed-up: ms/step of the fastest stock variant against this one.
KV: memory of the cache in the end. RSS: peak of the process while generating."""


def show(console: Console, found: dict[str, Any]) -> None:
    """Prints everything that `runner.demo` measured."""
    console.print()
    console.print(layers_line(found["applied"]["report"]), highlight=False)
    first = found["results"][0]
    console.print(f"\nSpeed: {first['prompt_tokens']:,} tokens of text read, {written(found['results'])}")
    console.print(speed_table(found["results"]))
    console.print(LEGEND, style="dim", highlight=False)
    console.print()
    for line in token_lines(found["results"]):
        console.print(line, highlight=False)
    cost = found["applied"]["cost_s"]
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in cost.items())
    console.print(f"One-time cost of swa_pass in this process: {sum(cost.values()):.1f} s ({parts}).", highlight=False)
    sample = next(r for r in found["results"] if r["variant"] == "applied")
    console.print(f"\nIt wrote: [italic]{sample['text'].strip()}[/italic]\n", highlight=False)
    about = found["machine"]
    console.print(
        f"{about['cpu']}, {about['cores']} cores, {about['threads']} threads, torch {about['torch']}, transformers "
        f"{about['transformers']}. The demo took {found['seconds']:.0f} s. Variants ran one after another; "
        "benchmarks/decode.py interleaves them.",
        highlight=False,
        style="dim",
    )


def written(results: list[dict[str, Any]]) -> str:
    """How many tokens each variant wrote per row."""
    most = max(len(result["tokens"][0]) for result in results)
    fewest = min(len(result["tokens"][0]) for result in results)
    early = f" ({fewest} where a stock cache was clearly the slower one)" if fewest < most else ""
    return f"{most} written a row{early}"


def layers_line(report: dict[str, Any]) -> str:
    """What was found and proven, in a few lines."""
    layers = report["layers"]
    rewritten = [layer for layer in layers if layer["action"] == "rewritten"]
    windows = sorted({layer["window"] for layer in layers if layer["kind"] == "sliding"})
    sliding = [layer["index"] for layer in layers if layer["kind"] == "sliding"]
    full = [layer["index"] for layer in layers if layer["kind"] == "full"]
    lines = [
        f"Layers: {len(sliding)} of {len(layers)} slide with a window of {', '.join(map(str, windows))} tokens "
        f"(proven from the masks in the captured graph): {ranges(sliding)}",
        f"        {len(full)} see everything and keep a linear cache: {ranges(full)}",
        f"        {len(rewritten)} rewritten to ring buffers with fused attention",
    ]
    lines += [f"        layer {x['index']} refused: {x['reason']}" for x in layers if x["action"] == "refused"]
    return "\n".join(lines + [f"        {note}" for note in report["notes"]])


def speed_table(results: list[dict[str, Any]]) -> Table:
    """One line per batch size and variant, 80 columns wide; speed-up: against the fastest stock variant."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column("variant", no_wrap=True)
    for name in ("first, s", "ms/step", "tokens/s", "speed-up", "KV, MB", "RSS, MB"):
        table.add_column(name, justify="right", no_wrap=True)
    for batch in sorted({result["batch"] for result in results}):
        best = best_stock(results, batch)
        for result in (r for r in results if r["batch"] == batch):
            table.add_row(
                str(batch),
                TITLES[result["variant"]],
                f"{result['first_token_s']:.2f}",
                f"{result['step_ms']:.1f}",
                f"{result['tokens_per_s']:.1f}",
                f"{best['step_ms'] / result['step_ms']:.2f}x",
                f"{result['kv_bytes'] / 1e6:.1f}",
                f"{result['peak_rss'] / 1e6:,.0f}",
                style="bold" if result["variant"] == "applied" else None,
            )
        table.add_section()
    return table


def best_stock(results: list[dict[str, Any]], batch: int) -> dict[str, Any]:
    """The fastest stock result of a batch size; one that stopped early was slower."""
    stock = [r for r in results if r["batch"] == batch and r["variant"] != "applied"]
    most = max(len(result["tokens"][0]) for result in stock)
    return min((r for r in stock if len(r["tokens"][0]) == most), key=lambda result: result["step_ms"])


def token_lines(results: list[dict[str, Any]]) -> list[str]:
    """Per batch size: swa_pass against the best stock variant, and, for scale, the two stock variants."""
    lines = []
    for batch in sorted({result["batch"] for result in results}):
        by_variant = {r["variant"]: r for r in results if r["batch"] == batch}
        reference = best_stock(results, batch)
        other_stock = by_variant["static" if reference["variant"] == "dynamic" else "dynamic"]
        for title, other in ((TITLES["applied"], by_variant["applied"]), (TITLES[other_stock["variant"]], other_stock)):
            steps = min(len(reference["tokens"][0]), len(other["tokens"][0]))
            wanted, got = ([row[:steps] for row in r["tokens"]] for r in (reference, other))
            verdict = describe(first_differences(wanted, reference["margins"], got), len(wanted), steps)
            lines.append(f"Tokens, batch {batch}, {title} against {TITLES[reference['variant']]}: {verdict}.")
    return lines
