"""The pass inside compilers: a Dynamo backend in front of any other, and a pass for Inductor's own list."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, GraphModule

from .graph import example
from .lending import Rings
from .log import logger
from .passes import rewrite_graph
from .passes.lend import lend_rings
from .passes.lower_hpu import holds_ours, lower_hpu

#: Files of the package that decide what is rewritten, and into what.
_SOURCES = ("*.py", "passes/*.py", "patterns/*.py", "reader/*.py", "ops/schema.py")


def inner_compiler(backend: Any) -> Callable[..., Any]:
    """The compiler behind our pass: a callable, or the name of a registered Dynamo backend."""
    if callable(backend):
        return backend
    return torch._dynamo.lookup_backend(backend)


def compile_after(
    inner: Any, gm: GraphModule, inputs: list[Any], rings: Rings | None = None, hf: bool = False, **options: Any
) -> Callable[..., Any]:
    """The passes on one Dynamo graph, then the compiler `inner`. Graphs that need gradients go through as they are.

    rings: for decode steps whose stores belong to the caller; None leaves those alone.  hf: see `passes.lend`.
    options: what the caller of torch.compile gives to the compiler.
    """
    compiler = inner_compiler(inner)
    if needs_gradients(gm):
        logger.info("swa_pass: a graph that needs gradients is left alone")
        prepare(inner, gm)
        return compiler(gm, inputs, **options)
    ours = holds_ours(gm)  # a HybridCache under the caller's own torch.compile
    if ours or not for_gaudi(inner, gm):  # other graphs of Gaudi keep their attention
        result = rewrite_graph(gm, states=not for_gaudi(inner, gm))
        if result.matches or result.left_alone:
            logger.info("swa_pass: %d attentions rewritten, %d left alone", result.matches, result.left_alone)
    prepare(inner, gm)
    if ours or rings is None or torch.is_inference_mode_enabled():
        return compiler(gm, inputs, **options)
    lent = lend_rings(gm, hf)
    refusals = [str(loan) for loan in lent.loans if loan.refused]
    taken = len([loan for loan in lent.loans if not loan.refused and loan.window])
    rings.matches += taken
    rings.refusals += refusals
    if taken or lent.narrowed:
        logger.info("swa_pass: %d attentions read rings, %d prompts see one key fewer", taken, lent.narrowed)
    for refusal in refusals[:1]:
        logger.warning("swa_pass: %d attentions on stores are left alone; %s", len(refusals), refusal)
    return lent.around(compiler(lent.gm, [*lent.examples, *inputs], **options), rings)


def prepare(inner: Any, gm: GraphModule) -> None:
    """Puts what the compiler cannot take into terms of its own, in place: our operators mean nothing to hpu_backend."""
    if for_gaudi(inner, gm):
        lower_hpu(gm)


def for_gaudi(inner: Any, gm: GraphModule) -> bool:
    """Whether the graph goes to Intel's compiler, or runs on its device."""
    values = (example(node) for node in gm.graph.find_nodes(op="placeholder"))
    return inner == "hpu_backend" or any(isinstance(v, torch.Tensor) and v.device.type == "hpu" for v in values)


def needs_gradients(gm: GraphModule) -> bool:
    """Whether autograd may ask for a backward of this graph: our operators have none."""
    if not torch.is_grad_enabled():
        return False
    values = (example(node) for node in gm.graph.nodes if node.op in ("placeholder", "get_attr"))
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


class InductorPass(CustomGraphPass):
    """The passes as an entry in Inductor's list, for code whose ``backend="inductor"`` cannot be changed.

        torch._inductor.config.pre_grad_custom_pass = swa_pass.InductorPass()

    Inductor puts `uuid` into the keys of its caches, so a compiled graph is found again by the same pass only.
    """

    def __call__(self, graph: Graph) -> None:
        gm = graph.owning_module
        if gm is not None and not needs_gradients(gm):
            rewrite_graph(gm)

    def uuid(self) -> bytes:
        """A hash of the source of everything that decides what is rewritten: equal in every process."""
        here = Path(__file__).parent
        sources = [path for pattern in _SOURCES for path in here.glob(pattern)]
        return get_hash_for_files(tuple(sorted(map(str, sources))))
