"""The GPU kernels' machine code, without a GPU: NVRTC compiles it, gates read what is in it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moet.base.errors import KernelError, MachineError
from moet.kernels.cuda import build, toolkit
from moet.kernels.cuda.cubin import KernelInfo, read_cubin
from moet.kernels.cuda.gpu import KERNELS, Gpu
from moet.kernels.cuda.plan import FEWER_WARPS, MOST_WARPS, Card, Tuning, plan_layer
from moet.verify.gpu import CASES

HAVE_NVRTC = all(importlib.util.find_spec(name) for name in ("cuda", "nvidia")) and (
    importlib.util.find_spec("nvidia.cu13") is not None
)
needs_nvrtc = pytest.mark.skipif(
    not HAVE_NVRTC, reason="NVRTC is not installed here: pip install 'moet[gpu]'"
)

CONSUMER = "sm_120a"
"""The target with the least shared memory, where nobody here has a card: gated on its code."""

BIG = ("sm_90", "sm_100", "sm_103")
"""Cards whose shared memory has room for more warps: `Card.most_warps`."""

STAGES = [name for name in KERNELS if "gate_up" in name or "down" in name]
SHARED_LIMIT = 99 << 10
REGISTER_FILE = 65536

RTX_5090 = Card(
    name="GeForce RTX 5090",
    capability=(12, 0),
    multiprocessors=170,
    shared_per_block=SHARED_LIMIT,
    shared_per_multiprocessor=100 << 10,
)

H200 = Card(
    name="H200",
    capability=(9, 0),
    multiprocessors=132,
    shared_per_block=227 << 10,
    shared_per_multiprocessor=228 << 10,
)

FUSABLE = """
extern "C" __global__ void moet_fusable(float* x) {
  x[threadIdx.x] = x[threadIdx.x] * x[64 + threadIdx.x] + x[128 + threadIdx.x];
}
"""
FFMA, FADD, FMUL = 0x23, 0x21, 0x20
"""Low 8 of the 12 bits that name an operation; the other four say what kind its operands are."""


@pytest.fixture(scope="module")
def code() -> Callable[[str], dict[str, KernelInfo]]:
    made: dict[str, dict[str, KernelInfo]] = {}

    def of(architecture: str) -> dict[str, KernelInfo]:
        if architecture not in made:
            made[architecture] = read_cubin(build.compile_kernels(architecture))
        return made[architecture]

    return of


@needs_nvrtc
@pytest.mark.parametrize("architecture", [*build.ARCHITECTURES, CONSUMER])
def test_every_architecture_compiles_to_integer_mma(
    code: Callable[[str], dict[str, KernelInfo]], architecture: str
) -> None:
    kernels = code(architecture)
    assert set(KERNELS) <= set(kernels)
    for name in STAGES:
        assert kernels[name].count("IMMA") >= 4, name
        warps = MOST_WARPS if architecture in BIG else FEWER_WARPS
        assert kernels[name].registers * 32 * warps <= REGISTER_FILE, name


@needs_nvrtc
@pytest.mark.parametrize("name", KERNELS)
def test_consumer_cards_use_no_local_memory(
    code: Callable[[str], dict[str, KernelInfo]], name: str
) -> None:
    kernel = code(CONSUMER)[name]
    assert kernel.stack_bytes == 0
    assert kernel.count("LDL") == kernel.count("STL") == 0
    assert kernel.registers <= 168


@needs_nvrtc
def test_weights_are_copied_in_bulk_from_sm_90_on_and_per_lane_before(
    code: Callable[[str], dict[str, KernelInfo]],
) -> None:
    for name in STAGES:
        assert code(CONSUMER)[name].count("UBLKCP") > 0, name
        assert code("sm_80")[name].count("UBLKCP") == 0, name
        lanes = {a: code(a)[name].count("LDGSTS") for a in ("sm_80", CONSUMER)}
        assert lanes["sm_80"] > lanes[CONSUMER], name  # there, activations alone


@needs_nvrtc
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_plans_stay_within_99_kib_on_consumer_cards(
    code: Callable[[str], dict[str, KernelInfo]], case: object, tokens: int
) -> None:
    spec = case.spec  # type: ignore[attr-defined]
    plan = plan_layer(spec, RTX_5090, tokens)
    act = int(spec.act)
    for name, stage in (("gate_up", plan.gate_up), ("down", plan.down)):
        static = code(CONSUMER)[f"moet_{name}_{act}"].static_shared_bytes
        assert stage.shared_bytes + static <= SHARED_LIMIT


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", CONSUMER])
def test_a_multiply_and_an_add_stay_two_operations(architecture: str) -> None:
    operations = read_cubin(build.compile_source(FUSABLE, architecture))["moet_fusable"].operations
    kinds = {code & 0xFF for code in operations}
    assert {FMUL, FADD} <= kinds
    assert FFMA not in kinds


@needs_nvrtc
def test_fusing_is_what_the_test_above_would_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(build.OPTIONS, "fma", True)
    operations = read_cubin(build.compile_source(FUSABLE, "sm_80"))["moet_fusable"].operations
    assert FFMA in {code & 0xFF for code in operations}


@needs_nvrtc
def test_the_compiler_is_told_ieee() -> None:
    options = build.program_options("sm_90").as_bytes("nvrtc")
    wanted = {b"--fmad=false", b"--ftz=false", b"--prec-div=true", b"--prec-sqrt=true"}
    assert wanted <= set(options)


@needs_nvrtc
def test_a_source_that_does_not_compile_is_an_error_with_the_log() -> None:
    with pytest.raises(KernelError, match="undefined_name"):
        build.compile_source("__global__ void f() { undefined_name(); }", "sm_90")


@needs_nvrtc
def test_keys_change_with_what_the_code_depends_on() -> None:
    keys = [
        build.cache_key("sm_90", (), 13000),
        build.cache_key("sm_80", (), 13000),
        build.cache_key("sm_90", ("MOET_NO_BULK",), 13000),
        build.cache_key("sm_90", (), 13010),
        build.cache_key("sm_90", (), 13000, build.PROBES),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == build.cache_key("sm_90", (), 13000)


@needs_nvrtc
def test_keys_change_with_every_source_and_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = build.cache_key("sm_90", (), 13000)
    for path in build.SOURCES.iterdir():
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build.cache_key("sm_90", (), 13000) == before
    header = tmp_path / "contract.cuh"
    header.write_text(header.read_text() + "\n")
    changed = build.cache_key("sm_90", (), 13000)
    assert changed != before
    monkeypatch.setitem(build.OPTIONS, "ftz", True)
    assert build.cache_key("sm_90", (), 13000) not in (before, changed)


def test_a_kernel_is_compiled_once(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> bytes:
        made.append(1)
        return b"code %d" % len(made)

    folder = tmp_path / "new" / "cuda"
    assert build.cached(folder, "key", make) == b"code 1"
    assert build.cached(folder, "key", make) == b"code 1"
    assert build.cached(folder, "other", make) == b"code 2"
    assert sorted(p.name for p in folder.iterdir()) == ["key.cubin", "other.cubin"]


def test_a_damaged_entry_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build.cached(tmp_path, "key", lambda: b"good code")
    entry = tmp_path / "key.cubin"
    entry.write_bytes(entry.read_bytes()[:-1])
    assert build.cached(tmp_path, "key", lambda: b"made again") == b"made again"
    assert "damaged" in caplog.text
    assert build.cached(tmp_path, "key", lambda: b"not called") == b"made again"


def test_a_cache_that_cannot_be_written_costs_time_not_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("not a folder")
    assert build.cached(tmp_path / "file" / "cuda", "key", lambda: b"code") == b"code"
    assert "cannot be kept" in caplog.text


def test_a_failed_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, target: Path) -> None:
        raise OSError("no rename today")

    monkeypatch.setattr(build.os, "replace", refuse)
    assert build.cached(tmp_path, "key", lambda: b"code") == b"code"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [
        ((8, 0), "sm_80"), ((8, 6), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90"),
        ((10, 0), "sm_100"), ((10, 3), "sm_103"), ((12, 0), "sm_120"), ((12, 1), "sm_121"),
    ],
)  # fmt: skip
def test_a_card_gets_code_of_its_own_family(capability: tuple[int, int], architecture: str) -> None:
    assert build.architecture_of(capability) == architecture


@pytest.mark.parametrize("capability", [(7, 5), (11, 0), (13, 0)])
def test_families_without_kernels_are_refused(capability: tuple[int, int]) -> None:
    with pytest.raises(KernelError, match=r"\.".join(map(str, capability))):
        build.architecture_of(capability)


@pytest.mark.parametrize(
    ("content", "match"),
    [(b"", "ELF header"), (b"// PTX", "ELF header"), (b"\x7fELF\x02\x01" + bytes(90), "damaged")],
    ids=["empty", "text", "header only"],
)
def test_what_is_no_cubin_is_refused(content: bytes, match: str) -> None:
    with pytest.raises(KernelError, match=match):
        read_cubin(content)


def test_missing_packages_are_named_with_the_extra_that_brings_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(MachineError, match=r"cuda\.core") as caught:
        toolkit.compiler()
    assert "moet[gpu]" in caught.value.hint


@needs_nvrtc
def test_a_machine_without_a_driver_is_told_so(tmp_path: Path) -> None:
    listed = subprocess.run(["/sbin/ldconfig", "-p"], check=False, capture_output=True, text=True)
    if "libcuda.so" in listed.stdout:
        pytest.skip("this machine has an NVIDIA driver")
    with pytest.raises(MachineError, match="cuInit"):
        Gpu(0, tmp_path)


@pytest.mark.parametrize("tokens", [0, 1 << 20])
def test_steps_that_no_plan_can_have_are_refused(tokens: int) -> None:
    with pytest.raises(KernelError, match="routings"):
        plan_layer(CASES[0].spec, RTX_5090, tokens)


def test_a_card_with_too_little_shared_memory_is_refused() -> None:
    tiny = Card(
        name="tiny", capability=(8, 0), multiprocessors=1, shared_per_block=16 << 10,
        shared_per_multiprocessor=16 << 10,
    )  # fmt: skip
    with pytest.raises(KernelError, match="tiny"):
        plan_layer(CASES[0].spec, tiny, 8)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("card", [RTX_5090, H200], ids=lambda card: card.name)
def test_plans_fill_a_multiprocessor(case: object, card: Card) -> None:
    spec, tuning = case.spec, case.tuning  # type: ignore[attr-defined]
    plan = plan_layer(spec, card, 8, tuning)
    for stage in (plan.gate_up, plan.down):
        assert stage.blocks == card.multiprocessors
        assert stage.warps <= card.most_warps
        if tuning is None:
            assert stage.warps >= (MOST_WARPS if card is H200 else 5)
        assert stage.depth >= 2


def test_two_blocks_share_a_multiprocessor() -> None:
    plan = plan_layer(CASES[0].spec, H200, 8, Tuning(resident=2)).gate_up
    assert plan.blocks == 2 * H200.multiprocessors
    assert 2 * (plan.shared_bytes + 1024) <= H200.shared_per_multiprocessor
