"""One logger, and messages that are said once."""

from __future__ import annotations

import logging

logger = logging.getLogger("swa_pass")
_said: set[tuple[int, str]] = set()


def say_once(about: object, message: str) -> None:
    """Logs a warning the first time it is said about an object (a model)."""
    key = (id(about), message)
    if key not in _said:
        _said.add(key)
        logger.warning(message)
