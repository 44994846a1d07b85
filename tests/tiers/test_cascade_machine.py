"""A cascade against a dict: any order of calls, leases, guesses, faults and resizes."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from moet.base.errors import TierError
from moet.testing.below import MemoryBelow
from moet.testing.tiers import PAGE, memory_at, pattern
from moet.tiers import cascade as module
from moet.tiers.api import ExpertKey, Lease
from moet.tiers.cascade import Cascade
from moet.tiers.policy import POLICIES, Part
from moet.tiers.wanted import Wanted

EXPERTS, LAYERS = 5, 2
KEYS = [ExpertKey(layer, e) for layer in range(LAYERS) for e in range(EXPERTS)]
RECORDS = {key: pattern(key, 40 + 100 * key.expert) for key in KEYS}
REMEMBER_S, PATIENCE_S = 5.0, 50.0

some_keys = st.lists(st.integers(0, EXPERTS - 1), min_size=1, unique=True)


@dataclass
class Open:
    """A call that is under way: what is still to come, what of it may fail, and its last group."""

    call: Wanted
    left: set[ExpertKey]
    may_fail: set[ExpertKey]
    group: list[Lease] = field(default_factory=list)


class CascadeMachine(RuleBasedStateMachine):
    """Reads end at once, so every step has one right answer, up to what the policy keeps."""

    @initialize(
        slots=st.integers(1, 8), window=st.integers(1, 3), policy=st.sampled_from(sorted(POLICIES))
    )
    def start(self, slots: int, window: int, policy: str) -> None:
        self.turn_s, module._TURN_S = module._TURN_S, 0.0
        self.now = 0.0
        self.bad: set[ExpertKey] = set()
        self.remembered: set[ExpertKey] = set()
        self.held: list[Lease] = []
        self.calls: list[Open] = []
        self.below = MemoryBelow(RECORDS, lambda key: key in self.bad)
        self.slots = slots
        self.made = Cascade(
            self.below,
            slots * PAGE,
            policy=POLICIES[policy],
            window=window,
            remember_s=REMEMBER_S,
            patience_s=PATIENCE_S,
            clock=self.clock,
        )

    def clock(self) -> float:
        self.now += 1e-3 if not self.stuck() else 10.0
        return self.now

    def stuck(self) -> bool:
        """All memory is leased, or ready for a call that does not go on: nothing comes until we let
        go."""
        place = self.made._placement
        return int((place.there & (place.pins > 0)).sum()) >= place.slots

    def teardown(self) -> None:
        if not hasattr(self, "made"):
            return
        for one in self.calls:
            self.let_go(one)
            one.call.close()
        for lease in self.held:
            lease.release()
        assert self.made.stats().leases == 0
        self.made.close()
        assert self.below.registered == {}
        module._TURN_S = self.turn_s

    def let_go(self, one: Open) -> None:
        while one.group:
            one.group.pop().release()

    # ---- what users do

    @rule(layer=st.integers(0, LAYERS - 1), experts=some_keys, prefill=st.booleans())
    def begin(self, layer: int, experts: list[int], prefill: bool) -> None:
        keys = [ExpertKey(layer, e) for e in experts]
        call = self.made.want(keys, prefill)
        self.calls.append(Open(call, set(keys), self.remembered & set(keys)))

    @precondition(lambda self: getattr(self, "calls", None))
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """The next group of any call: its bytes, or failures that were asked for."""
        one = self.calls[data.draw(st.integers(0, len(self.calls) - 1))]
        self.let_go(one)
        there = self.made.resident().keys()
        if self.stuck() and not self.can_go_on(one.call):
            with pytest.raises(TierError, match="leased for"):
                self.made.next_group(one.call)
        else:
            one.group = self.made.next_group(one.call)
            if not one.group:
                assert one.left == one.call.failed.keys() & one.left, "all came or failed"
                one.call.close()
                self.calls.remove(one)
        came = {lease.key for lease in one.group}
        failed = one.call.failed.keys() & one.left
        assert came <= one.left
        assert came & self.bad <= there, "what cannot be read does not come"
        assert failed <= one.may_fail, "nothing fails that was not made to"
        one.left -= came | failed

    def can_go_on(self, call: Wanted) -> bool:
        """Whether a call needs no slot: something is there for it, or all the rest has failed."""
        place = self.made._placement
        failed = [self.made._failures.why(i, call.failures) is not None for i in call.todo]
        return bool(place.there[call.todo].any()) or all(failed)

    @precondition(lambda self: getattr(self, "calls", None))
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        one = self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))
        self.let_go(one)
        one.call.close()

    @rule(key=st.sampled_from(KEYS))
    def hold(self, key: ExpertKey) -> None:
        there, stuck = key in self.made.resident(), self.stuck()
        try:
            self.held.append(self.made.acquire(key))
        except TierError:
            assert not there, "what is in memory can always be leased"
            assert stuck or key in self.remembered

    @precondition(lambda self: getattr(self, "held", None))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.held.pop(data.draw(st.integers(0, len(self.held) - 1))).release()

    @rule(keys=st.lists(st.sampled_from(KEYS)))
    def expect(self, keys: list[ExpertKey]) -> None:
        self.made.expect(keys)

    @rule(slots=st.integers(1, 12))
    def resize(self, slots: int) -> None:
        self.made.resize(slots * PAGE)
        self.slots = min(slots, len(KEYS))

    # ---- what disks do

    @rule(key=st.sampled_from(KEYS))
    def break_one(self, key: ExpertKey) -> None:
        self.bad.add(key)
        self.remembered.add(key)
        for one in self.calls:
            one.may_fail |= {key} & one.left

    @rule()
    def mend(self) -> None:
        self.bad.clear()

    @rule()
    def time_passes(self) -> None:
        """After that, what is whole is read again."""
        self.now += REMEMBER_S + 1
        self.remembered = set(self.bad)

    @rule()
    def forgive(self) -> None:
        self.made.forgive()

    # ---- what always holds

    @invariant()
    def leased_bytes_stay(self) -> None:
        for lease in [*getattr(self, "held", []), *(x for c in self.calls_now() for x in c.group)]:
            assert np.array_equal(memory_at(lease), RECORDS[lease.key])

    def calls_now(self) -> list[Open]:
        return getattr(self, "calls", [])

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "made"):
            return
        place, tier = self.made._placement, self.made._tier
        assert set(tier.keys()) == self.made.resident().keys()
        assert not place.coming.any(), "reads end at once here"
        assert np.array_equal(place.there, place.ledger.part != Part.ABSENT)
        leases = len(self.held) + sum(len(c.group) + len(c.call.todo) for c in self.calls)
        assert place.pins.sum() == leases
        assert place.ledger.main() <= place.main
        assert place.used <= tier.slots
        if tier.slots > self.slots:
            pinned = int((place.there & (place.pins > 0)).sum())
            assert tier.slots == pinned, "what is over the budget is leased or waited for"
        assert tier.slots == max(self.slots, place.used)


TestCascadeMachine = CascadeMachine.TestCase
TestCascadeMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_hundred_thousand_steps() -> None:
    run_state_machine_as_test(
        CascadeMachine, settings=settings(max_examples=1000, stateful_step_count=100, deadline=None)
    )
