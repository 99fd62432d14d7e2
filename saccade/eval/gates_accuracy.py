"""What a model answers when it may read only part of its context: a budget, the needle alone, or all but the needle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from saccade.errors import PolicyError, RequestError, SaccadeError
from saccade.eval.predict import Setting, answer
from saccade.eval.render import Prompt, render
from saccade.eval.samples import Sample
from saccade.llm import LLM
from saccade.methods.base import Method, Query
from saccade.methods.options import require_whole
from saccade.methods.policy import Policy, PolicyLike
from saccade.selection import Dense, Selection, Tokens

Evaluate = Callable[[Sample, Policy, str], float]  # sample, policy, protocol (A or B) -> score from 0 to 1
Range = tuple[int, int]  # token positions, half open

BUDGET = 0.1  # of the keys
BEFORE, AFTER, BLOCK = 24, 8, 32  # tokens around an answer that count as its needle; the blocks that are masked


@dataclass(frozen=True)
class KeyRanges(Method):
    """Decode reads everything but the positions in ``remove``, or with ``keep`` only those, the first ``sinks`` and the
    last ``local`` keys; the row's own key always. The causal check of what an answer hangs on, no method to use."""

    name: ClassVar[str] = "key_ranges"
    paper: ClassVar[str] = "causal check"
    phases: ClassVar[tuple[str, ...]] = ("decode",)

    remove: tuple[Range, ...] = ()
    keep: tuple[Range, ...] | None = None
    sinks: int = 4
    local: int = 64

    def __post_init__(self) -> None:
        require_whole("sinks", self.sinks, 0)
        require_whole("local", self.local, 1)
        for start, stop in (*self.remove, *(self.keep or ())):
            if not 0 <= start < stop:
                raise PolicyError(f"range ({start}, {stop}) must be (start, stop) with 0 <= start < stop")

    def select_decode(self, query: Query, state: Any) -> Selection:
        n = query.shape.k_len
        read = torch.full((n,), self.keep is None)
        for start, stop in self.keep or ():
            read[start:stop] = True
        if self.keep is not None:
            read[: self.sinks] = read[max(0, n - self.local) :] = True
        for start, stop in self.remove:
            read[start:stop] = False
        read[-1] = True
        return Dense(query.shape) if bool(read.all()) else Tokens.from_mask(query.shape, read[None, None])


def evaluator(llm: LLM) -> Evaluate:
    """Score a sample with the model: the mean over its turns. Raises RequestError for a sample that cannot be asked."""
    from saccade.eval.metrics import METRICS
    from saccade.eval.score import score_record

    def evaluate(sample: Sample, policy: Policy, protocol: str) -> float:
        record, _ = answer(llm, sample, Setting(policy, protocol))
        score = score_record(sample, record, METRICS)["score"]
        if score is None:
            raise RequestError(f"sample '{sample.id}' could not be asked: {record['error']}")
        return float(score)

    return evaluate


def accuracy(samples: Sequence[Sample], policy: PolicyLike, evaluate: Evaluate, protocol: str = "B") -> list[float]:
    """Scores of the samples under one policy, in order. Raises SaccadeError for no samples."""
    if not samples:
        raise SaccadeError("no samples: give at least one of each task")
    chosen = Policy.parse(policy)
    return [evaluate(sample, chosen, protocol) for sample in samples]


def budget_policies(length: int, budget: float = BUDGET) -> dict[str, str]:
    """The policies of the discrimination gate: dense, and three decode methods that read ``budget`` of ``length`` keys.

    Streaming's window is fixed, as it is a number of keys."""
    window = max(1, round(budget * length) - 4)
    return {
        "dense": "dense",
        "oracle": f"topk(k={budget})",
        "streaming": f"prefill=dense, decode=streaming(sinks=4, window={window})",
        "random": f"prefill=dense, decode=random(k={budget})",
    }


def discrimination(samples: Sequence[Sample], length: int, evaluate: Evaluate) -> dict[str, list[float]]:
    """Scores under protocol B of dense, the oracle, streaming and random at ``BUDGET`` of the keys."""
    return {name: accuracy(samples, policy, evaluate) for name, policy in budget_policies(length).items()}


def needle_ranges(tokenizer: Any, prompt: Prompt, answers: Sequence[str]) -> list[Range]:
    """Where the answers stand in the context, as whole blocks of ``BLOCK`` tokens that reach ``BEFORE`` tokens before
    them and ``AFTER`` behind. Merged and sorted; empty if an answer does not stand there word by word."""
    context = prompt.ids[: prompt.cut]
    found: list[Range] = []
    for text in answers:
        spelt = [tokenizer.encode(form, add_special_tokens=False) for form in (text, f" {text}")]
        places = [(at, at + len(ids)) for ids in spelt if ids for at in _occurrences(context, ids)]
        if not places:
            return []
        found += [
            (max(0, start - BEFORE) // BLOCK * BLOCK, min(-(-(stop + AFTER) // BLOCK) * BLOCK, len(context)))
            for start, stop in places
        ]
    return _merged(found)


def causal(llm: LLM, samples: Sequence[Sample], evaluate: Evaluate) -> dict[str, list[float]]:
    """Scores under protocol B of dense, of everything but the needle's blocks (``without``), and of these, sinks and a
    local window alone (``only``). Samples of several turns, or whose answer does not stand in the context word by word,
    are left out; raises SaccadeError if none is left."""
    scores: dict[str, list[float]] = {"dense": [], "without": [], "only": []}
    for sample in samples:
        if len(sample.turns) != 1:
            continue
        prompt = render(llm.tokenizer, [], sample.turns[0])
        ranges = tuple(needle_ranges(llm.tokenizer, prompt, sample.turns[0].answers)) if prompt.question_last else ()
        if ranges:
            policies = {
                "dense": Policy(),
                "without": Policy(decode=KeyRanges(remove=ranges)),
                "only": Policy(decode=KeyRanges(keep=ranges)),
            }
            for name, policy in policies.items():
                scores[name].append(evaluate(sample, policy, "B"))
    if not scores["dense"]:
        raise SaccadeError(
            "no sample fits the causal check: it takes one turn, the question last, and an answer that stands in the "
            "context word by word"
        )
    return scores


def _occurrences(ids: Sequence[int], part: Sequence[int]) -> list[int]:
    """Every place in ``ids`` where ``part`` begins."""
    wanted = list(part)
    return [
        at
        for at in range(len(ids) - len(wanted) + 1)
        if ids[at] == wanted[0] and list(ids[at : at + len(wanted)]) == wanted
    ]


def _merged(ranges: Sequence[Range]) -> list[Range]:
    out: list[Range] = []
    for start, stop in sorted(ranges):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(stop, out[-1][1]))
        else:
            out.append((start, stop))
    return out
