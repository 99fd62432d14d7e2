"""RULER's thirteen tasks (Hsieh et al. 2024, arXiv:2404.06654) without a download.

``make`` draws samples in our own wording, fitted to a token count; their scores are not RULER's. Tasks whose haystack
RULER takes from essays are called ``..._prose`` over made-up prose and ``..._file`` over a user's text; the questions
of SQuAD (``qa_1``) and HotpotQA (``qa_2``) need the user's files, and ``qa_syn_1``, ``qa_syn_2`` are their made-up
counterparts. ``compat`` gives the very samples of RULER's public generator where it needs no text of others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from saccade.errors import RequestError
from saccade.eval.haystack import PROSE, file_of, read_text
from saccade.eval.lengths import LEAST, Lengths, fit
from saccade.eval.ruler import counting, needles, questions
from saccade.eval.ruler.drafts import Plan
from saccade.eval.ruler.needles import Niah
from saccade.eval.ruler.public import compat
from saccade.eval.samples import Sample, Turn
from saccade.eval.suite.rng import Rng

__all__ = ["DATA_TASKS", "TASKS", "VERSION", "compat", "make"]

VERSION = "2"
LEAST_SHARE = 0.9  # of the nominal length that a sample must reach

_ESSAYS = {
    "niah_single_2": Niah("text"),
    "niah_single_3": Niah("text", value="uuid"),
    "niah_multikey_1": Niah("text", keys=4),
    "niah_multivalue": Niah("text", values=4),
    "niah_multiquery": Niah("text", keys=4, asked=4),
}
_NIAH = {
    "niah_single_1": Niah("repeat"),
    **{f"{name}_prose": niah for name, niah in _ESSAYS.items()},
    "niah_multikey_2": Niah("needle"),
    "niah_multikey_3": Niah("needle", key="uuid", value="uuid"),
}
_FILE = {f"{name}_file": niah for name, niah in _ESSAYS.items()}
_COUNTING: dict[str, tuple[Callable[[Rng, int], Plan], int]] = {
    "vt": (counting.tracking, 30),
    "cwe": (counting.common_words, 120),
    "fwe": (counting.coded_words, 50),
}
_CORPORA = {"qa_1": questions.read_squad, "qa_2": questions.read_hotpot}
_WORLDS = {"qa_syn_1": 1, "qa_syn_2": 2}

TASKS = (*_NIAH, *_COUNTING, *_WORLDS)
DATA_TASKS = (*_FILE, *_CORPORA)  # need haystack="file:PATH" or data=PATH


def make(
    task: str,
    length: int,
    index: int,
    seed: int = 0,
    *,
    lengths: Lengths,
    haystack: str = PROSE,
    data: Path | str | None = None,
) -> Sample:
    """Sample ``index`` of a task, of 99 to 100 % of ``length`` tokens as ``lengths`` counts them, those to be generated
    included.

    A function of its arguments alone. Where a task's lines, sentences or documents are coarser than that, a few short
    sentences fill it up; the word counts (cwe, fwe), which cannot be filled up, and documents may stay further below at
    a thousand tokens, as may a text or a corpus that runs out.

    ``haystack``: "prose", or "file:PATH" (UTF-8) for the tasks that end in ``_file``. ``data``: SQuAD v2's or
    HotpotQA's JSON, for ``qa_1`` and ``qa_2``. The sample's ``meta`` has ``version``, ``tokens`` (the length reached),
    ``haystack`` (the size found) and ``filled`` (sentences added); the turn's has ``depth``: where the needles or gold
    documents lie, 0..1.

    Raises RequestError for an unknown task, data that is missing or unreadable, a length that the task cannot be made
    as short as, or less than 90 % of it.
    """
    plan, new_tokens, metric = _plan(task, length, index, seed, haystack, data)

    def turn(size: int, filled: int = 0) -> Turn:
        draft = plan.render(size).filled(filled)
        # In plain text the answer's opening would stand right behind the question.
        prefix = draft.prefix if lengths.chat else f"\n{draft.prefix}"
        return Turn(draft.context, draft.question, draft.answers, metric, new_tokens, "end", prefix, draft.meta)

    filled = 0
    try:
        size, tokens = fit(lambda size: lengths.of([turn(size)]), length, plan.least, plan.most)
    except RequestError as error:
        raise RequestError(f"{task} at length={length}: {error}") from None
    if tokens < LEAST * length and size != plan.most and plan.render(size).joint is not None:
        filled, tokens = fit(lambda count: lengths.of([turn(size, count)]), length)
    if tokens < LEAST_SHARE * length:
        why = "its text or documents run out" if size == plan.most else "its units are too long"
        raise RequestError(f"{task} reaches only {tokens} of length={length} tokens: {why}; ask for another length")
    meta = {"version": VERSION, "tokens": tokens, "haystack": size, "filled": filled}
    return Sample(task, length, index, seed, (turn(size, filled),), meta=meta)


def _plan(
    task: str, length: int, index: int, seed: int, haystack: str, data: Path | str | None
) -> tuple[Plan, int, str]:
    """(plan, tokens to generate, metric)."""
    rng = partial(Rng, "ruler", VERSION, task, length, seed, index)
    if task in _ESSAYS:
        raise RequestError(f"task={task!r} is RULER's, over essays; ours are {task}_prose and {task}_file")
    if task in _NIAH:
        return needles.plan(_NIAH[task], rng("task"), rng("haystack"), index, None), 128, "string_match_all"
    if task in _FILE:
        path = file_of(haystack)
        if path is None:
            raise RequestError(f"{task} needs haystack='file:PATH', not {haystack!r}")
        text = read_text(path)
        return needles.plan(_FILE[task], rng("task"), rng("haystack"), index, text), 128, "string_match_all"
    if task in _COUNTING:
        draw, new_tokens = _COUNTING[task]
        return draw(rng("task"), length), new_tokens, "string_match_all"
    if task in _CORPORA:
        if data is None:
            raise RequestError(f"{task} needs data=PATH, the JSON of its dataset; qa_syn_{task[-1]} needs none")
        return questions.from_corpus(_CORPORA[task](Path(data)), rng("task"), index), 32, "string_match_part"
    if task in _WORLDS:
        return questions.from_world(_WORLDS[task], rng("task"), rng("world"), index), 32, "string_match_part"
    raise RequestError(f"task={task!r} is unknown; known: {', '.join((*TASKS, *DATA_TASKS))}")
