"""Bad input raises a sentence that says what was seen, and leaves the stores as they were."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_ops_common import Case, make_case, one_thread, same_bits

from swa_pass import ops
from swa_pass.ops import build, torch_ops

__all__ = ["one_thread"]  # a fixture

Change = Callable[[Case], None]


def _set(name: str, make: Callable[[Case], Any]) -> Change:
    def change(case: Case) -> None:
        if name in case.__dict__:
            setattr(case, name, make(case))
        else:
            case.options[name] = make(case)

    return change


BAD: dict[str, tuple[Change, str]] = {
    "ring too small": (
        _set("window", lambda c: 99),
        r"row 1: the ring holds 10 tokens, but of 11 tokens a window of 99 needs the last 11; grow the store",
    ),
    "negative window": (_set("window", lambda c: -1), r"window is -1"),
    "full linear store": (_set("window", lambda c: 0), r"row 1: the linear store is full: 9 tokens \+ 2 new ones"),
    "k dtype": (_set("k_new", lambda c: c.k_new.double()), r"k_new is torch.float64 and k_store is torch.float32"),
    "q dtype": (_set("q", lambda c: c.q.half()), r"q is torch.float16"),
    "v shape": (_set("v_new", lambda c: c.v_new[:, :1]), r"v_new \(2, 1, 2, 16\)"),
    "store batch": (_set("k_store", lambda c: c.k_store[:1]), r"k_store \(1, 2, 10, 16\) does not fit"),
    "v_store dim": (_set("v_store", lambda c: c.v_store[..., :8].contiguous()), r"v_store \(2, 2, 10, 8\)"),
    "store strides": (
        _set("k_store", lambda c: c.k_store.transpose(1, 2).contiguous().transpose(1, 2)),
        r"k_store must be contiguous",
    ),
    "lengths dtype": (_set("lengths", lambda c: c.lengths.int()), r"lengths is torch.int32; use torch.int64"),
    "lengths shape": (_set("lengths", lambda c: c.lengths[:1]), r"lengths must have shape \(2,\)"),
    "negative length": (_set("lengths", lambda c: c.lengths - 7), r"row 0: length -3"),
    "negative start": (_set("starts", lambda c: c.lengths - 7), r"start -3"),
    "starts shape": (_set("starts", lambda c: torch.zeros(3, dtype=torch.int64)), r"starts must have shape"),
    "too many new": (_set("new_lengths", lambda c: torch.tensor([1, 3])), r"row 1: new_lengths says 3 of 2"),
    "dims": (_set("k_new", lambda c: c.k_new[0]), r"k_new must have 4 dimensions"),
    "block_table": (_set("block_table", lambda c: c.lengths), r"paged stores"),
    "k_scale": (_set("k_scale", lambda c: torch.ones(2)), r"k_store .* of torch.float32 has scales, which only stores"),
    "v_scale": (_set("v_scale", lambda c: torch.ones(2)), r"k_store .* of torch.float32 has scales, which only stores"),
    "valid": (_set("valid", lambda c: torch.ones(2, 10)), r"validity bitmap"),
}
BAD_ATTEND: dict[str, tuple[Change, str]] = {
    "heads": (_set("q", lambda c: c.q[:, :3]), r"3 query heads cannot share 2 kv heads"),
    "q tokens": (_set("q", lambda c: torch.cat([c.q, c.q], 2)), r"q \(2, 4, \d+, 16\) does not fit k_new"),
    "sinks shape": (_set("sinks", lambda c: torch.zeros(3)), r"sinks must have shape \(4,\)"),
    "sinks dtype": (_set("sinks", lambda c: torch.zeros(4, dtype=torch.int64)), r"sinks is torch.int64"),
}


@pytest.mark.parametrize("kernel", ["torch", "cpp"])
@pytest.mark.parametrize("op", ["attend_append", "append", "attend"])
@pytest.mark.parametrize("what", [*BAD, *BAD_ATTEND])
def test_bad_input(kernel: str, op: str, what: str) -> None:
    if op == "attend" and what == "ring too small":
        pytest.skip("reading is fine: the 9 tokens so far fit")
    if op == "append" and (what in BAD_ATTEND or what in ("q dtype", "negative start", "starts shape")):
        pytest.skip("append has no such argument")
    if kernel == "cpp" and not build.ensure_kernels():
        pytest.skip(build.kernel_status())
    case = make_case(tokens=2, lengths=[4, 9])
    change, message = {**BAD, **BAD_ATTEND}[what]
    change(case)
    before = case.k_store.clone(), case.v_store.clone()
    module: Any = torch_ops if kernel == "torch" else ops
    args, options = case.args(), case.options
    if op == "append":
        args, options = args[1:6], {k: v for k, v in options.items() if k not in ("scale", "softcap", "sinks")}
    with pytest.raises((ValueError, NotImplementedError), match=message) as caught:
        getattr(module, op)(*args, **options)
    assert f"swa_pass.{op}:" in str(caught.value)
    assert same_bits(before[0], case.k_store)
    assert same_bits(before[1], case.v_store)


def test_view_names_the_layer() -> None:
    case = make_case(window=0, lengths=4)
    with pytest.raises(ValueError, match=re.escape("swa_pass.view (layer 3): row 0: the linear store is full")):
        ops.view(case.k_store, case.k_new, case.lengths + 20, 0, layer=3)
    with pytest.raises(ValueError, match=r"swa_pass.view: row 0: the ring holds"):
        ops.view(case.k_store, case.k_new, case.lengths + 20, 100)
    with pytest.raises(ValueError, match=r"swa_pass.view: new is torch.float64 and store is torch.float32"):
        ops.view(case.k_store, case.k_new.double(), case.lengths, 8)
