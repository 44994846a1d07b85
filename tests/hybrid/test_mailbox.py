"""The mailbox: both real ends, on a card where there is one, and on the CPU's stand-in for a card.

What only a card can show: memory order over PCIe, graphs, overlap. All that the card reads or
writes here lies in pinned host memory, which has one address for both sides.
"""

from __future__ import annotations

import time

import pytest
from tests.hybrid.mailbox_rig import MOST, SPECS, Parts, Rig, opened

from moet.base.errors import KernelError, TierError
from moet.hybrid.mailbox import Variant
from moet.hybrid.table import ExpertTable
from moet.kernels.cpu import CpuLayer
from moet.kernels.spec import DType


@pytest.mark.parametrize("variant", Variant)
@pytest.mark.parametrize("name", SPECS)
def test_any_split_gives_the_bits_of_the_cpu(parts: Parts, name: str, variant: Variant) -> None:
    with opened(Rig(parts, SPECS[name], variant)) as rig:
        every = list(range(rig.spec.experts))
        for residents in ([[], []], [every, every], *(rig.random_split() for _ in range(6))):
            rig.place(residents)
            call = rig.call(int(rig.rng.integers(1, 2 * MOST + 1)))
            call.run()
            call.assert_right()


@pytest.mark.parametrize("variant", Variant)
def test_a_captured_step_can_be_replayed_while_experts_move(parts: Parts, variant: Variant) -> None:
    with opened(Rig(parts, SPECS["int8"], variant)) as rig:
        rig.place(rig.random_split())
        call = rig.call(MOST)
        with rig.mailbox.recording() as posts:
            graph = rig.card.capture(rig.stream, call.enqueue)
        assert posts == [call.posts] == [2]
        for _ in range(20):
            rig.card.synchronise()
            rig.place(rig.random_split())
            for out in call.outs:
                out[:] = 0
            rig.mailbox.announce(posts[0])
            graph.replay()
            rig.card.synchronise()
            rig.mailbox.check()
            call.assert_right()


def test_layers_that_nobody_announced_announce_themselves(parts: Parts) -> None:
    with opened(Rig(parts, SPECS["int8"])) as rig:
        rig.place([[], [0]])
        call = rig.call(2)
        call.enqueue()
        rig.card.synchronise()
        rig.mailbox.check()
        call.assert_right()


def test_a_step_whose_experts_are_all_on_the_card_asks_nothing(parts: Parts) -> None:
    with opened(Rig(parts, SPECS["int8"])) as rig:
        every = list(range(rig.spec.experts))
        rig.place([every, every])
        rig.call(3).run()
        assert rig.mailbox.answered == 0
        rig.place([every, []])
        call = rig.call(3)
        call.run()
        call.assert_right()
        assert rig.mailbox.answered == 1
        assert rig.mailbox.busy_seconds > 0


def test_slots_of_other_ranks_are_skipped(parts: Parts) -> None:
    with opened(Rig(parts, SPECS["int8"], layers=1)) as rig:
        rig.place([[1, 2]])
        rig.tables[0].mark_foreign([0, 5])
        rig.tables[0].publish(rig.stream)
        rig.whole[0].mark_foreign(0)
        rig.whole[0].mark_foreign(5)
        call = rig.call(MOST)
        call.run()
        call.assert_right()


def test_tokens_of_many_kinds_share_a_post(parts: Parts) -> None:
    """Tokens with no slot for the CPU, with some, with none at all, and a poisoned one."""
    with opened(Rig(parts, SPECS["int8"], layers=1)) as rig:
        rig.place([[0, 1, 2, 3]])
        call = rig.call(5)
        ids, weights = call.routings[0]
        ids[:] = [[0, 1, 2], [4, 5, 6], [-1, -1, -1], [0, 7, -1], [6, 3, 0]]
        call.x[4, 7] = 0x7F80
        call.want[0] = rig.whole[0].run(call.x, ids, weights, DType.BF16)
        assert (call.want[0][4] == 0x7FFF).all()
        call.run()
        call.assert_right()


# ---- idle


def cpu_seconds(thread: int) -> float:
    with open(f"/proc/self/task/{thread}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


@pytest.mark.parametrize("last", ["asks", "asks nothing"])
@pytest.mark.parametrize("variant", Variant)
def test_idle_threads_use_no_cpu(parts: Parts, variant: Variant, last: str) -> None:
    with opened(Rig(parts, SPECS["int8"], variant)) as rig:
        rig.place([[], [] if last == "asks" else list(range(rig.spec.experts))])
        rig.call(1).run()
        time.sleep(0.1)
        threads = [*rig.mailbox.core.thread_ids, *rig.pool.core.thread_ids]
        before = [cpu_seconds(t) for t in threads]
        time.sleep(0.5)
        assert [cpu_seconds(t) for t in threads] == before


# ---- the table


def test_the_table_refuses_what_it_cannot_hold(parts: Parts) -> None:
    card, link = parts
    table = ExpertTable(card, link, 4)
    assert table.elsewhere == (0, 1, 2, 3)
    table.put(2, 4096)
    table.mark_foreign([3])
    assert table.resident == (2,)
    assert table.elsewhere == (0, 1)
    for expert, address in ((4, 4096), (-1, 4096), (0, 0), (0, 1), (0, 4100)):
        with pytest.raises(TierError):
            table.put(expert, address)
    table.close()
    table.close()


def test_a_layer_that_does_not_fit_the_mailbox_is_refused(parts: Parts) -> None:
    with opened(Rig(parts, SPECS["int8"])) as rig:
        other = CpuLayer(SPECS["int16"], rig.pool)
        with pytest.raises(KernelError, match="in a mailbox made for"):
            rig.mailbox.attach(3, other)
