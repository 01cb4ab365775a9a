"""The operators as plain ATen (`ops.aten`, what `swa_pass.export(lowering="aten")` puts in) against the reference."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from test_ops_common import TOLERANCE, make_case

from swa_pass.ops import aten, reference

WINDOW = 8


@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"), list(itertools.product((0, WINDOW), (0.0, 2.0), (False, True)))
)
@pytest.mark.parametrize("length", [0, 5, 29])
def test_same_values_and_same_stores(window: int, softcap: float, with_sinks: bool, length: int) -> None:
    for tokens, batch in ((1, 1), (3, 2), (2 * WINDOW + 9, 2)):
        case = make_case(batch=batch, tokens=tokens, window=window, lengths=length)
        stores = [store.nan_to_num(0.5) for store in (case.k_store, case.v_store)]
        ours, theirs = ([store.clone() for store in stores] for _ in range(2))
        heads = case.q.shape[1]
        options: dict[str, Any] = {"window": window, "scale": 0.25, "softcap": softcap}
        options["sinks"] = torch.linspace(-1, 2, heads) if with_sinks else None
        starts = torch.arange(batch) * 2  # the first row has no pads
        args = (case.q, case.k_new, case.v_new)
        want = reference.attend(*args, *theirs, case.lengths, starts, **options)
        read_only = aten.attend(*args, *ours, case.lengths, starts, **options)
        assert all(torch.equal(a, b) for a, b in zip(ours, stores)), "attend wrote"
        got = aten.attend_append(*args, *ours, case.lengths, starts, **options)
        reference.append(case.k_new, case.v_new, *theirs, case.lengths, window=window)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs)), "another store"
        for row, start in enumerate(starts.tolist()):
            real = slice(max(start - length, 0), None)  # a pad's result is some number that nobody looks at
            for out in (read_only, got):
                error = (out[row, :, real] - want[row, :, real]).abs().max() if start - length < tokens else 0
                assert error < TOLERANCE[torch.float32]
                assert torch.isfinite(out).all()
