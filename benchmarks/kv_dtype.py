"""What keys and values in one byte a number cost and save: perplexity of the real Gemma 3 270M, and bytes.

    python benchmarks/kv_dtype.py                      # 2,000 tokens of the text that the demo reads

Perplexity: the text goes through an applied model in chunks, so that every key is read from a store once the window has
moved on; what is counted is all but the first token. The first row is the stock model without a cache, the second our
rings in the model's own dtype: their distance is the noise of bfloat16, against which the others have to be read.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import swa_pass
from swa_pass.api import runtime_of
from swa_pass.compat import output_cache
from swa_pass.demo import gemma
from swa_pass.demo.runner import machine
from swa_pass.demo.text import document


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """Of every token but the first: logits (1, n, V) at all n tokens, ids (1, n)."""
    return torch.log_softmax(logits[0, :-1].float(), -1).gather(1, ids[0, 1:, None])[:, 0]


@torch.no_grad()
def through_the_stores(model: Any, ids: Tensor, chunk: int) -> tuple[Tensor, int]:
    """Log-probabilities, and the bytes of KV memory at the end."""
    cache, parts = None, []
    for first in range(0, ids.shape[1], chunk):
        given = {} if cache is None else {runtime_of(model).cache_name: cache}  # type: ignore[union-attr]
        output = model(ids[:, first : first + chunk], use_cache=True, **given)
        cache = output_cache(output)
        parts.append(output.logits)
    return log_probabilities(torch.cat(parts, 1), ids), cache.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--chunk", type=int, default=250)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, tokenizer = gemma(getattr(torch, options.dtype))
    ids = tokenizer(document() + "\n\n" + document(), return_tensors="pt").input_ids[:, : options.tokens]
    with torch.no_grad():
        exact = log_probabilities(model(ids, use_cache=False).logits, ids)
    rows: list[dict[str, Any]] = [{"kv": "stock, no cache", "perplexity": exact.mean().neg().exp().item()}]
    for kv_dtype in (None, "int8", "float8"):
        swa_pass.apply(model, backend="eager", kv_dtype=kv_dtype)
        found, held = through_the_stores(model, ids, options.chunk)
        swa_pass.revert(model)
        moved = (found - exact).abs()
        rows.append(
            {
                "kv": kv_dtype or f"rings, {options.dtype}",
                "perplexity": found.mean().neg().exp().item(),
                "mean |d log p|": moved.mean().item(),
                "max |d log p|": moved.max().item(),
                "KV bytes": held,
            }
        )
    table = Table(
        title=f"Gemma 3 270M ({options.dtype}), {ids.shape[1]} tokens, chunks of {options.chunk}", box=box.SIMPLE
    )
    for name in rows[-1]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{v:.5g}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else v for v in
                        (row.get(name, "") for name in rows[-1])))  # fmt: skip
    console = Console(width=100)
    console.print(table)
    print(json.dumps(machine(torch.get_num_threads())))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
