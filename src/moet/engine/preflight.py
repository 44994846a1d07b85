"""What must hold before an engine is started. Each check raises a named error with a way out."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from pathlib import Path

from moet.base import env
from moet.base.errors import CheckpointError, MachineError, UsageError
from moet.base.units import format_bytes
from moet.checkpoint import refuse_gguf

DEMO = "demo"
MOST_PORT = 65535
SOCKET_PATH = 107  # of a Unix socket: sockaddr_un, less the zero at its end
SERVER_NAME = 32  # at most, of a server's own directory (runfiles.create), with its slash
ENGINE_SOCKET = 37  # a slash and a UUID: vLLM's sockets
ON_A_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/([A-Za-z0-9][\w.-]*)")  # owner/name
ALLOW_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
OURS = {
    "--model": "the model is the first argument: moet serve MODEL",
    "--load-format": "moet loads the model: leave it out",
    "--uds": "moet serves over TCP: --port",
    "--headless": "moet serve answers requests itself: leave it out",
    "--api-server-count": "one process answers requests: leave it out",
    "-asc": "one process answers requests: leave it out",
}


def find_model(model: str) -> tuple[Path, str]:
    """The folder and the served name of what the user calls ``model``.

    Raises:
        CheckpointError: there is no such folder. Names on a hub are not downloaded.
    """
    if model == DEMO:
        from moet import demo

        return demo.path(), demo.NAME
    folder = env.expand_user(Path(model))
    refuse_gguf(folder)
    if not folder.is_dir():
        hint = "give the folder of a downloaded checkpoint, or: moet serve demo"
        if match := ON_A_HUB.fullmatch(model):
            name = match[1]
            hint = f"download it: hf download {model} --local-dir {name}, then: moet serve ./{name}"
        kind = "is a file, not a checkpoint folder" if folder.exists() else "is not a folder here"
        raise CheckpointError(f"{model} {kind}", hint=hint)
    return folder, folder.resolve().name


def find_tokenizer(folder: Path, asked: str | None) -> Path:
    """The folder of the tokenizer: the model's, or what ``--tokenizer`` names.

    Raises:
        UsageError: that is no folder. Names on a hub are not downloaded.
    """
    if asked is None:
        return folder
    if not Path(asked).is_dir():
        hint = "give a folder with tokenizer.json, or leave --tokenizer out"
        raise UsageError(f"--tokenizer {asked!r} is not a folder here", hint=hint)
    return Path(asked)


def require_config(asked: str | None) -> None:
    """Raises UsageError where ``--config`` does not name a file."""
    if asked is not None and not Path(asked).is_file():
        hint = "give a YAML file with flags of vLLM"
        raise UsageError(f"--config {asked!r} is not a file", hint=hint)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_access(host: str, api_key: str) -> None:
    """Raises UsageError when other machines could come in without a key, or for no host."""
    if not host.strip():
        raise UsageError("--host is empty", hint="leave it out to serve this machine only")
    if not is_loopback(host) and not api_key:
        hint = "set MOET_API_KEY (or --api-key), or leave --host out to serve this machine only"
        raise UsageError(f"--host {host} opens the server to others without an API key", hint=hint)


def require_free(host: str, port: int) -> None:
    """Raises MachineError when nothing can listen there, UsageError when it is no port."""
    if not 0 <= port <= MOST_PORT:
        raise UsageError(f"--port {port} is not a port", hint="take one of 1 to 65535, or 0: any")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            what = f"cannot listen on {host}:{port}: {error.strerror}"
            raise MachineError(what, hint=_listen_hint(error, port)) from error


def _listen_hint(error: OSError, port: int) -> str:
    other = port + 1 if port < MOST_PORT else port - 1
    if error.errno == errno.EADDRINUSE:
        return f"another server may run there; take another port: --port {other}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "ports below 1024 belong to the administrator: --port 8000"
    return "--host is a name or an address of this machine, for example 127.0.0.1"


def require_socket_room(base: Path) -> None:
    """Raises MachineError when the engine's sockets below ``base`` would have too long names."""
    longest = len(str(base)) + SERVER_NAME + ENGINE_SOCKET
    if longest > SOCKET_PATH:
        raise MachineError(
            f"{base} is too long: sockets below it need {longest} characters, {SOCKET_PATH} fit",
            hint="point XDG_RUNTIME_DIR to a shorter path, or leave it unset",
        )


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def require_threads(asked: int, usable: int) -> None:
    """Raises UsageError for more threads than logical CPUs: they would wait for each other."""
    if asked > usable:
        hint = "unset it: moet takes one thread a core"
        raise UsageError(f"MOET_THREADS={asked} of {usable} usable CPU(s)", hint=hint)


def require_memory(parts: dict[str, int], available: int) -> None:
    """Raises MachineError, with the numbers, when the parts do not fit. Sizes in bytes."""
    needed = sum(parts.values())
    if needed > available:
        detail = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
        raise MachineError(
            f"not enough memory: {format_bytes(needed)} needed ({detail}), "
            f"{format_bytes(available)} available",
            hint="close other programs, or shorten the context: --max-model-len",
        )


def require_context(asked: int | None, longest: int, extra: tuple[str, ...]) -> None:
    """Raises UsageError for a context that is longer than the model's own, as vLLM would.

    Args:
        asked: ``--max-model-len``.
        longest: of ``kvcache.longest_context``; 0: not known.
        extra: arguments for vLLM; with ``--hf-overrides`` the model may be made longer.
    """
    allowed = env.child_environ().get(ALLOW_LONG, "").strip().lower() in ("1", "true")
    overridden = any(word.startswith(("--hf-overrides", "--hf_overrides")) for word in extra)
    if asked and longest and asked > longest and not allowed and not overridden:
        hint = f"leave it out, or take {longest} at most"
        raise UsageError(
            f"--max-model-len {asked} is longer than the model's own {longest} tokens", hint=hint
        )


def flag_value(extra: tuple[str, ...], name: str) -> str | None:
    """The value of the flag ``name`` in arguments for vLLM, the last one given; "" for a switch."""
    found = None
    for i, word in enumerate(extra):
        head, equals, value = word.partition("=")
        if head.replace("_", "-") == name:
            after = (*extra[i + 1 :], "")[0]
            found = value if equals else "" if after.startswith("--") else after
    return found


def require_passable(model: str, extra: tuple[str, ...]) -> None:
    """Raises UsageError for arguments that moet sets itself, or that are no flags at all."""
    if not model.strip():
        hint = "moet serve FOLDER, or: moet serve demo"
        raise UsageError("the name of the model is empty", hint=hint)
    if model.startswith("-"):
        raise UsageError("the model comes first", hint="moet serve MODEL [flags]")
    for name, hint in OURS.items():
        if flag_value(extra, name) is not None:
            raise UsageError(f"{name} cannot be given", hint=hint)
    if extra and not extra[0].startswith("-"):
        raise UsageError(f"unexpected argument {extra[0]!r}", hint="moet serve takes one model")
