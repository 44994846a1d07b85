"""``moet serve``."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated

import typer

from moet.cli import console

if TYPE_CHECKING:
    from moet.engine.serve import Server
    from moet.engine.serveplan import ServePlan

PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True}


def serve(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder, or `demo`.")],
    *,
    host: Annotated[
        str, typer.Option(help="Where to listen. Others than this machine need an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port; 0: any free one.")] = 8000,
    api_key: Annotated[
        str,
        typer.Option(help="Ask clients for this key. Better in MOET_API_KEY: `ps` shows flags."),
    ] = "",
    compile: Annotated[
        bool,
        typer.Option(
            "--compile", help="Let torch compile the model: a slower start, faster answers."
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the engine's own log.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line on stdout when ready.")
    ] = False,
) -> int:
    """Serve a model: OpenAI's API on this machine.

    Flags that moet does not know are passed on to vLLM. It is ready when one real token has come
    out of it, and /health says 503 until then and whenever the engine stands still. ctrl-C ends it,
    a second ctrl-C at once. Exit status: 0 ended on request, 1 the engine died, 2 it did not start.
    """
    from moet.base import env
    from moet.engine import preflight, serveplan
    from moet.machine import read_machine

    settings = env.read()
    env.require_key(api_key, "--api-key")
    request = serveplan.Request(
        model=model,
        host=host,
        port=port or preflight.free_port(),
        api_key=api_key or settings.api_key,
        compiled=compile,
        extra=tuple(ctx.args),
    )
    plan = serveplan.make(request, read_machine(), settings)
    return run(plan, verbose=verbose, json=json)


def run(plan: ServePlan, *, verbose: bool, json: bool) -> int:
    """Starts a planned server and stays until it ends."""
    from moet.base.errors import EngineError
    from moet.cli.starting import wait_until_ready
    from moet.cli.stopping import Stopper
    from moet.engine.serve import Server

    stopper = Stopper()
    stopper.listen()
    with Server(plan, verbose=verbose) as server:
        stopper.hard = server.strike
        _tell_swept(server)
        seconds = wait_until_ready(server, stopper)
        if not stopper.asked:
            _show(server, seconds, json=json)
        try:
            for _ in server.serving():
                if stopper.asked:
                    break
        except EngineError as error:
            if not stopper.asked:  # else it has only ended as it was told
                console.show_error(error)
                return 1
        if stopper.typed:
            console.leave_line()
        console.say("stopping")
    return 130 if stopper.count > 1 else 0


def _tell_swept(server: Server) -> None:
    swept = server.swept
    if swept.servers:
        console.say(
            f"cleaned up after {swept.servers} killed server(s): {swept.processes} process(es), "
            f"{swept.segments} shared memory segment(s)",
            "yellow",
        )


def _show(server: Server, seconds: float, *, json: bool) -> None:
    """The panel for people, the line for programs."""
    from rich.panel import Panel

    plan = server.plan
    title = f"moet serves {plan.name}"
    panel = Panel(
        console.facts(rows(server, seconds)), title=title, title_align="left", expand=False
    )
    console.err().print(panel)
    if json:
        console.write(jsonlib.dumps(facts(plan)) + "\n")


def facts(plan: ServePlan) -> dict[str, object]:
    """What a program may want to know of a server."""
    geometry = plan.checkpoint.geometry
    return {
        "model": plan.name,
        "url": plan.url,
        "folder": str(plan.checkpoint.folder),
        "architecture": geometry.architecture,
        "moe_layers": len(geometry.moe_layers),
        "experts": geometry.experts,
        "top_k": geometry.top_k,
        "expert_bytes": plan.expert_bytes,
        "context": plan.context,
        "threads": plan.threads,
        "isa": plan.isa,
    }


def rows(server: Server, seconds: float) -> list[tuple[str, str]]:
    """The lines of the start panel."""
    from moet.base.units import format_bytes, format_seconds
    from moet.machine import read_machine

    plan, cpu = server.plan, read_machine().cpu
    geometry = plan.checkpoint.geometry
    kv = f", KV cache {format_bytes(plan.kv_bytes)}" if plan.kv_bytes else ""
    return [
        ("model", f"{geometry.architecture}, {plan.checkpoint.folder}"),
        (
            "experts",
            f"{len(geometry.moe_layers)} layers x {geometry.experts}, top-{geometry.top_k}, "
            f"{geometry.expert_format} x {geometry.act.name}",
        ),
        ("tier", f"RAM, {format_bytes(plan.expert_bytes)}"),
        ("cpu", f"{plan.isa}, {plan.threads} threads, {cpu.model}"),
        ("context", f"{plan.context} tokens{kv}"),
        ("API", f"{plan.url}/v1" + ("  (key needed)" if plan.api_key else "")),
        ("log", str(server.log) if server.log else "above"),
        ("ready in", f"{format_seconds(seconds)}; try: moet chat"),
    ]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(context_settings=PASS_ON)(serve)
