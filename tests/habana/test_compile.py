"""torch.compile around an applied model: how many graphs, and that nothing breaks or recompiles."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func
from gaudi_helpers import assert_upstream, distance, gaudi, step_logits
from gaudi_models import TOLERANCE
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import swa_pass


class Backend:
    """What hpu_backend is before its own passes: AOTAutograd that keeps mutations of inputs. Counts its graphs."""

    def __init__(self):
        self.graphs = []

    def __call__(self, gm, inputs, **options):
        self.graphs.append(gm)

        def compiler(graph, example):
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=compiler, inference_compiler=compiler, keep_inference_input_mutations=True)(
            gm, inputs
        )


@pytest.mark.parametrize(("family", "flash"), [("gemma3", True), ("mistral", False)])
def test_graphs(family, flash, references):
    """Prompt, masked decode, unmasked decode; the plugin's sdp_kernel, which Dynamo skips, is never called."""
    torch._dynamo.reset()
    counters.clear()
    model, backend = gaudi(family, references), Backend()
    model.model = torch.compile(model.model, backend=backend)
    for scenario, graphs in (("short", 3), ("short", 3)):
        logits = step_logits(model, scenario, lazy_mode=False, use_flash_attention=flash)
        assert_upstream(logits, references, family, scenario)
        assert len(backend.graphs) == graphs
    assert not counters["graph_break"]


def test_layer_by_layer(references):
    """Regional compilation: the masks, made once outside, are inputs of each layer's graph."""
    torch._dynamo.reset()
    counters.clear()
    model, backend = gaudi("gemma3", references), Backend()
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend=backend)
    logits = step_logits(model, "short", lazy_mode=False, use_flash_attention=True)
    assert_upstream(logits, references, "gemma3", "short")
    assert not counters["graph_break"]


def test_our_backend_in_front_of_an_applied_model(references):
    """Its stores are rings already, so there is nothing to lend; test_backend.py has stock models."""
    torch._dynamo.reset()
    eager = step_logits(gaudi("qwen3", references), "short", lazy_mode=False)
    model, inner = gaudi("qwen3", references), Backend()
    backend = swa_pass.backend(inner=inner)
    model.model = torch.compile(model.model, backend=backend)
    compiled = step_logits(model, "short", lazy_mode=False)
    assert distance(compiled, eager) < TOLERANCE
    assert inner.graphs
    assert (backend.rings.matches, backend.rings.nbytes) == (0, 0)
    for graph in inner.graphs:
        assert not [node for node in graph.graph.nodes if "swa_pass" in str(node.target)]
