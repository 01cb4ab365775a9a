"""Every family against its stock model: what was decided, what was done, and how far the logits are.

    python tests/families.py --write docs/families.md      all of families.json, as a table
    python tests/families.py gemma3 mistral                these, printed

A family is a tiny random model (fp32, weights drawn with a spread of 0.2). Two rows, the second left padded, read a
prompt of 2W + 3 tokens and then 3W + 2 more one at a time; all logits are compared with the stock model on the whole
sequence without a cache. `tells` is how far the logits move when the window is changed by one: a comparison that could
not see that would prove nothing.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import json
import logging
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from family_drivers import driven
from torch import Tensor

import swa_pass
from swa_pass.api import runtime_of

ENTRIES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "families.json").read_text())
BY_NAME = {entry["family"]: entry for entry in ENTRIES}
LETTERS = {"sliding": "s", "full": "f", "chunked": "c", "picked": "p", "state": "-", "other": "?"}
PADS = 3
#: What is as it should be; anything else is refused, not built, or runs eager on rings.
DONE = ("rewritten", "kept")
#: Logits further from the stock model's than this are wrong.
LIMIT = 1e-3


@dataclass(frozen=True)
class Row:
    """One family.

    layers: a letter per cache layer, see LETTERS.  error: largest |d logits|, None if nothing could be compared.
    tells: the same for a window changed by one (the smaller of the two).  compiled: calls through our graphs.
    """

    family: str
    action: str
    reason: str
    seconds: float
    layers: str = ""
    windows: tuple[int, ...] = ()
    error: float | None = None
    tells: float | None = None
    compiled: int = 0
    calls: int = 0


def build(entry: dict[str, Any], window_change: int = 0) -> Any:
    """The tiny model of an entry; the same weights whatever the window."""
    *path, name = entry["model_class"].split(".")
    owner = importlib.import_module("transformers." + ".".join(path)) if path else transformers
    arguments = _with(copy.deepcopy(entry["config"]), window_change)
    config = getattr(transformers, entry["config_class"])(**arguments)
    if "attn" in entry:
        config._attn_implementation = entry["attn"]
    torch.manual_seed(0)
    return driven(getattr(owner, name)(config).eval(), entry)


def _with(arguments: dict[str, Any], change: int) -> dict[str, Any]:
    arguments["initializer_range"] = 0.2
    for name, value in arguments.items():
        if isinstance(value, dict) and name.endswith(("config", "encoder", "decoder")):
            _with(value, change)
        elif _is_window(name, value):
            arguments[name] = value + change
    return arguments


def _is_window(name: str, value: Any) -> bool:
    return "window" in name and type(value) is int and name not in ("max_window_layers", "n_window", "n_window_infer")


def mutant(entry: dict[str, Any], stock: Any, window_change: int) -> Any:
    """The stock model's weights with another window."""
    model, weights = build(entry, window_change), stock.state_dict()
    if all(tensor.shape == weights[name].shape for name, tensor in model.state_dict().items()):
        model.load_state_dict(weights)
        return model
    model = copy.deepcopy(stock)  # a table has a place for each distance in the window: the masks alone change
    for name, value in list(vars(model.config).items()):
        if _is_window(name, value):
            setattr(model.config, name, value + window_change)
    return model


def ids_of(length: int, batch: int = 1, seed: int = 0) -> Tensor:
    """Random tokens that mean nothing special to any entry."""
    return torch.randint(5, 90, (batch, length), generator=torch.Generator().manual_seed(seed))


def measure(entry: dict[str, Any]) -> Row:
    """Builds, explains, runs and compares one family. Never raises for a family that cannot be built or captured."""
    started = time.perf_counter()

    def row(action: str, reason: str, **found: Any) -> Row:
        return Row(entry["family"], action, reason, time.perf_counter() - started, **found)

    try:
        stock = build(entry)
    except Exception as error:
        return row("not built", f"stock: {_line(error)}")
    try:
        model = swa_pass.apply(copy.deepcopy(stock), backend="eager")
        report = swa_pass.explain(model)
    except (TypeError, ValueError) as error:
        return row("refused", str(error))
    refused = [layer for layer in report.layers if layer.action == "refused"]
    rewritten = [layer for layer in report.layers if layer.action == "rewritten"]
    found: dict[str, Any] = {
        "layers": "".join(LETTERS[layer.kind] for layer in report.layers),
        "windows": tuple(sorted({layer.window for layer in rewritten})),
    }
    reason = (
        refused[0].reason
        if refused
        else " ".join(report.notes) or next((x.reason for x in report.layers if x.reason), "")
    )
    action = "refused" if refused or not report.layers else "rewritten" if rewritten else "kept"
    window = next((x.window for x in rewritten), 8)
    prompt, steps = 2 * window + 3, 3 * window + 2
    try:
        ids, mask = batch(stock, prompt + steps)
        wanted = whole(stock, ids, mask)
        if wanted.shape[:2] != ids.shape:
            raise ValueError(f"logits {tuple(wanted.shape)} are not one per token")
    except Exception as error:  # some stock models cannot be called with token ids alone
        return row(action, f"{reason} Stock: {_line(error)}", **found)
    real = mask.bool()
    if not rewritten:  # it runs the stock path, which must be untouched
        try:
            theirs = whole(stock, ids, mask, use_cache=True)
        except Exception as error:
            return row(action, f"{reason} Stock, with a cache: {_line(error)}", **found)
        found["error"] = (whole(model, ids, mask, use_cache=True) - theirs)[real].abs().max().item()
        return row(action, reason, **found)
    got = stepwise(model, ids, mask, prompt)
    found["error"] = (got - wanted)[real].abs().max().item()
    mutants = (mutant(entry, stock, change) for change in (-1, 1) if window + change > 0)
    moved = [(got - whole(each, ids, mask))[real].abs().max().item() for each in mutants]
    runtime = runtime_of(model)
    assert runtime is not None
    if not runtime.compiled_calls:
        action, reason = "eager", " ".join(swa_pass.explain(model).notes)
    return row(action, reason, **found, tells=min(moved), compiled=runtime.compiled_calls, calls=1 + steps)


def batch(stock: Any, length: int) -> tuple[Tensor, Tensor]:
    """Ids and mask of two rows; the second begins with PADS pads."""
    config = stock.config.get_text_config(decoder=True)
    ids = torch.randint(5, config.vocab_size - 8, (2, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :PADS] = 0
    return ids, mask


@torch.no_grad()
def whole(model: Any, ids: Tensor, mask: Tensor, use_cache: bool = False) -> Tensor:
    return model(input_ids=ids, attention_mask=mask, use_cache=use_cache, **_positions(model, mask, 0)).logits


@torch.no_grad()
def stepwise(model: Any, ids: Tensor, mask: Tensor, prompt: int) -> Tensor:
    """Logits at all positions, the prompt in one call and the rest token by token, on one HybridCache."""
    runtime = runtime_of(model)
    assert runtime is not None
    cache, parts = runtime.make_cache(), []
    for first, stop in [(0, prompt), *((n, n + 1) for n in range(prompt, ids.shape[1]))]:
        output = model(
            input_ids=ids[:, first:stop],
            attention_mask=mask[:, :stop],
            use_cache=True,
            **_positions(model, mask[:, :stop], first),
            **{runtime.cache_name: cache},
        )
        parts.append(output.logits)
    return torch.cat(parts, dim=1)


def _positions(model: Any, mask: Tensor, first: int) -> dict[str, Tensor]:
    """Positions as `generate` gives them, where the forward takes them (multi-axis positions are the model's own)."""
    if "position_ids" not in inspect.signature(model.forward).parameters or hasattr(model, "get_rope_index"):
        return {}
    return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, first:]}


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


def table(rows: list[Row]) -> str:
    """The page docs/families.md."""
    done = sum(row.action in DONE for row in rows)
    wrong = sum(row.error is not None and row.error > LIMIT for row in rows)
    swept = [row for row in rows if BY_NAME[row.family].get("swept")]
    good = sum(row.action in DONE for row in swept)
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
    lines = [
        "# Families",
        "",
        f"Written by `make families` with {versions}. Tiny random models, fp32, weights drawn with",
        "a spread of 0.2; two rows, one left padded; a prompt of 2W + 3 tokens, then 3W + 2 one at a time, against the",
        "stock model on the whole sequence without a cache.",
        "",
        "Driven by their text decoder alone, or by a driver of tests/family_drivers.py:",
        ", ".join(row.family for row in rows if BY_NAME[row.family].keys() & {"part", "driver"}) + ".",
        "",
        f"{len(rows)} configurations: {done} rewritten or rightly left alone, {len(rows) - done} refused or not built,",
        f"{wrong} wrong. Of the {len(swept)} that a first sweep of the sliding families found: {good} so.",
        "",
        "Layers: s sliding, f full, c chunked, p keys picked by content, - no keys (convolution or recurrence), ? not",
        "understood.",
        "compiled: calls through our graphs. \\|d logits\\|: against stock. tells: the same for a window changed by",
        "one, which must be far larger.",
        "",
        "| family | layers | W | action | compiled | \\|d logits\\| | tells | why |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        error = "" if row.error is None else f"{row.error:.1e}"
        tells = "" if row.tells is None or row.action != "rewritten" else f"{row.tells:.1e}"
        windows = ", ".join(map(str, row.windows))
        why = "" if row.action == "rewritten" else row.reason.replace("|", "\\|")
        calls = f"{row.compiled}/{row.calls}" if row.calls else ""
        lines.append(
            f"| {row.family} | {row.layers} | {windows} | {row.action} | {calls} | {error} | {tells} | {why} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", type=Path)
    parser.add_argument(
        "--rows", type=Path, help="take rows from this file where it has them, and add the others to it"
    )
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    rows = []
    lines = given.rows.read_text().splitlines() if given.rows and given.rows.exists() else []
    known = {row.family: row for row in (Row(**json.loads(line)) for line in lines)}
    for entry in ENTRIES:
        if given.families and entry["family"] not in given.families:
            continue
        row = known.get(entry["family"]) or measure(entry)
        if given.rows and entry["family"] not in known:
            with given.rows.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    if given.write:
        given.write.write_text(table(rows))
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
