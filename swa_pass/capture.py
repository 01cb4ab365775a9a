"""Captures a model's forward as one graph by Dynamo, on a probe cache. The graph is never run: no weights are read."""

from __future__ import annotations

import itertools
import re
import time
import types
from typing import Any

import torch
from torch.fx import GraphModule

from .compat import tracing
from .log import logger, quiet_capture
from .probe import CaptureError, probe_arguments


class _Captured(BaseException):
    """Stops a call after tracing, before anything runs. No `Exception`, or Dynamo would report a failing compiler."""

    def __init__(self, graph: GraphModule) -> None:
        self.graph = graph


def capture(model: Any, forward: Any, layers: int | None = None) -> GraphModule:
    """The forward of `model` as one Dynamo graph, with a probe cache.

    layers: how many the cache has; None: as many as the config says.

    Raises:
        CaptureError: the forward takes no cache, or Dynamo cannot trace it as one graph.
    """
    kwargs = probe_arguments(model, forward, layers)

    def stop(gm: GraphModule, inputs: list[Any]) -> Any:
        raise _Captured(gm)  # here, not when the graph is called: Dynamo need not build guards

    started = time.perf_counter()
    with torch.no_grad(), torch._dynamo.config.patch(suppress_errors=False), quiet_capture(), tracing(model.config):
        try:
            torch.compile(own_code(call), backend=stop, fullgraph=True, dynamic=False)(forward, kwargs)
        except _Captured as captured:
            logger.info("captured the forward in %.1f s", time.perf_counter() - started)
            return captured.graph
        except Exception as error:
            raise CaptureError(f"Dynamo could not capture the forward as one graph: {first_line(error)}") from error
    raise CaptureError("the forward ran without reaching a graph")


def call(forward: Any, kwargs: dict[str, Any]) -> Any:
    return forward(**kwargs)


_copies = itertools.count()


def own_code(function: Any) -> Any:
    """A copy of a function with a code object and a name of its own.

    Dynamo keeps graphs and its recompile limit per code object, and what it learnt about changing shapes per name and
    line: two models must not share either.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_copies)}")
    copy = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def first_line(error: BaseException) -> str:
    """One line about what really went wrong: Dynamo wraps the cause, sometimes more than once."""
    while True:
        inner = getattr(error, "inner_exception", None) or error.__cause__
        if inner is None or inner is error:
            break
        error = inner
    text = str(error).strip()
    cause = re.search(r"got (\w+\(.*\))", text)  # an operation failed while it was traced
    return f"{type(error).__name__}: {cause.group(1) if cause else text.splitlines()[0] if text else ''}"
