"""The record and the page made from it."""

from __future__ import annotations

import json

import pytest

import moet.demo

render = pytest.importorskip(
    "training.render", reason="the training folder is not beside the tests"
)
RECORD = json.loads(render.RECORD.read_text("utf-8"))


def test_the_page_shows_the_record() -> None:
    page = render.README.read_text("utf-8")
    assert render.replaced(page, render.render(RECORD)) == page


def test_the_record_says_where_when_and_how_well() -> None:
    assert RECORD["machine"] == "NVIDIA H200"
    assert len(RECORD["commit"]) == 40
    assert RECORD["wall_seconds"] < 900
    heldout = RECORD["heldout"]
    assert heldout["addition"] >= 95
    assert heldout["recall"] >= 95
    assert heldout["json"] >= 98


def test_the_record_is_about_the_shipped_geometry() -> None:
    config = json.loads((moet.demo.path() / "config.json").read_text("utf-8"))
    geometry = RECORD["geometry"]
    assert geometry["experts"] == config["num_experts"] >= 32
    assert geometry["top_k"] == config["num_experts_per_tok"] == 4
    assert len(RECORD["expert_usage"]["mixture"]["shares"]) == config["num_hidden_layers"]
