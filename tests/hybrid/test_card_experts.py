"""A model's layers on a card: binding, placing, moving; and the probe of the ways to wait."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
from tests.kernels.cuda_host.emulator import HostGpu, HostLink, build_library

from moet.base.errors import KernelError, MachineError, TierError, UsageError
from moet.formats.mxint import ActFormat
from moet.hybrid import probe
from moet.hybrid.card import CardExperts
from moet.hybrid.mailbox import Variant
from moet.kernels.cpu import CpuLayer, Pool, default_cpus
from moet.kernels.cuda.layer import Step
from moet.kernels.cuda.synthetic import random_records
from moet.kernels.spec import DType, LayerSpec
from moet.testing.card import HostCard
from moet.tiers.api import ExpertKey
from moet.tiers.ram import RamTier
from moet.verify.cases import random_routing, random_x

SPEC = LayerSpec(hidden=96, intermediate=64, experts=8, top_k=3, act=ActFormat.MXINT16)
LAYERS = (2, 5)
RECORD = SPEC.layout.record_bytes
PATIENT = 20.0


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_library(tmp_path_factory.mktemp("card_experts"))


class Model:
    def __init__(self, library: ctypes.CDLL, capacity: int) -> None:
        self.rng = np.random.default_rng(3)
        self.ram = RamTier(len(LAYERS) * SPEC.experts * RECORD, populate=False)
        self.card = HostGpu(library)
        self.memory = HostCard()
        self.experts = CardExperts(
            self.card,
            HostLink(self.card),
            self.memory,
            Pool(2, default_cpus()),
            dict.fromkeys(LAYERS, SPEC),
            capacity_bytes=capacity,
            max_tokens=4,
            stall_seconds=PATIENT,
        )
        self.alone = {i: CpuLayer(SPEC, Pool(1, default_cpus())) for i in LAYERS}
        for i in LAYERS:
            for e, record in enumerate(random_records(self.rng, SPEC, (118, 127))):
                key = ExpertKey(i, e)
                self.ram.put(key, record)
                lease = self.ram.acquire(key)
                self.alone[i].bind(e, lease.address)
                self.experts.bind([lease])

    def place(self, split: dict[int, tuple[int, ...]]) -> int:
        """The stand-in's stream has always ended: its fences pass at once."""
        record = self.memory.record

        def passed(stream: int) -> int:
            event = record(stream)
            self.memory.finish(event)
            return event

        self.memory.record = passed  # type: ignore[method-assign]
        try:
            return self.experts.place(split, 1)
        finally:
            self.memory.record = record  # type: ignore[method-assign]

    def check(self, tokens: int) -> None:
        for i in LAYERS:
            x = random_x(self.rng, tokens, SPEC.hidden, DType.F32)
            ids, weights = random_routing(self.rng, tokens, SPEC)
            out = np.empty_like(x)
            step = Step(
                x=x.ctypes.data,
                x_type=DType.F32,
                tokens=tokens,
                ids=ids.ctypes.data,
                weights=weights.ctypes.data,
                out=out.ctypes.data,
                out_type=DType.F32,
            )
            layer = self.experts.layers[i]
            self.experts.mailbox.announce(layer.posts(tokens))
            layer.run(step, 1)
            self.experts.mailbox.check()
            want = self.alone[i].run(x, ids, weights, DType.F32)
            np.testing.assert_array_equal(out.view(np.uint32), want.view(np.uint32))


@pytest.fixture
def model(library: ctypes.CDLL) -> Iterator[Model]:
    model = Model(library, 6 * RECORD)
    yield model
    model.experts.close()
    assert model.card.held == {}
    model.memory.close()


def test_experts_move_and_the_bits_stay(model: Model) -> None:
    model.check(5)
    splits = [{2: (0, 1, 2), 5: (7,)}, {2: (1, 4), 5: (7, 0, 3, 6)}, {2: (), 5: ()}, {2: (5,)}]
    for split in splits:
        held = model.experts.resident
        nbytes = model.place(split)
        assert model.experts.resident == sum(len(e) for e in split.values())
        assert nbytes <= model.experts.resident * RECORD
        assert held or nbytes == model.experts.resident * RECORD
        for i in LAYERS:
            assert model.experts.tables[i].resident == tuple(sorted(split.get(i, ())))
        model.check(1)
        model.check(9)


def test_placing_the_same_again_copies_nothing(model: Model) -> None:
    assert model.place({2: (3, 4)}) == 2 * RECORD
    assert model.place({2: (4, 3)}) == 0


def test_more_than_the_card_holds_is_refused(model: Model) -> None:
    with pytest.raises(TierError):
        model.place({2: tuple(range(7))})
    model.check(3)
    assert model.experts.resident == 0
    assert model.place({2: (0, 1), 5: (3,)}) == 3 * RECORD, "what had landed is in nobody's way"
    model.check(3)


def test_a_record_of_another_size_or_layer_is_refused(model: Model) -> None:
    stray = RamTier(4 * RECORD, populate=False)
    for key, nbytes, error in (
        (ExpertKey(2, 0), 2 * RECORD, TierError),
        (ExpertKey(3, 0), RECORD, KernelError),
    ):
        stray.put(key, np.zeros(nbytes, np.uint8))
        with stray.acquire(key) as lease, pytest.raises(error):
            model.experts.bind([lease])
    model.check(2)


def test_an_expert_that_is_bound_again_gives_its_old_record_back(model: Model) -> None:
    held = model.ram.stats().leases
    model.experts.bind([model.ram.acquire(ExpertKey(2, 0))])
    assert model.ram.stats().leases == held
    model.check(2)


def test_an_expert_that_is_nowhere_cannot_be_placed(model: Model) -> None:
    with pytest.raises(KernelError, match="not bound"):
        model.place({2: (SPEC.experts,)})


# ---- the probe


@pytest.mark.parametrize("variant", Variant)
def test_the_forced_variant_is_tried_and_taken(library: ctypes.CDLL, variant: Variant) -> None:
    card = HostGpu(library)
    assert probe.choose(card, HostLink(card), Pool(1, default_cpus()), str(variant)) is variant
    assert card.held == {}


def test_the_fastest_that_works_is_taken(library: ctypes.CDLL) -> None:
    card = HostGpu(library)
    pool = Pool(1, default_cpus())
    assert probe.choose(card, HostLink(card), pool) is Variant.POLL

    class NoKernel(HostGpu):
        def launch(self, kernel: str, *args: object, **more: object) -> None:
            if kernel != "moet_wait" or self.waits:
                super().launch(kernel, *args, **more)  # type: ignore[arg-type]

        waits = False

    class NoMemoryOperations(HostLink):
        def wait_for_word(self, stream: int, address: int, value: int) -> None:
            raise KernelError("cuStreamWaitValue32 failed: CUDA_ERROR_NOT_SUPPORTED")

    blind = NoKernel(library)  # does not wait: the combine reads rows that are not there
    results = [probe.probe(blind, NoMemoryOperations(blind), pool, variant) for variant in Variant]
    assert "NOT_SUPPORTED" in results[1].fault
    assert results[2].fault == "", "the host function itself waits"
    assert blind.held == {}


def test_nothing_that_works_is_an_error_with_every_reason(library: ctypes.CDLL) -> None:
    class Broken(HostLink):
        def capturing(self, stream: int) -> bool:
            raise KernelError("this link is down")

    card = HostGpu(library)
    with pytest.raises(MachineError, match=r"poll: this link is down; memop: .*; hostfunc: "):
        probe.choose(card, Broken(card), Pool(1, default_cpus()))


def test_a_variant_that_does_not_exist_is_named(library: ctypes.CDLL) -> None:
    card = HostGpu(library)
    with pytest.raises(UsageError, match="'telepathy' is no variant"):
        probe.choose(card, HostLink(card), Pool(1, default_cpus()), "telepathy")
