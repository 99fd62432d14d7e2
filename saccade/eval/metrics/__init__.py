"""All scorers, by name: what ``Turn.metric`` may say.

| name | scores |
|---|---|
| `exact`, `prefix` | equal to, or beginning with, a reference |
| `recall`, `iou`, `ordered` | references found; set overlap; list in order |
| `token_accuracy` | positions of a copy that are right |
| `string_match_all`, `string_match_part` | RULER's |
| `qa_f1_score`, `rouge_score`, `rouge_l_recall`, `count_score`, `retrieval_score`, `code_sim_score` | LongBench's (the best over the references) |
| `classification_score` | LongBench's; needs `all_classes` |
| `first_digits`, `first_number`, `holds_word`, `names_word`, `option_letter`, `marked_option`, `qa_f1_characters`, `rouge_lsum` | InfiniteBench's |
| `running_lines`, `aligned_lines` | lines of a long answer that are right, in order |
"""  # noqa: E501 - a table row

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from saccade.errors import RequestError
from saccade.eval.metrics.infinitebench import (
    first_digits,
    first_number,
    holds_word,
    marked_option,
    names_word,
    option_letter,
    qa_f1_characters,
    rouge_lsum,
)
from saccade.eval.metrics.longbench import (
    classification_score,
    code_sim_score,
    count_score,
    dataset2metric,
    f1_score,
    longbench_score,
    normalize_answer,
    qa_f1_score,
    retrieval_score,
    rouge_score,
)
from saccade.eval.metrics.longgen import aligned_lines, last_line, running_lines
from saccade.eval.metrics.rouge import rouge_l, rouge_l_recall
from saccade.eval.metrics.suite import (
    exact,
    iou,
    ordered,
    prefix,
    recall,
    string_match_all,
    string_match_part,
    token_accuracy,
)

__all__ = [
    "METRICS",
    "aligned_lines",
    "classification_score",
    "code_sim_score",
    "count_score",
    "dataset2metric",
    "exact",
    "f1_score",
    "iou",
    "last_line",
    "longbench_score",
    "normalize_answer",
    "ordered",
    "prefix",
    "qa_f1_score",
    "recall",
    "retrieval_score",
    "rouge_l",
    "rouge_l_recall",
    "rouge_score",
    "running_lines",
    "score",
    "string_match_all",
    "string_match_part",
    "token_accuracy",
]


def _whole(scorer: Callable[..., float]) -> Callable[..., float]:
    """A scorer against all references at once, which has no options."""
    return lambda prediction, references, **options: scorer(prediction, references)


def _best(scorer: Callable[..., float]) -> Callable[..., float]:
    """A scorer against one reference, as the best over several."""
    return lambda prediction, references, **options: max(scorer(prediction, one, **options) for one in references)


METRICS: dict[str, Callable[..., float]] = {
    **{
        scorer.__name__: _whole(scorer)
        for scorer in (exact, prefix, recall, iou, ordered, token_accuracy, string_match_all, string_match_part)
    },
    **{scorer.__name__: _whole(scorer) for scorer in (running_lines, aligned_lines)},
    **{
        scorer.__name__: _best(scorer)
        for scorer in (
            qa_f1_score,
            rouge_score,
            rouge_l_recall,
            count_score,
            retrieval_score,
            code_sim_score,
            classification_score,
        )
    },
    **{
        scorer.__name__: scorer
        for scorer in (
            first_digits,
            first_number,
            holds_word,
            names_word,
            option_letter,
            marked_option,
            qa_f1_characters,
            rouge_lsum,
        )
    },
}


def score(metric: str, prediction: str, references: Sequence[str], **options: Any) -> float:
    """Score of ``prediction`` against ``references`` in 0..1 by the metric of that name.

    ``options``: ``all_classes`` for ``classification_score``, ``compat`` for ``rouge_score``. Raises RequestError for
    an unknown metric and for no references. Options that a metric does not know are ignored.
    """
    if metric not in METRICS:
        raise RequestError(f"metric={metric!r} is unknown; known: {', '.join(METRICS)}")
    if isinstance(references, str) or not references:
        raise RequestError(f"references={references!r} must be a list of at least one text")
    return METRICS[metric](prediction, references, **options)
