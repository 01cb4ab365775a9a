"""Quantised stores in every implementation, against the reference on what the stores read back as."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_ops_common import (
    IMPLEMENTATIONS,
    TOLERANCE,
    Case,
    Implementation,
    implementation,
    make_case,
    one_thread,
    same_bits,
)

from swa_pass import ops
from swa_pass.ops import build, reference
from swa_pass.ops.quant import LARGEST, dequantise, quantise, rounded

__all__ = ["one_thread"]  # a fixture

DTYPES = list(LARGEST)
stores = pytest.mark.parametrize("store", DTYPES, ids=["int8", "float8"])


# "device" is parts of the torch twin, not all; "avx512bf16" has the kernels of "avx512" for these stores.
@pytest.fixture(params=[name for name in IMPLEMENTATIONS if name not in ("device", "avx512bf16")])
def impl(request: pytest.FixtureRequest) -> Any:
    yield implementation(request.param)
    build.select_variant("")


def quantised(case: Case, store: torch.dtype) -> tuple[list[torch.Tensor], Case]:
    """The stores of a case with their scales (NaN for unseen slots), and the same case as the reference sees it."""
    (k, ks), (v, vs) = quantise(case.k_store, store), quantise(case.v_store, store)
    plain = Case(
        case.q,
        rounded(case.k_new, store),
        rounded(case.v_new, store),
        dequantise(k, ks, torch.float64),
        dequantise(v, vs, torch.float64),
        case.lengths,
        case.starts,
        case.options,
    )
    return [k, v, ks, vs], plain


def check(impl: Implementation, case: Case, store: torch.dtype) -> None:
    kept, plain = quantised(case, store)
    options, window = case.options, case.window
    want = reference.attend(*plain.args(), **options)
    assert not want.isnan().any()
    written = [t.clone() for t in kept]
    fresh = (quantise(case.k_new, store), quantise(case.v_new, store))
    for n in (0, 1):  # numbers, then scales
        new_k, new_v, k, v = fresh[0][n], fresh[1][n], written[2 * n], written[2 * n + 1]
        if n:
            new_k, new_v, k, v = (t[..., None] for t in (new_k, new_v, k, v))
        k, v = k.view(torch.int8) if not n else k, v.view(torch.int8) if not n else v
        new_k, new_v = (t.view(torch.int8) if not n else t for t in (new_k, new_v))
        reference.append(new_k, new_v, k, v, case.lengths, window=window, new_lengths=options["new_lengths"])

    k, v, ks, vs = (t.clone() for t in kept)
    tolerance = TOLERANCE[case.q.dtype]
    got = impl.attend(*case.args(k, v), **options, k_scale=ks, v_scale=vs)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert all(map(same_bits, (k, v, ks, vs), kept)), "attend must not write"
    got = impl.attend_append(*case.args(k, v), **options, k_scale=ks, v_scale=vs)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert all(map(same_bits, (k, v, ks, vs), written))
    k, v, ks, vs = (t.clone() for t in kept)
    impl.append(case.k_new, case.v_new, k, v, case.lengths, window=window, new_lengths=options["new_lengths"],
                k_scale=ks, v_scale=vs)  # fmt: skip
    assert all(map(same_bits, (k, v, ks, vs), written))


@stores
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "value_dim"), [(16, 16), (80, 80), (192, 128), (24, 40), (512, 512), (7, 3)])
def test_head_dims(impl: Implementation, store: Any, dtype: torch.dtype, dim: int, value_dim: int) -> None:
    check(impl, make_case(dim=dim, value_dim=value_dim, dtype=dtype, window=20, lengths=[25, 7]), store)


@stores
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("window", [0, 8])
def test_everything_at_once(impl: Implementation, store: Any, tokens: int, window: int) -> None:
    case = make_case(
        tokens=tokens, window=window, lengths=[30, 4, 11], starts=[3, 5, 0], batch=3, softcap=3.0, sinks=True, group=4,
        dim=32, dtype=torch.bfloat16, packed=True, new_lengths=[tokens, 0, max(1, tokens - 1)],
    )  # fmt: skip
    check(impl, case, store)


@stores
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_cases(impl: Implementation, store: Any, data: st.DataObject) -> None:
    draw = data.draw
    window = draw(st.sampled_from([0, 1, 5, 8, 33]))
    batch = draw(st.integers(1, 3))
    case = make_case(
        batch=batch,
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 2, 5])),
        tokens=draw(st.integers(1, 12)),
        dim=draw(st.sampled_from([8, 20, 64])),
        window=window,
        lengths=draw(st.lists(st.integers(0, 3 * max(window, 8)), min_size=batch, max_size=batch)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 99)),
    )
    check(impl, case, store)


@stores
def test_split_along_the_window(impl: Implementation, store: Any) -> None:
    """One head, a long window and two threads: parts of the window, merged."""
    torch.set_num_threads(2)
    check(impl, make_case(batch=1, kv_heads=1, dim=64, window=1500, lengths=2000, dtype=torch.bfloat16), store)


@stores
def test_the_check_can_fail(store: Any) -> None:
    """New tokens that are attended to as they came, not as they are kept."""
    case = make_case(tokens=3, lengths=[30, 4])
    kept, plain = quantised(case, store)
    plain.k_new, plain.v_new = case.k_new, case.v_new
    want = reference.attend(*plain.args(), **case.options)
    got = ops.attend(*case.args(*kept[:2]), **case.options, k_scale=kept[2], v_scale=kept[3])
    assert (got - want).abs().max() > 50 * TOLERANCE[torch.float32]


@stores
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20))
def test_the_error_is_half_a_step(store: Any, numbers: list[float]) -> None:
    token = torch.tensor(numbers)
    back, top = rounded(token, store), token.abs().max()
    # int8 has equal steps; float8 has 3 bits after the leading one, and steps of 2^-9 below 2^-6
    step = top / 127 if store == torch.int8 else torch.maximum(token.abs() / 8, top / 448 * 2**-9)
    assert ((back - token).abs() <= step / 2 * 1.0001 + 1e-30).all()


@stores
def test_zeros_and_what_is_no_number(store: Any) -> None:
    assert rounded(torch.zeros(4), store).equal(torch.zeros(4))
    assert rounded(torch.tensor([1.0, float("nan")]), store).isnan().any()
    assert not rounded(torch.tensor([1.0, float("inf")]), store).isfinite().all()


@stores
def test_view_reads_back(store: Any) -> None:
    case = make_case(lengths=[30, 4], tokens=3, dtype=torch.bfloat16)
    (k, _, scale, _), _ = quantised(case, store)
    scale = scale.nan_to_num(1.0)
    want = reference.view(
        dequantise(k, scale, torch.bfloat16), rounded(case.k_new, store), case.lengths, window=case.window
    )
    assert torch.equal(ops.view(k, case.k_new, case.lengths, case.window, -1, None, scale), want)


@pytest.mark.parametrize("op", ["attend", "append", "attend_append"])
@pytest.mark.parametrize("wrong", ["no scales", "one scale", "shape", "dtype", "plain store", "lengths"])
def test_mistakes_change_nothing(op: str, wrong: str) -> None:
    case = make_case(lengths=[30, 4])
    (k, v, ks, vs), _ = quantised(case, torch.int8)
    given: dict[str, Any] = {"k_scale": ks, "v_scale": vs}
    lengths, said = case.lengths, "scale"
    if wrong == "no scales":
        given = {}
    elif wrong == "one scale":
        given["v_scale"] = None
    elif wrong == "shape":
        given["k_scale"] = ks[:, :, :3].contiguous()
    elif wrong == "dtype":
        given["v_scale"] = vs.double()
    elif wrong == "plain store":
        k, v = case.k_store, case.v_store
    else:
        lengths, said = lengths - 10, "row 1: length -6"
    before = [t.clone() for t in (k, v, ks, vs)]
    arguments: tuple[Any, ...] = (case.k_new, case.v_new, k, v, lengths)
    if op != "append":
        arguments, given = (case.q, *arguments), {**given, "scale": 0.25}
    with pytest.raises(ValueError, match=said):
        getattr(ops, op)(*arguments, window=case.window, **given)
    assert all(map(same_bits, before, (k, v, ks, vs)))


@stores
@pytest.mark.parametrize("op", ["view", "append", "attend", "attend_append"])
def test_bytes_without_scales_are_refused(op: str, store: Any) -> None:
    """Also where everything else has the same dtype, as a kernel of that dtype would want it."""
    q, k, v, k_store, v_store, lengths, _ = make_case(lengths=[30, 4]).args()
    q, k, v, k_store, v_store = (t.nan_to_num(1.0).to(store) for t in (q, k, v, k_store, v_store))
    calls: dict[str, Any] = {
        "view": lambda: ops.view(k_store, k, lengths, 8),
        "append": lambda: ops.append(k, v, k_store, v_store, lengths, window=8),
        "attend": lambda: ops.attend(q, k, v, k_store, v_store, lengths, window=8, scale=0.25),
        "attend_append": lambda: ops.attend_append(q, k, v, k_store, v_store, lengths, window=8, scale=0.25),
    }
    before = k_store.clone()
    with pytest.raises(ValueError, match="need their scales"):
        calls[op]()
    assert same_bits(before, k_store)
