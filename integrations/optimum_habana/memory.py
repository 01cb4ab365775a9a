"""KV memory of known models, with rings and without: `python -m swa_pass.integrations.optimum_habana.memory`."""

from __future__ import annotations

from dataclasses import dataclass

from .report import GaudiReport, spec

CONTEXTS = (8192, 32768, 131072)


@dataclass(frozen=True)
class Shape:
    """What KV bytes depend on. pattern: one layer in so many is global (the last of each group), or None: no layer."""

    layers: int
    pattern: int | None
    window: int
    heads: int
    kv_heads: int
    head_dim: int

    def windows(self) -> list[int | None]:
        full = [bool(self.pattern) and (i + 1) % (self.pattern or 1) == 0 for i in range(self.layers)]
        return [None if is_full else self.window for is_full in full]

    def report(self, name: str) -> GaudiReport:
        """The report of such a model in bfloat16."""
        windows = enumerate(self.windows())
        return GaudiReport(
            name, tuple(spec(i, window, self.heads, self.kv_heads, self.head_dim) for i, window in windows), 0
        )


MODELS = {
    "gemma-3-27b": Shape(layers=62, pattern=6, window=1024, heads=32, kv_heads=16, head_dim=128),
    "gemma-2-9b": Shape(layers=42, pattern=2, window=4096, heads=16, kv_heads=8, head_dim=256),
    "mistral-7b-v0.1": Shape(layers=32, pattern=None, window=4096, heads=32, kv_heads=8, head_dim=128),
    "gpt-oss-20b": Shape(layers=24, pattern=2, window=128, heads=64, kv_heads=8, head_dim=64),
}


def table() -> str:
    """Markdown: GiB of bfloat16 KV per row, stock and with rings, at each context."""
    lines = ["| model | context | stock, GiB | rings, GiB | saved |", "|---|---|---|---|---|"]
    for name, shape in MODELS.items():
        report = shape.report(name)
        for context in CONTEXTS:
            stock, ours = report.stock_kv_bytes(context), report.kv_bytes(context)
            lines.append(
                f"| {name} | {context:,} | {stock / 2**30:.2f} | {ours / 2**30:.2f} | {1 - ours / stock:.0%} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
