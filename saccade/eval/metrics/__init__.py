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
from saccade.eval.metrics import infinitebench, longbench, longgen, rouge, suite


def _whole(scorer: Callable[..., float]) -> Callable[..., float]:
    """A scorer against all references at once, which has no options."""
    return lambda prediction, references, **options: scorer(prediction, references)


def _best(scorer: Callable[..., float]) -> Callable[..., float]:
    """A scorer against one reference, as the best over several."""
    return lambda prediction, references, **options: max(scorer(prediction, one, **options) for one in references)


_WHOLE = (
    *(suite.exact, suite.prefix, suite.recall, suite.iou, suite.ordered, suite.token_accuracy),
    *(suite.string_match_all, suite.string_match_part, longgen.running_lines, longgen.aligned_lines),
)
_BEST = (
    *(longbench.qa_f1_score, longbench.rouge_score, rouge.rouge_l_recall, longbench.count_score),
    *(longbench.retrieval_score, longbench.code_sim_score, longbench.classification_score),
)
_PLAIN = (
    *(infinitebench.first_digits, infinitebench.first_number, infinitebench.holds_word, infinitebench.names_word),
    *(infinitebench.option_letter, infinitebench.marked_option, infinitebench.qa_f1_characters),
    infinitebench.rouge_lsum,
)
METRICS: dict[str, Callable[..., float]] = {
    **{scorer.__name__: _whole(scorer) for scorer in _WHOLE},
    **{scorer.__name__: _best(scorer) for scorer in _BEST},
    **{scorer.__name__: scorer for scorer in _PLAIN},
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
