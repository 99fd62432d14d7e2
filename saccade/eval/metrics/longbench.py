"""LongBench v1's English and code scorers under LongBench's own names (``metrics.py`` of THUDM/LongBench, MIT).

Every scorer is ``(prediction, ground_truth, **kwargs) -> 0..1`` and has the original's odd cases; keyword arguments a
scorer does not know are ignored, so that one call serves all sets. ``eval.score`` adds what LongBench's ``eval.py``
does around them: the first line alone for few-shot sets, and the best over all answers.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import Any

from saccade.errors import RequestError
from saccade.eval.metrics.rouge import rouge_l

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_INTEGER = re.compile(r"\d+")


def normalize_answer(text: str) -> str:
    """Lower case, ASCII punctuation deleted (nothing put in its place), articles dropped, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1_score(prediction: Sequence[str], ground_truth: Sequence[str], **kwargs: Any) -> float:
    """F1 of two bags of tokens; 0 if they share none (two empty bags too)."""
    shared = sum((Counter(prediction) & Counter(ground_truth)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(prediction), shared / len(ground_truth)
    return 2 * precision * recall / (precision + recall)


def qa_f1_score(prediction: str, ground_truth: str, **kwargs: Any) -> float:
    """F1 of the words of both texts after ``normalize_answer``."""
    return f1_score(normalize_answer(prediction).split(), normalize_answer(ground_truth).split())


def rouge_score(prediction: str, ground_truth: str, **kwargs: Any) -> float:
    """``rouge_l``; ``compat=True`` gives the original's 0 where its recursion fails on long sentences."""
    return rouge_l(prediction, ground_truth, compat=bool(kwargs.get("compat", False)))


def classification_score(prediction: str, ground_truth: str, **kwargs: Any) -> float:
    """1 / (number of classes named) if the right one is among them. ``all_classes``: the names of all classes.

    A class counts as named where its name occurs in the prediction (case counts). Names that are part of the right one
    are then dropped while iterating over the list, as in the original: of two adjacent ones, the second stays.
    Raises RequestError without ``all_classes``.
    """
    if not kwargs.get("all_classes"):
        raise RequestError("classification_score needs all_classes=[...], the names of all classes of the set")
    named = [name for name in kwargs["all_classes"] if name in prediction]
    for name in named:
        if name in ground_truth and name != ground_truth:
            named.remove(name)  # from the list in iteration: the original's fault, which its scores contain
    return 1.0 / len(named) if ground_truth in named else 0.0


def count_score(prediction: str, ground_truth: str, **kwargs: Any) -> float:
    """Share of the integers in the prediction that equal the right one, compared as text; 0 if there are none."""
    numbers = _INTEGER.findall(prediction)
    return numbers.count(str(ground_truth)) / len(numbers) if numbers else 0.0


def retrieval_score(prediction: str, ground_truth: str, **kwargs: Any) -> float:
    """``count_score`` of the number in ``Paragraph N``. Raises RequestError if the ground truth has no such number."""
    found = re.search(r"Paragraph (\d+)", ground_truth)
    if found is None:
        raise RequestError(f"ground_truth={ground_truth!r} must contain 'Paragraph N'")
    return count_score(prediction, found[1])


def code_sim_score(prediction: str, ground_truth: str, **kwargs: Any) -> float:
    """Edit similarity of the first line without a backquote, ``#`` or ``//`` (leading line breaks dropped)."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return _ratio(line, ground_truth) / 100


def _ratio(first: str, second: str) -> int:
    """``fuzz.ratio`` of fuzzywuzzy 0.18.0 without python-Levenshtein: difflib's ratio as an integer percentage."""
    if first == second:
        return 100
    if not first or not second:
        return 0
    return round(100 * SequenceMatcher(None, first, second).ratio())


dataset2metric: dict[str, Callable[..., float]] = {
    "narrativeqa": qa_f1_score,
    "qasper": qa_f1_score,
    "multifieldqa_en": qa_f1_score,
    "hotpotqa": qa_f1_score,
    "2wikimqa": qa_f1_score,
    "musique": qa_f1_score,
    "gov_report": rouge_score,
    "qmsum": rouge_score,
    "multi_news": rouge_score,
    "trec": classification_score,
    "triviaqa": qa_f1_score,
    "samsum": rouge_score,
    "lsht": classification_score,
    "passage_retrieval_en": retrieval_score,
    "passage_count": count_score,
    "lcc": code_sim_score,
    "repobench-p": code_sim_score,
}
FIRST_LINE_SETS = ("trec", "triviaqa", "samsum", "lsht")
