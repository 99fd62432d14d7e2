"""An answer as it comes, and what is said of it afterwards; shared by generate and chat."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from saccade.cli.progress import reading

if TYPE_CHECKING:
    from saccade.engine.messages import RequestOutcome, StepOutput


def show_stream(steps: Iterator[StepOutput], quiet: bool = False) -> RequestOutcome:
    """Print text as it comes, a progress bar on stderr while a long prompt is read; returns how it ended."""
    outcome: RequestOutcome | None = None
    with closing(steps), reading("reading", quiet) as show:  # type: ignore[type-var]
        for step in steps:
            outcome = step.outcome
            begun = bool(step.new_tokens or step.finished)
            show(step.prefill_total if begun else step.prefilled, step.prefill_total)
            if step.new_text:
                sys.stdout.write(step.new_text)
                sys.stdout.flush()
    assert outcome is not None, "a stream ends with an outcome"
    sys.stdout.write("\n")
    sys.stdout.flush()
    return outcome


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
    print(f"[{outcome.finish_reason}] " + "; ".join(parts), file=sys.stderr)
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
