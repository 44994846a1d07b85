"""The checkpoint as it ships: complete, small, consistent. Standard library only."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

import moet.demo

FOLDER = moet.demo.path()
SCALE = ".weight_scale"


def read_header(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def load_json(name: str) -> Any:
    return json.loads((FOLDER / name).read_text("utf-8"))


def shard_names() -> list[str]:
    return sorted(path.name for path in FOLDER.glob("*.safetensors"))


def test_everything_is_there_and_nothing_else() -> None:
    expected = {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        *shard_names(),
    }
    assert {path.name for path in FOLDER.iterdir()} == expected
    assert len(shard_names()) == 3


def test_at_most_ten_megabytes() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 10_000_000


def test_index_names_exactly_the_tensors_of_the_shards() -> None:
    found = {}
    for name in shard_names():
        header, _ = read_header(FOLDER / name)
        found.update({key: name for key in header if key != "__metadata__"})
    assert load_json("model.safetensors.index.json")["weight_map"] == found


def test_every_expert_is_mxfp4_and_nothing_else_is() -> None:
    config = load_json("config.json")
    names = load_json("model.safetensors.index.json")["weight_map"]
    packed = {n for n in names if n.endswith((".weight_packed", SCALE))}
    experts = config["num_hidden_layers"] * config["num_experts"] * 3
    assert len(packed) == 2 * experts
    assert all(".mlp.experts." in name for name in packed)
    assert not any(".mlp.experts." in name for name in set(names) - packed)


@pytest.mark.parametrize("shard", shard_names())
def test_shapes_and_scale_bytes(shard: str) -> None:
    header, body = read_header(FOLDER / shard)
    for name, entry in header.items():
        if not name.endswith(SCALE):
            continue
        codes = header[name.removesuffix(SCALE) + ".weight_packed"]
        assert entry["dtype"] == codes["dtype"] == "U8"
        assert entry["shape"] == [codes["shape"][0], codes["shape"][1] // 16]
        begin, end = entry["data_offsets"]
        assert 255 not in body[begin:end], name


def test_quantisation_config_is_what_stock_readers_know() -> None:
    quantization = load_json("config.json")["quantization_config"]
    weights = quantization["config_groups"]["group_0"]["weights"]
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["format"] == "mxfp4-pack-quantized"
    assert (weights["num_bits"], weights["type"], weights["group_size"]) == (4, "float", 32)


def test_generation_stops_at_the_end_of_a_turn() -> None:
    tokens = {t["content"]: t["id"] for t in load_json("tokenizer.json")["added_tokens"]}
    assert tokens["<|im_end|>"] in load_json("generation_config.json")["eos_token_id"]
    assert load_json("config.json")["eos_token_id"] == tokens["<|im_end|>"]
    assert load_json("tokenizer_config.json")["eos_token"] == "<|im_end|>"
