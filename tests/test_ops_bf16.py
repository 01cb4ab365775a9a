"""The kernels that multiply bf16 numbers in pairs: when they are chosen, what they are made of, and how exact they are.

Where the processor cannot, their instruction is emulated; test_ops_meaning.py runs every operator test on them.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_ops_common import implementation, make_case, one_thread
from torch.nn.functional import scaled_dot_product_attention

from swa_pass import ops
from swa_pass.ops import build, reference

__all__ = ["one_thread"]  # a fixture

AVX2, AVX512, AVX512_BF16, SLOW_BF16 = 1, 2, 4, 8  # Features in binding.cpp


@pytest.fixture
def pairs() -> Iterator[None]:
    implementation("avx512bf16")
    yield
    build.select_variant("")


@pytest.mark.skipif("avx512" not in build._variants(), reason="of x86 only")
def test_what_a_processor_gets() -> None:
    if not build.ensure_kernels():
        pytest.skip(build.kernel_status())
    assert build._loaded is not None
    choice = build._loaded.swa_pass_choice
    choice.restype = ctypes.c_char_p
    for features, want in (
        (0, b"plain"),
        (AVX2, b"avx2"),
        (AVX2 | AVX512, b"avx512"),
        (AVX2 | AVX512 | AVX512_BF16, b"avx512bf16"),
        (AVX2 | AVX512 | AVX512_BF16 | SLOW_BF16, b"avx512"),
        (AVX2 | AVX512_BF16, b"avx2"),  # nonsense, but no reason to run AVX-512
    ):
        assert choice(features) == want
    about = Path("/proc/cpuinfo")
    if about.exists():
        assert build.select_variant("avx512bf16") == ("avx512_bf16" in about.read_text().split())
    build.select_variant("")
    assert "emulated" not in build.kernel_status()


@pytest.mark.skipif("avx512" not in build._variants(), reason="of x86 only")
@pytest.mark.skipif(not shutil.which("objdump"), reason="no objdump")
def test_the_instruction_is_where_it_belongs_and_nowhere_else() -> None:
    if not build.ensure_kernels():
        pytest.skip(build.kernel_status())
    assert build._loaded is not None
    shown = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", build._loaded._name], capture_output=True, text=True, check=True
    )
    found, function = set(), ""
    for line in shown.stdout.splitlines():
        if line.endswith(">:"):
            function = line
        elif "vdpbf16ps" in line:
            found.add(function)
    names = [re.sub(r".*<(.*)>:", r"\1", line) for line in found]
    assert all("10avx512bf16" in name for name in names), names  # a name in that namespace
    for kernel in ("score_by_columns", "score_block", "wide_values", "value_block", "Paired"):
        assert any(kernel in name for name in names), kernel


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize(("dim", "window"), [(64, 128), (256, 512), (128, 700)])
@pytest.mark.parametrize("spread", [1.0, 6.0], ids=["flat", "peaked"])
def test_no_less_exact_than_sdpa(pairs: None, group: int, dim: int, window: int, spread: float) -> None:
    """Against the same in double precision. The ring has W slots; the one that the new token takes holds NaN."""
    shape = {"batch": 4, "kv_heads": 2, "group": group, "dim": dim, "window": window, "slack": 1}
    case = make_case(**shape, lengths=2 * window, dtype=torch.bfloat16)
    case.q.mul_(spread)
    case.k_store[:, :, 1] = case.q[:, ::group, 0]  # the oldest key in sight is one that counts

    def error(window: int) -> float:
        got = ops.attend(*case.args(), **{**case.options, "window": window})
        return float((got.double() - want).square().mean().sqrt())

    double = {name: getattr(case, name).double() for name in ("q", "k_new", "v_new", "k_store", "v_store")}
    want = reference.attend(*double.values(), case.lengths, None, **case.options)
    slot = reference.slot_of(2 * window, window, window)
    k, v = case.k_store.clone(), case.v_store.clone()
    k[:, :, slot], v[:, :, slot] = case.k_new[:, :, 0], case.v_new[:, :, 0]
    grouped = case.q.reshape(4, 2, group, dim)  # the heads of a group as queries of one head
    sdpa = scaled_dot_product_attention(grouped, k, v, scale=case.options["scale"]).reshape(want.shape)
    theirs = float((sdpa.double() - want).square().mean().sqrt())
    # Both round weights and results to bf16: equal but for chance (0.98 to 1.03 in these cases).
    assert error(window) <= 1.05 * theirs
    assert error(window - 1) > 2 * theirs


def test_denormals_count_as_zero(pairs: None) -> None:
    """As the instruction has it: what the emulation is to show too."""
    x, weight = torch.tensor([[2.0**-130, 0.0]]).bfloat16(), torch.tensor([[2.0**120, 1.0]]).bfloat16()
    assert x[0, 0] != 0
    assert torch.ops.swa_pass.linear(x, weight, None).item() == 0.0
    build.select_variant("avx512")
    assert torch.ops.swa_pass.linear(x, weight, None).item() == 2.0**-10
