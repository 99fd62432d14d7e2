"""``saccade tune``: which policy a checkpoint allows, and from which length it pays here; ``auto`` uses it."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade.cli.options import say_device, takes_engine
from saccade.errors import RequestError, finite_number

LEAST = 4096  # tokens over which others than the preset are tried
MADE_CONTEXT = 900  # tokens of the made text beside the user's, at least: its facts take room

if TYPE_CHECKING:
    from collections.abc import Callable

    from saccade.engine.settings.config import EngineConfig
    from saccade.eval.tune.study import Found
    from saccade.llm import LLM
    from saccade.passage import Passage


@takes_engine(model="retriever")
def tune(
    model_name: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="What --model says, as the first word.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="UTF-8 text like yours, held beside the one that is made without it."),
    ] = None,
    length: Annotated[int, typer.Option("--length", help="Tokens of the text, the forced ones among them.")] = 4096,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens at its end that are forced as decode steps.")] = 128,
    bound: Annotated[float, typer.Option("--bound", help="Most nats of KL to dense attention.")] = 0.02,
    seconds: Annotated[float, typer.Option("--seconds", help="About how long to try and to time.")] = 120.0,
    rounding: Annotated[
        bool, typer.Option("--rounding/--no-rounding", help="Measure bfloat16's rounding, the yardstick of agreement.")
    ] = True,
    *,
    config: EngineConfig,
) -> None:
    """Try policies on a checkpoint over a text, keep the fastest that answers as dense attention does, and time from
    which length it pays on this machine. Policy auto, the default of serve and chat, then uses it.

    saccade tune path/to/checkpoint -f novel.txt
    """
    from saccade.cli.inputs import has_room, read_text, room_of
    from saccade.eval.tune.page import table
    from saccade.eval.tune.study import tune as study
    from saccade.eval.tune.trial import FEWEST
    from saccade.passage import check_lengths, made_passage, passage_of

    for name, value in (("bound", bound), ("seconds", seconds)):
        if not finite_number(value) or value <= 0:
            raise RequestError(f"{name}={value} must be a number above 0")
    check_lengths(length, tokens)
    text = None if file is None else read_text(file)

    def note(line: str) -> None:
        print(f"saccade: {line}", file=sys.stderr, flush=True)

    if tokens < FEWEST:
        note(f"{tokens} forced tokens tell shares that agree apart by {100 / tokens:.1f} points; give {FEWEST} or more")

    def fitting(llm: LLM, wanted: int) -> int:
        if wanted < room_of(llm):
            return wanted
        note(f"{wanted:,} tokens and one to be predicted: {has_room(llm)}; {room_of(llm) - 1:,} are measured")
        return room_of(llm) - 1

    def made(llm: LLM) -> tuple[str, Passage]:
        wanted = length if text is None else max(length, tokens + MADE_CONTEXT)
        return "made prose with facts", made_passage(llm.encode, fitting(llm, wanted), tokens, 0)

    def given(llm: LLM) -> tuple[str, Passage]:
        assert text is not None
        assert file is not None
        return file.name, passage_of(text, llm.encode, fitting(llm, length), tokens, str(file))

    found = _uninterrupted(
        study,
        replace(config, model=model_name or config.model),
        made if text is None else given,
        also=() if text is None else (made,),
        bound=bound,
        seconds=seconds,
        rounding=rounding,
        least=LEAST,
        note=note,
        started=say_device,
    )
    print(table(found), end="")
    print(f"\n{found.said}")
    if found.tuned.times is not None:
        where = shlex.quote(str(model_name or config.model))
        print(f"Over other texts: saccade eval drift -m {where} -f TEXT -p {shlex.quote(found.tuned.policy)}")
    for file in (found.file, found.heads):
        if file is not None:
            print(file)
    if found.unwritten is not None:
        raise found.unwritten


def _uninterrupted(study: Callable[..., Found], *args: Any, **options: Any) -> Found:
    """What ``study`` finds; says that nothing is kept where it is interrupted."""
    try:
        return study(*args, **options)
    except KeyboardInterrupt:
        print("saccade: interrupted: nothing is kept, and policy auto is what it was", file=sys.stderr)
        raise
