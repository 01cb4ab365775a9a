"""Records what a model's forward does to tensors, by running it on tensors that have no data.

Python runs as it always does. A mode of torch sees every call on a tensor and writes it down as a node, in the form
that Dynamo gives it (functions, methods, operators), so that what is behind a capture reads both alike:

    the model's line                      the node
    x = self.proj(x)                      call_function linear(x, weight, bias)
    x = x.view(1, 3, 4, 16)               call_method view(x, 1, 3, 4, 16)
    visible = keys > queries - window     call_function sub(queries, window), call_function gt(keys, ...)

Dynamo interprets every bytecode to learn what must stay true for its graph to be used again. A graph that is only
looked at needs none of that, so a layer is recorded in a fraction of the time. What would make the record incomplete
raises `NotRecorded`: Python that depends on a tensor's number (no tensor has any), vmap, hooks of the caller's, a
tensor that came into being behind torch's back.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from .capture import first_line
from .hooks import Watch
from .log import logger, quiet_capture
from .probe import probe_arguments

_BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"]
_OTHERS = ["neg", "pos", "abs", "invert", "lt", "le", "eq", "ne", "gt", "ge", "getitem", "setitem"]
#: Methods that are operators, as Python's functions for them; `__rsub__` and its like have their operands swapped.
_OPERATORS = {f"__{name}__": getattr(operator, f"__{name}__") for name in [*_BINARY, *_OTHERS]}
_OPERATORS |= {f"__i{name}__": getattr(operator, f"__i{name}__") for name in _BINARY}
_SWAPPED = {f"__r{name}__": getattr(operator, f"__{name}__") for name in _BINARY}
_SWAPPED["__rdiv__"] = operator.truediv

#: Python's types, as torch understands them where a dtype is asked for.
_DTYPES: dict[type, Any] = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


class NotRecorded(RuntimeError):
    """The forward cannot be recorded like this; the message says why."""


def record(model: Any, forward: Any) -> GraphModule:
    """The forward of `model` as one graph of torch functions and methods, with a probe cache.

    Nothing of the model changes: a twin of its modules runs, with the model's own weights as inputs of the graph.

    Raises:
        NotRecorded: it cannot be recorded.
        CaptureError: no cache can be made for this model.
    """
    arguments = probe_arguments(model, forward)
    if Watch(model).sees():
        raise NotRecorded("submodules have forward hooks")
    if not isinstance(forward, MethodType) or not isinstance(forward.__self__, nn.Module):
        raise NotRecorded("the forward is not the model's own method")
    started = time.perf_counter()
    fakes = FakeTensorMode()
    recorder = Recorder(fakes)
    try:
        on_twin = _of_twin(forward, {})
        with torch.inference_mode(False), torch.no_grad(), quiet_capture(), _as_if_compiling(), fakes, recorder:
            result = on_twin(**arguments)
        gm = recorder.finish(result)
    except Exception as error:
        raise NotRecorded(first_line(error)) from error
    logger.info("recorded the forward in %.1f s", time.perf_counter() - started)
    return gm


class Recorder(TorchFunctionMode):
    """Writes down what runs under it. `fakes` makes the tensors without data; real ones are taken for inputs.

    Tensors are held weakly: one that is still there at the end was put somewhere, and counts as an output.
    """

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.fakes = fakes
        self.graph = Graph()
        self.nodes: Any = WeakIdKeyDictionary()  # which node made a tensor
        self.inputs: dict[int, tuple[Tensor, Tensor]] = {}  # by id: the real tensor, kept alive, and what stands for it
        self.failure = ""
        self._end_of_inputs = self.graph.call_function(len, ())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            args, kwargs = tree_map_only(Tensor, self._stand_in, (args, kwargs or {}))
            versions = [(leaf, leaf._version) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            result = func(*args, **kwargs)
            if any(result is leaf and leaf._version == version for leaf, version in versions):
                return result  # x.float() of what is float32 already
            made = any(isinstance(leaf, Tensor) for leaf in tree_leaves(result))
            if made or (result is None and versions):
                self._name(result, self._node(func, args, kwargs))
            return result
        except Exception as error:
            self.failure = self.failure or first_line(error)  # the model might catch it, and go another way
            raise

    def finish(self, result: Any) -> GraphModule:
        """The graph, with what the call returned and whatever else is left of it as outputs."""
        if self.failure:
            raise NotRecorded(self.failure)
        inputs = {id(fake) for _, fake in self.inputs.values()}
        left = [*tree_leaves(result), *self.nodes.keys()]
        outputs = {self.nodes[leaf]: None for leaf in left if leaf in self.nodes and id(leaf) not in inputs}
        self.graph.erase_node(self._end_of_inputs)
        self.graph.output(tuple(outputs))
        return GraphModule(nn.Module(), self.graph)

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """The tensor without data for a real one: a new input, if it is the first time."""
        if isinstance(tensor, FakeTensor):
            if tensor not in self.nodes:
                raise NotRecorded("a tensor was made by something that is no call of torch's")
            return tensor
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise NotRecorded("the forward uses vmap")
        if id(tensor) not in self.inputs:
            fake = self.fakes.from_tensor(tensor)
            self.inputs[id(tensor)] = tensor, fake
            with self.graph.inserting_before(self._end_of_inputs):
                node = self.graph.placeholder(f"input_{len(self.inputs)}")
            node.meta["example_value"] = fake
            self.nodes[fake] = node
        return self.inputs[id(tensor)][1]

    def _node(self, func: Any, args: Any, kwargs: Any) -> Node:
        args, kwargs = tree_map_only(Tensor, self.nodes.__getitem__, (args, kwargs))
        args, kwargs = tree_map_only(type, lambda kind: _DTYPES.get(kind, kind), (args, kwargs))
        name = getattr(func, "__name__", "")
        if name == "__set__":
            raise NotRecorded("the forward sets an attribute of a tensor")
        if name == "__get__":  # a property that is a tensor: x.T
            return self.graph.call_function(getattr, (args[0], func.__self__.__name__))
        if getattr(Tensor, name, None) is not func:
            return self.graph.call_function(func, args, kwargs)
        if name in _OPERATORS:
            return self.graph.call_function(_OPERATORS[name], args, kwargs)
        if name in _SWAPPED:
            return self.graph.call_function(_SWAPPED[name], (args[1], args[0]), kwargs)
        return self.graph.call_method(name, args, kwargs)

    def _name(self, result: Any, node: Node) -> None:
        """Says which node has made which tensor, and what each looks like."""
        if isinstance(result, FakeTensor):
            with torch._C.DisableTorchFunctionSubclass():
                node.meta["example_value"] = result.detach()  # another object: a node keeps no tensor alive
            self.nodes[result] = node
        elif isinstance(result, Tensor):
            raise NotRecorded(f"{node.target} made a tensor that has data, or is of a class of its own")
        elif isinstance(result, (tuple, list)):
            parts = [self.graph.call_function(operator.getitem, (node, place)) for place in range(len(result))]
            for part, each in zip(parts, result):
                self._name(each, part)
            node.meta["example_value"] = tuple(part.meta.get("example_value") for part in parts)
        else:
            node.meta["example_value"] = result


@contextmanager
def _as_if_compiling() -> Iterator[None]:
    """What asks `torch.compiler.is_compiling()` does what it does in graphs, here as in torch.export."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _twin(module: nn.Module, memo: dict[int, nn.Module]) -> nn.Module:
    """The same module with attributes of its own: what a forward puts into them is gone with the twin."""
    if id(module) in memo:
        return memo[id(module)]
    twin = memo[id(module)] = object.__new__(type(module))
    for name, value in vars(module).items():
        if name == "forward" and not isinstance(value, MethodType):
            raise NotRecorded(f"{type(module).__name__} has a forward that somebody put there")
        twin.__dict__[name] = _of_twin(value, memo)
    return twin


def _of_twin(value: Any, memo: dict[int, nn.Module]) -> Any:
    """An attribute, with the twins of the modules in it."""
    if isinstance(value, nn.Module):
        return _twin(value, memo)
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        return MethodType(value.__func__, _twin(value.__self__, memo))
    if type(value) in (list, tuple, set):
        return type(value)(_of_twin(each, memo) for each in value)
    if type(value) is dict:
        return {key: _of_twin(each, memo) for key, each in value.items()}
    return value
