"""Graphs with our operators, lowered for Intel Gaudi: the reference's numbers and stores, from core operators alone.

Without Intel's plugin attention is matrix products here; tests/habana/test_lower.py has FusedSDPA.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import MUTATED, TOLERANCE, make_pair
from hpu_compiler import Inner
from test_ops_common import Case, make_case, one_thread, same_values  # noqa: F401
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import swa_pass
from swa_pass.graph import op_name
from swa_pass.ops import quant, reference
from swa_pass.passes.lower_hpu import holds_ours, lower_hpu

W = 8
LONGEST = 3 * W
ops = torch.ops.swa_pass


def graph_of(function: Any, *args: Any) -> GraphModule:
    """The graph of a call, traced on copies: tracing runs it, and it writes."""
    return make_fx(function)(*(x.clone() for x in args))


def case_of(length: int, window: int, tokens: int = 1, slack: int = 3, **options: Any) -> Case:
    """One step at `length`, on stores whose size does not depend on it. What must be unseen is NaN."""
    room = slack if window else LONGEST + slack - length
    return make_case(window=window, tokens=tokens, slack=room, lengths=length, seed=length, **options)


def tensors_of(case: Case) -> list[Tensor]:
    optional = [case.starts] if case.starts is not None else []
    return [x.clone() for x in (*case.args()[:6], *optional)]


def step_graph(case: Case, op: str = "attend_append") -> GraphModule:
    """The graph of one call of an operator; its inputs are the operator's tensors."""
    return graph_of(lambda *args: getattr(ops, op).default(*args, **case.options), *tensors_of(case))


def check(gm: GraphModule, case: Case, writes: bool = True) -> None:
    tensors = tensors_of(case)
    got = gm(*tensors)
    want = reference.attend(*case.args(), **case.options)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    stores = [case.k_store.clone(), case.v_store.clone()]
    if writes:
        reference.append(case.k_new, case.v_new, *stores, case.lengths, window=case.window)
    for ours, theirs in zip(tensors[3:5], stores):
        assert same_values(ours, theirs)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one group": {"group": 1},
    "one kv head": {"kv_heads": 1, "group": 4},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "softcap and sinks": {"softcap": 2.0, "sinks": True},
    "values of another head_dim": {"value_dim": 24},
    "pads": {"starts": [0, 5]},
    "one row": {"batch": 1},
    "transposed": {"packed": True},
}


@pytest.mark.parametrize("tokens", [1, 3, 2 * W + 5], ids=["decode", "draft", "prompt"])
@pytest.mark.parametrize("window", [0, W], ids=["linear", "ring"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_serves_every_length(kind: str, window: int, tokens: int) -> None:
    """0 to 3 W tokens before the step: an empty ring, one that fills, one that has wrapped."""
    cases = [case_of(length, window, tokens, **KINDS[kind]) for length in range(LONGEST + 1)]
    for case in cases:
        case.options["sinks"] = cases[0].options["sinks"]
    gm = step_graph(cases[0])
    assert lower_hpu(gm) == 1
    for case in cases:
        check(gm, case)


@pytest.mark.parametrize("slack", [0, 1, 3])
@pytest.mark.parametrize("tokens", [1, 2, W])
def test_rings_of_every_size(tokens: int, slack: int) -> None:
    """W - 1 slots are enough; then the new token takes the slot of one that its own query still sees."""
    gm = step_graph(case_of(0, W, tokens, slack))
    lower_hpu(gm)
    for length in range(LONGEST + 1):
        check(gm, case_of(length, W, tokens, slack))


@pytest.mark.parametrize("window", [0, W], ids=["linear", "ring"])
def test_attend_writes_nothing(window: int) -> None:
    for length in (0, 3, LONGEST):
        case = case_of(length, window, 2)
        gm = step_graph(case, "attend")
        lower_hpu(gm)
        check(gm, case, writes=False)


@pytest.mark.parametrize("wrong", [W - 1, W + 1])
def test_a_window_that_is_off_by_one_is_seen(wrong: int) -> None:
    case = case_of(LONGEST, W)
    case.k_store, case.v_store = (x.nan_to_num(0.5) for x in (case.k_store, case.v_store))
    good = reference.attend(*case.args(), **case.options)
    gm = step_graph(case)
    (node,) = (node for node in gm.graph.nodes if "attend_append" in op_name(node))
    node.update_kwarg("window", wrong)
    lower_hpu(gm)
    assert (gm(*tensors_of(case)) - good).abs().max() > MUTATED


@pytest.mark.parametrize("tokens", [1, 3])
def test_what_is_in_the_graph(tokens: int) -> None:
    """Core operators, every store written whole by one index_copy, two products: and nothing that reads on the host."""
    gm = step_graph(case_of(3, W, tokens, starts=[0, 2]))
    lower_hpu(gm)
    assert not holds_ours(gm)
    done = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
    assert all(name.startswith("aten.") for name in done)
    assert (done.count("aten.index_copy_.default"), done.count("aten.bmm.default")) == (2, 2)
    unwanted = ("_assert", "item", "_local_scalar", "nonzero", "index_put", "scatter", "cat", "roll", "slice_scatter")
    assert not [name for name in done if any(f".{word}" in name for word in unwanted)]
    stores = [node for node in gm.graph.nodes if node.op == "placeholder"][3:5]
    writes = [node for node in gm.graph.nodes if op_name(node) == "index_copy_"]
    assert [write.args[0] for write in writes] == stores
    assert {write.args[2].meta["val"].dtype for write in writes} == {torch.int64}
    masks = [tuple(node.meta["val"].shape) for node in gm.graph.nodes if op_name(node) == "masked_fill"]
    assert (2, tokens, W - 1 + 3) in masks


def test_equal_layers_share_their_masks() -> None:
    case = case_of(5, W, starts=[0, 2])

    def layers(count: int) -> list[str]:
        def call(*args: Tensor) -> Tensor:
            first = ops.attend_append.default(*args, **case.options)
            for _ in range(count - 1):
                first = first + ops.attend_append.default(*args, **case.options)
            return first

        gm = graph_of(call, *tensors_of(case))
        assert lower_hpu(gm) == count
        return [op_name(node) for node in gm.graph.nodes]

    one, three = layers(1), layers(3)
    for name in ("arange", "remainder", "and", "le", "gt", "any", "zeros"):
        assert one.count(name) == three.count(name) > 0, name
    assert three.count("index_copy_") == 3 * one.count("index_copy_") == 6


def test_masks_are_made_anew_where_lengths_moved() -> None:
    """Two steps in one graph: `lengths` is written between them."""
    case = case_of(5, W)

    def call(q: Tensor, k: Tensor, v: Tensor, ks: Tensor, vs: Tensor, lengths: Tensor) -> Any:
        first = ops.attend_append.default(q, k, v, ks, vs, lengths, **case.options)
        lengths.add_(1)
        return first, ops.attend_append.default(q, v, k, ks, vs, lengths, **case.options)

    gm, tensors = graph_of(call, *tensors_of(case)), tensors_of(case)
    lower_hpu(gm)
    _, second = gm(*tensors)
    stores = [case.k_store.clone(), case.v_store.clone()]
    reference.append(case.k_new, case.v_new, *stores, case.lengths, window=W)
    want = reference.attend(case.q, case.v_new, case.k_new, *stores, case.lengths + 1, **case.options)
    torch.testing.assert_close(second, want, rtol=2e-5, atol=2e-5)


def test_prompts_go_in_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block has the keys that it can see, so a prompt costs length times window."""
    monkeypatch.setattr("swa_pass.ops.hpu_ops.QUERY_BLOCK", 4)
    for length in (0, 5, LONGEST):
        case = case_of(length, W, 21, starts=[0, 2])
        gm = step_graph(case)
        lower_hpu(gm)
        check(gm, case)
        widths = [n.meta["val"].shape[-1] for n in gm.graph.nodes if op_name(n) == "softmax"]
        capacity = W - 1 + 3
        assert widths == [capacity + 4, capacity + 8, 4 + W - 1, 4 + W - 1, 4 + W - 1, 1 + W - 1]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "float8"])
@pytest.mark.parametrize("length", [0, 5, LONGEST])
def test_quantised_stores(length: int, dtype: torch.dtype) -> None:
    case = case_of(length, W)
    (ks, k_scale), (vs, v_scale) = (quant.quantise(x.nan_to_num(0.5), dtype) for x in (case.k_store, case.v_store))
    args = [case.q, case.k_new, case.v_new, ks, vs, case.lengths, k_scale, v_scale]

    def call(*args: Tensor) -> Tensor:
        return ops.attend_append.default(*args[:6], **case.options, k_scale=args[6], v_scale=args[7])

    gm = graph_of(call, *args)
    lower_hpu(gm)
    ours, theirs = ([x.clone() for x in args] for _ in range(2))
    torch.testing.assert_close(gm(*ours), ops._attend_append.default(
        *theirs[:6], **case.options, k_scale=theirs[6], v_scale=theirs[7]), rtol=2e-5, atol=2e-5)  # fmt: skip
    for a, b in zip(ours, theirs):
        assert torch.equal(a.float(), b.float())


@pytest.mark.parametrize("window", [0, W], ids=["linear", "ring"])
def test_stores_in_order_of_time(window: int) -> None:
    """What a graph holds where attention could not be proven: views, and a write."""
    for length in (0, 5, LONGEST):
        case = case_of(length, window, 2)
        store = case.k_store.nan_to_num(0.5)

        def call(store: Tensor, new: Tensor, lengths: Tensor) -> Tensor:
            keys = ops.view.default(store, new, lengths, window)
            ops.append.default(new, new, store, store, lengths, window=window)
            return keys

        args = [store, case.k_new, case.lengths]
        gm = graph_of(call, *args)
        assert lower_hpu(gm) == 2
        ours = [x.clone() for x in args]
        assert torch.equal(gm(*ours), reference.view(*args, window))
        reference.append(case.k_new, case.k_new, store, store, case.lengths, window=window)
        assert torch.equal(ours[0], store)


def test_pages() -> None:
    case = make_case(batch=1, window=W, lengths=13, slack=50)
    pages = torch.randn(6, 2, 4, 16)
    table = torch.tensor([[5, 2, 0, 3]])
    args = [case.q, case.k_new, case.v_new, pages, pages + 1, case.lengths, table]
    gm = graph_of(lambda *a: ops.attend.default(*a[:6], window=W, scale=0.25, block_table=a[6]), *args)
    lower_hpu(gm)
    want = ops._attend.default(*args[:6], window=W, scale=0.25, block_table=table)
    torch.testing.assert_close(gm(*args), want, rtol=2e-5, atol=2e-5)


def test_rows_that_do_not_advance_together_are_nan() -> None:
    """One index writes all rows; a row that is elsewhere must not get a wrong token in silence."""
    case = case_of(5, W)
    gm = step_graph(case)
    lower_hpu(gm)
    tensors = tensors_of(case)
    tensors[5][1] = 6
    got = gm(*tensors)
    assert not got[0].isnan().any()
    assert got[1].isnan().all()


@pytest.mark.parametrize("tokens", [1, 3])
def test_rows_that_say_how_many_tokens_they_have(tokens: int) -> None:
    """With `new_lengths` every row is written for itself, at its own length."""
    case = make_case(lengths=[21, 6], tokens=tokens, window=W, new_lengths=[0, tokens])
    gm = step_graph(case)
    lower_hpu(gm)
    tensors = tensors_of(case)
    got = gm(*tensors)
    torch.testing.assert_close(got, reference.attend(*case.args(), **case.options), rtol=2e-5, atol=2e-5)
    stores, counts = [case.k_store, case.v_store], case.options["new_lengths"]
    reference.append(case.k_new, case.v_new, *stores, case.lengths, window=W, new_lengths=counts)
    assert all(same_values(ours, theirs) for ours, theirs in zip(tensors[3:5], stores))


@pytest.mark.parametrize("length", [-1, LONGEST + 4])
def test_a_store_that_is_full_gives_nan(length: int) -> None:
    case = case_of(5, 0)
    gm = step_graph(case)
    lower_hpu(gm)
    tensors = tensors_of(case)
    tensors[5].fill_(length)
    assert gm(*tensors).isnan().all()


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    case = case_of(3, W, 4, starts=[0, 6])
    gm = step_graph(case)
    lower_hpu(gm)
    got = gm(*tensors_of(case))
    assert (got[1, :, :3] == 0).all()
    assert (got[1, :, 3] != 0).all()


def test_what_cannot_be_lowered_is_refused_by_name() -> None:
    q, pages = torch.randn(1, 4, 16), torch.randn(3, 4, 2, 16)
    index = torch.tensor([0, 1]), torch.tensor([0, 0])
    gm = graph_of(lambda *args: ops.attend_blocks.default(*args, scale=0.25), q, pages, pages, *index)
    before = gm.code
    with pytest.raises(ValueError, match="attend_blocks"):
        lower_hpu(gm)
    assert gm.code == before
    case = case_of(5, W)
    functional = torch.export.export(_Module(case), tuple(tensors_of(case))).run_decompositions().graph_module
    with pytest.raises(ValueError, match="before it is functionalised"):
        lower_hpu(functional)
    gm = step_graph(case)
    for node in gm.graph.nodes:
        node.meta.clear()
    with pytest.raises(ValueError, match="example values"):
        lower_hpu(gm)


class _Module(torch.nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.options = case.options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ks: Tensor, vs: Tensor, lengths: Tensor) -> Tensor:
        return ops.attend_append.default(q, k, v, ks, vs, lengths, **self.options)


# ------------------------------------------------------------------------------------------------ behind a compiler


@pytest.fixture
def hpu_backend(monkeypatch: pytest.MonkeyPatch) -> Inner:
    torch._dynamo.reset()
    inner, lookup = Inner(), torch._dynamo.lookup_backend
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: inner if name == "hpu_backend" else lookup(name))
    return inner


@torch.no_grad()
def logits_of(model: Any, ids: Tensor, prompt: int, attention_mask: Tensor) -> Tensor:
    """Logits of a prompt, of a chunk of two tokens, and of one token after the other."""
    cache, parts = None, []
    ends = [prompt, prompt + 2, *range(prompt + 3, ids.shape[1] + 1)]
    for first, stop in zip([0, *ends], ends):
        mask = attention_mask[:, :stop]
        out = model(input_ids=ids[:, first:stop], past_key_values=cache, use_cache=True, attention_mask=mask)
        cache = out.past_key_values
        parts.append(out.logits)
    return torch.cat(parts, 1)


def tiny_pair(**options: Any) -> Any:
    return make_pair("gemma3", slack=4, layer_types=["sliding_attention", "full_attention"], **options)


def test_an_applied_model(hpu_backend: Inner) -> None:
    """A row without pads and one with; prompt, chunk and single tokens."""
    pair = tiny_pair(backend="hpu_backend")
    ids = torch.randint(1, 128, (2, 3 * W), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    got = logits_of(pair.model, ids, W + 3, attention_mask=mask)
    assert pair.runtime.compiled_calls == 2 + 2 * W - 5

    def error(stock: Any) -> float:
        with torch.no_grad():
            apart = (got - stock(ids, attention_mask=mask, use_cache=False).logits).abs()
        return float(max(apart[0].max(), apart[1, 5:].max()))

    assert error(pair.stock) < TOLERANCE
    for mutant in pair.mutants.values():
        assert error(mutant) > MUTATED
    hpu_backend.check()


@pytest.mark.parametrize("backend", ["eager", "hpu_backend"])
def test_a_callers_own_compile(backend: str, hpu_backend: Inner) -> None:
    """torch.compile around a model and a HybridCache: the views are fused, and for Gaudi lowered. The last layer counts
    the step before it attends, in the same graph."""
    pair = tiny_pair()
    ids = torch.randint(1, 128, (2, 2 * W + 3), generator=torch.Generator().manual_seed(0))
    cache, parts = pair.runtime.make_cache(hint=64), []
    step = torch.compile(pair.stock, backend=swa_pass.backend(backend))
    with torch.no_grad():
        for first, stop in [(0, W), *((t, t + 1) for t in range(W, ids.shape[1]))]:
            forward = step if first else pair.stock
            parts.append(forward(input_ids=ids[:, first:stop], past_key_values=cache).logits)
        got = torch.cat(parts, 1)
        assert (got - pair.stock(ids, use_cache=False).logits).abs().max() < TOLERANCE
        for mutant in pair.mutants.values():
            assert (got - mutant(ids, use_cache=False).logits).abs().max() > MUTATED
    if backend == "hpu_backend":
        hpu_backend.check()
        assert not [node for node in hpu_backend.graphs[-1].graph.nodes if op_name(node) == "index"]  # no views left


@pytest.mark.extended
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the fake hpu device with")
def test_an_applied_model_on_the_fake_device(tmp_path: Path) -> None:
    """Sizes are known there, so FusedSDPA is in the graph of the prompt and of one token; the chunk of two tokens makes
    the number of tokens a symbol, and is products."""
    here = Path(__file__).parent
    for name in ("fakehpu", "habana_frameworks"):  # and no stand-in for torchvision
        (tmp_path / name).symlink_to(here / "habana" / "stub" / name)
    environment = {**os.environ, "FAKEHPU_BUILD": str(tmp_path / "build")}
    environment["PYTHONPATH"] = os.pathsep.join([str(here), str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment["PATH"] = str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"]
    command = [sys.executable, str(here / "hpu_device_model.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split("\n")[-4:-1] == ["2 4", "0 4", "2 4"]
