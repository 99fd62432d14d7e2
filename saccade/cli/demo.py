"""``saccade demo``: ten facts in a long text, asked for under several policies, each answer beside what it cost."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade.cli.inputs import read_text
from saccade.errors import RequestError

if TYPE_CHECKING:
    from saccade.eval.facts import Fact
    from saccade.llm import LLM

POLICIES = ["dense", "streaming", "flexprefill+psa(epsilon=0.98)"]


@dataclass
class Row:
    """What one policy did with all questions of the session."""

    policy: str
    correct: int
    reports: list[dict[str, Any]]
    seconds: float

    def density(self, phase: str) -> float | None:
        """Attended over causal pairs of all turns together."""
        causal = sum(report[phase]["keys_causal"] for report in self.reports)
        return sum(report[phase]["keys_attended"] for report in self.reports) / causal if causal else None

    def phase_seconds(self, phase: str) -> float:
        return sum(report[phase]["seconds"] for report in self.reports)


def demo(
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text to plant the facts in; by default one is made up.")
    ] = None,
    facts: Annotated[int, typer.Option(help="Facts to plant and ask for.")] = 10,
    characters: Annotated[int, typer.Option(help="Length of the made-up text.")] = 24_000,
    seed: Annotated[int, typer.Option(help="Seed of the text and the facts.")] = 1,
    policy: Annotated[list[str] | None, typer.Option("--policy", "-p", help="Policies to compare.")] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="Checkpoint folder, or 'retriever'.")] = "retriever",
) -> None:
    """Plant facts in a long text, ask for all of them in one session per policy, and print one table."""
    if not 1 <= facts <= 100:
        raise RequestError(f"facts={facts} must be from 1 to 100")
    if not 1000 <= characters <= 120_000:
        raise RequestError(f"characters={characters} must be from 1000 to 120000")
    source = read_text(text) if text is not None else None
    from saccade.eval.facts import make_facts, plant
    from saccade.eval.prose import generate
    from saccade.llm import LLM
    from saccade.methods.policy import Policy

    chosen = [Policy.parse(one) for one in policy or POLICIES]
    planted = make_facts(facts, seed)
    document = plant(source if source is not None else generate(characters, seed), planted, seed)
    llm = LLM(model)
    where = str(text) if text is not None else f"text made from seed {seed}"
    print(f"{facts} facts in {len(document):,} characters ({where}), asked in one session per policy; model: {model}")
    for fact in planted[:2]:
        print(f"  planted: {fact.sentence}    asked: {fact.question} ...")
    rows = [_run(llm, one.text, document, planted) for one in chosen]
    _print(rows, len(planted))


def _run(llm: LLM, policy: str, document: str, facts: list[Fact]) -> Row:
    from saccade.engine.params import SamplingParams
    from saccade.eval.facts import is_correct

    params = SamplingParams(temperature=0.0, max_tokens=40, stop=["\n", ". "])
    reports, correct = [], 0
    began = time.perf_counter()
    with llm.session(policy) as session:
        context = document
        for fact in facts:
            output = session.generate(f"{context}\n{fact.question}", params)
            correct += is_correct(output.outputs[0].text, fact)
            reports.append(output.report)
            context = ""
    return Row(policy, correct, reports, time.perf_counter() - began)


def _print(rows: list[Row], count: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="what each policy answered and read")
    table.add_column("policy", no_wrap=True)
    columns = ("correct", "prefill density", "decode density", "prefill s", "decode s", "total s")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.policy,
            f"{row.correct}/{count}",
            _show(row.density("prefill")),
            _show(row.density("decode")),
            f"{row.phase_seconds('prefill'):.1f}",
            f"{row.phase_seconds('decode'):.1f}",
            f"{row.seconds:.1f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    console.print("density: pairs of query and key that were read, over those that dense attention reads")


def _show(density: float | None) -> str:
    return "-" if density is None else f"{100 * density:.1f} %"
