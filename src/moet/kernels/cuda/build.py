"""The device sources -> machine code of one architecture, by NVRTC, kept in a cache on disk.

No toolchain is needed on the user's machine. A cache entry's name is a hash of everything that the
code depends on: sources, options, architecture, versions of NVRTC and of the driver. Entries are
written to a temporary file, synced and renamed, so a reader never sees half of one; each carries a
checksum, and a damaged one is made again.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from moet.base import log
from moet.base.errors import KernelError
from moet.kernels.cuda import toolkit

ARCHITECTURES: Final = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
"""What the sources are compiled for in the tests; every card runs one of these."""

OPTIONS: Final[dict[str, Any]] = {
    "std": "c++17",
    "fma": False,
    "ftz": False,
    "prec_div": True,
    "prec_sqrt": True,
}
"""No contraction, subnormals kept, IEEE division: docs/numerics.md, section 0."""

SOURCES: Final = Path(__file__).parent / "device"
MAIN: Final = "kernels.cu"
PROBES: Final = "probes.cu"

_DIGEST_BYTES: Final = 32
_log = log.get("kernels")


def architecture_of(capability: tuple[int, int]) -> str:
    """The architecture whose code a card of this compute capability runs: same major, minor <= its.

    Raises:
        KernelError: a card older than Ampere, or a family that the kernels do not know.
    """
    known = [divmod(int(name.removeprefix("sm_")), 10) for name in ARCHITECTURES]
    fits = [c for c in known if c[0] == capability[0] and c[1] <= capability[1]]
    if not fits:
        raise KernelError(
            f"no kernels for compute capability {capability[0]}.{capability[1]}",
            hint=f"the kernels are made for {', '.join(ARCHITECTURES)}",
        )
    major, minor = max(fits)
    return f"sm_{major}{minor}"


def program_options(architecture: str, defines: tuple[str, ...] = ()) -> Any:
    """NVRTC's options for one compilation, as `cuda.core` takes them."""
    return toolkit.compiler().ProgramOptions(
        arch=architecture,
        include_path=str(SOURCES),
        define_macro=list(defines) or None,
        name=MAIN,
        **OPTIONS,
    )


def compile_source(code: str, architecture: str, defines: tuple[str, ...] = ()) -> bytes:
    """CUDA C++ -> cubin. Includes are looked for beside the kernels.

    Args:
        code: the source.
        architecture: one of `ARCHITECTURES`.
        defines: macros to define.

    Raises:
        MachineError: NVRTC is not installed.
        KernelError: the source does not compile; the message is the compiler's log.
    """
    core = toolkit.compiler()
    toolkit.nvrtc_version()
    options = program_options(architecture, defines)
    try:
        compiled = core.Program(code, "c++", options).compile("cubin")
    except Exception as error:  # the bindings raise their own class for a failed compilation
        raise KernelError(
            f"NVRTC cannot compile for {architecture}: {error}",
            hint="report this with the versions of moet and nvidia-cuda-nvrtc",
        ) from error
    return bytes(compiled.code)


def compile_kernels(architecture: str, defines: tuple[str, ...] = (), main: str = MAIN) -> bytes:
    """The cubin of one of the source files; raises as `compile_source`."""
    return compile_source((SOURCES / main).read_text(), architecture, defines)


def cache_key(
    architecture: str, defines: tuple[str, ...], driver_version: int, main: str = MAIN
) -> str:
    """Names the machine code: changes with anything that it depends on."""
    parts = [main, architecture, *defines, repr(sorted(OPTIONS.items()))]
    parts += [toolkit.nvrtc_version(), str(driver_version)]
    for path in sorted(SOURCES.iterdir()):
        parts += [path.name, path.read_text()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, cubin = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(cubin).digest() == digest:
        return cubin
    _log.warning("the cached kernels %s are damaged; compiling again", path)
    return None


def _write(path: Path, cubin: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def cached(folder: Path, key: str, make: Callable[[], bytes]) -> bytes:
    """The cubin of that key, from the folder or made (and kept there).

    A folder that cannot be written to costs a compilation at each start; it is logged, not fatal.
    """
    path = folder.expanduser() / f"{key}.cubin"
    found = _read(path)
    if found is not None:
        return found
    cubin = make()
    try:
        _write(path, cubin)
    except OSError as error:
        _log.warning("the compiled kernels cannot be kept in %s: %s", path.parent, error)
    return cubin
