"""Fuzzing of the two parsers of packs: damage is named, and what is accepted makes sense."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from moet.checkpoint.keys import ExpertKey
from moet.pack.faults import BrokenPack, PackFault
from moet.pack.identity import CheckpointFile
from moet.pack.journal import parse_journal
from moet.pack.spec import DataFile, Manifest, PackModel, Plan, parse_manifest

# What fuzzing writes over a good manifest or journal.
SNIPPETS = [
    *(b'"', b"{", b"}", b"[", b"]", b",", b":", b"0", b"-1", b"1.5", b"1e9", b"null", b"true"),
    *(b"NaN", b"\\", b"\\ud800", b"\xff", b"\n", b" ", b"9" * 30, b"[" * 5000, b"{}", b"[]"),
    *(b'""', b"18446744073709551616", b"9223372036854775808", b"0000000000000000", b"\0"),
    *(b'"tiles":1,', b'"format"', b"moe_layers", b"experts-1.bin", b"4096", b"16777217"),
]


def good() -> Manifest:
    model = PackModel(
        architecture="x", hidden=32, intermediate=32, biased=True, experts=2, moe_layers=(0, 3)
    )
    files = DataFile("", "experts-0.bin"), DataFile("/b/x.moetpack", "experts-1.bin")
    source = CheckpointFile("model.safetensors", 10, 20, 30, 40), CheckpointFile("z", 1, -2, 3)
    plan = Plan(model=model, source="/m", checkpoint=source, files=files)
    return Manifest(plan=plan, checksums=(1, 2**64 - 1, 3, 4), moet="1")


def damaged(draw: random.Random, raw: bytes) -> bytes:
    """``raw`` with a few spans replaced, doubled, moved or cut off."""
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        i = draw.randrange(len(raw) + 1)
        j = min(len(raw), i + draw.choice([0, 1, 1, 2, 5, 30]))
        kind = draw.randrange(5)
        middle = draw.choice(SNIPPETS) if kind < 2 else bytes([draw.randrange(256)])
        if kind == 2:
            k = draw.randrange(len(raw) + 1)
            middle = raw[k : k + draw.choice([1, 8, 40])]
        elif kind == 3 and draw.random() < 0.1:
            raw, middle = raw[:i], b""
        raw = raw[:i] + middle + raw[j:]
    return raw


def read_manifest(raw: bytes) -> bool:
    """Whether a manifest is accepted; then it must make sense."""
    try:
        manifest = parse_manifest(raw, Path("m"))
    except BrokenPack:
        return False
    plan = manifest.plan
    assert len(manifest.checksums) == plan.records > 0
    assert sum(map(plan.file_bytes, range(len(plan.files)))) == plan.nbytes
    assert plan.index(ExpertKey(plan.model.moe_layers[-1], plan.model.experts - 1)) is not None
    assert parse_manifest(manifest.to_bytes(), Path("m")) == manifest
    return True


def read_journal(raw: bytes) -> bool:
    """Whether a journal is accepted; then its records are the plan's."""
    try:
        plan, records, end = parse_journal(raw, Path("j"))
    except BrokenPack as error:
        if error.fault is not PackFault.BAD_JOURNAL:
            raise
        return False
    assert all(0 <= index < plan.records for index in records)
    assert 0 < end <= len(raw)
    return True


def fuzz(seed: int, count: int) -> tuple[int, int]:
    """Reads ``count`` damaged manifests and journals each; how many were accepted."""
    draw, manifest = random.Random(seed), good()
    head = json.dumps(manifest.plan.head(), separators=(",", ":")).encode()
    lines = b"0 0000000000000001 45bdb494\n1 ffffffffffffffff 13ae4d69\n"
    signed = manifest.to_bytes()
    accepted = [0, 0]
    for _ in range(count):
        accepted[0] += read_manifest(damaged(draw, signed))
        accepted[1] += read_journal(damaged(draw, head + b"\n" + lines))
    return accepted[0], accepted[1]


def test_fuzzed_manifests_and_journals() -> None:
    manifests, journals = fuzz(0, 4_000)
    assert 0 < manifests < 2_000  # damage to names and numbers that nothing else contradicts
    assert 0 < journals < 3_000


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))  # 10^6 inputs in all
def test_fuzzed_manifests_and_journals_for_long(seed: int) -> None:
    manifests, journals = fuzz(seed, 125_000)
    assert min(manifests, journals) > 0
