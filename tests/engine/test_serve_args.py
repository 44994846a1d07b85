"""Flags that reach vLLM: written out, and never against what the supervisor has checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from moet.base.errors import UnsupportedError, UsageError
from moet.engine import apiserver, flags

pytest.importorskip("vllm", reason="vLLM is not installed")

OURS = ["--model", "/m", "--load-format", "moet", "--host", "127.0.0.1", "--port", "8000"]


def test_what_was_planned_passes() -> None:
    args = apiserver.parse([*OURS, "--max-model-len", "1K", "--max_num_seqs=2"])
    assert (args.host, args.port, args.model, args.max_model_len) == ("127.0.0.1", 8000, "/m", 1024)


def test_the_flags_that_are_read_from_sources_are_those_of_the_parser() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    known = flags.of_vllm()
    parser = make_arg_parser(FlexibleArgumentParser(allow_abbrev=False))
    for name in parser._option_string_actions:
        if name.startswith("--"):
            assert name in known or "--" + name.removeprefix("--no-") in known
            flags.require_known((name,))


@pytest.mark.parametrize(
    "extra",
    [
        ["--hos", "0.0.0.0"],
        ["--hos=0.0.0.0"],
        ["--load-f", "auto"],
        ["--mod", "other"],
        ["--served-model-n", "x"],
    ],
)
def test_an_abbreviated_flag_is_unknown(extra: list[str]) -> None:
    with pytest.raises(UsageError, match="unrecognized arguments"):
        apiserver.parse([*OURS, *extra])


@pytest.mark.parametrize(
    ("extra", "flag"),
    [
        (["--host", "0.0.0.0"], "--host would be 0.0.0.0, not 127.0.0.1"),
        (["--port=9"], "--port would be 9, not 8000"),
        (["--load_format", "auto"], "--load-format would be auto, not moet"),
        (["--model", "other"], "--model would be other, not /m"),
    ],
)
def test_what_the_supervisor_has_checked_stays(extra: list[str], flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        apiserver.parse([*OURS, *extra])


def test_a_file_of_flags_is_looked_at_too(tmp_path: Path) -> None:
    flags = tmp_path / "flags.yaml"
    flags.write_text("pipeline-parallel-size: 2\n")
    with pytest.raises(UnsupportedError, match="pipeline parallelism"):
        apiserver.parse([*OURS, "--config", str(flags)])


def test_a_second_model_is_refused() -> None:
    with pytest.raises(UsageError, match="unexpected argument 'other'"):
        apiserver.parse([*OURS, "--seed", "1", "other"])
