"""What goes wrong between card and CPU: an error by name, in time, and no wrong token."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pytest
from tests.hybrid.mailbox_rig import LONG, MOST, PATIENT, SPECS, STALL, Call, Parts, Rig, opened

from moet import _core
from moet.base.errors import KernelError, MachineError, StepError
from moet.hybrid.mailbox import Mailbox, MailSizes, Variant
from moet.kernels.cpu import CpuLayer
from moet.kernels.cuda.mail import GATE_AT


def some_failure(rig: Rig, match: str, within: float) -> Call:
    """A step that must fail by name, soon, with NaN where the CPU's rows are missing."""
    rig.place([[0, 1], [0, 1]])
    call = rig.call(3)
    for ids, _ in call.routings:
        ids[:] = [[0, 1, -1], [2, 0, 1], [0, -1, 1]]
    start = time.monotonic()
    with pytest.raises(StepError, match=match) as caught:
        call.run()
    assert time.monotonic() - start < within
    assert caught.value.hint
    failed = call.outs[-1]
    assert (failed[1] == 0x7FFF).all(), "the token that needed the CPU is NaN"
    assert (failed[[0, 2]] != 0x7FFF).all(), "tokens that did not are whole"
    return call


def recovered(rig: Rig) -> None:
    end = time.monotonic() + PATIENT
    while True:
        try:
            rig.mailbox.reset()
            break
        except KernelError:  # the worker is on its way back
            assert time.monotonic() < end
            time.sleep(0.01)
    call = rig.call(MOST)
    call.run()
    call.assert_right()


@pytest.mark.parametrize("variant", Variant)
@pytest.mark.parametrize("worker", [0, -1])
def test_a_worker_that_stops_is_an_error_and_not_a_hang(
    parts: Parts, variant: Variant, worker: int
) -> None:
    with opened(Rig(parts, LONG, variant, stall=STALL)) as rig:
        _core.exam_stall(rig.pool.core, worker, -1)
        some_failure(rig, "made no progress", within=10 * STALL)
        with pytest.raises(KernelError, match="still in a layer"):
            rig.mailbox.reset()
        _core.exam_release(rig.pool.core)
        recovered(rig)


def test_a_worker_that_is_slow_is_waited_for(parts: Parts) -> None:
    with opened(Rig(parts, LONG)) as rig:
        rig.place([[], []])
        _core.exam_stall(rig.pool.core, -1, 300)
        call = rig.call(4)
        start = time.monotonic()
        call.run()
        assert time.monotonic() - start >= 0.3
        call.assert_right()


@pytest.mark.parametrize(("what", "match"), [(1, "not whole"), (2, "gave up")])
@pytest.mark.parametrize("variant", Variant)
def test_a_corrupted_word_is_an_error(
    parts: Parts, variant: Variant, what: int, match: str
) -> None:
    with opened(Rig(parts, SPECS["int8"], variant)) as rig:
        rig.mailbox.core.exam_corrupt(what)
        some_failure(rig, match, within=10)
        recovered(rig)


def test_a_doorbell_that_nobody_announced_is_an_error(parts: Parts) -> None:
    with opened(Rig(parts, SPECS["int8"])) as rig:
        rig.place([[], []])
        rig.mailbox.announce(1)
        ctypes.c_uint64.from_address(rig.mailbox.addresses.page).value = 2 * 40 + 1
        end = time.monotonic() + 5
        while rig.mailbox.core.verdict == 0 and time.monotonic() < end:
            time.sleep(0.001)
        with pytest.raises(StepError, match="doorbell shows post 40 after 0 of 1"):
            rig.mailbox.check()


@pytest.mark.parametrize("variant", Variant)
def test_a_replay_that_nobody_announced_is_an_error(parts: Parts, variant: Variant) -> None:
    with opened(Rig(parts, SPECS["int8"], variant, layers=1)) as rig:
        rig.place([[]])
        call = rig.call(2)
        with rig.mailbox.recording():
            graph = rig.card.capture(rig.stream, call.enqueue)
        graph.replay()
        rig.card.synchronise()
        with pytest.raises(StepError, match=r"not told of.* post 1 after 0 of 0") as caught:
            rig.mailbox.check()
        assert "announce" in caught.value.hint
        recovered(rig)


def test_a_gate_that_shuts_after_the_failure_is_opened_again(parts: Parts) -> None:
    """As when the guard gives up just before the card posts once more."""
    with opened(Rig(parts, SPECS["int8"], Variant.MEMOP, stall=STALL)) as rig:
        rig.place([[], []])
        rig.mailbox.announce(1)
        ctypes.c_uint64.from_address(rig.mailbox.addresses.page).value = 2 * 40 + 1
        gate = ctypes.c_uint32.from_address(rig.mailbox.addresses.page + GATE_AT)
        end = time.monotonic() + PATIENT
        while rig.mailbox.core.verdict == 0 and time.monotonic() < end:
            time.sleep(0.001)
        gate.value = 0
        while gate.value == 0 and time.monotonic() < end:
            time.sleep(0.001)
        assert gate.value == 1


def test_layers_that_interleave_are_refused(parts: Parts) -> None:
    with opened(Rig(parts, SPECS["int8"])) as rig:
        rig.place([[], []])
        call = rig.call(2)
        (first, step), (second, other) = call.steps()
        first.start(step, rig.stream)
        with pytest.raises(KernelError, match="starts before layer 10"):
            second.start(other, rig.stream)
        with pytest.raises(KernelError, match="layer 11 ends"):
            second.finish(other, rig.stream)
        first.finish(step, rig.stream)
        rig.card.synchronise()
        rig.mailbox.check()
        np.testing.assert_array_equal(call.outs[0], call.want[0])


def test_a_step_that_is_too_large_asks_nothing(parts: Parts) -> None:
    with opened(Rig(parts, SPECS["int8"], layers=1)) as rig:
        rig.place([[]])
        call = rig.call(MOST + 1)
        ((layer, step),) = call.steps()
        with pytest.raises(KernelError, match="planned for"):
            layer.start(step, rig.stream)
        assert rig.mailbox.core.answered == 0
        call.run()
        call.assert_right()


def test_a_pool_has_one_mailbox(parts: Parts) -> None:
    with opened(Rig(parts, SPECS["int8"])) as rig:
        sizes = MailSizes.of(rig.spec, MOST)
        with pytest.raises(KernelError, match="has a mailbox already"):
            Mailbox(rig.card, rig.link, rig.pool, sizes=sizes)
        call = rig.call(2)
        rig.place([[], []])
        call.run()
        call.assert_right()


def test_an_expert_that_nobody_has_is_named(parts: Parts) -> None:
    with opened(Rig(parts, SPECS["int8"])) as rig:
        missing = CpuLayer(rig.spec, rig.pool, max_tokens=MOST)
        rig.mailbox.attach(10, missing)
        some_failure(rig, "expert 2 .* is not bound", within=10)


def test_after_a_failure_every_later_step_fails_until_the_reset(parts: Parts) -> None:
    with opened(Rig(parts, SPECS["int8"])) as rig:
        rig.mailbox.core.exam_corrupt(1)
        some_failure(rig, "not whole", within=10)
        some_failure(rig, "not whole", within=10)
        recovered(rig)


def test_posts_that_never_came_are_settled(parts: Parts) -> None:
    with opened(Rig(parts, SPECS["int8"])) as rig:
        rig.mailbox.announce(7)
        rig.mailbox.settle()
        rig.place(rig.random_split())
        call = rig.call(2)
        call.run()
        call.assert_right()


def test_closing_with_a_stuck_worker_says_so(parts: Parts) -> None:
    rig = Rig(parts, LONG, stall=STALL)
    _core.exam_stall(rig.pool.core, 0, -1)
    some_failure(rig, "made no progress", within=10 * STALL)
    with pytest.raises(MachineError, match="stuck in a layer"):
        rig.mailbox.close()
    rows = np.ctypeslib.as_array((ctypes.c_uint8 * 64).from_address(rig.mailbox.addresses.rows))
    rows[:] = 1  # still ours: the stuck worker may yet write there
    _core.exam_release(rig.pool.core)
