"""Commands of the distribution saccade-eval, and what ``saccade`` says where it is not installed."""

from __future__ import annotations

import importlib
from typing import Any

import typer

from saccade.errors import SaccadeError

OURS = ("saccade.eval", "saccade.bench", "saccade.eval_cli")  # its folders
# By command: the module that has it, under the command's name or, for a group of commands, as ``app``.
COMMANDS = {
    "demo": "saccade.eval_cli.demo",
    "inspect": "saccade.eval_cli.inspect",
    "tune": "saccade.eval_cli.tune",
    "eval": "saccade.eval_cli.eval",
    "bench": "saccade.eval_cli.bench",
}
# Of a command that is missing: whatever it is given, it says so.
ANY = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def add(app: typer.Typer, name: str) -> None:
    """Add the command ``name`` of saccade-eval to ``app``; where that is not installed, one that says so."""
    try:
        module = importlib.import_module(COMMANDS[name])
    except ModuleNotFoundError as error:
        if error.name not in OURS:
            raise
        app.command(name, context_settings=ANY, help=f"Not installed: {way(name)}")(missing(name))
        return
    group = getattr(module, "app", None)
    if group is None:
        app.command(name)(getattr(module, name))
    else:
        app.add_typer(group, name=name)


def way(name: str) -> str:
    """How to get the command ``name``."""
    return f"'saccade {name}' is in saccade-eval: pip install \"saccade-llm[eval]\""


def missing(name: str) -> Any:
    """A command that ends with how to get it, whatever it is given."""

    def command(_: typer.Context) -> None:
        raise SaccadeError(f"{way(name)} (this installation has saccade-llm alone)")

    return command
