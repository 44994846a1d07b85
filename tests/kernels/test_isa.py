"""Which kernels run: chosen, forced, proven; and how they were compiled."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import moet
from moet import _core
from moet.base.errors import KernelError
from moet.formats.mxint import ActFormat
from moet.kernels import cpu
from moet.kernels.spec import LayerSpec
from moet.verify.cases import LayerCase, random_routing

ALL = {"portable", "avx2", "avx512vnni"}
NEEDS = {"avx2": ["avx2", "fma"], "avx512vnni": ["avx512f", "avx512bw", "avx512vl", "avx512_vnni"]}
FORBIDDEN = (
    "-Ofast",
    "-ffast-math",
    "-funsafe-math-optimizations",
    "-fassociative-math",
    "-freciprocal-math",
    "-ffinite-math-only",
    "-fno-signed-zeros",
    "-fno-rounding-math",
    "-mdaz-ftz",
    "-ffp-contract=fast",
    "-ffp-contract=on",
    "-flto",
    "-march=native",
)


def test_portable_is_always_there_and_comes_last() -> None:
    have = cpu.isa_available()
    assert have[-1] == "portable"
    assert set(have) <= ALL
    assert list(have) == [isa for isa in ("avx512vnni", "avx2", "portable") if isa in have]


@pytest.mark.parametrize("isa", NEEDS)
def test_an_isa_is_available_where_the_processor_has_it(isa: str) -> None:
    features = _core.cpu_features()
    assert (isa in cpu.isa_available()) == all(features[f] for f in NEEDS[isa])


def test_features_agree_with_the_kernel() -> None:
    text = Path("/proc/cpuinfo").read_text()
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    if not flags:
        pytest.skip("/proc/cpuinfo lists no x86 flags on this machine")
    assert {name: name in flags for name in _core.cpu_features()} == _core.cpu_features()


def test_the_best_is_the_default_and_any_can_be_forced() -> None:
    assert cpu.choose_isa() == cpu.isa_available()[0]
    for isa in cpu.isa_available():
        assert cpu.choose_isa(isa) == isa


@pytest.mark.parametrize("isa", sorted((ALL - set(cpu.isa_available())) | {"sse9"}))
def test_an_absent_isa_is_a_named_error(isa: str) -> None:
    with pytest.raises(KernelError, match=isa) as caught:
        cpu.choose_isa(isa)
    assert all(name in caught.value.hint for name in cpu.isa_available())
    spec = LayerSpec(hidden=32, intermediate=32, experts=1, top_k=1, act=ActFormat.MXINT8)
    with pytest.raises(KernelError, match=isa):
        cpu.CpuLayer(spec, cpu.Pool(1), isa)
    with pytest.raises(_core.Refusal, match=isa):
        _core.exp(isa, 0, 0, 0)


@pytest.mark.parametrize("isa", cpu.isa_available())
def test_the_forced_isa_is_the_one_that_ran(isa: str) -> None:
    rng = np.random.default_rng(1)
    spec = LayerSpec(hidden=64, intermediate=32, experts=2, top_k=2, act=ActFormat.MXINT8)
    case = LayerCase.random(rng, spec)
    layer = case.layer(cpu.Pool(2), isa)
    assert layer.ran_isa is None
    ids, weights = random_routing(rng, 3, spec, empty=0)
    layer.run(rng.standard_normal((3, 64)).astype(np.float32), ids, weights)
    assert layer.ran_isa == isa


@pytest.mark.parametrize("part", sorted(_core.build_flags()))
def test_no_part_is_built_with_loose_arithmetic(part: str) -> None:
    flags = _core.build_flags()[part].split()
    assert "-ffp-contract=off" in flags
    assert not [f for f in flags if f in FORBIDDEN]
    assert [f for f in flags if f.startswith("-ffp-contract")][-1] == "-ffp-contract=off"


def test_every_kernel_table_tells_its_flags() -> None:
    assert set(_core.build_flags()) == ALL | {"runtime"}
    assert len(set(_core.build_flags().values())) >= 3


def test_fma_has_one_rounding_and_an_expression_has_two() -> None:
    a = np.array([1 + 2.0**-12], np.float32)
    c = np.array([-1 - 2.0**-11], np.float32)
    out = np.zeros(1, np.float32)
    where = (a.ctypes.data, a.ctypes.data, c.ctypes.data, 1, out.ctypes.data)
    _core.fmaf(*where)
    assert out[0] == 2.0**-24
    _core.multiply_add(*where)
    assert out[0] == 0


def test_the_stub_names_what_the_module_has() -> None:
    stub = ast.parse((Path(moet.__file__).parent / "_core.pyi").read_text())
    told: dict[str, set[str]] = {"": set()}
    for node in stub.body:
        if isinstance(node, ast.ClassDef):
            told[node.name] = {f.name for f in node.body if isinstance(f, ast.FunctionDef)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            told[""].add(node.name)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            told[""].add(node.target.id)
    present = {n for n in vars(_core) if not n.startswith("__")} | {"__version__"}
    assert told.pop("") == present
    for name in ("Pool", "Layer", "ReadProbe"):
        methods = {n for n in vars(getattr(_core, name)) if not n.startswith("__")}
        assert told[name] - {"__init__"} == methods
