"""The code in docs/ runs."""

from __future__ import annotations

import re
import types
from pathlib import Path

import idioms
import torch

import swa_pass
from swa_pass.passes import states

DOCS = Path(__file__).parent.parent / "docs"


def blocks(page):
    """Python blocks by the name in their first comment."""
    found = re.findall(r"```python\n# (\w+)\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return dict(found)


def test_the_pattern_of_the_guide(monkeypatch):
    code = blocks("writing-a-pattern.md")
    assert len([line for line in code["pattern"].splitlines() if line.strip()]) <= 30
    names = {
        "torch": torch, "swa_pass": swa_pass, "Decoder": idioms.Decoder,
        "ids": torch.zeros(idioms.BATCH, 1, dtype=torch.int64), "position": torch.tensor([0]),
    }  # fmt: skip
    exec(code["model"], names)
    with torch.no_grad():
        program = torch.export.export(names["OneHot"](), (names["ids"], names["position"]))
    assert swa_pass.rewrite(program).matches == 0
    pattern = types.ModuleType("one_hot")
    exec(code["pattern"], vars(pattern))
    monkeypatch.setattr(states, "CACHES", (*states.CACHES, pattern))
    exec(code["use"], names)
    module, text = names["result"].graph.module(), torch.randint(0, idioms.VOCAB, (idioms.BATCH, 21))
    for t in range(21):
        out = module(text[:, t : t + 1], torch.tensor([t]))
        want = idioms.Decoder().reference(text)[:, t : t + 1]
        assert (out - want).abs().max() < 1e-5


def test_every_page_is_linked_from_the_readme():
    readme = (DOCS.parent / "README.md").read_text()
    assert [page.name for page in DOCS.glob("*.md") if f"docs/{page.name}" not in readme] == []
