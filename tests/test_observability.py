"""Debug files, and the page that `explain` makes of a graph."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from test_rewrite import dynamo_graph, graph

import swa_pass
from swa_pass.picture import draw

BASELINE = Path(__file__).parent / "baseline"


def test_debug_writes_each_graph_and_why(tmp_path):
    with swa_pass.debug(tmp_path / "new" / "folder") as folder:
        gm = graph("Roll", "export")
        swa_pass.rewrite(gm)
        swa_pass.rewrite(graph("Gather", "export"), own_state=False)
    swa_pass.rewrite(graph("Shift", "export"))  # outside: nothing is written
    files = sorted(path.name for path in folder.iterdir())
    assert [name.split(".", 1)[1] for name in files] == ["after.py", "before.py", "matches.txt"] * 2
    before, after, matches = ((folder / files[i]).read_text() for i in (1, 0, 2))
    assert "aten.roll" in before
    assert "attend_append" not in before
    assert "aten.roll" not in after
    assert "attend_append" in after
    assert "rewritten: k_cache_0 (shifted_window): window 8" in matches
    refused = (folder / files[5]).read_text()
    assert "left alone: k_cache_0 (gathered_window): its state belongs to the caller" in refused


@pytest.mark.parametrize(("value", "folder"), [("1", "swa_pass_debug"), ("elsewhere", "elsewhere")])
def test_debug_by_environment(monkeypatch, tmp_path, value, folder):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWA_PASS_DEBUG", value)
    swa_pass.rewrite(graph("Roll", "export"))
    assert len(list((tmp_path / folder).iterdir())) == 3
    monkeypatch.setenv("SWA_PASS_DEBUG", "0")
    swa_pass.rewrite(graph("Roll", "export"))
    assert len(list((tmp_path / folder).iterdir())) == 3


def test_explain_leaves_the_graph_alone():
    gm = graph("Roll", "export")
    before = gm.code
    report = swa_pass.explain(gm)
    assert gm.code == before
    assert [site.verdict for site in report.sites] == ["mask: sliding, 8 keys: rewritten"] * 2
    assert "2 rewritten, 0 left alone" in str(report)


def test_the_page(tmp_path):
    report = swa_pass.explain(graph("IndexCopy", "core"))
    text = report.save(tmp_path / "page.html").read_text()
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 2
    for drawing in drawings:
        ElementTree.fromstring(drawing.replace("xlink:href", "href"))
    assert text.count("k_cache_0 (linear_store)") >= 2


def test_a_refused_site_has_no_second_picture():
    report = swa_pass.explain(torch.export.export(_refused(), _ARGS))
    assert [site.after for site in report.sites] == [None, None]
    assert "slots that hold no token yet" in report.html()


def _refused():
    import idioms

    class Empty(idioms.Roll):
        def causal(self, position, key):
            distance = position[:, None] - key[None, :]
            return ((distance >= 0) & (distance < idioms.W))[None, None]

    return Empty().requires_grad_(False)


_ARGS = (torch.zeros(2, 1, dtype=torch.int64), torch.tensor([0]))


@pytest.mark.parametrize(("idiom", "form"), [("Roll", "export"), ("IndexCopy", "core")])
def test_the_picture_looks_as_it_did(idiom, form, tmp_path):
    """Against a picture that a person has looked at. To renew it: delete the file, run this, look at what it wrote."""
    compare = pytest.importorskip("matplotlib.testing.compare")
    site = swa_pass.explain(graph(idiom, form)).sites[0]
    drawn, kept = tmp_path / "drawn.png", BASELINE / f"{idiom}_{form}.png"
    draw(site.verdict, site.before, site.after).savefig(drawn, dpi=60)
    if not kept.exists():
        kept.write_bytes(drawn.read_bytes())
        pytest.fail(f"{kept.name} was missing and has been written: look at it")
    assert compare.compare_images(str(kept), str(drawn), tol=12) is None


def test_a_log_line_for_every_compiled_graph(caplog):
    import idioms

    with caplog.at_level(logging.INFO, logger="swa_pass"), torch.no_grad():
        torch.compile(idioms.IndexCopy(), backend=swa_pass.backend("eager"))(*_ARGS)
    assert "2 attentions rewritten, 0 left alone" in caplog.text


def test_a_graph_without_attention():
    gm = dynamo_graph(torch.nn.Linear(3, 3).requires_grad_(False), (torch.ones(1, 3),))
    assert "no attention on a KV cache" in str(swa_pass.explain(gm))
