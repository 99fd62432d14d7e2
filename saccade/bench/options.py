"""The options that the ``saccade bench`` commands share, and the reading of their texts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from saccade.cli.lengths import lengths, parts
from saccade.errors import SaccadeError

if TYPE_CHECKING:
    import torch

__all__ = ["at_least", "choice", "density", "device", "lengths", "method_text", "parts", "storage"]

Model = Annotated[str, typer.Option(help="random (a random 125M Llama), a built-in model, or a checkpoint folder.")]
Contexts = Annotated[str, typer.Option(help="Context lengths, separated by commas.")]
Storage = Annotated[str, typer.Option(help="bfloat16 or float32.")]
Threads = Annotated[int, typer.Option(help="Threads of torch and of the kernels.")]
Repeats = Annotated[int, typer.Option(help="Repeats of each measurement; the median counts.")]
Limit = Annotated[float, typer.Option(help="Seconds after which no measurement begins.")]
Chunk = Annotated[int | None, typer.Option(help="Prompt tokens of one step; by default the engine's own.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:N, or auto: the GPU where there is one.")]
Clock = Annotated[
    str, typer.Option(help="wall, or cpu for the time of this process: for one thread on a busy machine.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write machine, limits and rows to this file.")]
MarkdownFile = Annotated[Path | None, typer.Option("--markdown", help="Write the table to this file.")]


def choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise SaccadeError(f"{name}={value} is unknown; known: {', '.join(map(str, allowed))}")


def storage(name: str) -> torch.dtype:
    """The dtype that a ``Storage`` names."""
    import torch

    choice("dtype", name, ("bfloat16", "float32"))
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def device(name: str) -> torch.device:
    """The device that a ``Device`` names. ModelError where torch does not see it."""
    from saccade.machine import best_device
    from saccade.models.target import checked_device

    return checked_device(best_device() if name == "auto" else name)


def at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise SaccadeError(f"{name}={value} must be at least {least}")


def density(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise SaccadeError(f"densities: '{text}' is not a number above 0 and at most 1; write them as 0.25,0.1")
    return value


def method_text(text: str, suite: str) -> str:
    """``text`` itself, if it is a method of ``suite``; lfps may say its share of candidates, as in lfps@0.02."""
    from saccade.methods import Policy, parse_method

    name, at, share = text.partition("@")
    if suite == "decode" and Policy.parse(name).window is not None:
        return text
    method = parse_method(name)
    if at:
        if method.name != "lfps" or not 0 < density(share) < 0.5:
            raise SaccadeError(f"'{text}': only lfps runs at a share of candidates, below 0.5, as in lfps@0.02")
        return text
    if suite not in method.phases:
        raise SaccadeError(f"method '{method.name}' does not select in {suite}, only in {', '.join(method.phases)}")
    return text
