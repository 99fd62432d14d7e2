"""``saccade demo``: ten facts in a long text, asked for under several policies, each answer beside what it cost."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade.cli.inputs import read_text
from saccade.cli.options import DEVICE, KV_DTYPE, load_model
from saccade.cli.progress import reading
from saccade.errors import RequestError

if TYPE_CHECKING:
    from saccade.engine.messages import StepOutput
    from saccade.engine.sampling.params import SamplingParams
    from saccade.llm import LLM
    from saccade.session import Session

POLICIES = ["dense", "streaming", "flashprefill(alpha=0.3)+psa(epsilon=0.9)", "flexprefill(lines=block)+lfps"]
TOKENS, CHARACTERS = 16_384, 24_000  # of what is made up, by default
TOKENS_A_FACT = 256  # a fact's sentence, its question and its answer


@dataclass
class Ask:
    """One question: how to put it to a session, and whether an answer is right."""

    put: Callable[[Session, SamplingParams], Iterator[StepOutput]]
    right: Callable[[str], bool]
    params: dict[str, Any]


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
        Path | None,
        typer.Option(help="A UTF-8 text of yours to plant the facts in; the retriever then answers, byte by byte."),
    ] = None,
    facts: Annotated[int, typer.Option(help="Facts to plant and ask for.")] = 10,
    tokens: Annotated[
        int | None,
        typer.Option(help="Length of the reference model's made-up conversation.", show_default=str(TOKENS)),
    ] = None,
    characters: Annotated[
        int | None, typer.Option(help="Length of any other model's made-up text.", show_default=str(CHARACTERS))
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the text and the facts.")] = 1,
    policy: Annotated[list[str] | None, typer.Option("--policy", "-p", help="Policies to compare.")] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="'reference', 'retriever' or a checkpoint folder.")] = "",
    device: Annotated[str, DEVICE] = "auto",
    kv_dtype: Annotated[str, KV_DTYPE] = "auto",
) -> None:
    """Plant facts in a long text, ask for all of them in one session per policy, and print one table."""
    if not 1 <= facts <= 100:
        raise RequestError(f"facts={facts} must be from 1 to 100")
    if characters is not None and not 1000 <= characters <= 120_000:
        raise RequestError(f"characters={characters} must be from 1000 to 120000")
    if tokens is not None and not 64 * facts <= tokens <= 32_768:
        raise RequestError(f"tokens={tokens} must be from {64 * facts} (64 a fact) to 32768")
    source = read_text(text) if text is not None else None
    if source is not None and not source.strip():
        raise RequestError(f"text file {text} is empty; give one with some text, or leave --text out")
    from saccade.methods.policy import Policy

    chosen = [Policy.parse(one) for one in policy or POLICIES]
    model = model or ("reference" if text is None else "retriever")
    if model == "reference" and source is not None:
        raise RequestError("the reference model reads its own 740 words only; --text needs --model retriever")
    if tokens is not None and model != "reference":
        raise RequestError(f"tokens={tokens} is for --model reference; give --characters, or a --text of that length")
    if characters is not None and (model == "reference" or source is not None):
        raise RequestError(f"characters={characters} is for text made up for --model retriever, without --text")
    llm = load_model(
        model=model, device=device, kv_dtype=kv_dtype, enable_prefix_caching=False
    )  # each policy reads for itself
    if model == "reference":
        asked, where, example = _suite_questions(facts, TOKENS if tokens is None else tokens, seed)
    else:
        if source is not None:
            source = fitting(llm, source, facts)
        length = CHARACTERS if characters is None else characters
        asked, where, example = _text_questions(source, str(text), facts, length, seed)
    print(f"{facts} facts in {where}, asked in one session per policy; model: {model}\n  {example}", flush=True)
    if llm.model.device.type == "cuda":
        began = time.perf_counter()
        for one in chosen:
            _run(llm, one.text, asked)
        passed = time.perf_counter() - began
        print(f"once untimed in {passed:.0f} s: a GPU's kernels are compiled on first use, and kept", flush=True)
    rows = [_run(llm, one.text, asked) for one in chosen]
    _print(rows, len(asked))


def fitting(llm: LLM, source: str, facts: int) -> str:
    """As much of a text as the model can read with its facts, questions and answers; says so where that is not all."""
    room = min(llm.max_model_len, llm.engine.checks.most_tokens) - TOKENS_A_FACT * facts
    if room < TOKENS_A_FACT:
        raise RequestError(
            f"{facts} facts with their questions leave no room for a text: the model reads {llm.max_model_len} tokens; "
            "give fewer --facts or another --model"
        )
    ids = llm.tokenizer.encode(source[: room * 16], add_special_tokens=False)  # no text has longer tokens throughout
    if len(ids) <= room:
        return source
    print(
        f"saccade: note: the model reads {llm.max_model_len:,} tokens at most, so the text's first {room:,} are used; "
        "give a shorter text, or a --model that reads more, for all of it",
        file=sys.stderr,
    )
    return llm.tokenizer.decode(ids[:room]).rstrip("\ufffd")


def _suite_questions(facts: int, tokens: int, seed: int) -> tuple[list[Ask], str, str]:
    """Needles among prose, in the closed vocabulary that the trained model knows."""
    from saccade.eval import suite
    from saccade.eval.metrics import score

    task = replace(suite.TASKS["shared"], wanted=facts, asked=facts)
    turns = suite.sample("demo", task, tokens, 0, seed).turns

    def ask(turn: Any) -> Ask:
        return Ask(
            lambda session, params: session.stream_chat(turn.message(), params),
            lambda answer: score(turn.metric, answer, turn.answers) == 1.0,
            {"max_tokens": turn.max_new_tokens},
        )

    needle = next(line for line in turns[0].message().splitlines() if f":{turns[0].answers[0]};" in line)
    example = f"planted: {needle.strip().split(';')[0]};    asked: {turns[0].question.strip()}"
    return [ask(turn) for turn in turns], f"a made-up text (seed {seed}), {tokens:,} tokens in all", example


def _text_questions(
    source: str | None, name: str, count: int, characters: int, seed: int
) -> tuple[list[Ask], str, str]:
    """Sentences planted in any text, each to be completed."""
    from saccade.facts import is_correct, make_facts, plant
    from saccade.prose import generate

    planted = make_facts(count, seed)
    document = plant(source if source is not None else generate(characters, seed), planted, seed)

    def ask(index: int) -> Ask:
        fact = planted[index]
        prompt = f"{'' if index else document}\n{fact.question}"
        return Ask(
            lambda session, params: session.stream(prompt, params),
            lambda answer: is_correct(answer, fact),
            {"max_tokens": 40, "stop": ["\n", ". "]},
        )

    where = name if source is not None else f"text made from seed {seed}"
    example = f"planted: {planted[0].sentence}    asked: {planted[0].question} ..."
    return [ask(i) for i in range(count)], f"{len(document):,} characters ({where})", example


def _run(llm: LLM, policy: str, asked: Sequence[Ask]) -> Row:
    from saccade.engine.sampling.params import SamplingParams

    reports, correct = [], 0
    began = time.perf_counter()
    with llm.session(policy) as session, reading(llm, policy):
        for one in asked:
            for step in one.put(session, SamplingParams(temperature=0.0, **one.params)):
                outcome = step.outcome
            assert outcome is not None, "a stream ends with an outcome"
            if outcome.error is not None:
                raise RequestError(f"'{policy}' could not answer: {outcome.error}")
            correct += one.right(outcome.text)
            reports.append(outcome.report)
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
            f"{row.phase_seconds('prefill'):.2f}",
            f"{row.phase_seconds('decode'):.2f}",
            f"{row.seconds:.2f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    console.print("density: pairs of query and key that were read, over those that dense attention reads")


def _show(density: float | None) -> str:
    return "-" if density is None else f"{100 * density:.1f} %"
