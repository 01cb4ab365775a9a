"""The command line: `swa-pass demo | explain | capacity | bench`. Each command calls one function of the library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn, Optional

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    help="Sliding-window layers of Hugging Face models on ring buffers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

Folder = Annotated[Path, typer.Argument(help="A config.json, or a folder with one; weights are not read.")]
JsonFile = Annotated[Optional[Path], typer.Option("--json", help="Write everything measured to this file.")]  # noqa: UP045


@app.command()
def demo(
    batches: Annotated[str, typer.Option(help="Batch sizes, with commas between.")] = "1,8",
    tokens: Annotated[int, typer.Option(min=2, help="New tokens per row.")] = 64,
    backend: Annotated[str, typer.Option(help="Compiler behind the pass; empty: the best one found.")] = "",
    separate: Annotated[bool, typer.Option(help="Each row reads the text by itself; slow with 8 rows.")] = False,
    threads: Annotated[int, typer.Option(min=0, help="Threads for torch; 0: torch decides.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """The real Gemma 3 270M, stock against applied: speed, memory, and whether the tokens are the same."""
    from .demo.runner import demo as run

    sizes = _numbers(batches, "--batches")
    try:
        run(
            batches=sizes,
            new_tokens=tokens,
            backend=backend or None,
            separate=separate,
            threads=threads,
            json_file=json_file,
        )
    except (ModuleNotFoundError, RuntimeError) as error:
        _fail(str(error))


@app.command()
def explain(
    folder: Folder,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """What each layer's attention is, what is done with it, and why."""
    report = _report(folder)
    typer.echo(json.dumps(report.to_dict(), indent=1) if as_json else str(report))


@app.command()
def capacity(
    folder: Folder,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    contexts: Annotated[str, typer.Option(help="Tokens per row, with commas between.")] = "2048,8192,32768,131072",
) -> None:
    """KV memory by context length: rings against keeping the whole context in every layer."""
    report = _report(folder)
    table = Table(title=f"{report.model}: KV memory, {batch} row{'s' * (batch > 1)}")
    for name in ("context", "swa_pass, MiB", "whole context in every layer, MiB", "ratio"):
        table.add_column(name, justify="right")
    for context in _numbers(contexts, "--contexts"):
        ours, stock = report.kv_bytes(context, batch), report.stock_kv_bytes(context, batch)
        table.add_row(f"{context:,}", f"{ours / 2**20:,.1f}", f"{stock / 2**20:,.1f}", f"{stock / ours:.2f}x")
    Console().print(table)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """The decode benchmark of a source checkout; takes its options (--help lists them)."""
    script = Path(__file__).resolve().parent.parent / "benchmarks" / "decode.py"
    if not script.exists():
        _fail("the benchmarks are part of the source checkout, not of the installed package. Clone it: make bench")
    raise typer.Exit(subprocess.run([sys.executable, str(script), *context.args], check=False).returncode)


def main() -> None:
    """Entry point of the `swa-pass` command."""
    app()


def _report(path: Path) -> Any:
    """Explains a model from its configuration alone: the graph does not depend on weights, and none are read."""
    config_file = path if path.is_file() else path / "config.json"
    if not config_file.exists():
        _fail(f"{path} has no config.json. Give a config.json, or a folder that save_pretrained wrote.")
    import torch
    from transformers import AutoConfig

    import swa_pass

    default = torch.get_default_dtype()
    try:
        config = AutoConfig.from_pretrained(config_file)
        torch.set_default_dtype(config.dtype or default)
        with torch.device("meta"):
            model = _model_class(config)(config).eval()
        return swa_pass.explain(model)
    except (TypeError, ValueError, KeyError, OSError, RuntimeError) as error:
        _fail(str(error))
    finally:
        torch.set_default_dtype(default)


def _model_class(config: Any) -> Any:
    """The class that the configuration names, or else the causal language model of its kind."""
    import transformers

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    return transformers.AutoModelForCausalLM.from_config


def _numbers(text: str, option: str) -> list[int]:
    """ "1,8" -> [1, 8]; ends the program with a sentence when that is not what was given."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        _fail(f"{option} takes positive whole numbers with commas between, such as 1,8; got {text!r}")
    return [int(part) for part in parts]


def _fail(message: str) -> NoReturn:
    typer.echo(f"swa-pass: {message}", err=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    main()
