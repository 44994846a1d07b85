"""What is decided and refused before an engine starts: cheap, and with a way out."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moet import demo
from moet.base.env import Settings
from moet.base.errors import (
    CheckpointError,
    KernelError,
    MachineError,
    UnsupportedError,
    UsageError,
)
from moet.engine import flags, kvcache, preflight, serveplan
from moet.engine.serveplan import Request
from moet.hybrid.load import record_layout
from moet.machine import Machine, read_machine
from moet.testing.toy import toy_config, write_toy_checkpoint

GIB = 1 << 30


@pytest.fixture(scope="module")
def machine() -> Machine:
    real = read_machine()
    memory = replace(real.memory, available=16 * GIB)
    four = (0, 1, 2, 3)
    return replace(
        real, memory=memory, cpu=replace(real.cpu, cores=four, usable=four, numa_nodes=1)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "toy"
    write_toy_checkpoint(path, vocab=1024)
    shutil.copy(demo.path() / "tokenizer.json", path)
    return path


def request(folder: Path | str, *extra: str, **changes: Any) -> Request:
    changes = {"port": preflight.free_port(), **changes}
    return Request(model=str(folder), extra=extra, **changes)


def words(arguments: tuple[str, ...]) -> dict[str, str]:
    """Flag -> value; the last one of a flag that is given twice."""
    flags = [i for i, word in enumerate(arguments) if word.startswith("--")]
    return {arguments[i]: (*arguments[i + 1 :], "")[0] for i in flags}


def test_sockets_need_a_short_directory(
    folder: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("long" * 10)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with pytest.raises(MachineError, match="is too long: sockets below it need") as caught:
        serveplan.make(request(folder), machine, Settings())
    assert "XDG_RUNTIME_DIR" in caught.value.hint


def test_a_plan_needs_nothing_but_the_folder(folder: Path, machine: Machine) -> None:
    plan = serveplan.make(request(folder), machine, Settings())
    given = words(plan.arguments)
    assert plan.name == given["--served-model-name"] == "toy"
    assert given["--load-format"] == "moet"
    assert given["--host"] == "127.0.0.1"
    assert given["--tool-call-parser"] == "hermes"
    assert "--enforce-eager" in given
    assert [w for w in plan.arguments if w.startswith("moet.engine.")] == [
        "moet.engine.health.Readiness",
        "moet.engine.access.ApiKey",  # the last one is the outermost
    ]
    assert plan.context == 4096
    assert int(given["--kv-cache-memory-bytes"]) == plan.kv_bytes
    assert plan.expert_bytes == 2 * 8 * record_layout(plan.checkpoint.geometry).record_bytes
    assert plan.url == f"http://127.0.0.1:{given['--port']}"


def test_what_the_user_says_comes_last_and_wins(folder: Path, machine: Machine) -> None:
    extra = ("--max-model-len", "1K", "--served-model-name=mine", "--max-num-seqs", "2")
    plan = serveplan.make(request(folder, *extra), machine, Settings(threads=3))
    assert plan.arguments[-len(extra) :] == extra
    assert (plan.context, plan.name, plan.threads) == (1024, "mine", 3)
    own = serveplan.make(request(folder, "--kv-cache-memory-bytes", "1G"), machine, Settings())
    assert own.kv_bytes == 1 << 30


def test_compiled_on_request(folder: Path, machine: Machine) -> None:
    plan = serveplan.make(request(folder, compiled=True), machine, Settings())
    assert "--enforce-eager" not in plan.arguments


def test_one_worker_lives_with_the_engine_core(folder: Path, machine: Machine) -> None:
    plan = serveplan.make(request(folder), machine, Settings())
    assert words(plan.arguments)["--distributed-executor-backend"] == "uni"
    assert plan.environ["OMP_NUM_THREADS"] == "3"
    assert plan.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_several_workers_share_the_cores_of_one_node(folder: Path, machine: Machine) -> None:
    plan = serveplan.make(request(folder, "--tensor-parallel-size", "2"), machine, Settings())
    assert plan.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert "--distributed-executor-backend" not in plan.arguments
    few = replace(machine, cpu=replace(machine.cpu, cores=(5,)))
    assert serveplan.engine_environ(few, 2)["VLLM_CPU_OMP_THREADS_BIND"] == "5|5"
    nodes = replace(machine, cpu=replace(machine.cpu, numa_nodes=2))
    assert "VLLM_CPU_OMP_THREADS_BIND" not in serveplan.engine_environ(nodes, 2)


# --- refusals


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "my-box"])
def test_an_open_door_needs_a_key(folder: Path, machine: Machine, host: str) -> None:
    with pytest.raises(UsageError, match="without an API key") as error:
        serveplan.make(request(folder, host=host), machine, Settings())
    assert "MOET_API_KEY" in error.value.hint


def test_an_open_door_with_a_key(folder: Path, machine: Machine) -> None:
    plan = serveplan.make(request(folder, host="0.0.0.0", api_key="k"), machine, Settings())
    assert plan.url.startswith("http://127.0.0.1:")
    assert "k" not in plan.arguments  # `ps` shows them


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_this_machine_needs_none(host: str) -> None:
    assert preflight.is_loopback(host)


def test_urls() -> None:
    def url(host: str, *extra: str) -> str:
        return serveplan.base_url(Request(model="m", host=host, port=1, extra=extra))

    assert url("::") == "http://[::1]:1"
    assert url("10.0.0.1") == "http://10.0.0.1:1"
    assert url("::1", "--ssl-certfile", "c") == "https://[::1]:1"


def test_a_port_that_is_taken(folder: Path, machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineError, match=f"cannot listen on 127.0.0.1:{port}") as error:
            serveplan.make(request(folder, port=port), machine, Settings())
    assert f"--port {port + 1}" in error.value.hint


@pytest.mark.parametrize(
    ("host", "message", "hint"),
    [
        ("", "--host is empty", "leave it out"),
        ("256.1.1.1", "cannot listen on 256.1.1.1", "address of this machine"),
        ("203.0.113.9", "cannot listen on 203.0.113.9", "address of this machine"),
    ],
)
def test_hosts_that_are_not_this_one(
    folder: Path, machine: Machine, host: str, message: str, hint: str
) -> None:
    with pytest.raises((UsageError, MachineError), match=message) as error:
        serveplan.make(request(folder, host=host, api_key="k"), machine, Settings())
    assert hint in error.value.hint


@pytest.mark.parametrize("flag", ["--tokenizer", "--config"])
def test_files_that_flags_name_must_be_there(folder: Path, machine: Machine, flag: str) -> None:
    with pytest.raises(UsageError, match=f"{flag} '/nosuch' is not a") as error:
        serveplan.make(request(folder, flag, "/nosuch"), machine, Settings())
    assert error.value.hint


def test_a_tokenizer_from_elsewhere(broken: Path, folder: Path, machine: Machine) -> None:
    (broken / "tokenizer.json").unlink()
    plan = serveplan.make(request(broken, "--tokenizer", str(folder)), machine, Settings())
    assert plan.arguments[-2:] == ("--tokenizer", str(folder))


@pytest.mark.parametrize("length", ["many", -1, [4096], 1.5])
def test_a_context_that_is_no_number(broken: Path, machine: Machine, length: Any) -> None:
    config = json.loads((broken / "config.json").read_text())
    config["max_position_embeddings"] = length
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="max_position_embeddings is") as error:
        serveplan.make(request(broken), machine, Settings())
    assert error.value.hint


def test_too_little_memory_is_told_with_its_parts(folder: Path, machine: Machine) -> None:
    small = replace(machine, memory=replace(machine.memory, available=GIB))
    with pytest.raises(MachineError, match=r"not enough memory: .*experts .*KV cache .*engine"):
        serveplan.make(request(folder), small, Settings())


def test_a_forced_instruction_set_that_is_not_there(folder: Path, machine: Machine) -> None:
    with pytest.raises(KernelError, match="avx9"):
        serveplan.make(request(folder), machine, Settings(isa="avx9"))


def test_more_threads_than_cpus(folder: Path, machine: Machine) -> None:
    with pytest.raises(UsageError, match=r"MOET_THREADS=999 of 4 usable CPU\(s\)") as error:
        serveplan.make(request(folder), machine, Settings(threads=999))
    assert error.value.hint


def test_what_moet_has_not_is_known_before_a_start(folder: Path, machine: Machine) -> None:
    for extra in (("-pp", "2"), ("--enable-lora",), ("--spec-method", "ngram")):
        with pytest.raises(UnsupportedError, match="moet does not serve"):
            serveplan.make(request(folder, *extra), machine, Settings())
    settings = ("--additional-config", '{"moet": {"oops": 1}}')
    with pytest.raises(UsageError, match=r"additional_config\.moet\.oops"):
        serveplan.make(request(folder, *settings), machine, Settings())
    with pytest.raises(UsageError, match="ranks"):
        serveplan.make(request(folder, "-tp", "9"), machine, Settings())


@pytest.mark.parametrize("name", ["", " "])
def test_no_name_is_not_this_folder(name: str, machine: Machine) -> None:
    with pytest.raises(UsageError, match="name of the model is empty"):
        serveplan.make(request(name), machine, Settings())


def test_gguf_is_named(tmp_path: Path, machine: Machine) -> None:
    file = tmp_path / "model-Q4_K_M.GGUF"
    file.write_bytes(b"GGUF")
    for model in (file, tmp_path):
        with pytest.raises(CheckpointError, match="GGUF is not supported") as error:
            serveplan.make(request(model), machine, Settings())
        assert "safetensors" in error.value.hint


@pytest.fixture
def broken(folder: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the model to damage."""
    return shutil.copytree(folder, tmp_path / "broken")


def changed(folder: Path, **entries: Any) -> Path:
    """The model with other entries in its config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **entries}))
    return folder


@pytest.mark.parametrize(
    ("flag", "meant"),
    [("--prot", "--port"), ("--max_modle-len=9", "--max-model-len"), ("--no-enforce-egaer", "")],
)
def test_a_mistyped_flag(
    folder: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, flag: str, meant: str
) -> None:
    known = frozenset({"--max-model-len", "--enforce-eager", "--additional-config"})
    monkeypatch.setattr(flags, "of_vllm", lambda: known)
    with pytest.raises(UsageError, match="neither moet nor vLLM knows") as caught:
        serveplan.make(request(folder, flag, "9"), machine, Settings())
    assert caught.value.hint.startswith(f"did you mean {meant or '--enforce-eager'}?")
    for right in (
        "--no-enforce-eager",
        "--additional-config.moet.act",
        "--of-another-world",
        "-tp",
    ):
        flags.require_known((right,))


def test_no_word_of_flags_where_vllm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "of_vllm", frozenset)
    flags.require_known(("--prot",))


def test_a_context_beyond_the_model_s_own(
    broken: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = ("--max-model-len", "4097")
    with pytest.raises(UsageError, match="longer than the model's own 4096") as caught:
        serveplan.make(request(broken, *long), machine, Settings())
    assert "4096 at most" in caught.value.hint
    longer = ("--hf-overrides", "{}", *long)
    assert serveplan.make(request(broken, *longer), machine, Settings()).context == 4097
    monkeypatch.setenv(preflight.ALLOW_LONG, "1")
    assert serveplan.make(request(broken, *long), machine, Settings()).context == 4097
    monkeypatch.delenv(preflight.ALLOW_LONG)
    stretched = {"rope_type": "linear", "factor": 2.0}
    changed(broken, rope_scaling=stretched)  # 8192 to vLLM, which says so itself
    assert serveplan.make(request(broken, *long), machine, Settings()).context == 4097


@pytest.mark.parametrize("key", ["num_attention_heads", "num_key_value_heads", "head_dim"])
def test_no_attention_heads(broken: Path, machine: Machine, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"{key} is 0; a whole number from 1 up"):
        serveplan.make(request(changed(broken, **{key: 0})), machine, Settings())


def test_no_tokenizer(broken: Path, machine: Machine) -> None:
    (broken / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        serveplan.make(request(broken), machine, Settings())


def test_an_architecture_that_is_not_known(broken: Path, machine: Machine) -> None:
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(CheckpointError, match="'llama' is not known"):
        serveplan.make(request(broken), machine, Settings())


def test_a_truncated_shard(broken: Path, machine: Machine) -> None:
    shard = broken / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as error:
        serveplan.make(request(broken), machine, Settings())
    assert error.value.hint


def test_folders_that_are_none(tmp_path: Path, machine: Machine) -> None:
    for model in (tmp_path, tmp_path / "nosuch", Path(__file__)):
        with pytest.raises(CheckpointError) as error:
            serveplan.make(request(model), machine, Settings())
        assert error.value.hint


# --- the KV cache


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("4096", 4096),
        ("32k", 32_000),
        ("32K", 32_768),
        ("1.5k", 1500),
        ("auto", None),
        ("2G", 2 << 30),
        ("9" * 400, None),
    ],
)
def test_lengths_as_vllm_reads_them(text: str, tokens: int | None) -> None:
    assert kvcache.parse_count(text) == tokens


def test_bytes_of_a_token() -> None:
    config = toy_config(layers=3)
    assert kvcache.bytes_per_token(config) == 2 * 2 * 3 * 2 * 32
    assert kvcache.bytes_per_token({"text_config": config}) == 2 * 2 * 3 * 2 * 32
    plain = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    assert kvcache.bytes_per_token(plain) == 2 * 2 * 2 * 4 * 16
    assert kvcache.bytes_per_token({**config, "kv_lora_rank": 512}) is None
    for odd in ({}, {"text_config": [1]}, {**plain, "num_attention_heads": "4"}):
        assert kvcache.bytes_per_token(odd) is None
    assert kvcache.bytes_per_token({**plain, "num_attention_heads": 0}) is None


def test_the_budget_holds_one_context_always_and_several_where_it_can() -> None:
    one = 1000 * (4096 + 256)
    assert kvcache.budget(1000, 4096, 100 * GIB) == max(kvcache.LEAST_BYTES, 8 * one)
    assert kvcache.budget(100_000, 4096, GIB) == 100 * one
    assert kvcache.budget(1, 4096, 100 * GIB) == kvcache.LEAST_BYTES


@pytest.mark.parametrize(
    ("extra", "value"),
    [
        (("--port", "1"), "1"),
        (("--port=2",), "2"),
        (("--a", "--port", "3", "--port=4"), "4"),
        (("--port", "--b"), ""),
        (("--porter", "5"), None),
        ((), None),
    ],
)
def test_flags_are_found(extra: tuple[str, ...], value: str | None) -> None:
    assert preflight.flag_value(extra, "--port") == value
    assert preflight.flag_value(("--max_model_len", "9"), "--max-model-len") == "9"
