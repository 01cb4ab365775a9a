"""swa_pass::linear against float64, and the pass that puts it into a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import linear as torch_linear

from swa_pass import ops
from swa_pass.ops import build
from swa_pass.passes.decode_linear import use_decode_linear

linear = torch.ops.swa_pass.linear.default
DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    if not ops.ensure_kernels():
        pytest.skip(ops.kernel_status())


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def inputs(rows: int, k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(rows, k).to(dtype), (torch.randn(n, k) / k**0.5).to(dtype), torch.randn(n).to(dtype)


def check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """No worse than F.linear. `noise`: what the order of fp32 additions may change; one more rounding is far above."""
    result = linear(x, weight, bias)
    exact = torch_linear(x.double(), weight.double(), None if bias is None else bias.double())
    theirs = torch_linear(x, weight, bias)
    assert result.shape == theirs.shape
    assert result.dtype == x.dtype
    assert result.is_contiguous()
    noise = 2e-7 * x.shape[-1] ** 0.5 + 1e-6
    assert (result - exact).abs().max() <= 1.01 * (theirs - exact).abs().max() + noise


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 8, 31, 64, 640, 2048, 2050])
def test_shapes(dtype: torch.dtype, k: int) -> None:
    for n in (1, 3, 16, 257):
        x, weight, bias = inputs(65, k, n, dtype)
        for rows in (1, 2, 3, 5, 7, 16, 17, 64, 65):
            check(x[:rows], weight, bias if (rows + n) % 2 else None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_rows(dtype: torch.dtype) -> None:
    x, weight, bias = inputs(70, 90, 37, dtype)
    for rows in range(1, 71):
        check(x[:rows], weight, bias)


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_many_inputs(rows: int) -> None:
    check(*inputs(rows, 32768, 50, torch.bfloat16))


@pytest.mark.parametrize("variant", [*build._variants()])
@pytest.mark.parametrize("dtype", DTYPES)
def test_instruction_sets(variant: str, dtype: torch.dtype) -> None:
    if not build.select_variant(variant):
        pytest.skip(f"this machine has no {variant}")
    try:
        for rows in (1, 2, 3, 4, 6, 9):
            for k in (64, 77):
                check(*inputs(rows, k, 45, dtype))
    finally:
        build.select_variant("")


def test_layouts() -> None:
    x, weight, bias = inputs(12, 640, 100, torch.bfloat16)
    check(x.view(3, 4, 640), weight, bias)
    check(x[0], weight, bias)
    check(x.view(3, 4, 640).transpose(0, 1), weight, bias)  # rows in another order
    check(x[:, ::2], weight[:, :320], bias)  # x with a stride, a slice of the weight
    check(x[:, :320], weight[:, ::2], bias)  # not for the kernel
    check(x, weight, torch.randn(200).bfloat16()[::2])
    assert linear(x[:0], weight).shape == (0, 100)
    with pytest.raises(RuntimeError, match="shapes"):
        linear(x[:, :5], weight)


@pytest.mark.parametrize("rows", [1, 6, 33])
def test_threads_do_not_change_a_bit(rows: int, two_threads: None) -> None:
    x, weight, bias = inputs(rows, 640, 2000, torch.bfloat16)
    check(x, weight, bias)
    two = linear(x, weight, bias)
    torch.set_num_threads(1)
    assert torch.equal(two, linear(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity(dtype: torch.dtype) -> None:
    x, weight, _ = inputs(4, 100, 40, dtype)
    x[0, 99], x[1, 3] = float("nan"), float("inf")
    weight[7, 50] = float("-inf")
    result, expected = linear(x, weight), torch_linear(x.double(), weight.double()).to(dtype)
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.isinf(), expected.isinf())
    assert torch.equal(result[result.isinf()], expected[expected.isinf()])
    largest = torch.full((1, 8), torch.finfo(dtype).max, dtype=dtype)
    assert linear(largest, torch.ones(1, 8, dtype=dtype)).isinf().all()


def test_operator_contract() -> None:
    x, weight, bias = inputs(3, 16, 8, torch.bfloat16)
    torch.library.opcheck(linear, (x, weight, bias))
    torch.library.opcheck(linear, (x.view(1, 3, 16), weight))


@pytest.mark.parametrize("loaded", [True, False])
def test_gradients_are_those_of_torch(loaded: bool) -> None:
    arguments = [t.requires_grad_() for t in inputs(3, 16, 8, torch.bfloat16)]
    function: Callable[..., Tensor] = linear if loaded else ops.linear._autograd  # the one without a kernel
    ours = torch.autograd.grad(function(*arguments).sum(), arguments)
    theirs = torch.autograd.grad(torch_linear(*arguments).sum(), arguments)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    with torch.no_grad():
        assert torch.equal(function(*arguments), linear(*arguments))


def test_inductor() -> None:
    torch._dynamo.reset()
    _, weight, bias = inputs(1, 64, 32, torch.bfloat16)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(lambda x: linear(x, weight, bias), backend=counter, fullgraph=True, dynamic=True)
    first, code = run_and_get_code(compiled, torch.ones(2, 1, 64).bfloat16())
    assert first.shape == (2, 1, 32)
    assert "swa_pass.linear" in "".join(code)
    graphs = counter.frame_count
    for rows in (2, 5, 70):
        x = torch.randn(rows, 1, 64).bfloat16()
        assert torch.equal(compiled(x), linear(x, weight, bias))
    assert counter.frame_count == graphs == 1


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 32).bfloat16()
        self.second = nn.Linear(32, 64, bias=False).bfloat16()
        self.last = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu())
        x = torch_linear(input=x, bias=None, weight=self.first.weight)
        return self.last(torch_linear(x, weight=self.second.weight).float())


def test_pass() -> None:
    torch._dynamo.reset()
    model, x, counts = Small(), torch.randn(2, 3, 64).bfloat16(), []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., object]:
        before = [node.meta["example_value"].shape for node in gm.graph.nodes if "example_value" in node.meta]
        counts.append(use_decode_linear(gm))
        assert use_decode_linear(gm) == 0
        after = [node.meta["example_value"].shape for node in gm.graph.nodes if "example_value" in node.meta]
        assert before == after
        return gm.forward

    with torch.no_grad():
        result = torch.compile(model, backend=backend, fullgraph=True)(x)
        torch.testing.assert_close(result, model(x), rtol=2e-2, atol=2e-2)
    assert counts == [4]  # all but the float32 one
