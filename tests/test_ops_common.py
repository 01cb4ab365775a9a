"""What the operator tests share: the implementations under test, random cases, and a naive model of the meaning.

The tests in this file check the reference itself against that model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from swa_pass import ops
from swa_pass.ops import build, hpu_ops, reference, torch_masked, torch_ops, triton_ops

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Implementation:
    """One way to compute the four operators."""

    attend: Callable[..., Tensor]
    append: Callable[..., None]
    attend_append: Callable[..., Tensor]
    view: Callable[..., Tensor]


def _masked_attend(q: Tensor, k: Tensor, v: Tensor, ks: Tensor, vs: Tensor, lengths: Tensor, starts: Any = None,
                   *, window: int, scale: float, softcap: float = 0.0, sinks: Any = None,
                   new_lengths: Any = None) -> Tensor:  # fmt: skip
    out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    torch_masked.attend(q, k, v, ks, vs, lengths, starts, window, scale, softcap, sinks, new_lengths, out)
    return out


def _device_append(k: Tensor, v: Tensor, ks: Tensor, vs: Tensor, lengths: Tensor, *, window: int,
                   new_lengths: Any = None) -> None:  # fmt: skip
    torch_ops._write_on_device([(k, ks), (v, vs)], lengths, new_lengths, window)


def _device_attend_append(*args: Any, **kwargs: Any) -> Tensor:
    out = _masked_attend(*args, **kwargs)
    _device_append(*args[1:6], window=kwargs["window"], new_lengths=kwargs.get("new_lengths"))
    return out


def _device_view(store: Tensor, new: Tensor, lengths: Tensor, window: int) -> Tensor:
    width = window - 1 + new.shape[2] if window > 0 else store.shape[2]
    return torch_ops._view_on_device(store, new, lengths, window, width)


def implementation(name: str) -> Implementation:
    """By name: "torch" (the fallback on CPU), "device" (for other devices, run on CPU), "hpu" (Intel Gaudi without its
    plugin, run on CPU), "triton", or a C++ variant."""
    if name == "torch":
        return Implementation(torch_ops.attend, torch_ops.append, torch_ops.attend_append, torch_ops.view)
    if name == "device":
        return Implementation(_masked_attend, _device_append, _device_attend_append, _device_view)
    if name == "hpu":
        return Implementation(hpu_ops.attend, hpu_ops.append, hpu_ops.attend_append, hpu_ops.view)
    if name == "triton":  # in Triton's interpreter, on CPU tensors; see conftest.py
        pytest.importorskip("triton")
        return Implementation(triton_ops.attend, triton_ops.append, triton_ops.attend_append, torch_ops.view)
    if not build.ensure_kernels():
        pytest.skip(build.kernel_status())
    if not build.select_variant(name) and not (name == "avx512bf16" and build.select_variant("avx512bf16emulated")):
        pytest.skip(f"this machine has no {name}")
    return Implementation(ops.attend, ops.append, ops.attend_append, ops.view)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Most cases are tiny: on a busy machine, waking a second thread takes longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


IMPLEMENTATIONS = ["torch", "device", "hpu", "triton", "avx512bf16", "avx512", "avx2", "plain"]


@pytest.fixture(params=IMPLEMENTATIONS)
def impl(request: pytest.FixtureRequest) -> Any:
    yield implementation(request.param)
    build.select_variant("")


@dataclass
class Case:
    """Inputs of one step. Stores are already in the state before the step."""

    q: Tensor
    k_new: Tensor
    v_new: Tensor
    k_store: Tensor
    v_store: Tensor
    lengths: Tensor
    starts: Tensor | None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def window(self) -> int:
        return int(self.options["window"])

    def args(self, k_store: Tensor | None = None, v_store: Tensor | None = None) -> tuple[Any, ...]:
        ks = self.k_store if k_store is None else k_store
        vs = self.v_store if v_store is None else v_store
        return (self.q, self.k_new, self.v_new, ks, vs, self.lengths, self.starts)


def make_case(
    *,
    batch: int = 2,
    kv_heads: int = 2,
    group: int = 2,
    tokens: int = 1,
    dim: int = 16,
    value_dim: int | None = None,
    window: int = 8,
    slack: int = 3,
    lengths: list[int] | int = 0,
    starts: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    softcap: float = 0.0,
    sinks: bool = False,
    new_lengths: list[int] | None = None,
    packed: bool = False,
    seed: int = 0,
) -> Case:
    """`packed`: q, k and v are transposed views of (B, Q, heads, dim), as projections produce them.

    Slots that no query of the step can see hold NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    value_dim = dim if value_dim is None else value_dim
    lengths = [lengths] * batch if isinstance(lengths, int) else lengths
    capacity = max(1, window - 1 + slack) if window > 0 else max(lengths) + tokens + slack

    def random(heads: int, count: int, width: int) -> Tensor:
        if packed:
            x = torch.randn(batch, count, heads, width, generator=generator).to(dtype).transpose(1, 2)
        else:
            x = torch.randn(batch, heads, count, width, generator=generator).to(dtype)
        return x

    def store(width: int) -> Tensor:
        x = torch.randn(batch, kv_heads, capacity, width, generator=generator).to(dtype)
        for b, length in enumerate(lengths):
            first = max(length - (window - 1), 0) if window > 0 else 0
            first = max(first, starts[b] if starts else 0)
            seen = {reference.slot_of(p, capacity, window) for p in range(first, length)}
            x[b, :, [s for s in range(capacity) if s not in seen]] = float("nan")
        return x

    return Case(
        q=random(kv_heads * group, tokens, dim),
        k_new=random(kv_heads, tokens, dim),
        v_new=random(kv_heads, tokens, value_dim),
        k_store=store(dim),
        v_store=store(value_dim),
        lengths=torch.tensor(lengths),
        starts=None if starts is None else torch.tensor(starts),
        options={
            "window": window,
            "scale": 1.0 / math.sqrt(dim),
            "softcap": softcap,
            "sinks": torch.randn(kv_heads * group, generator=generator) if sinks else None,
            "new_lengths": None if new_lengths is None else torch.tensor(new_lengths),
        },
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))


def same_values(a: Tensor, b: Tensor) -> bool:
    """Equal, NaN where NaN (torch's scatter gives a bfloat16 NaN other bits, so bits would be too strict)."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def check_case(impl: Implementation, case: Case) -> None:
    """All four operators against the reference: results close, writes equal, layout as promised."""
    window, new_lengths = case.window, case.options["new_lengths"]
    want = reference.attend(*case.args(), **case.options)
    assert not want.isnan().any()
    k_want, v_want = case.k_store.clone(), case.v_store.clone()
    reference.append(case.k_new, case.v_new, k_want, v_want, case.lengths, window=window, new_lengths=new_lengths)

    tolerance = TOLERANCE[case.q.dtype]
    before = case.k_store.clone()
    got = impl.attend(*case.args(), **case.options)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert got.transpose(1, 2).is_contiguous()
    assert same_bits(before, case.k_store), "attend must not write"

    k, v = case.k_store.clone(), case.v_store.clone()
    got = impl.attend_append(*case.args(k, v), **case.options)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert same_values(k, k_want)
    assert same_values(v, v_want)

    k, v = case.k_store.clone(), case.v_store.clone()
    impl.append(case.k_new, case.v_new, k, v, case.lengths, window=window, new_lengths=new_lengths)
    assert same_values(k, k_want)
    assert same_values(v, v_want)

    store = case.k_store.nan_to_num(0.5)
    assert torch.equal(
        impl.view(store, case.k_new, case.lengths, window), reference.view(store, case.k_new, case.lengths, window)
    )


class ListModel:
    """The meaning without stores: every row is a Python list of all its tokens, and attention loops over numbers."""

    def __init__(self, batch: int) -> None:
        self.keys: list[list[Tensor]] = [[] for _ in range(batch)]  # one (KV, D) tensor a token
        self.values: list[list[Tensor]] = [[] for _ in range(batch)]

    def step(self, case: Case) -> Tensor:
        batch, heads, tokens, _ = case.q.shape
        group = heads // case.k_new.shape[1]
        out = torch.zeros(batch, heads, tokens, case.v_new.shape[3], dtype=torch.float64)
        for b in range(batch):
            self.keys[b] += list(case.k_new[b].double().unbind(1))
            self.values[b] += list(case.v_new[b].double().unbind(1))
            start = 0 if case.starts is None else int(case.starts[b])
            for i in range(tokens):
                position = len(self.keys[b]) - tokens + i
                for h in range(heads):
                    total, sinks = 0.0, case.options["sinks"]
                    result = torch.zeros(case.v_new.shape[3], dtype=torch.float64)
                    for p in range(start, position + 1):
                        if 0 < case.window <= position - p:
                            continue
                        score = float(case.q[b, h, i].double() @ self.keys[b][p][h // group])
                        score *= case.options["scale"]
                        if case.options["softcap"]:
                            score = case.options["softcap"] * math.tanh(score / case.options["softcap"])
                        total += math.exp(score)
                        result += math.exp(score) * self.values[b][p][h // group]
                    if total > 0:
                        out[b, h, i] = result / (total + (math.exp(float(sinks[h])) if sinks is not None else 0.0))
        return out


@pytest.mark.parametrize("window", [0, 1, 2, 5])
@pytest.mark.parametrize(("softcap", "sinks"), [(0.0, False), (2.0, False), (0.0, True), (2.0, True)])
def test_reference_is_the_list_model(window: int, softcap: float, sinks: bool) -> None:
    model = ListModel(batch=2)
    stores: tuple[Tensor, Tensor] | None = None
    length = 0
    for step, tokens in enumerate([3, 1, 1, 7, 1, 2, 1]):
        case = make_case(
            window=window,
            tokens=tokens,
            lengths=length,
            starts=[0, 2],
            softcap=softcap,
            sinks=sinks,
            seed=step,
            slack=1,
        )
        if stores is None:
            capacity = 40 if window == 0 else max(1, window - 1)
            stores = (torch.full((2, 2, capacity, 16), float("nan")), torch.full((2, 2, capacity, 16), float("nan")))
        got = reference.attend(*case.args(*stores), **case.options)
        torch.testing.assert_close(got.double(), model.step(case), rtol=1e-6, atol=1e-6)
        reference.append(case.k_new, case.v_new, *stores, case.lengths, window=window)
        length += tokens
        # `view` before the next step shows the newest tokens in order
        empty = case.k_new[:, :, :1]
        seen = reference.view(stores[0], empty, torch.tensor([length, length]), window)
        n = min(length, window - 1) if window > 0 else length
        for b in range(2):
            for j in range(n):
                assert torch.equal(seen[b, :, j].double(), model.keys[b][length - n + j])
