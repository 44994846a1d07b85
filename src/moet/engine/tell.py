"""Failures of moet inside the engine, left where the user will see them.

An exception in a worker passes through three processes of the engine and comes out as "engine core
died". The heartbeat page of the server (where there is one) carries the cause past all that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moet.base import env
from moet.base.errors import MoetError
from moet.engine.heartbeat import Page


def own_page() -> Page | None:
    """The heartbeat page of the server that this process belongs to; None outside a server.

    Raises:
        EngineError: MOET_HEARTBEAT does not name one.
    """
    path = env.read().heartbeat
    return Page.open(path) if path else None


def tell(error: MoetError) -> None:
    """Leaves an error on the page."""
    if page := own_page():
        page.fail(error)


@contextmanager
def telling() -> Iterator[None]:
    """Leaves a ``MoetError`` of the block on the page and lets it pass."""
    try:
        yield
    except MoetError as error:
        tell(error)
        raise
