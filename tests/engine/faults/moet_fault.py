"""A vLLM plugin for tests: when the file $FAULT_FILE appears, moet's pool gets stuck for ever."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any


def register() -> None:
    """Makes every pool of this process listen to the file."""
    from moet import _core
    from moet.kernels.cpu import Pool

    if getattr(Pool, "can_stick", False):
        return
    made = Pool.__init__

    def listening(pool: Pool, *args: Any, **kwargs: Any) -> None:
        made(pool, *args, **kwargs)
        threading.Thread(target=wait, args=(pool,), daemon=True).start()

    def wait(pool: Pool) -> None:
        while not Path(os.environ["FAULT_FILE"]).exists():
            time.sleep(0.05)
        _core.exam_stall(pool.core, -1, -1)

    Pool.__init__ = listening  # type: ignore[method-assign]
    Pool.can_stick = True  # type: ignore[attr-defined]
