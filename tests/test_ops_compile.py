"""The operators under torch.compile, torch.export and torch's own operator checks."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_ops_common import Case, make_case, one_thread, same_values
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from swa_pass import ops
from swa_pass.ops import reference

__all__ = ["one_thread"]  # a fixture

WINDOW = 8


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    """A layer as a rewritten model holds it: stores are buffers, q/k/v come from projections."""

    k_store: Tensor
    v_store: Tensor

    def __init__(self, case: Case, split: bool = False, use: bool = True) -> None:
        super().__init__()
        self.register_buffer("k_store", case.k_store.clone())
        self.register_buffer("v_store", case.v_store.clone())
        self.split, self.use = split, use

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) * 1.5 for x in (q, k, v))  # (B, Q, heads, D) -> heads first, as models do
        if self.split:
            out = torch.ops.swa_pass.attend(q, k, v, self.k_store, self.v_store, lengths, window=WINDOW, scale=0.25)
            torch.ops.swa_pass.append(k, v, self.k_store, self.v_store, lengths, window=WINDOW)
        else:
            out = torch.ops.swa_pass.attend_append(
                q, k, v, self.k_store, self.v_store, lengths, window=WINDOW, scale=0.25
            )
        if not self.use:
            return v + 1
        return out.transpose(1, 2).contiguous().flatten(2) + 1


def _inputs(batch: int, tokens: int, seed: int, length: int = 20) -> tuple[Tensor, ...]:
    case = make_case(batch=batch, tokens=tokens, seed=seed, window=WINDOW)
    return (*(x.transpose(1, 2).contiguous() for x in (case.q, case.k_new, case.v_new)), torch.tensor([length] * batch))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("split", [False, True])
def test_one_graph_and_the_same_numbers(backend: str, split: bool) -> None:
    case = make_case(lengths=20, window=WINDOW)
    plain, layer = Layer(case, split), Layer(case, split)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    with torch.no_grad():
        for step in range(4):
            inputs = _inputs(2, 1, seed=step, length=20 + step)
            torch.testing.assert_close(compiled(*inputs), plain(*inputs))
            assert same_values(layer.k_store, plain.k_store)
            assert same_values(layer.v_store, plain.v_store)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("split", [False, True])
def test_a_write_survives_when_nothing_reads_the_result(backend: str, split: bool) -> None:
    case = make_case(lengths=20, window=WINDOW)
    plain, layer = Layer(case, split, use=False), Layer(case, split, use=False)
    inputs = _inputs(2, 1, seed=1)
    with torch.no_grad():
        plain(*inputs)
        torch.compile(layer, backend=backend, fullgraph=True)(*inputs)
    assert not same_values(layer.k_store, case.k_store)
    assert same_values(layer.k_store, plain.k_store)
    assert same_values(layer.v_store, plain.v_store)


def test_fx_dead_code_removal_keeps_writes() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, ks: Tensor, vs: Tensor, lengths: Tensor) -> Tensor:
        torch.ops.swa_pass.attend_append.default(q, k, v, ks, vs, lengths, window=WINDOW, scale=0.25)
        torch.ops.swa_pass.append.default(k, v, ks, vs, lengths, window=WINDOW)
        torch.ops.swa_pass.attend.default(q, k, v, ks, vs, lengths, window=WINDOW, scale=0.25)
        return q

    graph = torch.fx.symbolic_trace(step)
    graph.graph.eliminate_dead_code()
    targets = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert targets == {"swa_pass.attend_append.default", "swa_pass.append.default"}


def _store_copies(layer: nn.Module, case: Case, **config: Any) -> list[str]:
    """Lines of Inductor's program that allocate as much as a store, or copy into one."""
    with torch.no_grad(), torch._inductor.config.patch(config):
        _, sources = run_and_get_code(torch.compile(layer, backend="inductor", fullgraph=True), *_inputs(2, 1, seed=1))
    source = "\n".join(sources)
    assert "torch.ops.swa_pass" in source
    size, capacity = case.k_store.numel(), case.k_store.shape[2]
    allocated = [line.strip() for line in source.splitlines() if "= empty_strided" in line or "copy_(" in line]
    return [line for line in allocated if re.search(rf"\b({size}|{capacity})\b", line) or "copy_(" in line]


def test_inductor_copies_no_store() -> None:
    case = make_case(lengths=20, window=WINDOW, slack=16)
    assert _store_copies(Layer(case), case) == []


def test_inductor_copies_no_store_of_separate_append() -> None:
    """Inductor moves `attend` past `append` (nothing says it may not), and then must copy the store.

    So the pass writes with the last reader (`attend_append`), or compiles with this option off.
    """
    case = make_case(lengths=20, window=WINDOW, slack=16)
    assert _store_copies(Layer(case, split=True), case, reorder_for_locality=False) == []
    torch._dynamo.reset()
    if not _store_copies(Layer(case, split=True), case):
        pytest.fail("this torch keeps the order by itself: the pass may use append freely")


def test_inductor_copies_no_store_that_layers_share() -> None:
    class Sharing(Layer):
        """Two layers on one store: the first reads, the last reads and writes."""

        def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) * 1.5 for x in (q, k, v))
            stores = (self.k_store, self.v_store)
            first = torch.ops.swa_pass.attend(q, k, v, *stores, lengths, window=WINDOW, scale=0.25)
            last = torch.ops.swa_pass.attend_append(q + first, k, v, *stores, lengths, window=WINDOW, scale=0.25)
            return first + last

    case = make_case(lengths=20, window=WINDOW, slack=16)
    assert _store_copies(Sharing(case), case) == []


def test_sizes_stay_dynamic() -> None:
    """Batch, tokens and capacity may vary without one graph each; positions never matter."""
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def step(q: Tensor, k: Tensor, v: Tensor, ks: Tensor, vs: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.ops.swa_pass.view(ks, k, lengths, WINDOW)
        out = torch.ops.swa_pass.attend_append(q, k, v, ks, vs, lengths, window=WINDOW, scale=0.25)
        return out.transpose(1, 2).flatten(2), seen

    for batch, tokens, slack in [(3, 5, 12), (6, 3, 4), (4, 2, 2), (5, 9, 30)]:  # first: no two sizes equal
        case = make_case(batch=batch, tokens=tokens, slack=slack, window=WINDOW, lengths=11)
        ks = case.k_store.nan_to_num(0.5)
        want = reference.attend(*case.args(ks), window=WINDOW, scale=0.25).transpose(1, 2).flatten(2)
        want_view = reference.view(ks, case.k_new, case.lengths, WINDOW)
        got, seen = step(case.q, case.k_new, case.v_new, ks, case.v_store, case.lengths)
        torch.testing.assert_close(got, want)
        assert torch.equal(seen, want_view)
    assert counter.frame_count == 1


@pytest.mark.parametrize("window", [0, WINDOW])
def test_fake_results_have_the_real_layout(window: int) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    case = make_case(tokens=3, value_dim=24, window=window, lengths=5, packed=True)
    real = [
        ops.attend(*case.args(), window=window, scale=1.0),
        ops.view(case.k_store, case.k_new, case.lengths, window),
    ]
    with FakeTensorMode() as mode:
        q, k, v, ks, vs, lengths = (mode.from_tensor(t) for t in case.args()[:6])
        fake = [
            ops.attend(q, k, v, ks, vs, lengths, None, window=window, scale=1.0),
            ops.view(ks, k, lengths, window),
        ]
    for a, b in zip(real, fake):
        assert a.shape == b.shape
        assert a.stride() == b.stride()
        assert a.dtype == b.dtype


def test_export_save_load() -> None:
    case = make_case(lengths=20, window=WINDOW)
    inputs = _inputs(2, 3, seed=1)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    dynamic: Any = ({1: tokens}, {1: tokens}, {1: tokens}, None)
    with torch.no_grad():
        program = torch.export.export(Layer(case), inputs, dynamic_shapes=dynamic)
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        buffer.seek(0)
        module, plain = torch.export.load(buffer).module(), Layer(case)
        for n in (3, 5):
            inputs = _inputs(2, n, seed=n)
            torch.testing.assert_close(module(*inputs), plain(*inputs))
            assert same_values(module.get_buffer("k_store"), plain.k_store)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_grad_modes(mode: str) -> None:
    case = make_case(lengths=20, window=WINDOW)
    want = reference.attend(*case.args(), **case.options)
    with getattr(torch, mode)():
        torch.testing.assert_close(ops.attend_append(*case.args(), **case.options), want)


@pytest.mark.parametrize("op", ["view", "append", "attend", "attend_append"])
def test_opcheck(op: str) -> None:
    case = make_case(lengths=20, window=WINDOW, tokens=2)
    ks, vs = case.k_store.nan_to_num(0.5), case.v_store.nan_to_num(0.5)  # opcheck compares stores, and NaN != NaN
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    if op == "view":
        args, kwargs = (ks, case.k_new, case.lengths, WINDOW), {}
    elif op == "append":
        args, kwargs = (case.k_new, case.v_new, ks, vs, case.lengths), {"window": WINDOW}
    else:
        args, kwargs = case.args(ks, vs), {"window": WINDOW, "scale": 0.25}
    torch.library.opcheck(getattr(torch.ops.swa_pass, op).default, args, kwargs)
