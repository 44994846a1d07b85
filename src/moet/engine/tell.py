"""Failures of moet inside the engine, left where the user will see them.

An exception in a worker passes through three processes of the engine and comes out as "engine core
died". The heartbeat page of the server (where there is one) carries the cause past all that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from moet.base import env, log
from moet.base.errors import MoetError
from moet.engine.heartbeat import Page


def own_page() -> Page | None:
    """The heartbeat page of the server that this process belongs to; None outside a server.

    Raises:
        EngineError: MOET_HEARTBEAT does not name one.
    """
    path = env.read().heartbeat
    return _page(path) if path else None


@lru_cache(maxsize=1)  # pages stay mapped for ever: one is enough
def _page(path: str) -> Page:
    return Page.open(path)


def tell(error: MoetError) -> None:
    """Leaves an error on the page. Never raises: what has happened matters more than the page."""
    try:
        if page := own_page():
            page.fail(error)
    except MoetError as other:
        log.get("engine").warning("%s cannot be told to the supervisor: %s", error, other)


@contextmanager
def telling() -> Iterator[None]:
    """Leaves a ``MoetError`` of the block on the page and lets it pass."""
    try:
        yield
    except MoetError as error:
        tell(error)
        raise
