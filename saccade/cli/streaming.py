"""An answer as it comes, and what is said of it afterwards; shared by generate and chat."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from saccade.cli.progress import reading

if TYPE_CHECKING:
    from saccade.engine.messages import RequestOutcome, StepOutput
    from saccade.llm import LLM


def show_stream(
    llm: LLM, steps: Iterator[StepOutput], quiet: bool = False, stop: Callable[[], bool] | None = None
) -> RequestOutcome:
    """Print text as it comes, a progress bar on stderr while ``llm`` reads a long prompt; returns how it ended. Ctrl-C
    calls ``stop``, which ends an answer that has begun and lets it stand, or says that it cannot; then, and the second
    time, it interrupts. Without ``stop`` nothing comes after this: the engine ends, in the midst of a chunk too."""
    outcome: RequestOutcome | None = None
    with _interrupts(stop, llm.loop.close_soon), closing(steps), reading(llm, quiet=quiet) as read:  # type: ignore[type-var]
        for step in steps:
            outcome = step.outcome
            if step.new_tokens or step.finished:
                read()
            if step.new_text:
                sys.stdout.write(step.new_text)
                sys.stdout.flush()
    assert outcome is not None, "a stream ends with an outcome"
    sys.stdout.write("\n")
    sys.stdout.flush()
    return outcome


@contextmanager
def _interrupts(stop: Callable[[], bool] | None, end: Callable[[], None]) -> Iterator[None]:
    """Within the block Ctrl-C asks ``stop`` first, once; without one it calls ``end``."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def interrupted(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if stop is None:
            end()
        if stop is None or asked or not stop():
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def as_dict(outcome: RequestOutcome) -> dict[str, Any]:
    """How a request ended and its report, as plain data."""
    return {"finish_reason": outcome.finish_reason, "error": outcome.error, **outcome.report}


def summary(outcome: RequestOutcome) -> None:
    """What an answer cost, in one line on stderr, and what ran otherwise than asked."""
    report = outcome.report
    parts = []
    for phase in ("prefill", "decode"):
        stats = report[phase]
        if stats["tokens"]:
            read = "nothing read" if stats["density"] is None else f"density {stats['density']:.3f}"
            parts.append(
                f"{phase} {stats['tokens']} tokens by {stats['policy']}, {read}, "
                f"{stats['seconds']:.2f} s ({stats['tokens_per_second'] or 0:.1f} tokens/s)"
            )
    cut = "; the answer was cut: -n allows more" if outcome.finish_reason == "length" else ""
    print(f"[{outcome.finish_reason}] " + "; ".join(parts) + cut, file=sys.stderr)
    for note in report["notes"]:
        print(f"saccade: note: {note}", file=sys.stderr)


def hint(model: str, text: str) -> bool:
    """Where a built-in model had nothing to say: what it can do, and how to give another. Whether it was said."""
    from saccade.models.reference import ABOUT

    needed = not text.strip() and model in ABOUT
    if needed:
        print(
            f"saccade: note: the built-in model '{model}' found nothing to say: {ABOUT[model]}. Give a language model "
            "with -m: a folder, a GGUF file, a hub name such as Qwen/Qwen3-8B, or one that saccade fetch brings",
            file=sys.stderr,
        )
    return needed
