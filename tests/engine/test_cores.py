"""Which cores a worker's pool gets, with an engine that has pinned its thread already."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moet.base.errors import UsageError
from moet.engine import cores, versions


def test_shares_are_contiguous_and_complete() -> None:
    cpus = tuple(range(3, 14))
    for world in range(1, 12):
        parts = [cores.share(cpus, rank, world) for rank in range(world)]
        assert sum(parts, ()) == cpus
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_more_ranks_than_cpus_share_them() -> None:
    parts = [cores.share((4, 9), rank, 5) for rank in range(5)]
    assert all(len(part) == 1 for part in parts)
    assert {cpu for part in parts for cpu in part} == {4, 9}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that the engine has pinned to CPU 6; its starter may use 4 to 7."""
    allowed = {"self": (6,), 77: (4, 5, 6, 7)}
    monkeypatch.setattr(cores, "usable_cpus", lambda pid="self": allowed[pid])
    monkeypatch.setattr(cores, "one_per_core", lambda cpus: cpus)
    monkeypatch.setattr(cores.multiprocessing, "parent_process", lambda: SimpleNamespace(pid=77))
    monkeypatch.setattr(cores, "cpu_quota", lambda: None)


def binding(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(versions, "thread_binding", lambda: text)


@pytest.mark.usefixtures("worker")
def test_the_starters_cpus_count_and_our_own_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    binding(monkeypatch, "auto")
    assert cores.of_rank(0, 1) == (6, 4, 5, 7)
    assert cores.of_rank(0, 2) == (4, 5)
    assert cores.of_rank(1, 2) == (6, 7)


@pytest.mark.usefixtures("worker")
def test_a_list_of_the_user_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    binding(monkeypatch, "0-1,5|2")
    assert cores.of_rank(0, 2) == (0, 1, 5)
    assert cores.of_rank(1, 2) == (2,)
    with pytest.raises(UsageError, match="VLLM_CPU_OMP_THREADS_BIND"):
        cores.of_rank(2, 3)


def test_threads_stay_within_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    for quota, world, expected in [(None, 1, 4), (2.5, 1, 2), (2.5, 2, 1), (0.5, 1, 1), (9, 1, 4)]:
        monkeypatch.setattr(cores, "cpu_quota", lambda quota=quota: quota)
        assert cores.threads((0, 1, 2, 3), 0, world) == expected
        assert cores.threads((0, 1, 2, 3), 3, world) == 3
