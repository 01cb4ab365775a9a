"""One logger, and messages that are said once."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger("swa_pass")
_said: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def say_once(about: Any, message: str) -> None:
    """Logs a warning the first time it is said about an object (a model)."""
    said = _said.setdefault(about, set())
    if message not in said:
        said.add(message)
        logger.warning(message)


@contextmanager
def quiet_capture() -> Iterator[None]:
    """Without torch's own messages about an operation that cannot be traced: our error carries the cause."""
    loggers = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "torch._dynamo.utils")]
    before = [each.disabled for each in loggers]
    for each in loggers:
        each.disabled = True
    try:
        yield
    finally:
        for each, was in zip(loggers, before):
            each.disabled = was
