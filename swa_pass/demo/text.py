"""The text that the demo's model reads, and the ways in which eight writers would go on with it.

The text was written for this project. Its 1,698 Gemma tokens are more than three windows of 512.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

# Same form, other content: every ending is 15 Gemma tokens long, so that a batch needs no padding.
ENDINGS = (
    "\n\nMarch 16. Wind west, light. This morning Tomas found",
    "\n\nMarch 16. Wind east, fresh. Before breakfast I wrote",
    "\n\nMarch 16. Wind south, light. After dinner we heard",
    "\n\nMarch 16. Wind north, strong. All night the sea",
    "\n\nMarch 16. Wind west, fresh. A small boat brought",
    "\n\nMarch 16. Wind east, light. The five hens escaped",
    "\n\nMarch 16. Wind south, strong. At noon the mason",
    "\n\nMarch 16. Wind north, fresh. In the store house",
)


@dataclass(frozen=True)
class Prompts:
    """document: ids (1, n), first token included; endings: ids (batch, m), to be written behind the document."""

    document: torch.Tensor
    endings: torch.Tensor

    @property
    def full(self) -> torch.Tensor:
        """Whole prompts, ids (batch, n + m)."""
        return torch.cat([self.document.expand(len(self.endings), -1), self.endings], dim=1)

    def first(self, batch: int) -> Prompts:
        """The same for fewer rows."""
        return Prompts(self.document, self.endings[:batch])

    def save(self, path: Path) -> None:
        """As JSON, for processes that have no tokenizer."""
        path.write_text(json.dumps({"document": self.document.tolist(), "endings": self.endings.tolist()}))

    @staticmethod
    def load(path: Path) -> Prompts:
        ids = json.loads(path.read_text())
        return Prompts(torch.tensor(ids["document"]), torch.tensor(ids["endings"]))


def document() -> str:
    """The text, without a trailing newline (an ending brings its own)."""
    return resources.files(__package__).joinpath("keepers_log.txt").read_text(encoding="utf-8").rstrip()


def prompts(tokenizer: Any, batch: int) -> Prompts:
    """The document and `batch` endings (taken in turn), tokenised. ValueError: the endings differ in length."""
    endings = [tokenizer(ending, add_special_tokens=False).input_ids for ending in ENDINGS]
    lengths = sorted({len(ids) for ids in endings})
    if len(lengths) != 1:
        raise ValueError(
            f"the demo's endings need one length to go without padding, but this tokenizer gives {lengths}"
        )
    rows = [endings[row % len(endings)] for row in range(batch)]
    return Prompts(torch.tensor([tokenizer(document()).input_ids]), torch.tensor(rows))
