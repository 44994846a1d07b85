"""Section 6 and the whole layer: combine, skipped slots, poison, tensor parallelism, bits."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet.base.errors import FormatError, KernelError
from moet.formats import mxfp4, mxint
from moet.formats.mxfp4 import Mxfp4Matrix
from moet.formats.mxint import ActFormat
from moet.formats.tiling import ExpertWeights
from moet.kernels import reference
from moet.kernels.spec import DType, GateKind, LayerSpec
from moet.testing.exact import differing

BOTH = pytest.mark.parametrize("act", list(ActFormat), ids=lambda a: a.name)
H, I, E, K = 128, 96, 6, 3  # noqa: E741
INF, NAN = np.float32(np.inf), np.float32(np.nan)
# gate kind, limit, biased: the geometries of qwen3_moe, DeepSeek, gpt-oss and a gelu model.
VARIANTS = [
    (GateKind.SILU, None, False),
    (GateKind.SILU, 10.0, False),
    (GateKind.GPT_OSS, 7.0, True),
    (GateKind.GELU_TANH, None, False),
]


def spec(act: ActFormat, variant: int = 0, scale: float | None = None) -> LayerSpec:
    kind, limit, biased = VARIANTS[variant]
    return LayerSpec(
        hidden=H,
        intermediate=I,
        experts=E,
        top_k=K,
        act=act,
        gate=kind,
        limit=limit,
        biased=biased,
        output_scale=scale,
    )


def raw_floats(stream: np.random.PCG64, shape: tuple[int, ...], spread: int) -> np.ndarray:
    """fp32 from raw generator bits (the same in every numpy): +-[1, 2) * 2^-0..-spread."""
    raw = stream.random_raw(int(np.prod(shape))).reshape(shape)
    mantissa, sign = raw & 0x7FFFFF, (raw >> 23 & 1) << 31
    exponent = (127 - (raw >> 32) % spread) << 23
    return (mantissa | sign | exponent).astype(np.uint32).view(np.float32)


def make_expert(stream: np.random.PCG64, biased: bool) -> ExpertWeights:
    shapes = ((I, H), (I, H), (H, I))
    matrices = [mxfp4.quantise(raw_floats(stream, s, 6) * np.float32(0.1)) for s in shapes]
    biases = [raw_floats(stream, (n,), 6) if biased else None for n in (I, I, H)]
    return ExpertWeights(*matrices, *biases)


def make_layer(layer: LayerSpec, tokens: int, seed: int = 0) -> tuple[object, ...]:
    """(spec, x, ids, weights, experts) with skipped slots and duplicates among the ids."""
    stream = np.random.PCG64(seed)
    experts = {e: make_expert(stream, layer.biased) for e in range(E)}
    x = raw_floats(stream, (tokens, H), 8) * np.float32(32)  # reaches the limits
    ids = (stream.random_raw(tokens * K) % (E + 1)).reshape(tokens, K).astype(np.int32) - 1
    weights = np.abs(raw_floats(stream, (tokens, K), 4))
    return layer, x, ids, weights, experts


def in_double(layer: LayerSpec, x, ids, weights, experts) -> np.ndarray:  # type: ignore[no-untyped-def]
    """The layer in fp64 on the dequantised weights, activations not quantised."""
    out = np.zeros(x.shape)
    for t, slot in zip(*np.nonzero(ids >= 0), strict=True):
        e = experts[int(ids[t, slot])]
        gate, up, down = (mxfp4.dequantise(*m).astype(float) for m in (e.gate, e.up, e.down))
        biases = (b if b is not None else 0 for b in (e.gate_bias, e.up_bias, e.down_bias))
        gate_bias, up_bias, down_bias = biases
        g, u = gate @ x[t] + gate_bias, up @ x[t] + up_bias
        if layer.limit is not None:
            g, u = np.minimum(g, layer.limit), np.clip(u, -layer.limit, layer.limit)
        h = {
            GateKind.SILU: lambda g=g, u=u: g / (1 + np.exp(-g)) * u,
            GateKind.GPT_OSS: lambda g=g, u=u: g / (1 + np.exp(-1.702 * g)) * (u + 1),
            GateKind.GELU_TANH: lambda g=g, u=u: (
                g * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u
            ),
        }[layer.gate]()
        out[t] += weights[t, slot] * (down @ h + down_bias)
    return out


# ---- the whole layer


@BOTH
@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_layer_is_the_model_up_to_quantisation(act: ActFormat, variant: int) -> None:
    case = make_layer(spec(act, variant), 24)
    out, true = reference.moe_layer(*case), in_double(*case)
    error = np.linalg.norm(out - true) / np.linalg.norm(true)
    low, high = (3e-3, 3e-2) if act is ActFormat.MXINT8 else (5e-6, 1.5e-4)
    assert low < error < high


# Golden bits: the head of the sha256 of the stored bf16 and fp32 outputs. They change only when
# the contract does: a commit of the class "new bits", with docs/numerics.md changed first.
GOLDEN = {
    (8, 0): "f65e21f517ed74ef",
    (8, 1): "b56ab70956864a82",
    (8, 2): "13a3f32f036f4488",
    (8, 3): "ff53aa65b6a8ee9a",
    (16, 0): "81fa933f0941817c",
    (16, 1): "662c05f012128dbc",
    (16, 2): "7fe557f5c96d5ca7",
    (16, 3): "d65db7a430584a0d",
}


@BOTH
@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_golden_bits(act: ActFormat, variant: int) -> None:
    out = reference.moe_layer(*make_layer(spec(act, variant), 24, seed=2026))
    stored = [reference.round_output(out, d).tobytes() for d in (DType.BF16, DType.F32)]
    digest = hashlib.sha256(b"".join(stored)).hexdigest()
    assert digest[:16] == GOLDEN[act.value, variant]


@BOTH
def test_a_token_does_not_depend_on_its_batch(act: ActFormat) -> None:
    layer, x, ids, weights, experts = make_layer(spec(act), 64)
    whole = reference.moe_layer(layer, x, ids, weights, experts)
    order = np.random.default_rng(0).permutation(64)
    shuffled = reference.moe_layer(layer, x[order], ids[order], weights[order], experts)
    assert differing(shuffled, whole[order]).size == 0
    for t in range(0, 64, 9):
        one = slice(t, t + 1)
        alone = reference.moe_layer(layer, x[one], ids[one], weights[one], experts)
        assert differing(alone, whole[one]).size == 0


@BOTH
def test_no_tokens_is_no_work(act: ActFormat) -> None:
    layer, x, ids, weights, experts = make_layer(spec(act), 2)
    out = reference.moe_layer(layer, x[:0], ids[:0], weights[:0], experts)
    assert out.shape == (0, H)


@BOTH
@pytest.mark.parametrize("bad", [NAN, INF, -INF, np.float32(6e33)])
def test_a_poisoned_token_is_nan_and_alone(act: ActFormat, bad: np.float32) -> None:
    layer, x, ids, weights, experts = make_layer(spec(act), 8)
    ids[:] = np.abs(ids)
    clean = reference.moe_layer(layer, x, ids, weights, experts)
    x[3, 77] = bad
    out = reference.moe_layer(layer, x, ids, weights, experts)
    assert np.isnan(out[3]).all()
    others = np.arange(8) != 3
    assert differing(out[others], clean[others]).size == 0
    for dtype, nan in ((DType.BF16, 0x7FFF), (DType.F16, 0x7FFF), (DType.F32, 0x7FFFFFFF)):
        assert (reference.round_output(out, dtype)[3] == nan).all()


@BOTH
def test_an_infinite_h_poisons_its_token(act: ActFormat) -> None:
    """x is fine, but gate * up leaves the fp32 range: h is infinite."""
    layer, x, ids, weights, experts = make_layer(spec(act), 2)
    ids[:] = [[0, -1, -1], [1, -1, -1]]
    x[0] = np.float32(1e25)
    out = reference.moe_layer(layer, x, ids, weights, experts)
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1]).all()


@BOTH
def test_a_poisoned_token_without_valid_slots_is_zero(act: ActFormat) -> None:
    layer, x, ids, weights, experts = make_layer(spec(act, scale=2.5), 2)
    x[0, 0], ids[0] = NAN, -1
    out = reference.moe_layer(layer, x, ids, weights, experts)
    assert (out[0].view(np.uint32) == 0).all()


@BOTH
def test_ids_that_are_not_ours_are_skipped(act: ActFormat) -> None:
    layer, x, ids, weights, experts = make_layer(spec(act), 4)
    ids[:, 0], ids[:, 1], ids[:, 2] = 2, 5, -1
    want = reference.moe_layer(layer, x, ids, weights, experts)
    for other in (-2, -(2**31)):
        ids[:, 2] = other
        got = reference.moe_layer(layer, x, ids, weights, experts)
        assert differing(got, want).size == 0
    ids[:, 1] = -1
    without_5 = reference.moe_layer(layer, x, ids, weights, experts)
    ids[:, 1] = 5
    owned = {e: w for e, w in experts.items() if e != 5}
    assert differing(reference.moe_layer(layer, x, ids, weights, owned), without_5).size == 0
    assert differing(want, without_5).size > 0


@BOTH
def test_fewer_slots_than_top_k_are_a_call_with_empty_slots(act: ActFormat) -> None:
    layer, x, ids, weights, experts = make_layer(spec(act), 4)
    fewer = reference.moe_layer(layer, x, ids[:, :2], weights[:, :2], experts)
    ids[:, 2] = -1
    assert differing(fewer, reference.moe_layer(layer, x, ids, weights, experts)).size == 0


@BOTH
def test_rows_are_bf16_with_int8_and_fp32_with_int16(act: ActFormat) -> None:
    layer, x, _, _, experts = make_layer(spec(act), 4)
    rows = reference.expert_rows(layer, experts[0], mxint.quantise(x, act))
    low_bits = rows.view(np.uint32) & 0xFFFF
    assert (low_bits == 0).all() if act is ActFormat.MXINT8 else (low_bits != 0).any()


@BOTH
def test_an_expert_of_another_geometry_is_refused(act: ActFormat) -> None:
    layer, x, _, _, experts = make_layer(spec(act), 1)
    e = experts[0]
    halved = Mxfp4Matrix(e.gate.codes[: I // 2], e.gate.scales[: I // 2])
    with pytest.raises(FormatError, match="gate codes"):
        reference.expert_rows(
            layer, ExpertWeights(halved, e.up, e.down), mxint.quantise(x, layer.act)
        )
    with pytest.raises(FormatError, match="gate_bias"):
        reference.expert_rows(spec(act, 2), e, mxint.quantise(x, layer.act))


def test_calls_that_do_not_fit_the_spec_are_refused() -> None:
    layer, x, ids, weights, experts = make_layer(spec(ActFormat.MXINT8), 2)
    bad_calls = {
        "x": (x[:, :-1], ids, weights),
        "ids": (x, ids.astype(np.int64), weights),
        "weights": (x, ids, weights[:, :2]),
    }
    for name, call in bad_calls.items():
        with pytest.raises(KernelError, match=f"^{name}: "):
            reference.moe_layer(layer, *call, experts)
    with pytest.raises(KernelError, match=r"expert id 6 is outside 0\.\.5"):
        reference.moe_layer(layer, x, np.maximum(ids, E), weights, experts)
    with pytest.raises(KernelError, match=r"^x: float32"):
        reference.moe_layer(layer, x.astype(np.float64), ids, weights, experts)


# ---- combine


def combine(
    rows: list[list[float]], weights: list[float], scale: float | None = None
) -> np.ndarray:
    """One token; a row of None is a skipped slot over a NaN-filled buffer."""
    width = max(len(r) for r in rows if r is not None)
    valid = np.array([[r is not None for r in rows]])
    buffer = np.float32([[[NAN] * width if r is None else r for r in rows]])
    return reference.combine(buffer, valid, np.float32([weights]), scale)[0]


def test_skipped_slots_are_not_looked_at() -> None:
    skipped: list = [None, [1.0, 2.0], None]
    assert combine(skipped, [NAN, 0.5, INF]).tolist() == [0.5, 1.0]


def test_slots_are_added_in_order() -> None:
    big, tiny = [2.0**24], [1.0]
    assert combine([big, tiny, tiny], [1, 1, 1]) == 2.0**24
    assert combine([tiny, tiny, big], [1, 1, 1]) == 2.0**24 + 2


def test_each_slot_is_one_fma() -> None:
    w, row = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12)
    assert combine([[-1.0], [row]], [1, w]) == np.float32(2.0**-11 + 2.0**-24)


def test_zero_weights_are_multiplied() -> None:
    assert combine([[3.0], [4.0]], [0, 1]) == 4
    assert np.isnan(combine([[np.inf], [4.0]], [0, 1]))
    assert np.isnan(combine([[1.0], [4.0]], [NAN, 1]))


def test_signs_of_zero() -> None:
    assert combine([[-0.0, 0.0]], [1]).view(np.uint32).tolist() == [0, 0]
    tiny = [-(2.0**-100)]
    assert combine([tiny], [2.0**-60]).view(np.uint32).tolist() == [0x80000000]
    assert combine([tiny, [0.0]], [2.0**-60, 1]).view(np.uint32).tolist() == [0]
    assert combine([tiny, [-0.0]], [2.0**-60, 1]).view(np.uint32).tolist() == [0x80000000]


def test_the_output_scale_is_one_more_rounding() -> None:
    third = np.float32(1) / np.float32(3)
    assert combine([[third]], [1], 2.5) == np.float32(2.5) * third
    unscaled = np.array([[1.1, 2.7]], np.float32)
    assert (combine(unscaled.tolist(), [0.3]) != combine(unscaled.tolist(), [0.3], 1.5)).all()
    assert combine([[3e38]], [1], 2.0) == np.inf


def test_duplicates_are_independent_slots() -> None:
    layer, x, ids, weights, experts = make_layer(spec(ActFormat.MXINT16), 1)
    ids[:], weights[:] = [[4, 4, -1]], [[0.25, 0.5, 9]]
    row = reference.expert_rows(layer, experts[4], mxint.quantise(x, layer.act))
    once = reference.fma32(row, np.float32(0.25), np.float32(0))
    want = reference.fma32(row, np.float32(0.5), once)
    assert differing(reference.moe_layer(layer, x, ids, weights, experts), want).size == 0


@given(st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_combine_equals_scalar_fmas(seed: int, slots: int) -> None:
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, (2, slots, 4), dtype=np.uint64).astype(np.uint32)
    rows, weights = bits.view(np.float32), rng.standard_normal((2, slots)).astype(np.float32)
    valid = rng.random((2, slots)) < 0.7
    out = reference.combine(rows, valid, weights)
    for token in range(2):
        acc = np.zeros(4, np.float32)
        for s in np.flatnonzero(valid[token]):
            acc = reference.fma32(rows[token, s], weights[token, s], acc)
        assert differing(out[token], acc).size == 0


# ---- tensor parallelism


def sliced(expert: ExpertWeights, lo: int, hi: int) -> ExpertWeights:
    """Blocks lo..hi-1 of the intermediate dimension; rank 0 keeps the down bias."""
    n, k = slice(32 * lo, 32 * hi), slice(lo, hi)
    rows = [Mxfp4Matrix(m.codes[n], m.scales[n]) for m in (expert.gate, expert.up)]
    down = Mxfp4Matrix(expert.down.codes[:, 16 * lo : 16 * hi], expert.down.scales[:, k])
    if expert.gate_bias is None or expert.up_bias is None or expert.down_bias is None:
        return ExpertWeights(*rows, down)
    down_bias = expert.down_bias if lo == 0 else np.zeros_like(expert.down_bias)
    return ExpertWeights(*rows, down, expert.gate_bias[n], expert.up_bias[n], down_bias)


@BOTH
@pytest.mark.parametrize("variant", [0, 2])
def test_ranks_have_the_bits_of_h_and_sum_to_the_layer(act: ActFormat, variant: int) -> None:
    layer, x, _, _, experts = make_layer(spec(act, variant), 5)
    quantised = mxint.quantise(x, act)
    whole_rows = reference.expert_rows(layer, experts[0], quantised)

    def h_of(expert: ExpertWeights) -> mxint.Quantised:
        g, u = reference.matmul(expert.gate, quantised), reference.matmul(expert.up, quantised)
        if expert.gate_bias is not None and expert.up_bias is not None:
            g, u = g + expert.gate_bias, u + expert.up_bias
        return mxint.quantise(reference.gates(layer.gate, layer.limit, g, u), act)

    whole = h_of(experts[0])
    total = np.zeros((5, H))
    for lo, hi in ((0, 1), (1, 3)):  # 3 blocks over 2 ranks
        part = sliced(experts[0], lo, hi)
        h = h_of(part)
        assert (h.q == whole.q[:, lo:hi]).all()
        assert (h.be == whole.be[:, lo:hi]).all()
        rank = LayerSpec(
            hidden=H,
            intermediate=32 * (hi - lo),
            experts=E,
            top_k=K,
            act=act,
            gate=layer.gate,
            limit=layer.limit,
            biased=layer.biased,
        )
        total += reference.expert_rows(rank, part, quantised)
    tolerance = 2.0**-7 if act is ActFormat.MXINT8 else 1e-6
    assert np.abs(total - whole_rows).max() <= tolerance * np.abs(whole_rows).max()


# ---- the spec


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"hidden": 100}, FormatError),
        ({"intermediate": 16}, FormatError),
        ({"top_k": 0}, KernelError),
        ({"top_k": E + 1}, KernelError),
        ({"limit": 0.0}, KernelError),
        ({"limit": float("nan")}, KernelError),
        ({"output_scale": float("inf")}, KernelError),
        ({"output_scale": -1.0}, KernelError),
    ],
)
def test_a_spec_that_no_kernel_has_is_refused(change: dict, error: type[Exception]) -> None:
    good = {"hidden": H, "intermediate": I, "experts": E, "top_k": K, "act": ActFormat.MXINT8}
    assert LayerSpec(**good).layout.hidden == H
    with pytest.raises(error):
        LayerSpec(**(good | change))
