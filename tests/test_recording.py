"""Recorded forwards: the same proofs as from Dynamo's graph, nothing left behind, and what cannot be recorded."""

from __future__ import annotations

import copy
import operator
import threading
from types import MethodType
from typing import Any

import pytest
import torch
from families import BY_NAME, build
from helpers import tiny
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import swa_pass
from swa_pass import discover as discovery
from swa_pass.api import runtime_of
from swa_pass.compat import output_cache
from swa_pass.discover import discover
from swa_pass.graph import op_name
from swa_pass.passes import find_sites
from swa_pass.probe import ProbeLayer
from swa_pass.recording import NotRecorded, record

#: Masks as tables, softcap, sinks, two windows, keys of other layers, chunks, states beside keys, eager attention.
FAMILIES = ["gemma2", "gpt_oss", "gemma3n_text", "gemma4_kv_eq_moe", "llama4_text", "zaya", "mixtral_eager", "doge"]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Dynamo was asked to capture."""
    asked: list[Any] = []
    stock = discovery.capture
    monkeypatch.setattr(discovery, "capture", lambda *args: asked.append(args) or stock(*args))
    return asked


@pytest.mark.parametrize("family", FAMILIES)
def test_proves_what_dynamos_graph_proves(family: str) -> None:
    model = build(BY_NAME[family])
    recorded = discovery._specs(record(model, model.forward), model)
    assert recorded == discovery._captured(model, model.forward)
    changed = build(BY_NAME[family], window_change=1)
    if any(spec.kind == "sliding" for spec in recorded):
        assert discovery._specs(record(changed, changed.forward), changed) != recorded


def test_a_plain_model_needs_no_dynamo(captures: list[Any]) -> None:
    report = swa_pass.explain(tiny("gemma3"))
    assert {layer.window for layer in report.layers if layer.kind == "sliding"} == {8}
    assert not captures


def changed(forward: Any, where: str = "model.layers.1.self_attn") -> Any:
    """A Mistral, one submodule of which runs `forward(module, stock forward, ...)`, as a class of its own would."""
    model = tiny("mistral")
    module = model.get_submodule(where)
    stock = type(module).forward

    class Changed(type(module)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return forward(self, MethodType(stock, self), *args, **kwargs)

    module.__class__ = Changed
    return model


def everything_of(model: nn.Module) -> list[Any]:
    found: list[Any] = []
    for module in model.modules():
        for value in vars(module).values():
            found += value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return found


def test_the_model_stays_as_it_was() -> None:
    def remembers(module: Any, stock: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
        module.last = module.friends[0].last = hidden_states
        module.all.append(hidden_states)
        module.by_name["hidden"] = hidden_states
        module.seen.add_(hidden_states.sum())
        module.steps += 1
        return stock(hidden_states, **kwargs)

    model = changed(remembers)
    attention = model.model.layers[1].self_attn
    attention.register_buffer("seen", torch.zeros(()))
    attention.friends = [nn.Identity()]  # a module that torch does not know of
    attention.friends[0].last = None
    attention.last, attention.all, attention.by_name, attention.steps = None, [], {}, 0
    weights = copy.deepcopy(model.state_dict())
    gm = record(model, model.forward)
    assert {finding.mask.window for finding in find_sites(gm)} == {8}
    assert attention.last is None
    assert attention.friends[0].last is None
    assert (attention.all, attention.by_name, attention.steps) == ([], {}, 0)
    assert not any(isinstance(value, FakeTensor) for value in everything_of(model))
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert not torch.compiler.is_compiling()


def test_keys_that_are_put_somewhere_are_read_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps(module: Any, stock: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
        update = ProbeLayer.update

        def kept(layer: ProbeLayer, *states: Any, **more: Any) -> Any:
            module.kept, values = update(layer, *states, **more)
            return module.kept, values

        with monkeypatch.context() as patch:
            patch.setattr(ProbeLayer, "update", kept)
            return stock(hidden_states, **kwargs)

    model = changed(keeps)
    findings = {finding.layer: finding for finding in find_sites(record(model, model.forward))}
    assert "also read by" in findings[1].problem
    assert not findings[0].refused


def branches(module: Any, stock: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    return stock(hidden_states * 2 if hidden_states.sum() > 0 else hidden_states, **kwargs)


def hides_a_branch(module: Any, stock: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    try:
        return branches(module, stock, hidden_states, **kwargs)
    except Exception:
        return stock(hidden_states, **kwargs)


def maps(module: Any, stock: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    return stock(torch.vmap(lambda row: row * 2)(hidden_states), **kwargs)


def leaves_torch(module: Any, stock: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    return stock(Strange.apply(hidden_states), **kwargs)


class Strange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return x * 2


def sets(module: Any, stock: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    twice = hidden_states * 2
    twice.data = hidden_states
    return stock(twice, **kwargs)


NOT_RECORDED = {
    branches: "data-dependent|DataDependent|item",
    hides_a_branch: "data-dependent|DataDependent|item",
    maps: "vmap",
    leaves_torch: "no call of torch's",
    sets: "sets an attribute",
}


@pytest.mark.parametrize("forward", NOT_RECORDED, ids=lambda fn: fn.__name__)
def test_what_cannot_be_recorded(forward: Any) -> None:
    model = changed(forward)
    with pytest.raises(NotRecorded, match=NOT_RECORDED[forward]):
        record(model, model.forward)


def test_hooks_and_forwards_of_others_are_left_to_dynamo(captures: list[Any]) -> None:
    model = tiny("mistral")
    handle = model.model.layers[0].register_forward_hook(lambda module, args, output: None)
    with pytest.raises(NotRecorded, match="hooks"):
        record(model, model.forward)
    handle.remove()
    with pytest.raises(NotRecorded, match="not the model's own"):
        record(model, lambda cache=None, **kwargs: model(cache=cache, **kwargs))
    model.model.norm.forward = lambda hidden: hidden
    with pytest.raises(NotRecorded, match="MistralRMSNorm has a forward that somebody put there"):
        record(model, model.forward)
    assert {spec.window for spec in discover(model, model.forward)} == {8}
    assert len(captures) == 1


def test_a_refusal_is_dynamos(captures: list[Any]) -> None:
    model = build(BY_NAME["gpt_neo"])
    assert any(spec.action == "refused" for spec in discovery._specs(record(model, model.forward), model))
    assert "l_forward_self_modules" in discover(model, model.forward)[0].reason
    assert len(captures) == 1


def test_nodes_are_those_of_dynamo() -> None:
    """The forms of a call that differ between Python and graphs: operators, swapped operands, in place, properties."""

    def forms(module: Any, stock: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
        x = 1 - hidden_states
        x += hidden_states
        x[:, 0] = 0.0
        x = 1 / (1 / x)
        x = x.mT.mT
        first, *_ = x.split(1, dim=1)
        x = torch.cat([first, x[:, 1:].float()], dim=1)
        return stock(x + torch.zeros(1, dtype=float).to(x.dtype), **kwargs)

    model = changed(forms)
    gm = record(model, model.forward)
    nodes = {op_name(node): node for node in gm.graph.nodes}
    one = next(node for node in gm.graph.nodes if node.target is operator.sub and node.args[0] == 1)
    (added,) = (user for user in one.users if user.target == "add_")
    assert any(user.target is operator.setitem for user in added.users)
    assert nodes["truediv"].args[0] == 1
    assert nodes["getattr"].args[1] == "mT"
    assert nodes["zeros"].kwargs["dtype"] is torch.float64
    assert nodes["split"].op == "call_method"
    assert {finding.mask.window for finding in find_sites(gm)} == {8}


def test_other_threads_run_as_before() -> None:
    """A call in another thread must not take the way of traced code while this one records."""
    stock = tiny("mistral")
    other = swa_pass.apply(copy.deepcopy(stock), backend="eager")
    ids = torch.arange(24)[None] % 7
    with torch.no_grad():
        cache = output_cache(other(input_ids=ids[:, :20], use_cache=True))
    runtime = runtime_of(other)
    assert runtime is not None
    compiled, seen = runtime.compiled_calls, list[Tensor]()

    def meanwhile(module: Any, stock: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
        @torch.no_grad()
        def run() -> None:
            for step in range(20, 24):
                seen.append(other(input_ids=ids[:, step : step + 1], past_key_values=cache, use_cache=True).logits)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return stock(hidden_states, **kwargs)

    model = changed(meanwhile)
    assert {finding.mask.window for finding in find_sites(record(model, model.forward))} == {8}
    assert len(seen) == 4
    assert runtime.compiled_calls == compiled + 4
    assert cache.get_seq_length() == 24
    expected = stock(input_ids=ids, use_cache=False).logits[:, 20:]
    torch.testing.assert_close(torch.cat(seen, 1), expected, atol=1e-4, rtol=1e-4)
