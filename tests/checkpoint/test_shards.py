"""Folders: files, index and config that agree, and every way in which they may not."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from moet.base.report import Level
from moet.checkpoint import BrokenCheckpoint, Checkpoint, Fault, open_checkpoint
from moet.checkpoint.shards import read_shards
from moet.testing.malformed import FILES, FOLDERS, SINGLE_FOLDERS, entry, file_of
from moet.testing.toy import FAMILIES, write_toy_checkpoint

Toy = Callable[..., Path]


def fault_of(folder: Path) -> Fault:
    with pytest.raises(BrokenCheckpoint) as caught:
        open_checkpoint(folder)
    assert caught.value.hint
    assert str(caught.value.where) in str(caught.value)
    return caught.value.fault


@pytest.mark.parametrize("name", FOLDERS)
def test_each_spoiled_folder_has_a_name(name: str, toy: Toy) -> None:
    fault, spoil = FOLDERS[name]
    folder = toy(shards=3)
    open_checkpoint(folder)
    spoil(folder)
    assert fault_of(folder) is fault


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SINGLE_FOLDERS)
def test_each_spoiled_expert_has_a_name(name: str, family: str, toy: Toy) -> None:
    fault, spoil = SINGLE_FOLDERS[name]
    folder = toy(family)
    spoil(folder)
    assert fault_of(folder) is fault


def test_every_fault_of_reading_has_an_exam() -> None:
    writing = {Fault.UNKNOWN_PRESET, Fault.NO_SPACE, Fault.NOT_EMPTY}
    cases = [*FILES.values(), *FOLDERS.values(), *SINGLE_FOLDERS.values()]
    assert {fault for fault, _ in cases} == set(Fault) - writing


def test_no_folder(tmp_path: Path) -> None:
    assert fault_of(tmp_path / "none") is Fault.UNREADABLE


def test_a_good_folder_has_no_findings(toy: Toy) -> None:
    assert open_checkpoint(toy(shards=3)).findings == ()


@pytest.mark.parametrize(
    ("content", "fact"),
    [(file_of({"other": entry(0, 4)}, bytes(4)), "not read"), (b"cut", "damaged (too-short)")],
)
def test_a_stray_shard_is_reported(content: bytes, fact: str, toy: Toy) -> None:
    folder = toy(shards=3)
    (folder / "stray.safetensors").write_bytes(content)
    (finding,) = open_checkpoint(folder).findings
    assert finding.level is Level.WARN
    assert "stray.safetensors" in finding.fact
    assert fact in finding.fact
    assert finding.fix


def test_a_tensor_that_the_index_leaves_out_is_reported(toy: Toy) -> None:
    folder = toy(shards=3)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    (finding,) = open_checkpoint(folder).findings
    assert "'model.norm.weight'" in finding.fact


def test_shards_agree_with_the_single_file(toy: Toy) -> None:
    one, many = read_shards(toy()), read_shards(toy(shards=3))
    assert len(many.files) > 1
    assert one.tensors.keys() == many.tensors.keys()
    for name, info in one.tensors.items():
        other = many.tensors[name]
        assert (info.dtype, info.shape) == (other.dtype, other.shape)
        a = info.file.read_bytes()[info.offset :][: info.nbytes]
        assert a == other.file.read_bytes()[other.offset :][: other.nbytes]


def experts_of(checkpoint: Checkpoint) -> list[object]:
    geometry = checkpoint.geometry
    pairs = [(i, e) for i in geometry.moe_layers for e in range(geometry.experts)]
    return [geometry, *(checkpoint.expert_tensors(i, e) for i, e in pairs)]


def check_flips(folder: Path, bits: list[int]) -> None:
    """A flipped header bit is named, or leaves every expert where it was."""
    file = folder / "model.safetensors"
    good, before = file.read_bytes(), experts_of(open_checkpoint(folder))
    for bit in bits:
        with file.open("r+b") as stream:
            stream.seek(bit // 8)
            stream.write(bytes([good[bit // 8] ^ (1 << bit % 8)]))
        try:
            assert experts_of(open_checkpoint(folder)) == before, f"bit {bit}"
        except BrokenCheckpoint:
            continue
        finally:
            with file.open("r+b") as stream:
                stream.seek(bit // 8)
                stream.write(good[bit // 8 : bit // 8 + 1])


def header_bits(folder: Path) -> int:
    raw = (folder / "model.safetensors").read_bytes()[:8]
    return 8 * (8 + int.from_bytes(raw, "little"))


@pytest.mark.parametrize("family", FAMILIES)
def test_flipped_bits_never_move_an_expert(family: str, toy: Toy) -> None:
    folder = toy(family)
    check_flips(folder, random.Random(1).sample(range(header_bits(folder)), 500))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_flipped_bit_ever_moves_an_expert(family: str, toy: Toy) -> None:
    folder = toy(family)
    check_flips(folder, list(range(header_bits(folder))))


@pytest.mark.parametrize("sixteenth", range(16))
def test_truncated_files_are_named(sixteenth: int, toy: Toy) -> None:
    folder = toy()
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * sixteenth // 16])
    assert fault_of(folder) in {Fault.TOO_SHORT, Fault.HEADER_PAST_END, Fault.TRUNCATED}


@pytest.mark.parametrize("kind", ["config.json", "model.safetensors.index.json", "a shard"])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    write_toy_checkpoint(tmp_path / "toy", "qwen3_moe", shards=2)
    victim = next((tmp_path / "toy").glob("*.safetensors" if kind == "a shard" else kind))
    victim.unlink()
    os.mkfifo(victim)
    with pytest.raises(BrokenCheckpoint, match="not a regular file") as caught:
        open_checkpoint(tmp_path / "toy")
    assert caught.value.fault is Fault.UNREADABLE
