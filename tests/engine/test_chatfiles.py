"""Tokenizers and chat templates that cannot be used are named before a start."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moet import demo
from moet.base.errors import CheckpointError, UsageError
from moet.engine import chatfiles

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in FILES:
        if (demo.path() / name).exists():
            shutil.copy(demo.path() / name, tmp_path)
    return tmp_path


@pytest.fixture
def bare(folder: Path) -> Path:
    """A folder whose template the test writes."""
    pytest.importorskip("jinja2", reason="jinja2 renders chat templates: pip install moet[cpu]")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    return folder


def check(folder: Path, asked: str | None = None) -> None:
    chatfiles.require_tokenizer(folder)
    chatfiles.require_chat_template(folder, asked)


def test_the_demo_s_pass(folder: Path) -> None:
    check(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff{}"])
def test_damaged_files_are_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read") as caught:
        check(folder)
    assert caught.value.hint == f"download {name} of the model again"


def test_a_tokenizer_that_its_library_does_not_take(folder: Path) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers loads them: pip install moet[cpu]")
    (folder / "tokenizer.json").write_text('{"model": {"type": "nosuch"}}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        check(folder)


@pytest.mark.parametrize("name", FILES)
def test_things_that_are_no_files(folder: Path, name: str) -> None:
    def no_file(make: Callable[[Path], None]) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        with pytest.raises(CheckpointError, match=rf"{name}.* cannot be read") as caught:
            check(folder)
        assert caught.value.hint

    no_file(os.mkfifo)  # reading one would wait for ever
    no_file(lambda file: file.symlink_to("nowhere"))
    no_file(lambda file: file.symlink_to(file))
    no_file(Path.mkdir)


def test_a_configuration_alone_is_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        check(folder)


def test_none_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        check(tmp_path)


GOOD = [
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{% break %}{% endfor %}",
    "{% for m in messages %}{{ m.content[0].text + '!' }}{% endfor %}",
    "{% generation %}{{ messages | tojson(indent=2) }}{% endgeneration %}",
    "{{ strftime_now('%Y') }}{% if tools %}{{ raise_exception('x') }}{% endif %}",
]


@pytest.mark.parametrize("template", GOOD)
def test_templates_of_every_form_pass(bare: Path, template: str) -> None:
    (bare / "chat_template.jinja").write_text(template)
    check(bare)


BAD = {
    "{% for m in messages %}": "has an error in line 1",
    "\n{{ messages }": "has an error in line 2",
    "{{ messages[3].content.upper() }}": "cannot render a question: UndefinedError",
    "{{ raise_exception('say please') }}": "cannot render a question: TemplateError: say please",
    "{{ messages.append(1) }}": "cannot render a question: SecurityError",
}


@pytest.mark.parametrize("template", BAD)
@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_templates_that_would_refuse_every_chat(bare: Path, template: str, place: str) -> None:
    named = [{"name": "tools", "template": ""}, {"name": "default", "template": template}]
    content = template if place.endswith("jinja") else json.dumps({"chat_template": named})
    (bare / place).write_text(content)
    with pytest.raises(CheckpointError, match=rf"{place}: .*{BAD[template]}") as caught:
        check(bare)
    assert "--chat-template" in caught.value.hint
    check(bare, GOOD[0])


def test_a_template_that_was_asked_for(bare: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine"
    file.write_text(GOOD[0])
    check(bare, str(file))
    with pytest.raises(UsageError, match="cannot be read"):
        check(bare, str(tmp_path / "nosuch.jinja"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="cannot be read"):
        check(bare, str(tmp_path / "pipe"))
    with pytest.raises(UsageError, match="has an error in line 1"):
        check(bare, "{% if %}")
