"""Replaces `F.linear` by `swa_pass::linear`, which is fast for the few rows of a decode step."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..graph import argument, example

_LINEAR = (torch.nn.functional.linear, torch._C._nn.linear)
_DTYPES = (torch.bfloat16, torch.float16)


def use_decode_linear(gm: GraphModule) -> int:
    """Replaces linears with half-precision CPU weights, in place. Returns how many.

    A decode step is mostly these: it reads every weight once, for as few rows as the batch has. oneDNN does that at a
    fraction of the speed of memory. The bf16 output layer of Gemma 3 270M, (262144, 640), on one thread of a busy Xeon
    with AVX-512: 112, 230 and 550 ms for 1, 4 and 16 rows, against 65, 74 and 147 (benchmarks/linear.py).
    """
    count = 0
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in _LINEAR:
            continue
        x, weight, bias = (argument(node, i, name, None) for i, name in enumerate(("input", "weight", "bias")))
        if not _fits(x, weight, bias):
            continue
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(torch.ops.swa_pass.linear.default, (x, weight, bias))
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        count += 1
    if count:
        gm.graph.lint()
        gm.recompile()
    return count


def _fits(x: Node, weight: Node, bias: Node | None) -> bool:
    values = [example(node) for node in (x, weight, bias) if node is not None]
    if not all(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in values):
        return False
    if any(is_traceable_wrapper_subclass(value) for value in values):
        return False  # quantised weights say they are bfloat16, and know their own linear
    dtype = values[1].dtype
    return values[1].ndim == 2 and dtype in _DTYPES and all(value.dtype == dtype for value in values)
