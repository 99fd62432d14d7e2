"""``saccade explain``: which path a policy's rows take through attention here, and why not a faster one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade.cli.options import POLICY, load_model, takes_engine

if TYPE_CHECKING:
    from saccade.engine.settings.config import EngineConfig

LENGTHS = "88,2048"
TOKENS = 16  # decoded at each length: fewer leave auto dense


@takes_engine()
def explain(
    policy: Annotated[str, POLICY] = "dense",
    lengths: Annotated[str, typer.Option("--lengths", help="Prompt tokens, separated by commas.")] = LENGTHS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    config: EngineConfig | None = None,
) -> None:
    """Run a policy on prompts of some lengths and tell which path their rows took, what was read, and why no faster
    path served.

    saccade explain --policy psa -m smollm2
    """
    from saccade.cli.lengths import lengths as parsed
    from saccade.engine.steps.paths import MEANINGS

    with load_model(config) as llm:
        rows = [row for length in parsed(lengths) for row in measured(llm, policy, length)]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        read = ", ".join(row["selections"])
        print(f"{row['tokens']} tokens, {row['phase']}: {row['path']} ({row['rows']} rows; {row['backend']}; {read})")
        print(f"  {MEANINGS[row['path']]}")
        if row["why"] is not None:
            print(f"  no faster path: {row['why']}")


def measured(llm: Any, policy: str, length: int) -> list[dict[str, Any]]:
    """Paths of a prompt of ``length`` tokens and some tokens after it, as plain data."""
    from saccade import SamplingParams

    vocabulary = llm.model.spec.vocab_size
    ids = [(17 * at * at + 31 * at + 7) % vocabulary for at in range(length)]  # no text: paths hang on lengths
    asked = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    report = llm.generate([ids], asked, policy=policy)[0].report
    rows = []
    for phase in ("prefill", "decode"):
        of = report[phase]
        for one in of["paths"]:
            rows.append(
                {
                    "tokens": length,
                    "phase": phase,
                    **one,
                    "backend": "+".join(of["backends"]) or "-",
                    "selections": list(of["selections"]),
                }
            )
    return rows
