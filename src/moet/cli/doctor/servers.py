"""Findings about the demo model and about servers of this user, running or killed."""

from __future__ import annotations

from collections.abc import Iterator

from moet.base.errors import MoetError
from moet.base.report import Finding, Level
from moet.base.units import format_bytes

RUNS = "server"  # the topic of a server that runs


def findings() -> Iterator[Finding]:
    """The demo, what runs, what is left over."""
    from moet.engine import runfiles

    yield _demo()
    for record in runfiles.running():
        yield Finding(level=Level.INFO, topic=RUNS, fact=f"{record.model} at {record.url}")
    left = runfiles.left_over()
    if left:
        yield Finding(
            level=Level.WARN,
            topic="left over",
            fact=f"files of {len(left)} server(s) that were killed",
            consequence="the next moet serve removes them",
        )


def _demo() -> Finding:
    from moet import demo
    from moet.checkpoint import open_checkpoint

    try:
        checkpoint = open_checkpoint(demo.path())
    except MoetError as error:
        return Finding(
            level=Level.ERROR,
            topic="demo model",
            fact=f"cannot be read: {error}",
            consequence="moet serve demo fails",
            fix=error.hint,
        )
    size = format_bytes(sum(t.nbytes for t in checkpoint.tensors.values()))
    experts = checkpoint.geometry.experts * len(checkpoint.geometry.moe_layers)
    fact = f"{demo.NAME}, {size}, {experts} experts"
    return Finding(level=Level.OK, topic="demo model", fact=fact)
