"""The mailbox: both real ends, on a card where there is one, and on the CPU's stand-in for a card.

What only a card can show: memory order over PCIe, graphs, overlap. All that the card reads or
writes here lies in pinned host memory, which has one address for both sides.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.kernels.cuda_host.emulator import HostGpu, HostLink, build_library

from moet import _core
from moet.base.errors import KernelError, MachineError, MoetError, StepError, TierError
from moet.formats.mxint import ActFormat
from moet.hybrid.mailbox import Mailbox, MailSizes, Variant
from moet.hybrid.step import HybridLayer
from moet.hybrid.table import ExpertTable
from moet.kernels.cpu import CpuLayer, Pool, default_cpus
from moet.kernels.cuda.gpu import Gpu
from moet.kernels.cuda.layer import CudaLayer, Step, workspace_of
from moet.kernels.cuda.link import Link
from moet.kernels.cuda.mail import GATE_AT
from moet.kernels.cuda.plan import plan_layer
from moet.kernels.spec import DType, LayerSpec
from moet.verify.cases import LayerCase, random_routing, random_x

Array = NDArray[Any]

SPECS = {
    "int8": LayerSpec(hidden=96, intermediate=64, experts=8, top_k=3, act=ActFormat.MXINT8),
    "int16": LayerSpec(
        hidden=64, intermediate=96, experts=6, top_k=2, act=ActFormat.MXINT16, output_scale=1.5
    ),
}
MOST = 6
PATIENT, STALL = 20.0, 0.5
"""Seconds: a machine may be busy; only where a stop is wanted is it waited for briefly."""


Parts = tuple[Any, Any]
"""A card and its host link."""


def real_card(cache: Path) -> Parts:
    try:
        gpu = Gpu(0, cache)
    except MoetError as error:
        pytest.skip(f"no GPU that moet can use: {error}")
    return gpu, Link(gpu)


@pytest.fixture(scope="module", params=["stand-in", "card"])
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Parts:
    folder = tmp_path_factory.mktemp("mailbox")
    if request.param == "card":
        return real_card(folder)
    card = HostGpu(build_library(folder))
    return card, HostLink(card)


class Rig:
    """Some hybrid layers of one mailbox on the stand-in, and the same layers on the CPU alone."""

    def __init__(
        self,
        parts: Parts,
        spec: LayerSpec,
        variant: Variant = Variant.POLL,
        *,
        layers: int = 2,
        stall: float = PATIENT,
    ) -> None:
        self.rng = np.random.default_rng(11)
        self.card, self.link = parts
        self.stream = self.card.stream()
        self.pinned: list[int] = []
        self.spec = spec
        self.pool = Pool(2, default_cpus())
        sizes = MailSizes.of(spec, MOST)
        self.mailbox = Mailbox(
            self.card, self.link, self.pool, sizes=sizes, variant=variant, stall_seconds=stall
        )
        self.alone = Pool(1, default_cpus())
        self.cases = [LayerCase.random(self.rng, spec) for _ in range(layers)]
        self.records = [self.array(case.records) for case in self.cases]
        self.tables = [ExpertTable(self.card, self.link, spec.experts) for _ in self.cases]
        self.layers = [self._layer(i) for i in range(layers)]
        self.whole = [self._bound(case, self.alone) for case in self.cases]

    def _bound(self, case: LayerCase, pool: Pool) -> CpuLayer:
        layer = CpuLayer(self.spec, pool, max_tokens=MOST)
        for e, record in enumerate(case.records):
            layer.bind(e, record.ctypes.data)
        return layer

    def _layer(self, index: int) -> HybridLayer:
        plan = plan_layer(self.spec, self.card.card, MOST)
        workspace = self.array(np.zeros(workspace_of(self.spec, plan).nbytes, np.uint8))
        table = self.tables[index]
        cuda = CudaLayer(
            self.spec,
            self.card.card,
            self.card,
            table=table.address,
            workspace=workspace.ctypes.data,
            max_tokens=MOST,
        )
        self.mailbox.attach(10 + index, self._bound(self.cases[index], self.pool))
        return HybridLayer(10 + index, cuda, table, self.mailbox)

    def place(self, residents: list[list[int]]) -> None:
        """Puts these experts of each layer on the card, and takes the others away."""
        for records, table, resident in zip(self.records, self.tables, residents, strict=True):
            for e in range(self.spec.experts):
                table.remove(e)
            for e in resident:
                table.put(e, records[e].ctypes.data)
            table.publish(self.stream)

    def array(self, data: Array) -> Array:
        """A copy that both sides can see."""
        self.pinned.append(self.link.pinned(data.nbytes + 256))
        start = self.pinned[-1] + -self.pinned[-1] % 256
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * data.nbytes).from_address(start))
        copy = raw.view(data.dtype).reshape(data.shape)
        copy[...] = data
        return copy

    def random_split(self) -> list[list[int]]:
        count = int(self.rng.integers(0, self.spec.experts + 1))
        return [list(self.rng.choice(self.spec.experts, count, replace=False)) for _ in self.layers]

    def call(self, tokens: int) -> Call:
        return Call(self, tokens)

    def close(self) -> None:
        self.mailbox.close()
        for table in self.tables:
            table.close()
        for address in self.pinned:
            self.link.free_pinned(address)


class Call:
    """One step through all layers, each on a call of its own, and what it must give."""

    def __init__(self, rig: Rig, tokens: int) -> None:
        self.rig = rig
        self.x = rig.array(random_x(rng := rig.rng, tokens, rig.spec.hidden, DType.BF16))
        routings = [random_routing(rng, tokens, rig.spec) for _ in rig.layers]
        self.routings = [(rig.array(ids), rig.array(weights)) for ids, weights in routings]
        self.outs = [rig.array(np.zeros_like(self.x)) for _ in rig.layers]
        self.want = [
            whole.run(self.x, ids, weights, DType.BF16)
            for whole, (ids, weights) in zip(rig.whole, self.routings, strict=True)
        ]

    def steps(self) -> Iterator[tuple[HybridLayer, Step]]:
        for layer, (ids, weights), out in zip(
            self.rig.layers, self.routings, self.outs, strict=True
        ):
            yield (
                layer,
                Step(
                    x=self.x.ctypes.data,
                    x_type=DType.BF16,
                    tokens=len(self.x),
                    ids=ids.ctypes.data,
                    weights=weights.ctypes.data,
                    out=out.ctypes.data,
                    out_type=DType.BF16,
                ),
            )

    @property
    def posts(self) -> int:
        return sum(layer.posts(len(self.x)) for layer in self.rig.layers)

    def enqueue(self) -> None:
        for layer, step in self.steps():
            layer.run(step, self.rig.stream)

    def run(self) -> None:
        self.rig.mailbox.announce(self.posts)
        self.enqueue()
        self.rig.card.synchronise()
        self.rig.mailbox.check()

    def assert_right(self) -> None:
        for got, want in zip(self.outs, self.want, strict=True):
            np.testing.assert_array_equal(got, want)


@contextmanager
def opened(rig: Rig) -> Iterator[Rig]:
    try:
        yield rig
    finally:
        rig.close()


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


# ---- faults


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


LONG = LayerSpec(hidden=512, intermediate=512, experts=8, top_k=3, act=ActFormat.MXINT8)
"""Long enough that every worker gets an item of it."""


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
