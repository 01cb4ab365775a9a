"""Our operators on the fake "hpu" device, and a compiled step there, in a process of its own. Prints what it did."""

from __future__ import annotations

import fakehpu  # noqa: F401  (the device)
import torch
from habana_frameworks.torch.hpex.kernels.FusedSDPA import calls
from hpu_compiler import Inner
from test_ops_common import Case, make_case, same_values

import swa_pass
from swa_pass.ops import reference
from swa_pass.passes.lower_hpu import holds_ours

W = 8
ops = torch.ops.swa_pass


def on_device(case: Case) -> tuple[list, dict]:
    tensors = [None if x is None else x.to("hpu") for x in case.args()]
    return tensors, {k: v.to("hpu") if torch.is_tensor(v) else v for k, v in case.options.items()}


def check(case: Case, run: object) -> None:
    tensors, options = on_device(case)
    got = run(*tensors, **options)
    assert got.device.type == "hpu"
    torch.testing.assert_close(
        got.cpu(), reference.attend(*case.args(), **case.options), rtol=2e-5, atol=2e-5, equal_nan=False
    )
    stores, counts = [case.k_store, case.v_store], case.options["new_lengths"]
    reference.append(case.k_new, case.v_new, *stores, case.lengths, window=case.window, new_lengths=counts)
    assert all(same_values(ours.cpu(), theirs) for ours, theirs in zip(tensors[3:5], stores))


def eager() -> int:
    """Rows of their own lengths, too."""
    before = len(calls)
    for options in ({}, {"softcap": 2.0}, {"sinks": True}, {"new_lengths": [1, 3]}, {"starts": [0, 6]}):
        for window in (0, W):
            check(make_case(lengths=[21, 6], tokens=3, window=window, **options), ops.attend_append.default)
            store = make_case(lengths=[21, 6], tokens=3, window=window).k_store.nan_to_num(0.5)
            case = make_case(lengths=[21, 6], tokens=3, window=window)
            got = ops.view.default(store.to("hpu"), case.k_new.to("hpu"), case.lengths.to("hpu"), window)
            assert torch.equal(got.cpu(), reference.view(store, case.k_new, case.lengths, window))
    return len(calls) - before


@torch.no_grad()
def compiled() -> int:
    """One graph for all lengths, behind our backend: a device tensor is enough to say that it goes to a Gaudi."""
    inner, lengths = Inner(), range(3 * W + 1)
    options = {**make_case(window=W).options, "starts": None}

    def step(*args: torch.Tensor) -> torch.Tensor:
        return ops.attend_append.default(*args[:6], **options)

    run = torch.compile(step, backend=swa_pass.backend(inner), fullgraph=True)
    for length in lengths:
        check(make_case(lengths=length, window=W, seed=length), lambda *tensors, **_: run(*tensors))
    assert len(inner.graphs) == 1
    for graph in (*inner.graphs, *inner.lowered):
        assert not holds_ours(graph)
    done = [str(node.target) for node in inner.lowered[0].graph.nodes]
    assert [name.count("sdpa") for name in done].count(1) == 1
    return done.count("aten.index_copy.default")


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("fused calls", eager())
    print("index_copy", compiled())
