"""``python -m saccade.transformers [--policy POLICY] COMMAND ...``: runs a command of Python's as it is, with saccade's
attention in the models that it loads: ``lm_eval``, ``transformers serve``, a script.

COMMAND is what a shell would start (an installed script of Python's), or the path of a .py file.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import saccade.transformers  # noqa: F401  (registers)
from saccade.errors import SaccadeError
from saccade.methods.policy import Policy
from saccade.models.attention import ATTENTION_NAME
from saccade.models.families import FAMILIES
from saccade.transformers.runtime import POLICY, usable

USAGE = "python -m saccade.transformers [--policy POLICY] COMMAND ..."


def choose_by_default() -> None:
    """Models of families that are served attend by saccade unless another way is named at load."""
    theirs = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    @functools.wraps(theirs)
    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        served = any(
            one.causal_lm == cls.__name__ and one.keeping is None and not one.latent for one in FAMILIES.values()
        )
        if served and kwargs.get("attn_implementation") is None:
            kwargs["attn_implementation"] = ATTENTION_NAME
            config = kwargs.get("config")
            if config is not None:
                config._attn_implementation = ATTENTION_NAME
        elif kwargs.get("attn_implementation") != ATTENTION_NAME:
            print(f"saccade: note: {cls.__name__} does not attend by saccade; no policy holds in it", file=sys.stderr)
        return theirs(cls, name, *args, **kwargs)

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment]


def main(arguments: list[str]) -> int:
    """Run a command in this process; its exit code, or 2 with a line that says what is wrong."""
    if arguments[:1] == ["--policy"] and len(arguments) > 1:
        try:
            os.environ[POLICY] = usable(Policy.parse(arguments[1])).text
        except SaccadeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        arguments = arguments[2:]
    if not arguments or arguments[0].startswith("-"):
        print(f"usage: {USAGE}", file=sys.stderr)
        return 2
    command, sys.argv = arguments[0], list(arguments)
    choose_by_default()
    if command.endswith(".py") and Path(command).is_file():
        sys.path.insert(0, str(Path(command).resolve().parent))  # as Python itself does
        runpy.run_path(command, run_name="__main__")
        return 0
    found = entry_points(group="console_scripts", name=command)
    if not found:
        print(
            f"error: '{command}' is neither a .py file nor a command that a Python package here has installed; usage: "
            f"{USAGE}",
            file=sys.stderr,
        )
        return 2
    return found[command].load()() or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
