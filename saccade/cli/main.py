"""The ``saccade`` command: one line and exit code 2 for anything the user can mend, never a traceback for it."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated, Any

import typer

from saccade.cli import calibrate, chat, demo, doctor, generate, inspect
from saccade.cli import eval as evaluation
from saccade.errors import SaccadeError

app = typer.Typer(
    name="saccade",
    help="Long-context LLM inference with sparse attention in prefill and decode.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("inspect")(inspect.inspect)
app.command("calibrate")(calibrate.calibrate)
app.add_typer(evaluation.app, name="eval")

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


def _mount_bench() -> None:
    from saccade.bench.cli import app as bench_app

    app.add_typer(bench_app, name="bench", help="Measure kernels and methods against dense and the machine's limits.")


def main(args: list[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 1 a request failed while running, 2 bad input, 130 interrupted."""
    warnings.showwarning = _note
    if len(args := sys.argv[1:] if args is None else args) == 0 or args[0] not in (
        "generate",
        "chat",
        "demo",
        "doctor",
        "inspect",
        "calibrate",
        "eval",
    ):
        _mount_bench()  # imports torch; the other commands need not wait for it
    try:
        code = app(args=args, standalone_mode=False)
    except SaccadeError as error:
        _fail(str(error))
    except _UsageError as error:
        if not type(error).__name__.startswith("NoArgs"):
            _fail(f"{error.format_message()} (see: saccade {' '.join(_command(args))}--help)")
        code = 2
    except (KeyboardInterrupt, EOFError):
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        if type(error).__name__ != "Abort":
            raise
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _command(args: list[str]) -> list[str]:
    first = [arg for arg in args[:1] if not arg.startswith("-")]
    return [*first, ""]


def _fail(message: str) -> None:
    print("saccade: error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


def _note(message: object, category: type[Warning], *_: object, **__: object) -> None:
    """Warnings meant for users, as one line; Python's own stay out of the way."""
    if issubclass(category, (UserWarning, RuntimeWarning)):
        print("saccade: note: " + " ".join(str(message).split()), file=sys.stderr)


if __name__ == "__main__":
    main()
