"""HPU graphs as a recorder: what Python did at capture is baked in, as on the device.

`wrap_in_hpu_graph` has the contract of the plugin's: the key of a graph is the shapes of all tensor arguments and the
values of all others; on a hit Python does not run, inputs are copied into the buffers of the first call, and the
outputs are the same buffers every time. The recording is `make_fx` of aten operators on real tensors, with parameters
and caches closed over and in-place operators kept.
"""

from functools import wraps

import torch
from torch.fx.experimental.proxy_tensor import make_fx

stats = {"captures": 0, "replays": 0, "bypass": 0}


class HPUGraph:
    def capture_begin(self, *args, **kwargs): ...
    def capture_end(self, *args, **kwargs): ...
    def replay(self, *args, **kwargs): ...
    def clear_inputs(self): ...


def _key(value):
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return tuple((name, _key(v)) for name, v in value.items())
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return tuple(_key(v) for v in value)
    return value


def _flatten(value):
    """The tensors of nested containers, and a function that puts an iterator of tensors back in their places."""
    if isinstance(value, torch.Tensor):
        return [value], next
    if isinstance(value, dict):
        parts = {name: _flatten(v) for name, v in value.items()}

        def rebuild_dict(tensors):
            filled = {name: rebuild(tensors) for name, (_, rebuild) in parts.items()}
            return filled if type(value) is dict else type(value)(**filled)

        return [t for found, _ in parts.values() for t in found], rebuild_dict
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        items = [_flatten(v) for v in value]
        return [t for found, _ in items for t in found], lambda tensors: type(value)(r(tensors) for _, r in items)
    return [], lambda tensors: value


def _capture(forward, args, kwargs):
    inputs, rebuild_inputs = _flatten((args, kwargs))
    found = {}

    def flat(*tensors):
        a, k = rebuild_inputs(iter(tensors))
        outputs, found["rebuild"] = _flatten(forward(*a, **k))
        return outputs

    with torch.no_grad():
        graph = make_fx(flat, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    # Recording ran everything once but hands no outputs out; writes into caches are the same when done twice.
    return inputs, graph, list(graph(*inputs)), found["rebuild"]


def wrap_in_hpu_graph(module, asynchronous=False, disable_tensor_cache=False, dry_run=False, max_graphs=None):
    cache, forward = {}, module.forward

    @wraps(forward)
    def replaying(*args, **kwargs):
        kwargs = {name: v for name, v in kwargs.items() if name != "warmup_mode"}
        if kwargs.pop("bypass_hpu_graphs", False):
            stats["bypass"] += 1
            return forward(*args, **kwargs)
        key = _key((args, kwargs))
        if key not in cache:
            if max_graphs is not None and len(cache) >= max_graphs:
                return forward(*args, **kwargs)
            stats["captures"] += 1
            cache[key] = _capture(forward, args, kwargs)
            return cache[key][3](iter(cache[key][2]))
        inputs, graph, outputs, rebuild = cache[key]
        for buffer, given in zip(inputs, _flatten((args, kwargs))[0]):
            if buffer is not given:
                buffer.copy_(given)
        for buffer, result in zip(outputs, graph(*inputs)):
            buffer.copy_(result)
        stats["replays"] += 1
        return rebuild(iter(outputs))

    module.forward = replaying
    module.clear_cache = cache.clear
    module.clear_inputs = lambda: None
    return module


class ModuleCacher:
    def __init__(self, max_graphs=10): ...

    def __call__(self, model, **kwargs):
        return model
