"""Compiles the Triton kernels for a GPU that need not be here: types, layouts and shared memory are checked for real.

    python tests/triton_compile.py [compute capability, e.g. 90]

A process of its own, since tests run Triton in its interpreter. Prints one line a kernel.
"""

from __future__ import annotations

import os
import sys

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from swa_pass.ops.kernels.cuda import attend as kernels
from swa_pass.ops.kernels.cuda import launch

POINTERS = {"lengths": "*i64", "starts": "*i64", "counts": "*i64", "part_values": "*fp32", "part_sums": "*fp32"}
#: (dtype, head_dim, value head_dim, group, queries, splits, window); without a window also everything that is optional
CASES = [
    ("bf16", 64, 64, 8, 1, 4, 0),
    ("bf16", 256, 256, 2, 1, 1, 512),
    ("bf16", 192, 128, 16, 300, 1, 0),
    ("fp16", 80, 80, 1, 300, 1, 512),
    ("fp32", 256, 256, 4, 1, 8, 512),
    ("fp32", 256, 256, 4, 300, 1, 0),
    ("int8", 256, 256, 2, 1, 1, 512),
    ("int8", 128, 128, 4, 300, 1, 0),
    ("float8", 64, 64, 8, 1, 4, 512),
]
MOST_SHARED = 99 << 10  # bytes that one program may ask for on sm_86 and sm_89; more elsewhere


def signature(fn: object, constants: dict[str, object], dtype: str) -> dict[str, str]:
    """Types of the arguments, by their names. Beside one-byte stores the model is bf16."""
    stores = ("k_new", "v_new", "k_store", "v_store")
    scaled = dtype in ("int8", "float8")
    types = {}
    for name in fn.arg_names:  # type: ignore[attr-defined]
        if name in constants:
            types[name] = "constexpr"
        elif name in stores:
            types[name] = "*i8" if scaled else f"*{dtype}"
        elif name in ("q", "out", "sinks"):
            types[name] = "*bf16" if scaled else f"*{dtype}"
        elif name.endswith("_scale"):
            types[name] = "*fp32" if scaled else "*i64"  # lengths, for want of scales
        elif name in ("scale", "softcap"):
            types[name] = "fp32"
        else:
            types[name] = POINTERS.get(name, "i32")
    return types


def main() -> None:
    target = GPUTarget("cuda", int(sys.argv[1]) if len(sys.argv) > 1 else 90, 32)
    for dtype, dim, value_dim, group, queries, splits, window in CASES:
        size = 4 if dtype == "fp32" else 2
        rows = launch.rows_of_block(queries * group, dim, size)
        optional = window == 0
        constants: dict[str, object] = {
            "GROUP": group, "DIM": dim, "VALUE_DIM": value_dim, "WINDOW": window, "HAS_STARTS": optional,
            "HAS_COUNTS": optional, "HAS_SINKS": optional, "CAPPED": optional, "WRITE": queries == 1, "FLOAT": False,
            "SPLITS": splits, "SCALED": dtype in ("int8", "float8"), "FP8": dtype == "float8",
            "BLOCK_Q": max(1, rows // group), "BLOCK_M": rows,
            "BLOCK_N": launch.keys_of_block(dim, size),
            "BLOCK_D": launch.power_of_two(dim), "BLOCK_DV": launch.power_of_two(value_dim),
        }  # fmt: skip
        for fn in (kernels.attend, kernels.merge, kernels.append):
            mine = {name: value for name, value in constants.items() if name in fn.arg_names}
            source = ASTSource(fn=fn, signature=signature(fn, mine, dtype), constexprs=mine)
            shared = triton.compile(source, target=target, options={"num_warps": 4}).metadata.shared
            assert shared <= MOST_SHARED, (fn.__name__, dtype, constants, shared)
            print(f"{fn.__name__} {dtype} {dim}/{value_dim}, group {group}, {rows} rows: {shared} bytes shared")


if __name__ == "__main__":
    main()
