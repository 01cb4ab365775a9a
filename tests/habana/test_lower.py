"""Graphs with our operators, lowered beside the plugin: FusedSDPA where it can do it, matrix products elsewhere.

tests/test_lower_hpu.py says the rest: every option, every length, and what is in the graph around the attention.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gaudi_models import MUTATED, W
from habana_frameworks.torch.hpex import kernels
from habana_frameworks.torch.hpex.kernels.FusedSDPA import FusedSDPA12, FusedSDPA15
from test_ops_common import Case, make_case, same_values
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from swa_pass.graph import op_name
from swa_pass.ops import hpu_ops, reference
from swa_pass.passes.lower_hpu import holds_ours, lower_hpu

LONGEST = 3 * W
SDPA = "hpu::sdpa_recomp_fwd"


@pytest.fixture(params=[FusedSDPA12, FusedSDPA15], ids=["12 arguments", "15 arguments"], autouse=True)
def generation(request, monkeypatch):
    monkeypatch.setattr(kernels, "FusedSDPA", request.param)
    hpu_ops._fused.cache_clear()
    yield request.param
    hpu_ops._fused.cache_clear()


def case_of(length: int, window: int, tokens: int, **options: Any) -> Case:
    """What must be unseen is NaN. A linear store has the same size at every length."""
    slack = 3 if window else LONGEST + 3 - length
    return make_case(window=window, lengths=length, tokens=tokens, slack=slack, seed=length, **options)


def tensors_of(case: Case) -> list[torch.Tensor]:
    return [x.clone() for x in (*case.args()[:6], case.starts, case.options["sinks"]) if x is not None]


def lowered(case: Case) -> GraphModule:
    """Traced with fake tensors: nothing runs, so nothing is compiled either."""
    given = {"starts": case.starts, "sinks": case.options["sinks"]}
    places = [name for name, value in given.items() if value is not None]

    def call(*args: torch.Tensor) -> torch.Tensor:
        return torch.ops.swa_pass.attend_append.default(*args[:6], **{**case.options, **dict(zip(places, args[6:]))})

    gm = make_fx(call, tracing_mode="fake")(*tensors_of(case))
    assert lower_hpu(gm) == 1
    assert not holds_ours(gm)
    return gm


def names(gm: GraphModule) -> list[str]:
    return [op_name(node) for node in gm.graph.nodes]


@pytest.mark.parametrize("tokens", [1, 3, 2 * W + 5], ids=["decode", "draft", "prompt"])
@pytest.mark.parametrize("window", [0, W], ids=["linear", "ring"])
@pytest.mark.parametrize(
    "options",
    [{}, {"starts": [0, 5]}, {"group": 1}, {"kv_heads": 1, "group": 4}],
    ids=["groups", "pads", "no groups", "one kv head"],
)
def test_fused_at_every_length(options, window, tokens):
    """One graph, one FusedSDPA in it: scale and mask said, no window, and the store as it lies at decode."""
    gm = lowered(case_of(0, window, tokens, **options))
    (call,) = (node for node in gm.graph.nodes if op_name(node) == SDPA)
    slots = W - 1 + 3 if window else LONGEST + tokens + 3
    keys = slots if window == 0 or slots >= W - 1 + tokens else slots + tokens
    q, k, _, mask = (node.meta["val"].shape for node in call.args[:4])
    assert (q[-2], k[-2]) == (tokens, keys)
    assert (mask[0], *mask[-2:]) == (2, tokens, keys)
    assert all(size == 1 for size in mask[1:-2])
    assert call.args[4:9] == (0.0, 0.25, False, False, "none")
    assert "softmax" not in names(gm)
    for length in range(LONGEST + 1):
        case = case_of(length, window, tokens, **options)
        tensors = tensors_of(case)
        got = gm(*tensors)
        torch.testing.assert_close(got, reference.attend(*case.args(), **case.options), rtol=2e-5, atol=2e-5)
        stores = [case.k_store, case.v_store]
        reference.append(case.k_new, case.v_new, *stores, case.lengths, window=window)
        assert all(same_values(ours, theirs) for ours, theirs in zip(tensors[3:5], stores))


@pytest.mark.parametrize("wrong", [W - 1, W + 1])
def test_a_window_that_is_off_by_one_is_seen(wrong):
    case = case_of(LONGEST, W, 1)
    case.k_store, case.v_store = (x.nan_to_num(0.5) for x in (case.k_store, case.v_store))
    good = reference.attend(*case.args(), **case.options)
    case.options["window"] = wrong
    gm = lowered(case)
    assert names(gm).count(SDPA) == 1
    assert (gm(*tensors_of(case)) - good).abs().max() > MUTATED


@pytest.mark.parametrize(
    "options", [{"softcap": 2.0}, {"sinks": True}, {"value_dim": 24}], ids=["softcap", "sinks", "value head_dim"]
)
def test_what_fused_sdpa_cannot_do_is_products(options):
    case = case_of(LONGEST, W, 1, **options)
    gm = lowered(case)
    assert SDPA not in names(gm)
    torch.testing.assert_close(
        gm(*tensors_of(case)), reference.attend(*case.args(), **case.options), rtol=2e-5, atol=2e-5
    )


def test_sizes_that_are_symbols_are_products():
    """The plugin says that FusedSDPA is not for dynamic shapes."""
    case = case_of(5, W, 3)
    call = make_fx(
        lambda *args: torch.ops.swa_pass.attend_append.default(*args, **case.options), tracing_mode="symbolic"
    )(*tensors_of(case))
    lower_hpu(call)
    assert SDPA not in names(call)
    torch.testing.assert_close(
        call(*tensors_of(case)), reference.attend(*case.args(), **case.options), rtol=2e-5, atol=2e-5
    )
