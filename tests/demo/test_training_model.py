"""The training model against transformers, and MXFP4 against compressed-tensors."""

from __future__ import annotations

import pytest

import moet.demo

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("training.model", reason="the training folder is not beside the tests")

from training.dequantize import dequantize  # noqa: E402
from training.load import load  # noqa: E402
from training.model import TinyMoe  # noqa: E402
from training.mxfp4 import decode, encode, fake_quantize, scale_bytes, split  # noqa: E402

WIDE = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
WIDE = WIDE * torch.exp(3 * torch.randn(64, 1, generator=torch.Generator().manual_seed(1)))


def test_quantising_twice_changes_nothing() -> None:
    codes, scales = encode(WIDE)
    again = encode(decode(codes, scales))
    assert torch.equal(codes, again[0])
    assert torch.equal(scales, again[1])


def test_training_rounds_as_the_export_does() -> None:
    assert torch.equal(decode(*encode(WIDE)), fake_quantize(WIDE))
    assert torch.equal(fake_quantize(WIDE).bfloat16().float(), fake_quantize(WIDE))


def test_zero_blocks_have_a_normal_scale() -> None:
    codes, scales = encode(torch.zeros(1, 64))
    assert scales.tolist() == [[1, 1]]
    assert not codes.any()


@pytest.mark.parametrize(
    ("peak", "byte", "value"), [(4.0, 127, 4.0), (6.9, 127, 6.0), (7.0, 128, 8.0), (8.0, 128, 8.0)]
)
def test_a_peak_goes_up_a_binade_at_seven_quarters(peak: float, byte: int, value: float) -> None:
    block = torch.full((1, 32), 0.01)
    block[0, 0] = peak
    assert scale_bytes(split(block)).item() == byte
    assert fake_quantize(block)[0, 0] == value


def test_the_scale_rule_is_that_of_compressed_tensors() -> None:
    util = pytest.importorskip("compressed_tensors.quantization.utils.mxfp_utils")
    theirs = util.generate_mx_scales(split(WIDE).abs().amax(-1)).to(torch.uint8)
    assert torch.equal(theirs, encode(WIDE)[1])


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bf16")
    dequantize(moet.demo.path(), folder)
    return transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)


def test_the_training_model_is_qwen3_moe(stock) -> None:
    state, geometry = load(moet.demo.path())
    model = TinyMoe(geometry, torch.float32)
    model.load_state_dict(state)
    ids = torch.randint(0, geometry.vocab, (2, 160), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours = model.logits(model(ids)[0]).unflatten(0, ids.shape)
        theirs = stock(ids).logits
    assert (ours - theirs).abs().max() < 2e-4 * theirs.abs().max()


def test_stock_transformers_reads_the_mxfp4_files(stock) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    folder = str(moet.demo.path())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for (name, a), (other, b) in zip(
        sorted(model.named_parameters()), sorted(stock.named_parameters()), strict=True
    ):
        assert name == other
        assert torch.equal(a, b), name
