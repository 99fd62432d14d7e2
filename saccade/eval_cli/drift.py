"""``saccade eval drift``: how far policies move a model away from dense attention on a text, and which to use."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from saccade.cli.options import say_device, takes_engine

if TYPE_CHECKING:
    from saccade.engine.settings.config import EngineConfig
    from saccade.llm import LLM
    from saccade.passage import Passage

METHODS = "topp, lfps, cis, arkvale, psa, quest, twilight, snapkv, flexprefill+lfps", "decode=streaming"


@takes_engine(model="reference", dtype="float32")
def drift(
    file: Annotated[Path | None, typer.Option("--file", "-f", help="UTF-8 text; without it one is made.")] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--methods", "-p", help=f"Policies, separated by commas or given again. Default: {', '.join(METHODS)}."
        ),
    ] = None,
    length: Annotated[int, typer.Option("--length", help="Tokens of the text, the forced ones among them.")] = 4096,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens at its end that are forced as decode steps.")] = 128,
    bound: Annotated[
        float, typer.Option("--bound", help="Nats of KL that are accepted where rounding's are not.")
    ] = 0.02,
    rounding: Annotated[
        bool, typer.Option("--rounding/--no-rounding", help="Measure dense in bfloat16 beside float32.")
    ] = True,
    weights: Annotated[
        bool, typer.Option("--weights/--no-weights", help="Measure the true attention weight that is kept.")
    ] = True,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the made text, of sampled rows and of intervals.")] = 0,
    mix: Annotated[bool, typer.Option("--mix", help="Continue results that other versions or machines began.")] = False,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write to, and to go on from.")] = Path(
        "drift-results"
    ),
    *,
    config: EngineConfig,
) -> None:
    """Force a text on dense and on policies: KL, agreement, perplexity, true weight kept, density, and what to use. A
    killed run goes on where it was."""
    from saccade.cli.inputs import read_text
    from saccade.errors import RequestError, finite_number
    from saccade.eval.drift.page import advice_line, notes, table
    from saccade.eval.drift.study import REPORT, measure_drift
    from saccade.methods.policy import Policy, split_policies
    from saccade.passage import check_lengths, made_passage, passage_of

    policies = [Policy.parse(text) for given in methods or METHODS for text in split_policies(given)]
    check_lengths(length, tokens)
    if not finite_number(bound) or bound <= 0:
        raise RequestError(f"bound={bound} must be a number of nats above 0")
    text = None if file is None else read_text(file)

    def source(llm: LLM) -> tuple[str, Passage]:
        if text is None or file is None:
            return "made prose with facts", made_passage(llm.encode, length, tokens, seed)
        return file.name, passage_of(text, llm.encode, length, tokens, str(file))

    _, rows, advice = measure_drift(
        config,
        source,
        policies,
        out,
        seed=seed,
        bound=bound,
        rounding=rounding,
        weights=weights,
        mix=mix,
        note=lambda line: print(f"saccade: {line}", file=sys.stderr, flush=True),
        started=say_device,
    )
    print(table(rows), end="")
    for line in notes(rows):
        print(line)
    print(f"\n{advice_line(advice)}")
    print(out / REPORT)
