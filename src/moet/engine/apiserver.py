"""The API server process: vLLM's OpenAI server with moet's middleware, child of ``moet serve``.

Run as ``python -m moet.engine.apiserver VLLM-ARGUMENTS``. It and every process that it spawns die
with the one that started them. vLLM spawns its processes by importing the main module again under
another name, which is where they get that from. Exit status: 0 stopped on request, 1 the engine
died, 2 it did not start.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from typing import NoReturn

from moet.base import env, log
from moet.base.errors import EngineError, MoetError, UsageError
from moet.engine import health, refuse
from moet.engine.heartbeat import Page, Phase
from moet.machine import processes

EXIT_DIED = 1
EXIT_NOT_STARTED = 2
PLANNED = ("--model", "--load-format", "--host", "--port")  # what the supervisor has decided
LAST_WORDS_SECONDS = 1.0  # for errors to reach the clients before the process ends


def prepare() -> None:
    """What every process of the server does first: die with its parent, log what moet says."""
    processes.die_with_parent()
    form = f"%(levelname)s %(asctime)s [%(name)s] pid {os.getpid()}: %(message)s"
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(form, "%m-%d %H:%M:%S"))
    log.root().addHandler(handler)
    log.root().setLevel(logging.INFO)


if __name__ == "__mp_main__":  # a process that vLLM has spawned
    prepare()


def end_soon() -> None:
    """Ends this process, whatever its threads are stuck in; the supervisor does the rest."""
    threading.Timer(LAST_WORDS_SECONDS, os._exit, (EXIT_DIED,)).start()


def parse(arguments: list[str]) -> argparse.Namespace:
    """vLLM's own reading of its flags.

    Raises:
        UsageError: a flag that vLLM does not know, a value that it does not take, a second model,
            or another value for something that the supervisor has decided and checked.
        UnsupportedError: what moet does not serve, from a file of flags (``--config``).
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise UsageError(f"vLLM says: {message}", hint="moet passes flags it does not know on")

    parser = make_arg_parser(Parser(allow_abbrev=False))  # "--hos" must not get past our checks
    args: argparse.Namespace = parser.parse_args(arguments)
    require_planned(args, arguments)
    refuse.arguments(args)
    configure_logging_from_args(args)
    try:
        validate_parsed_serve_args(args)
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"vLLM says: {error}", hint="moet passes on what it does not know"
        ) from error
    return args


def require_planned(args: argparse.Namespace, arguments: list[str]) -> None:
    """Raises UsageError where vLLM read something else than the supervisor planned.

    Args:
        args: what vLLM read.
        arguments: what it read; the supervisor's own words come first.
    """
    if args.model_tag is not None:
        hint = "moet serve takes one model"
        raise UsageError(f"unexpected argument {args.model_tag!r}", hint=hint)
    for flag in (flag for flag in PLANNED if flag in arguments):
        planned = arguments[arguments.index(flag) + 1]
        read = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if str(read) != planned:
            hint = f"moet serve has to know {flag} itself: write it out, before other flags"
            raise UsageError(f"{flag} would be {read}, not {planned}", hint=hint)


def serve(arguments: list[str], page: Page) -> int:
    """Serves until it is told to stop or cannot go on. Returns the exit status."""
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    cli_env_setup()
    state = health.Health(page, env.read().stall_seconds, on_failure=end_soon)
    health.install(state)
    args = parse(arguments)
    page.phase = Phase.LAUNCHING
    uvloop.run(run_server(args))
    return EXIT_DIED if state.failure else 0


def plain(error: Exception) -> str:
    """What an error says; of pydantic's only the sentence, not its frame."""
    details = error.errors() if hasattr(error, "errors") else []
    said = [str(detail["msg"]).removeprefix("Value error, ") for detail in details]
    return "; ".join(said) or str(error)


def main(arguments: list[str]) -> int:
    """The process. Failures are left on the heartbeat page, tracebacks in the log."""
    prepare()
    page = Page.open(env.read().heartbeat)
    if page.supervisor != os.getppid():  # it died before we could ask to die with it
        return EXIT_NOT_STARTED
    try:
        return serve(arguments, page)
    except KeyboardInterrupt:
        return 0
    except MoetError as error:
        log.get("engine").exception("%s", error)
        page.fail(error)
    except Exception as error:
        log.get("engine").exception("the server has ended")
        if page.phase is not Phase.STOPPING:
            page.fail(EngineError(f"vLLM has ended: {plain(error)}", hint=health.LOG_HINT))
    return EXIT_NOT_STARTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
