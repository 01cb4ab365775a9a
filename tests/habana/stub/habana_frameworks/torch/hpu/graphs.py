"""HPU graphs as a recorder: what Python did at capture is baked in, as on the device.

`wrap_in_hpu_graph` has the contract of the plugin's: the key of a graph is the shapes of all tensor arguments and the
values of all others; on a hit Python does not run, inputs are copied into the buffers of the first call, and the
outputs are the same buffers every time. What is recorded is the list of operators of the first call, which are run
again on the same parameters and caches.
"""

from functools import wraps

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

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


class Recording(TorchDispatchMode):
    """The operators that ran, with the tensors that they read and made."""

    def __init__(self):
        super().__init__()
        self.tape = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError(f"{func} reads a tensor on the host while an HPU graph is being captured")
        result = func(*args, **(kwargs or {}))
        self.tape.append((func, args, kwargs or {}, result))
        return result

    def replay(self):
        """Runs everything once more. Returns the new tensor of each recorded one, by the id of the old one."""
        now = {}

        def current(tensor):
            return now.get(id(tensor), tensor)

        for func, args, kwargs, recorded in self.tape:
            args, kwargs = tree_map_only(torch.Tensor, current, (args, kwargs))
            result = func(*args, **kwargs)
            for old, new in zip(tree_leaves(recorded), tree_leaves(result)):
                if isinstance(old, torch.Tensor):
                    now[id(old)] = new
        return now


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
            inputs, rebuild_inputs = _flatten((args, kwargs))
            inputs = [tensor.clone() for tensor in inputs]  # buffers of the graph's own
            args, kwargs = rebuild_inputs(iter(inputs))
            recording = Recording()
            with torch.no_grad(), recording:
                result = forward(*args, **kwargs)
            cache[key] = (inputs, recording, *_flatten(result))
            return result
        inputs, recording, outputs, rebuild = cache[key]
        for buffer, given in zip(inputs, _flatten((args, kwargs))[0]):
            buffer.copy_(given)
        now = recording.replay()
        for buffer in outputs:
            buffer.copy_(now[id(buffer)])
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
