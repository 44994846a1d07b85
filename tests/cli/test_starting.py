"""What is said while a server starts."""

from __future__ import annotations

import pytest

from moet.cli.starting import Loading, describe
from moet.engine.heartbeat import Phase
from moet.engine.serve import Status

GIB = 1 << 30


def status(phase: Phase, loaded: int = 0, to_load: int = 0) -> Status:
    return Status(phase=phase, loaded=loaded, to_load=to_load, alive=True)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (status(Phase.STARTING), "starting vLLM"),
        (status(Phase.LAUNCHING), "starting the engine core"),
        (status(Phase.LAUNCHING, 4 * GIB, 4 * GIB), "experts loaded, warming up"),
        (status(Phase.PROBING, 4 * GIB, 4 * GIB), "waiting for the first token"),
        (status(Phase.READY), "waiting for the first token"),
    ],
)
def test_stages(now: Status, said: str) -> None:
    assert describe(now, Loading(), 0.0) == said


def test_loading_shows_rate_and_time_left() -> None:
    loading = Loading()
    first = describe(status(Phase.LAUNCHING, 0, 8 * GIB), loading, 100.0)
    assert first == "loading experts  0 B of 8.00 GiB"
    later = describe(status(Phase.LAUNCHING, 2 * GIB, 8 * GIB), loading, 101.0)
    assert later == "loading experts  2.00 GiB of 8.00 GiB  2.1 GB/s  3.0 s left"
