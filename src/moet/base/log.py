"""One logger. The library logs; only ``cli`` prints."""

from __future__ import annotations

import logging


def get(room: str) -> logging.Logger:
    """The logger of a room: ``get("engine")`` is ``moet.engine``."""
    return logging.getLogger(f"moet.{room}")
