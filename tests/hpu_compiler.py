"""What stands in for hpu_backend: it keeps the graphs that it gets."""

from __future__ import annotations

from typing import Any

from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from swa_pass.graph import op_name
from swa_pass.passes.lower_hpu import holds_ours


class Inner:
    """Registered as "hpu_backend": what that is before its own passes, AOTAutograd that keeps mutations of inputs."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []
        self.lowered: list[Any] = []

    def __call__(self, gm: Any, inputs: Any, **options: Any) -> Any:
        self.graphs.append(gm)

        def compiler(graph: Any, example: Any) -> Any:
            self.lowered.append(graph)
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=compiler, inference_compiler=compiler, keep_inference_input_mutations=True)(
            gm, inputs
        )

    def check(self) -> None:
        """Nothing of ours, and every store is written as hpu_backend's own pass wants it to work in place."""
        assert self.graphs
        assert not any(holds_ours(graph) for graph in (*self.graphs, *self.lowered))
        for graph in self.lowered:
            writes = [node for node in graph.graph.nodes if op_name(node) == "index_copy"]
            copies = {node.args[1]: node.args[0] for node in graph.graph.nodes if op_name(node) == "copy_"}
            assert writes
            for write in writes:
                assert write.args[0].op == "placeholder"
                assert copies[write] is write.args[0]
