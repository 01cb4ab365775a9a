import contextlib

import torch

from . import graphs, random
from .graphs import HPUGraph, ModuleCacher, wrap_in_hpu_graph

__all__ = ["HPUGraph", "ModuleCacher", "graphs", "random", "wrap_in_hpu_graph"]

_recompute = True


def recompute_sdp_enabled():
    return _recompute


@contextlib.contextmanager
def sdp_kernel(enable_recompute=True):
    global _recompute
    before, _recompute = _recompute, enable_recompute
    try:
        yield {}
    finally:
        _recompute = before


def is_available():
    return False


def device_count():
    return 0


def current_device():
    return 0


def set_device(*args): ...


def get_device_name(*args):
    return "GAUDI3"


def is_initialized():
    return True


def init(): ...


def synchronize(*args): ...


def memory_stats(*args):
    return {"InUse": 0, "MaxInUse": 0, "Limit": 1, "NumAllocs": 0}


def is_autocast_hpu_enabled():
    return False


def get_autocast_hpu_dtype():
    return torch.bfloat16


class Stream:
    def synchronize(self): ...
    def record_event(self, *args): ...


class Event:
    """Dynamo looks this class up by name on every device module."""

    def __init__(self, *args, **kwargs): ...
    def record(self, *args): ...
    def wait(self, *args): ...
    def synchronize(self): ...

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


_default = Stream()


def default_stream(*args):
    return _default


current_stream = default_stream


@contextlib.contextmanager
def stream(chosen):
    yield
