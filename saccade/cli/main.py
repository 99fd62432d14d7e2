"""The ``saccade`` command: one line and exit code 2 for anything the user can mend, never a traceback for it."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import warnings
from typing import Annotated, Any, NoReturn

import typer

from saccade.cli import (
    calibrate,
    chat,
    doctor,
    explain,
    fetch,
    generate,
    given,
    info,
    measuring,
    methods,
    serve,
)
from saccade.cli import sessions as kept_sessions
from saccade.cli.options import HELP_NAMES
from saccade.errors import SaccadeError, shown

app = typer.Typer(
    name="saccade",
    help="Long-context LLM inference with sparse attention in prefill and decode. A command's options may also "
    "stand in a YAML file (--config FILE) and in the environment (SACCADE_KV_MEMORY for --kv-memory).",
    no_args_is_help=True,
    context_settings=HELP_NAMES,
    pretty_exceptions_enable=False,
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("sessions")(kept_sessions.sessions)
app.command("serve")(serve.serve)
measuring.add(app, "demo")
app.command("fetch")(fetch.fetch)
app.command("info")(info.info)
app.command("doctor")(doctor.doctor)
measuring.add(app, "inspect")
app.command("calibrate")(calibrate.calibrate)
measuring.add(app, "tune")
app.command("methods")(methods.methods)
app.command("explain")(explain.explain)
measuring.add(app, "eval")

# typer's own usage errors, wherever its version keeps click
_UsageError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def _version(value: bool) -> None:
    if value:
        from saccade import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@functools.cache  # once: what is mounted again is listed and searched again
def _mount_bench() -> None:
    measuring.add(app, "bench")


def main(args: list[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 1 a request failed while running, 2 bad input, 130 interrupted."""
    warnings.showwarning = _note
    _prepare_output()
    args = sys.argv[1:] if args is None else args
    try:
        if not args or args[0] not in _known():
            _mount_bench()  # imports torch; the other commands need not wait for it
        if given.wanted(args, os.environ):
            args = given.expanded(args, typer.main.get_command(app), os.environ)
        code = app(args=args, standalone_mode=False, prog_name="saccade")
        sys.stdout.flush()  # here, and not at the interpreter's end: a full disk is an error like any other
    except SaccadeError as error:
        _fail(str(error))
    except _UsageError as error:
        if not type(error).__name__.startswith("NoArgs"):
            _fail(f"{error.format_message().removesuffix('.')} (see: saccade {_command(args)}--help)")
        code = 2
    except (KeyboardInterrupt, EOFError):
        sys.exit(130)
    except BrokenPipeError:
        _end_unread()
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # click saw it first, and calls it a failure
            _end_unread()
        raise
    except OSError as error:
        _drop_output()
        name = "" if error.filename is None else f"{shown(str(error.filename))}: "
        _fail(f"{name}{error.strerror or error}")
    except Exception as error:
        if type(error).__name__ != "Abort":
            raise
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _prepare_output() -> None:
    """Output that the terminal's encoding has no letters for is spelt out; output without a reader goes nowhere, and
    from an input that is closed nothing comes."""
    if sys.stdin is None:  # closed by the parent process, as are those below
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  (for as long as this runs)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (for as long as this runs)
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """What is still to be written cannot be: the interpreter's end would try once more, and complain."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (as above)
    with contextlib.suppress(OSError):
        os.dup2(sys.stdout.fileno(), 1)


def _end_unread() -> NoReturn:
    """The reader of the output has seen enough: no failure."""
    _drop_output()
    sys.exit(0)


def _command(args: list[str]) -> str:
    """The command whose help says more, with a space; nothing where there is no such command."""
    return f"{args[0]} " if args[:1] and args[0] in _known() else ""


def _known() -> set[str | None]:
    return {command.name for command in app.registered_commands} | {str(group.name) for group in app.registered_groups}


def _fail(message: str) -> None:
    print("saccade: error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


def _note(message: object, category: type[Warning], *_: object, **__: object) -> None:
    """Warnings meant for users, as one line; Python's own stay out of the way."""
    if issubclass(category, (UserWarning, RuntimeWarning)):
        print("saccade: note: " + " ".join(str(message).split()), file=sys.stderr)


if __name__ == "__main__":
    main()
