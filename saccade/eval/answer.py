"""Answering one sample: its turns as one session, or its questions over one context."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from saccade.engine.sampling.params import SamplingParams
from saccade.errors import RequestError, SaccadeError
from saccade.eval.render import Exchange, Prompt, gold_answer, render
from saccade.eval.samples import Sample, Turn
from saccade.eval.setting import Setting
from saccade.llm import LLM
from saccade.outputs import RequestOutput
from saccade.session import Session

COUNTS = (
    *("tokens", "keys_attended", "keys_causal", "keys_scored", "keys_estimated", "retrievals"),
    *("searches", "searchable"),
)


def answer(llm: LLM, sample: Sample, setting: Setting) -> tuple[dict[str, Any], dict[str, float]]:
    """(prediction record, seconds by phase). A sample that cannot be answered gives a record with ``error`` set."""
    with quietly():
        return answer_aloud(llm, sample, setting)


@contextmanager
def quietly() -> Iterator[None]:
    """A failed request is recorded, not announced. For the whole process, so threads share one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def answer_aloud(llm: LLM, sample: Sample, setting: Setting) -> tuple[dict[str, Any], dict[str, float]]:
    """``answer`` without ``quietly``: for threads that answer at once."""
    head = {"id": sample.id, "task": sample.task, "length": sample.length, "index": sample.index}
    timing = {"prefill": 0.0, "decode": 0.0}
    turns: list[dict[str, Any]] = []
    context: dict[str, Any] | None = None
    error: str | None = None
    failed = False
    ask = _shared if sample.shared else _conversation
    try:
        with llm.session(setting.policy) as session:
            for kind, output, extra in ask(session, sample, setting):
                for phase in timing:
                    timing[phase] = round(timing[phase] + output.report[phase]["seconds"], 6)
                if kind == "context":
                    context = _cost(output)
                else:
                    turns.append({**_said(output), **extra, **_cost(output)})
                if output.error is not None:
                    error, failed = output.error, True
                    break
    except SaccadeError as caught:
        error = " ".join(str(caught).split())
    protocol = setting.letter
    if protocol == "B" and not all(turn["question_decoded"] for turn in turns):
        protocol = "A"
    record = {**head, "protocol": protocol, "turns": turns, "context": context, "error": error, "failed": failed}
    return record, timing


Answered = tuple[str, RequestOutput, dict[str, Any]]


def _conversation(session: Session, sample: Sample, setting: Setting) -> Iterable[Answered]:
    tokenizer = session.llm.tokenizer
    history: list[Exchange] = []
    for turn in sample.turns:
        prompt = render(tokenizer, history, turn)
        decoded = len(prompt.ids) - prompt.cut if setting.protocol == "B" and prompt.question_last else 0
        output = session.complete(prompt.ids, _params(session.llm, prompt, turn), decoded=decoded)
        yield "turn", output, {"question_decoded": decoded}
        said = gold_answer(turn) if setting.history == "gold" else output.outputs[0].text
        history.append(Exchange(turn.message(), turn.prefix + said))


def _shared(session: Session, sample: Sample, setting: Setting) -> Iterable[Answered]:
    """The context once, as a stretch of its own; then every question from there, the one before it cut off again."""
    tokenizer = session.llm.tokenizer
    context = sample.turns[0].context
    asked = [replace(turn, context=context) for turn in sample.turns]
    prompts = [render(tokenizer, [], turn) for turn in asked]
    if not all(prompt.question_last for prompt in prompts):
        raise RequestError(f"sample '{sample.id}' shares its context, so every question must stand at its end")
    cut = min(prompt.cut for prompt in prompts)
    params = [_params(session.llm, prompt, turn) for prompt, turn in zip(prompts, asked)]  # all fit, or none runs
    yield "context", session.complete(prompts[0].ids[:cut], SamplingParams(temperature=0.0, max_tokens=1)), {}
    for prompt, chosen in zip(prompts, params):
        decoded = len(prompt.ids) - cut if setting.protocol == "B" else 0
        output = session.complete(prompt.ids, chosen, keep=cut, decoded=decoded)
        yield "turn", output, {"question_decoded": decoded}


def _params(llm: LLM, prompt: Prompt, turn: Turn) -> SamplingParams:
    needed = len(prompt.ids) + turn.max_new_tokens
    if needed > llm.max_model_len:
        raise RequestError(f"the sample needs {needed} tokens with its answer, the model takes {llm.max_model_len}")
    return SamplingParams(temperature=0.0, max_tokens=turn.max_new_tokens, stop=turn.meta.get("stop"))


def _said(output: RequestOutput) -> dict[str, Any]:
    sampled = output.outputs[0]
    return {"prediction": sampled.text, "finish": sampled.finish_reason}


def _cost(output: RequestOutput) -> dict[str, Any]:
    """Counts of work done; times are kept elsewhere, as they differ from run to run."""
    report = output.report
    phases = {phase: {name: report[phase][name] for name in COUNTS} for phase in ("prefill", "decode")}
    return {
        "prompt_tokens": report["prompt_tokens"],
        "cached_tokens": report["cached_tokens"],
        "output_tokens": report["output_tokens"],
        **phases,
        "notes": report["notes"],
    }
