"""The processor: what it is, which instruction sets moet may use, which cores are ours."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from moet.base.errors import MachineError
from moet.machine.cgroup import cpu_quota, read_text


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """The processor as this process may use it.

    Attributes:
        model: the name that the processor gives itself.
        isa: vocabularies of moet's kernels that run here, best first; empty when moet's native
            part is not built.
        online: logical CPUs of the machine.
        usable: logical CPUs that this process may run on (affinity, cpuset).
        cores: one logical CPU of each usable physical core.
        quota: CPUs' worth of time that the control group allows; None: no limit.
        numa_nodes: memory nodes that the usable CPUs belong to.
    """

    model: str
    isa: tuple[str, ...]
    online: int
    usable: tuple[int, ...]
    cores: tuple[int, ...]
    quota: float | None
    numa_nodes: int

    @property
    def threads(self) -> int:
        """Threads worth starting: one a usable core, and no more than the quota can feed."""
        cores = len(self.cores)
        return cores if self.quota is None else max(1, min(cores, int(self.quota)))


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """``"0-2,7"`` as ``(0, 1, 2, 7)``. Format: cpuset(7), "List format"."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cpus))


def usable_cpus(root: Path = Path("/"), pid: int | str = "self") -> tuple[int, ...]:
    """Logical CPUs that a process may run on. The kernel has applied its cpuset already.

    An engine may pin its worker to one core before moet is asked. ``pid`` lets the worker ask for
    the CPUs of the process that started it.

    Raises:
        MachineError: the kernel does not say.
    """
    for line in read_text(root / f"proc/{pid}/status").splitlines():
        name, _, value = line.partition(":")
        if name == "Cpus_allowed_list":
            return parse_cpu_list(value)
    raise MachineError(
        f"/proc/{pid}/status does not say which CPUs may be used",
        hint="moet needs Linux with /proc mounted",
    )


def _siblings(cpu: int, root: Path) -> tuple[int, ...]:
    text = read_text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return parse_cpu_list(text) or (cpu,)


def one_per_core(cpus: tuple[int, ...], root: Path = Path("/")) -> tuple[int, ...]:
    """The first of the given logical CPUs on every physical core, in the given order."""
    seen: set[int] = set()
    chosen = []
    for cpu in cpus:
        if cpu not in seen:
            chosen.append(cpu)
            seen.update(_siblings(cpu, root))
    return tuple(chosen)


def usable_threads(root: Path = Path("/")) -> int:
    """Threads worth starting in this process: affinity, cpuset, cores and quota considered."""
    return read_cpu(root).threads


def _numa_nodes(cpus: tuple[int, ...], root: Path) -> int:
    """Nodes that hold the CPUs; a machine that knows no nodes (or says -1) has one."""
    nodes = set()
    for node in (root / "sys/devices/system/node").glob("node[0-9]*"):
        if set(parse_cpu_list(read_text(node / "cpulist"))) & set(cpus):
            nodes.add(node.name)
    return max(1, len(nodes))


def _model(root: Path) -> str:
    for line in read_text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return "unknown processor"


def native_version() -> str:
    """The version that moet's native part was built as.

    Raises:
        ImportError: it is not built, or cannot be loaded.
    """
    return str(import_module("moet._core").__version__)


def _isa() -> tuple[str, ...]:
    try:
        core = import_module("moet._core")
    except ImportError:
        return ()
    return tuple(core.isa_available())


def read_cpu(root: Path = Path("/")) -> Cpu:
    """Looks at the processor. Everything but ``isa`` comes from the files under ``root``."""
    usable = usable_cpus(root)
    online = parse_cpu_list(read_text(root / "sys/devices/system/cpu/online"))
    return Cpu(
        model=_model(root),
        isa=_isa(),
        online=len(online) or len(usable),
        usable=usable,
        cores=one_per_core(usable, root),
        quota=cpu_quota(root),
        numa_nodes=_numa_nodes(usable, root),
    )
