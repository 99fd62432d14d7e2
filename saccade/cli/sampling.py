"""The options of sampling, stated once for all commands that sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from saccade.cli.options import Command, replaced
from saccade.errors import RequestError, shown


def _option(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help)


# Of saccade.SamplingParams, whose names and defaults these are; log-probabilities and samples are for programs.
SAMPLING: dict[str, tuple[Any, Any]] = {
    "max_tokens": (Annotated[int, _option("Most tokens to generate.", "--max-tokens", "-n")], 128),
    "temperature": (Annotated[float, _option("0 is greedy.")], 0.0),
    "top_p": (Annotated[float, _option("Nucleus sampling.")], 1.0),
    "top_k": (Annotated[int, _option("Sample from the k likeliest; 0 is off.")], 0),
    "min_p": (Annotated[float, _option("Least probability relative to the likeliest.")], 0.0),
    "repetition_penalty": (Annotated[float, _option("On tokens of prompt and answer; 1 is off.")], 1.0),
    "frequency_penalty": (Annotated[float, _option("For each time that a token stands in the answer.")], 0.0),
    "presence_penalty": (Annotated[float, _option("Once for a token that stands in the answer.")], 0.0),
    "min_tokens": (Annotated[int, _option("No end before so many tokens.")], 0),
    "stop": (Annotated[list[str] | None, _option("Stop at this text; may be given several times.")], None),
    "include_stop": (Annotated[bool, _option("Let that text stand in the answer.", "--include-stop")], False),
    "stop_token_ids": (
        Annotated[list[int] | None, _option("Stop at this token; may be given several times.", "--stop-token-id")],
        None,
    ),
    "bad_words": (
        Annotated[list[str] | None, _option("Never say this; may be given several times.", "--bad-word")],
        None,
    ),
    "logit_bias": (
        Annotated[
            list[str] | None,
            typer.Option("--logit-bias", metavar="TOKEN=BIAS", help="Add to a token's logit; several may be given."),
        ],
        None,
    ),
    "certify": (
        Annotated[
            tuple[float, float] | None,
            typer.Option("--certify", metavar="EPSILON DELTA", help="Bound each head's error (docs/audit.md)."),
        ],
        None,
    ),
    "bounds": (
        Annotated[float | None, _option("Share of decode steps with PrHS's certificates (docs/audit.md).")],
        None,
    ),
    "seed": (Annotated[int | None, _option("Seed of sampling.")], None),
    "ignore_eos": (Annotated[bool, _option("Go on after an end token.", "--ignore-eos")], False),
    "special_tokens": (Annotated[bool, _option("Show special tokens.", "--special-tokens")], False),
}


def takes_sampling(**defaults: Any) -> Callable[[Command], Command]:
    """Gives a command with ``params: SamplingParams`` the options of sampling; ``defaults`` of its own."""

    def make(given: dict[str, Any], _: dict[str, Any]) -> Any:
        from saccade.engine.sampling.params import SamplingParams

        given["include_stop_str_in_output"] = given.pop("include_stop")
        given["skip_special_tokens"] = not given.pop("special_tokens")
        given["logit_bias"] = biases(given["logit_bias"])
        for name in ("stop", "stop_token_ids", "bad_words"):
            given[name] = given[name] or None
        return SamplingParams(**given)

    known = {name: (kind, defaults.get(name, default)) for name, (kind, default) in SAMPLING.items()}
    return lambda command: replaced(command, "params", known, make)


def biases(texts: Iterable[str] | None) -> dict[int, float] | None:
    """``TOKEN=BIAS`` texts as a mapping; None for none. RequestError for others."""
    if not texts:
        return None
    found: dict[int, float] = {}
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            found[int(token)] = float(bias)
        except ValueError:
            raise RequestError(f"logit_bias={shown(text)} must be TOKEN=BIAS, for example 42=-5") from None
    return found
