"""The safetensors header: good ones read as the format's own library reads them, bad ones named."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.checkpoint.faults import BrokenCheckpoint, Fault
from moet.checkpoint.header import DTYPE_BITS, Header, check_length, parse_header, read_header
from moet.testing.malformed import FILES, entry, file_of

FILE = Path("x.safetensors")


def parse(content: bytes) -> Header:
    length = check_length(content[:8], len(content), FILE)
    return parse_header(content[8 : 8 + length], len(content), FILE)


def library_accepts(content: bytes) -> bool:
    try:
        safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return False
    return True


@pytest.mark.parametrize("name", FILES)
def test_each_way_to_be_wrong_has_a_name(name: str, tmp_path: Path) -> None:
    fault, content = FILES[name]
    file = tmp_path / "bad.safetensors"
    file.write_bytes(content)
    with pytest.raises(BrokenCheckpoint, match=r"bad\.safetensors") as caught:
        read_header(file)
    assert caught.value.fault is fault
    assert caught.value.hint


# Where we are stricter than the library, and why.
STRICTER = {
    "entry with more",  # a reader that does not know a field cannot honour it
    "a tensor twice",  # which of them counts depends on the reader
    "a field twice",
    "leading space",  # the format says that the header starts with {
    "a hundred dimensions",  # numpy and torch have fewer
}


@pytest.mark.parametrize("name", sorted(FILES.keys() - STRICTER))
def test_the_library_refuses_it_too(name: str) -> None:
    assert not library_accepts(FILES[name][1])


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BrokenCheckpoint) as caught:
        read_header(tmp_path / "none.safetensors")
    assert caught.value.fault is Fault.UNREADABLE


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(BrokenCheckpoint) as caught:
        read_header(tmp_path)
    assert caught.value.fault is Fault.UNREADABLE


def test_padding_and_empty_tensors_are_fine() -> None:
    header = {"e": entry(0, 0, "F32", [0, 7]), "a": entry(0, 4, "F32", []), "z": entry(4, 4)}
    content = file_of(json.dumps(header) + "   ", bytes(4))
    got = parse(content)
    assert {n: (t.shape, t.nbytes) for n, t in got.tensors.items()} == {
        "e": ((0, 7), 0),
        "a": ((), 4),
        "z": ((0,), 0),
    }
    assert library_accepts(content)


def test_an_empty_header_is_fine() -> None:
    assert parse(file_of({})).tensors == {}


SHAPES = st.lists(st.integers(0, 6), max_size=4)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
SPECS = st.dictionaries(
    NAMES.filter(lambda n: n != "__metadata__"),
    st.tuples(st.sampled_from(sorted(DTYPE_BITS)), SHAPES),
    max_size=6,
)


@given(SPECS, st.dictionaries(st.text(max_size=5), st.text(max_size=5)), st.randoms())
def test_good_headers_read_as_they_were_written(
    specs: dict[str, tuple[str, list[int]]], metadata: dict[str, str], order: random.Random
) -> None:
    header: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape) in specs.items():
        count = 8 if DTYPE_BITS[dtype] % 8 else 1  # whole bytes
        nbytes = count * DTYPE_BITS[dtype] // 8
        for n in shape:
            nbytes *= n
        header[name] = entry(at, at + nbytes, dtype, [count, *shape])
        at += nbytes
    items = list(header.items())
    order.shuffle(items)
    content = file_of(dict(items), bytes(at))
    got = parse(content)
    assert got.metadata == metadata
    base = len(content) - at
    for name in specs:
        info, wrote = got.tensors[name], header[name]
        assert isinstance(wrote, dict)
        assert (info.dtype, list(info.shape)) == (wrote["dtype"], wrote["shape"])
        assert [info.offset - base, info.offset - base + info.nbytes] == wrote["data_offsets"]


GOOD = file_of(
    {
        "__metadata__": {"format": "pt"},
        "layers.0.w1": entry(0, 64, "U8", [4, 16]),
        "layers.0.scale": entry(64, 80, "F8_E8M0", [4, 4]),
        "layers.1.norm": entry(80, 112, "BF16", [16]),
        "x": entry(112, 116, "F32", []),
    },
    bytes(116),
)
GOOD_END = len(GOOD) - 116


def check_flipped(content: bytes) -> str:
    """A named error, or a header that says the same of every tensor, names aside."""
    try:
        got = parse(content)
    except BrokenCheckpoint as error:
        return error.fault
    before = [(t.dtype, t.shape, t.offset, t.nbytes) for t in parse(GOOD).tensors.values()]
    assert [(t.dtype, t.shape, t.offset, t.nbytes) for t in got.tensors.values()] == before
    return "same"


def test_every_flipped_bit_is_named_or_harmless() -> None:
    outcomes = set()
    for bit in range(8 * GOOD_END):
        content = bytearray(GOOD)
        content[bit // 8] ^= 1 << bit % 8
        outcomes.add(check_flipped(bytes(content)))
    assert {"same", Fault.NOT_JSON, Fault.NOT_UTF8, Fault.SIZE_MISMATCH} <= outcomes


@pytest.mark.parametrize("sixteenth", range(16))
def test_truncation_anywhere_is_named(sixteenth: int) -> None:
    with pytest.raises(BrokenCheckpoint) as caught:
        parse(GOOD[: len(GOOD) * sixteenth // 16])
    assert caught.value.fault in {Fault.TOO_SHORT, Fault.HEADER_PAST_END, Fault.TRUNCATED}
    assert "cut short" in caught.value.hint


# What fuzzing writes over a good header.
WORDS = ["-1", "1e9", "null", "true", "data_offsets", '"U8"', '"shape"', "9" * 30, "\\ud800"]
TOKENS = [*(w.encode() for w in [*'{}[]",:0\\ \0', *WORDS]), b"\xff"]


def edited(rng: random.Random) -> bytes:
    """A good file with up to four edits in its header, its length made to fit half of the time."""
    content = GOOD
    for _ in range(rng.randint(1, 4)):
        at, drop = rng.randrange(GOOD_END), rng.randrange(8)
        put = rng.choice(TOKENS) if rng.random() < 0.7 else rng.randbytes(rng.randrange(4))
        content = content[:at] + put + content[at + drop :]
    if rng.random() < 0.5:
        length = max(0, len(content) - 116 - 8)
        content = length.to_bytes(8, "little") + content[8:]
    return content


def check_whole(content: bytes) -> bool:
    """A named error (False), or tensors that cover the file and that the library accepts too."""
    try:
        got = parse(content)
    except BrokenCheckpoint:
        return False
    end = 8 + int.from_bytes(content[:8], "little")
    for info in got.tensors.values():
        assert info.offset == end, content
        end += info.nbytes
    assert end == len(content), content
    assert library_accepts(content), content
    return True


def fuzz(seed: int, count: int) -> int:
    rng = random.Random(seed)
    return sum(check_whole(edited(rng)) for _ in range(count))


def test_fuzzed_headers() -> None:
    accepted = fuzz(0, 20_000)
    assert 0 < accepted < 20_000  # both ends were reached


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_fuzzed_headers_for_long(seed: int) -> None:
    assert fuzz(seed, 125_000)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64) | st.text(max_size=64).map(file_of))
def test_any_bytes_are_named_or_whole(content: bytes) -> None:
    check_whole(content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "a"]), inner
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(["__metadata__", "a", "b"]), JSON), st.integers(0, 8))
def test_any_json_is_named_or_whole(header: dict[str, object], data: int) -> None:
    check_whole(file_of(header, bytes(data)))
