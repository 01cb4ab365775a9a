"""The demo: a real Gemma 3 270M reads a long text and continues it, stock against applied.

`swa-pass demo` runs it. The parts are useful by themselves: `gemma()` gives the real model, `measure` times
`generate` step by step.
"""

from .text import ENDINGS, Prompts, document, prompts
from .weights import gemma, weights_folder

__all__ = ["ENDINGS", "Prompts", "document", "gemma", "prompts", "weights_folder"]
