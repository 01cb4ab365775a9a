"""Runs the variants one after another, each in a process of its own, and prints what they found."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from . import tables
from .text import prompts
from .weights import gemma_tokenizer, weights_folder


def demo(
    *,
    batches: Sequence[int] = (1, 8),
    new_tokens: int = 64,
    backend: str | None = None,
    separate: bool = False,
    threads: int = 0,
    json_file: Path | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measures stock `generate` (both caches) against the applied model on the real Gemma 3 270M, and prints tables.

    Args: see `swa-pass demo --help`. Returns everything measured, which is also what `json_file` gets.
    Raises RuntimeError when a variant's process fails, with the end of its messages.
    """
    console = console or Console()
    started = time.perf_counter()
    weights_folder(console)
    tokenizer = gemma_tokenizer()
    names = ", ".join(f"{batch}" for batch in batches)
    console.print(
        f"[bold]swa_pass demo[/bold]: Gemma 3 270M (bfloat16) reads a long text and writes {new_tokens} tokens a row, "
        f"greedy, batch {names}.\nThree variants, each in a process of its own; a few minutes on two cores."
    )
    command = [f"--batches={','.join(map(str, batches))}", f"--threads={threads}", f"--tokens={new_tokens}"]
    command += ["--separate"] * separate + ([f"--backend={backend}"] if backend else [])
    results: list[dict[str, Any]] = []
    applied: dict[str, Any] = {}

    def run(variant: str, *more: str) -> None:
        nonlocal applied
        with console.status(f"{variant}: starting") as status:
            for event in _events(variant, [*command, *more]):
                if event["event"] == "phase":
                    status.update(f"{variant}: {event['text']}")
                    if not console.is_terminal:  # a log shows no spinner
                        console.print(f"  {variant}: {event['text']}", highlight=False)
                elif event["event"] == "result":
                    results.append(event)
                else:
                    applied = event

    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder, "prompts.json")
        prompts(tokenizer, max(batches)).save(texts)
        command.append(f"--prompts={texts}")
        run("static")
        run("dynamic", f"--goals={','.join(str(result['step_ms']) for result in results)}")
        run("applied")
    for result in results:
        result["text"] = tokenizer.decode(result["tokens"][0])
    found = {
        "machine": machine(results[0]["threads"]),
        "applied": applied,
        "results": results,
        "seconds": time.perf_counter() - started,
    }
    tables.show(console, found)
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1), encoding="utf-8")
        console.print(f"All numbers: {json_file}")
    return found


def _events(variant: str, command: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The JSON lines of one variant's process, as they come."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TRANSFORMERS_VERBOSITY": "error"}
    child = [sys.executable, "-m", "swa_pass.demo.child", f"--variant={variant}", *command]
    # Messages go to a file: a pipe that nobody reads would block the child once it is full.
    with tempfile.TemporaryFile("w+") as messages:
        process = subprocess.Popen(child, stdout=subprocess.PIPE, stderr=messages, text=True, env=environment)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith('{"event"'):
                    yield json.loads(line)
            status = process.wait()
        finally:
            process.kill()  # does nothing to a process that has ended
        if status != 0:
            messages.seek(0)
            tail = "\n".join(messages.read().strip().splitlines()[-15:])
            raise RuntimeError(f"the {variant} variant stopped with exit status {status}:\n{tail}")


def machine(threads: int) -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    import torch
    import transformers

    import swa_pass

    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "swa_pass": swa_pass.__version__,
    }


def cpu_name() -> str:
    """The processor's own name for itself, where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
