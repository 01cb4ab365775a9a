from . import hccl

__all__ = ["hccl"]
