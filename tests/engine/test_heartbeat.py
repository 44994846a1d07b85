from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moet.base.errors import EngineError, MachineError
from moet.engine.heartbeat import MAX_RANKS, PAGE_BYTES, Page, Phase


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page.create(tmp_path / "beat")


def test_two_mappings_see_each_other(page: Page) -> None:
    other = Page.open(page.path)
    other.phase = Phase.READY
    other.rank(3).loading(5, 9)
    other.beat_loop()
    assert (page.phase, page.rank(3).loaded, page.loop_beats) == (Phase.READY, (5, 9), 1)


def test_a_native_counter_at_the_address_is_seen(page: Page) -> None:
    counter = ctypes.c_uint64.from_address(page.rank(2).address)
    counter.value += 41
    page.rank(0).beat()
    assert (page.rank(2).beats, page.beats) == (41, 42)
    assert page.rank(2).address % 64 == 0


def test_the_address_outlives_the_page_object(page: Page) -> None:
    address = Page.open(page.path).rank(4).address
    gc.collect()
    ctypes.c_uint64.from_address(address).value = 7
    assert page.rank(4).beats == 7


def test_odd_means_that_a_step_is_in_flight(page: Page) -> None:
    assert not page.is_stepping
    page.rank(5).beat()
    page.rank(5).moved()
    assert page.is_stepping
    page.rank(5).beat()
    assert (page.is_stepping, page.rank(5).beats) == (False, 4)


def test_another_process_beats_after_this_one_forgot_it(page: Page) -> None:
    code = (
        "import sys; from moet.engine.heartbeat import Page; r = Page.open(sys.argv[1]).rank(1);"
        "r.claim(); r.beat(); r.beat()"
    )
    child = subprocess.run([sys.executable, "-c", code, str(page.path)], check=True)
    assert child.returncode == 0
    assert page.rank(1).beats == 2
    assert [rank.pid != os.getpid() for rank in page.ranks()] == [True]


def test_lines_do_not_overlap(page: Page) -> None:
    for index in range(MAX_RANKS):
        page.rank(index).loading(index, index + 1)
    assert [page.rank(i).loaded for i in range(MAX_RANKS)] == [(i, i + 1) for i in range(MAX_RANKS)]
    assert page.failure is None
    with pytest.raises(EngineError, match="outside"):
        page.rank(MAX_RANKS)


def test_the_first_failure_stays(page: Page) -> None:
    with pytest.raises(MachineError), page.reporting():
        raise MachineError("not enough memory: 3 of 9 GiB", hint="close something")
    page.fail(EngineError("engine core initialisation failed", hint="see above"))
    failure = Page.open(page.path).failure
    assert failure is not None
    assert (str(failure), failure.hint) == ("not enough memory: 3 of 9 GiB", "close something")
    assert page.phase is Phase.FAILED


def test_a_failure_longer_than_the_page_is_cut(page: Page) -> None:
    page.fail(EngineError("é" * 9999, hint="y" * 9999))
    failure = page.failure
    assert failure is not None
    assert (str(failure), failure.hint) == ("é" * 1500, "y" * 1000)
    assert page.path.stat().st_size == PAGE_BYTES


def test_the_file_is_private_and_never_shared_by_accident(page: Page) -> None:
    assert page.path.stat().st_mode & 0o077 == 0
    with pytest.raises(EngineError, match=r"cannot be made: .*File exists"):
        Page.create(page.path)


@pytest.mark.parametrize("content", [None, b"", b"x" * PAGE_BYTES])
def test_what_is_no_page_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "beat"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EngineError, match="heartbeat page") as error:
        Page.open(path)
    assert error.value.hint
