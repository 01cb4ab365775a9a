from . import debug, experimental, internal

__all__ = ["debug", "experimental", "internal"]
