"""The manifest: what is written is what is read; whatever else is refused, by name."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moet.checkpoint import Checkpoint, open_checkpoint
from moet.checkpoint.keys import ExpertKey
from moet.pack.faults import HINTS, BrokenPack, PackFault
from moet.pack.identity import CheckpointFile
from moet.pack.journal import JOURNAL, read_journal
from moet.pack.reader import open_pack
from moet.pack.spec import (
    MANIFEST,
    DataFile,
    Manifest,
    PackModel,
    Plan,
    parse_head,
    parse_manifest,
    sign,
)
from moet.pack.writer import plan_pack, write_pack
from moet.testing.malformed_packs import CHECKPOINTS, PACKS

HASHES = st.integers(0, 2**64 - 1)
CHECKPOINT_FILES = st.builds(
    CheckpointFile,
    name=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9),
    nbytes=st.integers(0, 2**62),
    mtime_ns=st.integers(-(2**62), 2**62),
    header=HASHES,
    content=st.none() | HASHES,
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    layers = draw(st.sets(st.integers(0, 100), min_size=1, max_size=4))
    model = PackModel(
        architecture=draw(st.sampled_from(["qwen3_moe", "gpt_oss"])),
        hidden=32 * draw(st.integers(1, 200)),
        intermediate=32 * draw(st.integers(1, 200)),
        biased=draw(st.booleans()),
        experts=draw(st.integers(1, 5)),
        moe_layers=tuple(sorted(layers)),
    )
    files = draw(st.integers(1, 3))
    plan = Plan(
        model=model,
        source="/models/x",
        checkpoint=tuple(draw(st.lists(CHECKPOINT_FILES, min_size=1, max_size=3))),
        files=tuple(DataFile(f"/disk{i}/x" if i else "", f"experts-{i}.bin") for i in range(files)),
    )
    count = plan.records
    checksums = tuple(draw(st.lists(HASHES, min_size=count, max_size=count)))
    return Manifest(plan=plan, checksums=checksums, moet="1.2.3")


@given(manifests())
def test_what_is_written_is_read(manifest: Manifest) -> None:
    raw = manifest.to_bytes()
    assert parse_manifest(raw, Path("m")) == manifest
    assert json.loads(raw)["format"] == "moet-pack-1"
    assert parse_head(json.dumps(manifest.plan.head()).encode(), Path("j")) == manifest.plan


@given(manifests())
def test_every_record_has_a_place_of_its_own(manifest: Manifest) -> None:
    plan = manifest.plan
    size = plan.layout.record_bytes
    assert [plan.index(key) for key in plan.keys] == list(range(plan.records))
    places = [plan.place(i) for i in range(plan.records)]
    assert len(set(places)) == plan.records
    for number in range(len(plan.files)):
        offsets = sorted(offset for file, offset in places if file == number)
        assert offsets == list(range(0, plan.file_bytes(number), size))  # no hole, nothing behind
        assert all(offset % 4096 == 0 for offset in offsets)
    assert sum(map(plan.file_bytes, range(len(plan.files)))) == plan.nbytes
    layer = plan.model.moe_layers[0]
    strangers = [(layer, plan.model.experts), (layer, -1), (101, 0), (-1, 0)]
    assert [plan.index(ExpertKey(*key)) for key in strangers] == [None] * 4


@pytest.mark.parametrize("name", PACKS)
def test_a_malformed_pack_is_named(name: str, packed: Path) -> None:
    fault, spoil = PACKS[name]
    open_pack(packed)
    spoil(packed)
    with pytest.raises(BrokenPack) as caught:
        open_pack(packed)
    assert caught.value.fault is fault
    assert caught.value.hint
    assert str(packed) in str(caught.value) or fault is PackFault.MISSING_FILE


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_changed_checkpoint_is_named(name: str, mine: Path, tmp_path: Path) -> None:
    fault, spoil = CHECKPOINTS[name]
    checkpoint = open_checkpoint(mine)
    folder = write_pack(checkpoint, [tmp_path / "packs"]).folder
    open_pack(folder, checkpoint)
    spoil(mine)
    with pytest.raises(BrokenPack) as caught:
        open_pack(folder, open_checkpoint(mine))
    assert caught.value.fault is fault
    assert "moet pack" in caught.value.hint
    open_pack(folder)  # the pack itself is whole


def test_every_fault_of_opening_has_an_example() -> None:
    later = {"no-record", "bad-record", "no-space", "write-failed", "foreign", "bad-journal"}
    later |= {"changed", "in-use"}  # of reading records, writing and removing: their own tests
    covered = {fault for fault, _ in (*PACKS.values(), *CHECKPOINTS.values())}
    assert set(PackFault) - covered == {PackFault(value) for value in later}
    assert set(HINTS) <= set(PackFault)
    assert all(BrokenPack(fault, "x", "y").hint for fault in PackFault)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path / "file"):
        (tmp_path / "file").write_text("")
        with pytest.raises(BrokenPack) as caught:
            open_pack(path)
        assert caught.value.fault in (PackFault.NO_PACK, PackFault.UNREADABLE)


def test_each_changed_byte_of_a_manifest_is_found(toy: Checkpoint, tmp_path: Path) -> None:
    folder = write_pack(toy, [tmp_path]).folder
    raw = (folder / MANIFEST).read_bytes()
    for i in range(len(raw)):
        for flip in (1, 0x20, 0x80):
            changed = bytearray(raw)
            changed[i] ^= flip
            (folder / MANIFEST).write_bytes(changed)
            with pytest.raises(BrokenPack) as caught:
                open_pack(folder)
            assert caught.value.fault is PackFault.DAMAGED_MANIFEST
    (folder / MANIFEST).write_bytes(raw)
    open_pack(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(manifests(), st.data())
def test_fields_that_are_anything_raise_nothing_else(
    manifest: Manifest, data: st.DataObject
) -> None:
    content = manifest.plan.head() | {"moet": "0", "checksums": {}}
    where = content
    for _ in range(data.draw(st.integers(0, 2))):
        inner = [v for v in where.values() if isinstance(v, dict) and v]
        inner += [v[0] for v in where.values() if isinstance(v, list) and v and type(v[0]) is dict]
        where = data.draw(st.sampled_from(inner)) if inner else where
    where[data.draw(st.sampled_from(sorted(where)))] = data.draw(JSON)
    raw = sign(content)
    with suppress(BrokenPack):
        parsed = parse_manifest(raw, Path("m"))
        assert len(parsed.checksums) == parsed.plan.records


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_bytes_that_are_anything_raise_nothing_else(raw: bytes) -> None:
    for text in (raw, b"{" + raw, sign({"format": "moet-pack-1"})[:-2] + b"," + raw):
        with pytest.raises(BrokenPack):
            parse_manifest(text, Path("m"))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_journal_of_anything_is_read_or_named(
    toy: Checkpoint, tmp_path: Path, data: st.DataObject
) -> None:
    head = json.dumps(plan_pack(toy, [Path("/x")]).head()).encode() + b"\n"
    raw = bytearray(head + data.draw(st.binary(max_size=60)))
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / JOURNAL).write_bytes(raw)
    with suppress(BrokenPack):
        plan, records = read_journal(tmp_path)
        assert all(0 <= index < plan.records for index in records)


def test_a_manifest_does_not_depend_on_who_finished_it(toy: Checkpoint, tmp_path: Path) -> None:
    folder = write_pack(toy, [tmp_path]).folder
    manifest = parse_manifest((folder / MANIFEST).read_bytes(), folder)
    other = replace(manifest, moet="9.9.9").to_bytes()
    (folder / MANIFEST).write_bytes(other)
    assert open_pack(folder, toy).manifest.moet == "9.9.9"
