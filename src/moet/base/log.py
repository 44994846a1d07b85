"""One logger. The library logs; only ``cli`` prints."""

from __future__ import annotations

import logging


def get(room: str) -> logging.Logger:
    """The logger of a room: ``get("engine")`` is ``moet.engine``."""
    return logging.getLogger(f"moet.{room}")


def root() -> logging.Logger:
    """The logger above all rooms; whoever owns the process gives it a handler."""
    return logging.getLogger("moet")
