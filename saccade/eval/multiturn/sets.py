"""The sets the builder knows: the eleven of LoopServe's Table 3, and ours of the same shapes (``mtsyn_*``).

Scores are those of its section 6.1.3: F1 for questions, LCS(C, R) / |R| for summaries, accuracy for types of questions.
Table 3 says accuracy for samsum too, whose answers are summaries in free words: an exact match would score nearly all
of them 0, so they are scored as summaries.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.errors import RequestError

QA, SUMMARY, FEW_SHOT = "qa", "summary", "few_shot"
NOISE = {QA: 0.10, SUMMARY: 0.15, FEW_SHOT: 0.0}  # of a turn's words
TURNS = {QA: 3, SUMMARY: 2, FEW_SHOT: 2}
INSTANCES = {QA: 500, SUMMARY: 500, FEW_SHOT: None}  # None: every item that parses, once

SCORED = (
    "Multi-turn sets are scored as LoopServe's section 6.1.3 says: questions by F1, summaries by LCS/|R|, types of "
    "questions by accuracy. samsum is the exception: Table 3 names accuracy, but its answers are summaries, and scored "
    "so."
)

_BRIEF = "Answer from the texts given so far, in as few words as possible."
_UNANSWERABLE = (
    'Answer from the texts given so far, in as few words as possible; write "unanswerable" if they do not say it, and '
    '"yes" or "no" to a yes/no question.'
)
_TYPE = "Name the type of this question, as the examples do."
_DIALOGUE = "Summarize this dialogue in a few short sentences, as the examples do."


@dataclass(frozen=True)
class MultiTurnSet:
    """``passages``: contexts are ``Passage n:`` blocks, which are never split. ``cue`` opens the assistant's turn.
    ``shot``: the two line starts of an example. ``paper_tokens``: LoopServe's Table 3 average, tokenizer unnamed."""

    kind: str
    metric: str
    max_new_tokens: int
    cue: str
    instruction: str = ""
    passages: bool = False
    shot: tuple[str, str] | None = None
    paper_tokens: int | None = None


def _qa(tokens: int, paper: int | None, *, passages: bool = False, instruction: str = _BRIEF) -> MultiTurnSet:
    return MultiTurnSet(QA, "qa_f1_score", tokens, "Answer:", instruction, passages, paper_tokens=paper)


def _summary(cue: str, paper: int | None, tokens: int = 512) -> MultiTurnSet:
    return MultiTurnSet(SUMMARY, "rouge_l_recall", tokens, cue, paper_tokens=paper)


_TREC, _SAMSUM = ("Question:", "Type:"), ("Dialogue:", "Summary:")
SETS: dict[str, MultiTurnSet] = {
    "narrativeqa": _qa(128, 30546),
    "qasper": _qa(128, 5434, instruction=_UNANSWERABLE),
    "multifieldqa_en": _qa(64, 7280),
    "hotpotqa": _qa(32, 13847, passages=True),
    "2wikimqa": _qa(32, 7471, passages=True),
    "musique": _qa(32, 16588, passages=True),
    "multi_news": _summary("Summary:", 2376),
    "gov_report": _summary("Summary:", 9324),
    "qmsum": _summary("Answer:", 12780),
    "trec": MultiTurnSet(FEW_SHOT, "classification_score", 64, "Type:", _TYPE, shot=_TREC, paper_tokens=2294),
    "samsum": MultiTurnSet(FEW_SHOT, "rouge_l_recall", 128, "Summary:", _DIALOGUE, shot=_SAMSUM, paper_tokens=3114),
    "mtsyn_qa": _qa(32, None),
    "mtsyn_multidoc": _qa(32, None, passages=True),
    "mtsyn_summary": _summary("Summary:", None, tokens=128),
    "mtsyn_fewshot": MultiTurnSet(FEW_SHOT, "classification_score", 32, "Type:", _TYPE, shot=_TREC),
}


def find_set(name: str) -> MultiTurnSet:
    """Raises RequestError naming the known sets."""
    if name not in SETS:
        raise RequestError(f"unknown multi-turn set '{name}'; known: {', '.join(SETS)}")
    return SETS[name]
