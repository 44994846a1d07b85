"""``moet``: parse, then call. Nothing heavy is imported before a command needs it.

Exit status: 0 all is well; 1 it ran and the answer is bad (differences, a failed check, an engine
that died); 2 it could not run (usage, a bad input, a missing thing).
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from moet.base import env
from moet.base.errors import MoetError

EXIT_BAD = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130

# Some typers use click, others bring a copy of it: its errors are met through what typer exports.
PARSE_ERRORS: type[Exception] = typer.BadParameter.__mro__[2]  # click.ClickException

app = typer.Typer(
    name="moet",
    help="Serve Mixture-of-Experts models that do not fit on your card.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        from moet.cli.version import version

        version()
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="As `moet version`.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Serve Mixture-of-Experts models that do not fit on your card: the experts, bit for bit.

    Data goes to stdout, everything else to stderr. Exit status: 0 well, 1 a bad answer, 2 an error.
    In a clone, ./moet test [pytest arguments] runs the tests.
    """
    global _debug  # noqa: PLW0603  (read by main() after the command has failed)
    _debug = debug
    env.read()  # a misspelt setting is an error of every command


_debug = False


def _register() -> None:
    from moet.cli import bench, chat, doctor, pack, replay, serve, synth, verify, version

    for module in (serve, chat, doctor, pack, verify, bench, replay, synth, version):
        module.register(app)


_register()


def _usage(error: Any) -> int:
    """A command line that cannot be read."""
    from moet.cli import console

    message = error.format_message()
    if message.startswith("Usage:"):  # no command at all: the help says it
        console.say(message)
        return EXIT_ERROR
    context = getattr(error, "ctx", None)
    console.tell("error", "bold red", message.rstrip("."))
    console.tell("hint", "cyan", f"{context.command_path if context else env.program()} --help")
    return EXIT_ERROR


def _told(error: Exception) -> tuple[str, str]:
    """An error that ended a command, as message and hint."""
    if isinstance(error, MoetError):
        return str(error), error.hint
    if isinstance(error, ImportError):
        return f"something is not installed: {error}", "moet doctor says what is missing"
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}", "ask for less, or close other programs"
    if isinstance(error, OSError):  # a full disk behind stdout, say
        return f"the system refuses: {error}", "moet --debug shows where"
    what = f"a fault of moet: {type(error).__name__}: {error}"
    return what, "moet --debug shows where; please report it"


def run(arguments: list[str] | None = None) -> int:
    """Runs one command line; returns the exit status. Errors are shown, not raised."""
    from moet.cli import console

    try:
        result = app(arguments, prog_name=env.program(), standalone_mode=False)
    except PARSE_ERRORS as error:
        return _usage(error)
    except (KeyboardInterrupt, typer.Abort):
        console.leave_line()
        console.say("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read our data has seen enough
        return 0
    except Exception as error:
        if _debug:
            raise
        message, hint = _told(error)
        console.show_error(MoetError(message, hint=hint))
        return EXIT_ERROR
    return result if isinstance(result, int) else 0


def main() -> None:
    """The entry point of the command ``moet``."""
    status = run()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stderr.close()
    except OSError:  # told already, when it was written
        status = status or EXIT_ERROR
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
