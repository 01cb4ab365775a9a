"""One logger, and messages that are said once."""

from __future__ import annotations

import logging
import weakref
from typing import Any

logger = logging.getLogger("swa_pass")
_said: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def say_once(about: Any, message: str) -> None:
    """Logs a warning the first time it is said about an object (a model)."""
    said = _said.setdefault(about, set())
    if message not in said:
        said.add(message)
        logger.warning(message)
