from . import kernels, normalization, optimizers

__all__ = ["kernels", "normalization", "optimizers"]
