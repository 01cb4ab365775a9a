"""Every implementation of the operators against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_ops_common import IMPLEMENTATIONS, Implementation, check_case, impl, implementation, make_case, one_thread

from swa_pass.ops import build, reference

__all__ = ["impl", "one_thread"]  # fixtures


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("dim", "value_dim"), [(16, 16), (64, 64), (80, 80), (96, 96), (192, 128), (24, 40), (512, 512), (7, 3)]
)
def test_head_dims(impl: Implementation, dtype: torch.dtype, dim: int, value_dim: int) -> None:
    check_case(impl, make_case(dim=dim, value_dim=value_dim, dtype=dtype, window=20, lengths=[25, 7], batch=2))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_groups(impl: Implementation, group: int, tokens: int) -> None:
    check_case(impl, make_case(group=group, tokens=tokens, dim=32, window=9, lengths=[30, 4], dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("group", "tokens"), [(5, 1), (8, 1), (16, 1), (9, 3)])
@pytest.mark.parametrize("dim", [7, 64, 80, 96])
@pytest.mark.parametrize("impl", ["avx512bf16", "avx512", "avx2", "plain"], indirect=True)
def test_many_rows_over_short_keys(impl: Implementation, dtype: torch.dtype, group: int, tokens: int, dim: int) -> None:
    """Scores by columns: 16 keys at a time, from both runs of a ring and the new tokens; more than a block of keys."""
    shape: dict[str, Any] = {"group": group, "tokens": tokens, "dim": dim, "dtype": dtype, "kv_heads": 1}
    check_case(impl, make_case(window=21, lengths=[30, 4, 50], batch=3, softcap=3.0, sinks=True, **shape))
    check_case(impl, make_case(window=300, lengths=[700], batch=1, slack=16, **shape))


@pytest.mark.parametrize("window", [1, 2, 8, 33])
def test_wraps_at_every_place(impl: Implementation, window: int) -> None:
    for length in range(0, 3 * window + 2, max(1, window // 8)):
        check_case(impl, make_case(window=window, slack=2, lengths=length, kv_heads=1, batch=1, seed=length))


@pytest.mark.parametrize("softcap", [0.0, 3.0, 50.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_softcap_and_sinks(impl: Implementation, softcap: float, sinks: bool, window: int, tokens: int) -> None:
    case = make_case(softcap=softcap, sinks=sinks, window=window, tokens=tokens, lengths=[11, 3])
    case.q.mul_(4)  # scores large enough for the cap to matter
    check_case(impl, case)


@pytest.mark.parametrize(("tokens", "queries"), [(2, 1), (5, 2), (40, 1), (300, 1), (300, 140)])
@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("starts", [None, [3, 0]])
def test_queries_of_the_last_tokens_only(
    impl: Implementation, tokens: int, queries: int, window: int, starts: list[int] | None
) -> None:
    """What the same call gives for the last queries when all are asked for."""
    case = make_case(tokens=tokens, window=window, lengths=[11, 3], starts=starts, sinks=True)
    want = impl.attend(*case.args(), **case.options)[:, :, -queries:]
    case.q = case.q[:, :, -queries:]
    check_case(impl, case)
    torch.testing.assert_close(impl.attend(*case.args(), **case.options), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 4, 70])
def test_pads_return_zeros(impl: Implementation, tokens: int) -> None:
    case = make_case(tokens=tokens, lengths=[2, 5, 0], starts=[2 + tokens, 5, 1], batch=3, sinks=True)
    check_case(impl, case)
    out = impl.attend(*case.args(), **case.options)
    assert torch.equal(out[0], torch.zeros_like(out[0]))  # nothing but pads so far
    assert torch.equal(out[2, :, 0], torch.zeros_like(out[2, :, 0]))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [1, 6, 50])
def test_layouts(impl: Implementation, packed: bool, tokens: int) -> None:
    case = make_case(packed=packed, tokens=tokens, lengths=[9, 21])
    check_case(impl, case)
    # every second head of a larger tensor, rows in reverse order of memory
    wide = torch.randn(2, tokens, 8, 16)
    case.q = wide.transpose(1, 2)[:, ::2]
    case.k_new = torch.randn(2, 2, 2 * tokens, 16)[:, :, ::2]
    check_case(impl, case)


@pytest.mark.parametrize("tokens", [1, 3, 30])
def test_rows_with_fewer_new_tokens(impl: Implementation, tokens: int) -> None:
    counts = [tokens, 0, max(0, tokens - 1)]
    case = make_case(batch=3, tokens=tokens, lengths=[4, 12, 30], new_lengths=counts)
    # what is beyond a row's count must not matter
    for b, count in enumerate(counts):
        for t in (case.k_new, case.v_new):
            t[b, :, count:] = float("nan")
    got = impl.attend(*case.args(), **case.options)
    want = reference.attend(*case.args(), **case.options)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    for t in (case.k_new, case.v_new):
        t.nan_to_num_(1.0)
    check_case(impl, case)


@pytest.mark.parametrize("window", [4, 32])
def test_which_key_is_visible_exactly(impl: Implementation, window: int) -> None:
    """Equal scores and one-hot values: each output shows 1/n at every key it saw."""
    total = 3 * window
    for length in (0, 1, window - 2, window - 1, window, window + 1, 2 * window + 1):
        for tokens in (1, 2, window + 1):
            for slack in (0, 1, 5):  # slack 0: a ring of window - 1
                case = make_case(batch=1, kv_heads=1, group=1, tokens=tokens, window=window, slack=slack, dim=4,
                                 value_dim=total + window + 2, lengths=length)  # fmt: skip
                case.q.zero_()
                capacity = case.k_store.shape[2]
                case.k_store.nan_to_num_(0.0)
                case.v_store.fill_(float("nan"))
                for p in range(max(0, length - (window - 1)), length):
                    case.v_store[0, 0, p % capacity] = torch.nn.functional.one_hot(torch.tensor(p), total + window + 2)
                for i in range(tokens):
                    hot = torch.nn.functional.one_hot(torch.tensor(length + i), total + window + 2)
                    case.v_new[0, 0, i] = hot
                out = impl.attend_append(*case.args(), **case.options)[0, 0]
                for i in range(tokens):
                    position = length + i
                    seen = set(out[i].nonzero().flatten().tolist())
                    assert seen == set(range(max(0, position - window + 1), position + 1)), (length, tokens, slack, i)


def test_window_off_by_one_is_noticed(impl: Implementation) -> None:
    """The comparison has the power to tell windows apart: one more or one less key changes the result."""
    case = make_case(window=8, slack=3, lengths=[20, 30])
    case.k_store.nan_to_num_(1.0)
    case.v_store.nan_to_num_(1.0)
    want = reference.attend(*case.args(), **case.options)
    for wrong in (7, 9):
        got = impl.attend(*case.args(), **{**case.options, "window": wrong})
        assert (got - want).abs().max() > 1e-3
    got = impl.attend(*case.args(), **{**case.options, "scale": case.options["scale"] * 1.05})
    assert (got - want).abs().max() > 1e-3


@pytest.mark.parametrize(("window", "tokens"), [(16, 300), (150, 300), (400, 300), (0, 300), (130, 129)])
@pytest.mark.parametrize("start", [0, 9, 140])
@pytest.mark.parametrize("name", ["torch", "device", "avx512"])
def test_prefill(name: str, window: int, tokens: int, start: int) -> None:
    impl = implementation(name)
    case = make_case(batch=2, kv_heads=1, group=2, tokens=tokens, window=window, lengths=[0, 37], starts=[start, 0])
    check_case(impl, case)


@pytest.mark.parametrize(("window", "tokens"), [(30, 30), (30, 29), (30, 31), (0, 30)])
@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
def test_prompts_into_empty_rows(window: int, tokens: int, packed: bool) -> None:
    """One length at, below and above which the window matters; then the calls that look alike and must not be taken
    for one: a row that is not empty, pads, fewer tokens, a softcap, sinks."""
    impl = implementation("avx512")
    shape: dict[str, Any] = {"window": window, "tokens": tokens, "packed": packed, "group": 3, "kv_heads": 1}
    check_case(impl, make_case(**shape))
    check_case(impl, make_case(**shape, dtype=torch.bfloat16))
    check_case(impl, make_case(**shape, lengths=[0, 3]))
    check_case(impl, make_case(**shape, starts=[0, 5]))
    check_case(impl, make_case(**shape, new_lengths=[tokens, tokens - 9]))
    check_case(impl, make_case(**shape, softcap=2.0))
    check_case(impl, make_case(**shape, sinks=True))
    check_case(impl, make_case(**shape, value_dim=8))


def test_lengths_beyond_32_bits(impl: Implementation) -> None:
    far = 2**33 + 5
    case = make_case(batch=1, kv_heads=1, window=8, slack=4, lengths=0)
    case.k_store.nan_to_num_(0.25)
    case.v_store.nan_to_num_(0.75)
    case.lengths = torch.tensor([far])
    check_case(impl, case)


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_ring_smaller_than_its_window_until_it_wraps(impl: Implementation, tokens: int) -> None:
    case = make_case(batch=2, window=9, slack=0, lengths=[6, 3], tokens=tokens)  # 8 slots
    case.options["window"] = 100
    check_case(impl, case)


def test_empty_batch_and_no_tokens(impl: Implementation) -> None:
    case = make_case(batch=1, lengths=5)
    none = [t[:, :, :0] for t in (case.q, case.k_new, case.v_new)]
    out = impl.attend(*none, case.k_store, case.v_store, case.lengths, None, window=8, scale=1.0)
    assert out.shape == (1, 4, 0, 16)
    empty = [t[:0] for t in (case.q, case.k_new, case.v_new, case.k_store, case.v_store, case.lengths)]
    assert impl.attend(*empty, None, window=8, scale=1.0).shape == (0, 4, 1, 16)


def test_infinite_and_nan_tokens_stay_with_queries_that_see_them() -> None:
    """The kernels read only what a query sees: a NaN in a later draft token cannot reach earlier queries."""
    for name in ("avx512bf16", "avx512", "avx2", "plain"):
        try:
            impl = implementation(name)
        except pytest.skip.Exception:
            continue
        case = make_case(tokens=4, lengths=[20, 3], window=8)
        case.k_new[:, :, 2] = float("nan")
        case.v_new[:, :, 2] = float("inf")
        out = impl.attend(*case.args(), **case.options)
        assert out[:, :, :2].isfinite().all()
        assert out[:, :, 2:].isnan().all()
    build.select_variant("")


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize(("batch", "kv_heads", "tokens"), [(1, 1, 1), (1, 3, 1), (1, 1, 6), (4, 4, 1)])
def test_threads(impl: Implementation, threads: int, batch: int, kv_heads: int, tokens: int) -> None:
    torch.set_num_threads(threads)  # `one_thread` undoes it
    lengths = [1500 + 7 * b for b in range(batch)]
    parameters: dict[str, Any] = {"window": 600, "slack": 16, "dim": 64, "dtype": torch.bfloat16, "sinks": True}
    parameters.update(batch=batch, kv_heads=kv_heads, tokens=tokens, lengths=lengths, starts=[1000] * batch)
    check_case(impl, make_case(**parameters))


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    window = draw(st.sampled_from([0, 1, 2, 3, 8, 17]))
    batch = draw(st.integers(1, 3))
    tokens = draw(st.sampled_from([1, 1, 1, 2, 3, 7, 20]))
    dim = draw(st.sampled_from([16, 32, 40, 64, 80, 96, 128]))
    lengths = [draw(st.integers(0, 3 * window if window else 30)) for _ in range(batch)]
    counts = [draw(st.integers(0, tokens)) for _ in range(batch)] if draw(st.booleans()) else None
    return {
        "window": window,
        "batch": batch,
        "tokens": tokens,
        "dim": dim,
        "value_dim": draw(st.sampled_from([dim, 24])),
        "lengths": lengths,
        "starts": [draw(st.integers(0, length + tokens)) for length in lengths] if draw(st.booleans()) else None,
        "new_lengths": counts,
        "kv_heads": draw(st.integers(1, 2)),
        "group": draw(st.integers(1, 16)),
        "slack": draw(st.sampled_from([0, 1, 5, 16])),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        "softcap": draw(st.sampled_from([0.0, 5.0])),
        "sinks": draw(st.booleans()),
        "packed": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_random_cases(name: str) -> None:
    chosen = implementation(name)

    # Triton's interpreter takes a second for a case.
    examples = 25 if name == "triton" else 100

    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(cases())
    def run(parameters: dict[str, Any]) -> None:
        check_case(chosen, make_case(**parameters))

    try:
        run()
    finally:
        build.select_variant("")
