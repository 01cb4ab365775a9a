"""The pass inside compilers: any inner backend, graph breaks, dynamic sizes, gradients, Inductor's list of passes."""

from __future__ import annotations

import subprocess
import sys

import idioms
import pytest
import torch
from idioms import SLOTS, W
from test_rewrite import SLACK, TEXT, decode, error, expected, graph, names
from torch._dynamo.utils import counters

import swa_pass
from swa_pass.graph import op_name, shape_of


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()


class Recorder:
    """An inner compiler that keeps the graphs it is given."""

    def __init__(self, inner="eager"):
        self.graphs, self.inner = [], torch._dynamo.lookup_backend(inner)

    def __call__(self, gm, inputs):
        self.graphs.append(gm)
        return self.inner(gm, inputs)

    @property
    def fused(self):
        return [names(gm).count("swa_pass::attend_append") for gm in self.graphs]


def run(model, steps=2 * W + 3):
    with torch.no_grad():
        return torch.cat([model(TEXT[:, t : t + 1], torch.tensor([t])) for t in range(steps)], dim=1)


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor", "a callable"])
def test_any_inner_compiler(inner):
    inner = Recorder() if inner == "a callable" else inner
    ours, stock = idioms.IndexCopy(), idioms.IndexCopy()
    compiled = torch.compile(ours, backend=swa_pass.backend(inner))
    assert error(run(compiled), run(stock)) < 1e-5
    for a, b in zip(ours.buffers(), stock.buffers()):
        torch.testing.assert_close(a, b)  # the store is the user's, and stays what it was
    assert counters["stats"]["unique_graphs"] == 1
    if isinstance(inner, Recorder):
        assert inner.fused == [2]


def test_by_its_name():
    assert error(run(torch.compile(idioms.IndexCopy(), backend="swa_pass")), expected()[:, : 2 * W + 3]) < 1e-5
    with pytest.raises(ValueError, match="no Dynamo backend"):
        swa_pass.backend("inductr")


def test_a_window_that_is_off_by_one_is_seen():
    got = run(torch.compile(idioms.IndexCopy(shown=W + 1), backend=swa_pass.backend("eager")))
    assert error(got, expected()[:, : 2 * W + 3]) > 1e-2


def test_graph_breaks():
    class Breaks(idioms.IndexCopy):
        def forward(self, ids, position):
            x = self.layer(0, self.embed[ids] * 2.0, position)
            torch._dynamo.graph_break()
            return self.layer(1, x, position) @ self.embed.T

    inner = Recorder()
    got = run(torch.compile(Breaks(), backend=swa_pass.backend(inner)))
    assert error(got, expected()[:, : 2 * W + 3]) < 1e-5
    assert inner.fused == [1, 1]


def test_a_break_between_write_and_read_is_left_alone():
    class Breaks(idioms.IndexCopy):
        def attend(self, q, keys, values, mask):
            torch._dynamo.graph_break()
            return super().attend(q, keys, values, mask)

    inner = Recorder()
    got = run(torch.compile(Breaks(), backend=swa_pass.backend(inner)))
    assert error(got, expected()[:, : 2 * W + 3]) < 1e-5
    assert sum(inner.fused) == 0


def test_dynamic_lengths():
    inner = Recorder()
    model = idioms.IndexCopy()
    compiled = torch.compile(model, backend=swa_pass.backend(inner), dynamic=True)
    with torch.no_grad():
        for length in (5, 11, 3 * W + 1):
            out = compiled(TEXT[:, :length], torch.arange(length))
            assert error(out, expected()[:, :length]) < 1e-5
    assert inner.fused == [2]


def test_training_graphs_are_left_alone():
    def gradients(backend):
        torch._dynamo.reset()
        model = idioms.IndexCopy()
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        forward = torch.compile(model, backend=backend) if backend else model
        forward(TEXT[:, :4], torch.arange(4)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    inner = Recorder("aot_eager")
    for ours, stock in zip(gradients(swa_pass.backend(inner)), gradients(None)):
        torch.testing.assert_close(ours, stock)
    assert sum(inner.fused) == 0


class Recording(swa_pass.InductorPass):
    def __init__(self):
        self.fused = []

    def __call__(self, graph):
        super().__call__(graph)
        self.fused.append([op_name(node) for node in graph.nodes].count("swa_pass::attend_append"))


def test_in_inductors_own_list():
    recording = Recording()
    with torch._inductor.config.patch(pre_grad_custom_pass=recording, fx_graph_cache=False):
        got = run(torch.compile(idioms.IndexCopy(), backend="inductor"))
    assert recording.fused == [2]
    assert error(got, expected()[:, : 2 * W + 3]) < 1e-5


def test_its_uuid_is_the_same_in_every_process():
    code = "import swa_pass; print(swa_pass.InductorPass().uuid().hex())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == swa_pass.InductorPass().uuid().hex()


def test_its_uuid_covers_what_decides(monkeypatch):
    hashed = []
    monkeypatch.setattr(swa_pass.backends, "get_hash_for_files", lambda files: hashed.extend(files) or b"")
    swa_pass.InductorPass().uuid()
    for part in (
        "masks.py",
        "formula.py",
        "reader/core.py",
        "reader/shapes.py",
        "patterns/state.py",
        "passes/adopt.py",
    ):
        assert any(file.endswith(f"swa_pass/{part}") for file in hashed), part


def after_inductor(model):
    """The graph that Inductor generates code from."""
    graphs = []
    with torch._inductor.config.patch(post_grad_custom_post_pass=graphs.append, fx_graph_cache=False):
        run(torch.compile(model, backend=swa_pass.backend("inductor")), steps=3)
    return graphs[0]


def test_no_store_is_copied():
    """Functionalisation, re-inplacing and Inductor's passes leave one write per layer, in place, and no copy."""
    nodes = list(after_inductor(idioms.IndexCopy(layers=3)).nodes)
    done = [op_name(node) for node in nodes]
    assert done.count("swa_pass::attend_append") == 3  # equal layers are not merged
    stores = {(idioms.BATCH, idioms.KV_HEADS, SLOTS, idioms.HEAD_DIM)}
    calls = [n for n in nodes if n.op == "call_function" and tuple(shape_of(n)) in stores]
    assert [n for n in calls if op_name(n) != "copy_" or n.args[0] is not n.args[1]] == []  # a copy onto itself is none
    written = [str(node.args[3]) for node in nodes if op_name(node) == "swa_pass::attend_append"]
    assert len(set(written)) == 3


def test_stores_are_copied_without_the_pass():
    """The check above can fail."""
    graphs = []
    with torch._inductor.config.patch(post_grad_custom_post_pass=graphs.append, fx_graph_cache=False):
        run(torch.compile(idioms.Roll(), backend="inductor"), steps=1)
    window = (idioms.BATCH, idioms.KV_HEADS, W, idioms.HEAD_DIM)
    assert any(n.op == "call_function" and tuple(shape_of(n)) == window for n in graphs[0].nodes)


@pytest.mark.parametrize("idiom", ["IndexCopy", "Roll"])
def test_a_rewritten_graph_survives_other_passes(idiom):
    """Dead code removal, merging of equal expressions, functionalisation, a second export."""
    from torch.fx.passes.dialect.common.cse_pass import CSEPass

    gm = graph(idiom, "export", layers=3)
    swa_pass.rewrite(gm, slack=SLACK)
    gm.graph.eliminate_dead_code()
    gm = CSEPass()(gm).graph_module
    assert names(gm).count("swa_pass::attend_append") == 3
    with torch.no_grad():
        program = torch.export.export(gm, (TEXT[:, :1], torch.tensor([0]))).run_decompositions()
    assert error(decode(program.module()), expected(layers=3)) < 1e-5


@pytest.mark.parametrize("idiom", ["IndexCopy", "Gather"])
def test_a_rewritten_graph_compiles(idiom):
    """Checks come before writes there, too: a call at a wrong position changes nothing."""
    gm = graph(idiom, "export")
    swa_pass.rewrite(gm, slack=SLACK)
    compiled = torch.compile(gm, backend="inductor")
    with torch.no_grad():
        first = decode(compiled, stop=20)
        with pytest.raises(RuntimeError, match="positions must go on"):
            compiled(TEXT[:, :1], torch.tensor([30]))
        assert error(torch.cat([first, decode(compiled, 20)], dim=1), expected()) < 1e-5


@pytest.mark.extended
@pytest.mark.parametrize("idiom", ["IndexCopy", "Roll"])
def test_a_rewritten_program_in_aotinductor(idiom, tmp_path):
    with torch.no_grad():
        program = torch.export.export(getattr(idioms, idiom)(), (TEXT[:, :1], torch.tensor([0])))
        result = swa_pass.rewrite(program, slack=SLACK)
        package = torch._inductor.aoti_compile_and_package(result.graph, package_path=str(tmp_path / "rings.pt2"))
        runner = torch._inductor.aoti_load_package(package)
        assert error(decode(runner), expected()) < 1e-5
        with pytest.raises(RuntimeError, match="positions must go on"):
            runner(TEXT[:, :1], torch.tensor([50]))
