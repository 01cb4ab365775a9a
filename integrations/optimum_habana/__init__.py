"""Intel Gaudi: ring caches and windowed attention for the models of optimum-habana.

    from swa_pass.integrations import optimum_habana
    model = optimum_habana.apply(model)      # before wrap_in_hpu_graph or torch.compile; swa_pass.apply does the same

optimum-habana and Intel's plugin are imported when a model is applied, not before. docs/gaudi.md says what was run and
what never ran on hardware.
"""

from .apply import apply, explain, revert, runtime_of
from .tracing import make_traceable

__all__ = ["apply", "explain", "make_traceable", "revert", "runtime_of"]
