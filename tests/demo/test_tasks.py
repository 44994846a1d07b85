"""The tasks: deterministic, split by problem, markable."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from random import Random

import pytest

from moet.demo.tasks import KINDS, arithmetic, correct, heldout, recall, stories, tools
from moet.demo.tasks.base import draw, held_out
from moet.demo.tasks.grade import parse_json, valid_json


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_samples(kind: str) -> None:
    assert heldout(kind, 20, 5) == heldout(kind, 20, 5)
    assert heldout(kind, 20, 5) != heldout(kind, 20, 6)


def test_the_samples_do_not_drift() -> None:
    text = json.dumps([asdict(s) for kind in KINDS for s in heldout(kind, 5, 0)], sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "a45f97442922018a"


@pytest.mark.parametrize("kind", KINDS)
def test_the_right_answer_is_marked_right(kind: str) -> None:
    for sample in heldout(kind, 50, 1):
        assert correct(sample, sample.answer)
        assert not correct(sample, "")


def test_wrong_answers_are_marked_wrong() -> None:
    (addition,) = heldout("addition", 1)
    (json_sample,) = heldout("json", 1)
    (lookup,) = heldout("recall", 1)
    assert not correct(addition, addition.answer + "0")
    assert not correct(json_sample, json_sample.answer[:-3])
    assert not correct(lookup, lookup.answer + "x")


@pytest.mark.parametrize(
    "make", [arithmetic.addition, arithmetic.subtraction, tools.write_object, stories.story]
)
def test_training_never_draws_a_held_out_problem(make: object) -> None:
    assert callable(make)
    rng = Random(3)
    seen = {draw(make, rng, held=False).identity for _ in range(2000)}
    asked = {draw(make, rng, held=True).identity for _ in range(200)}
    assert not any(map(held_out, seen))
    assert all(map(held_out, asked))
    assert seen.isdisjoint(asked)


def test_constant_identities_are_on_the_training_side() -> None:
    constants = ("add digits", "sub digits", "mul table", "chat", "fact", "unknown", "meet")
    assert not any(map(held_out, (*constants, "code", "memory")))


def test_recall_asks_about_a_record_that_is_there_once() -> None:
    for sample in heldout("recall", 30, 2):
        text = sample.messages[0]["content"]
        assert text.count(sample.answer.removesuffix(".")) >= 1
        assert 0.0 <= sample.facts["depth"] < 1.0
        assert sample.facts["value"] in sample.answer


def test_recall_covers_every_depth_and_size() -> None:
    samples = heldout("recall", 200, 3)
    depths = {int(s.facts["depth"] * 5) for s in samples}
    sizes = sorted(len(s.messages[0]["content"]) for s in samples)
    assert depths == {0, 1, 2, 3, 4}
    assert sizes[0] < 1_000
    assert sizes[-1] > 7_000


def test_keys_of_a_table_are_distinct() -> None:
    for seed in range(20):
        keys = [k for k, _ in recall.table(Random(seed), 1500).records]
        assert len(keys) == len(set(keys))


def test_json_answers_parse_and_calls_name_an_offered_tool() -> None:
    for sample in heldout("json", 200, 4):
        assert valid_json(sample.answer)
        value = parse_json(sample.answer)
        if sample.tools:
            offered = {t["function"]["name"]: t["function"]["parameters"] for t in sample.tools}
            assert set(value["arguments"]) == set(offered[value["name"]]["properties"])


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown kind"):
        heldout("poetry", 1)
