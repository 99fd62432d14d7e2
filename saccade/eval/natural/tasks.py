"""The natural tasks: one fact of a text, many questions over one text, and conversations of three turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from saccade.errors import RequestError
from saccade.eval.haystack import PROSE
from saccade.eval.lengths import LEAST, Lengths, fit
from saccade.eval.natural.texts import Words
from saccade.eval.samples import POSITIONS, Sample, Turn
from saccade.eval.suite.rng import Rng
from saccade.facts import BOUNDARY, Fact, make_facts, plant

VERSION = "1"
TASKS = {
    "facts": "one of four facts in a text, one of a kind, each from another quarter of it in turn",
    "questions": "eight facts in a text, each asked on its own over one context",
    **{
        f"turns_{position}": f"three turns with a text each, the question at the {position} of the message; the second "
        "asks about the first text, the third about each in turn"
        for position in POSITIONS
    },
}
FACTS = 4  # of a text; four neighbours of saccade.facts are of four kinds
_ASKED = 8  # facts of the text of many questions, two of a kind
_TURNS = 3
_NEAR = 24  # sizes tried beyond the first that is too long
_ANSWER = 24  # tokens
_METRIC = "string_match_part"


@dataclass(frozen=True)
class _Document:
    """A text with its facts in the order in which they stand."""

    text: str
    facts: tuple[Fact, ...]

    def depth(self, fact: Fact) -> float:
        return round(self.text.index(fact.sentence) / max(1, len(self.text) - len(fact.sentence)), 4)


def make(task: str, length: int, index: int, seed: int = 0, *, lengths: Lengths, haystack: str = PROSE) -> Sample:
    """Sample ``index`` of a task, of 99 to 100 % of ``length`` tokens as ``lengths`` counts them.

    A function of its arguments alone. ``haystack``: "prose", or "file:PATH" (UTF-8). The sample's ``meta`` has
    ``version``, ``tokens`` (the length reached) and ``words`` (of its texts); a turn's has ``depth``, where in its text
    the fact lies, 0..1, and ``about``, which turn's text that is.

    Raises RequestError for an unknown task, a length that is too short, or a text that runs out.
    """
    if task not in TASKS:
        raise RequestError(f"task={task!r} is unknown; known: {', '.join(TASKS)}")
    rng = Rng("natural", VERSION, task, length, seed, index)
    parts = _TURNS if task.startswith("turns") else 1
    key = rng.below(2**32)
    facts = make_facts(_ASKED if task == "questions" else FACTS * parts, key)
    start = rng.below(2**32)
    texts = [Words(haystack, length, start, part, parts) for part in range(parts)]
    most = parts * min(text.most for text in texts)

    def turns(size: int) -> tuple[Turn, ...]:
        """With ``size`` words, of all texts together."""
        share = len(facts) // parts
        documents = [
            _document(text.first((size + part) // parts), facts[part * share : (part + 1) * share], key + part)
            for part, text in enumerate(texts)
        ]
        if parts > 1:
            return _conversation(documents, task.removeprefix("turns_"), index, lengths.chat)
        if task == "questions":
            return _questions(documents[0], lengths.chat)
        (document,) = documents
        fact = document.facts[index % FACTS]
        return (_turn(document.text, "end", fact, document.depth(fact), 0, lengths.chat),)

    shared = task == "questions"

    def measure(size: int) -> int:
        return lengths.of(turns(size), shared)

    try:
        size, tokens = fit(measure, length, 0, most)
    except RequestError as error:
        raise RequestError(f"{task} at length={length}: {error}") from None
    if tokens < LEAST * length:  # facts change places with the size, so a size beyond one that is too long may do
        near = [(measure(other), other) for other in range(size + 1, min(size + _NEAR, most + 1))]
        tokens, size = max((one for one in near if one[0] <= length), default=(tokens, size))
    if tokens < LEAST * length:
        why = "its text runs out" if size == most else "its words are too long"
        raise RequestError(f"{task} reaches only {tokens} of length={length} tokens: {why}; ask for another length")
    meta = {"version": VERSION, "tokens": tokens, "words": size}
    return Sample(task, length, index, seed, turns(size), shared, meta)


def _document(text: str, facts: Sequence[Fact], key: int) -> _Document:
    planted = plant(text, facts, key)
    return _Document(planted, tuple(sorted(facts, key=lambda fact: planted.index(fact.sentence))))


def _questions(document: _Document, chat: bool) -> tuple[Turn, ...]:
    return tuple(
        _turn(document.text if number == 0 else "", "end", fact, document.depth(fact), 0, chat)
        for number, fact in enumerate(document.facts)
    )


def _conversation(documents: Sequence[_Document], position: str, index: int, chat: bool) -> tuple[Turn, ...]:
    made = []
    for number, document in enumerate(documents):
        about = (0, 0, index % _TURNS)[number]
        source = documents[about]
        fact = source.facts[(index + number) % FACTS]
        made.append(_turn(document.text, position, fact, source.depth(fact), about, chat, number))
    return tuple(made)


def _turn(text: str, position: str, fact: Fact, depth: float, about: int, chat: bool, number: int = 0) -> Turn:
    """A message of ``text`` and the question. Without a chat template the answer is opened by the fact's sentence."""
    asked = f"What is the {fact.subject}? Answer with the value alone."
    context: tuple[str, ...] = ()
    if text:
        head = f"Read this text{' carefully' if number == 0 else ', too'}. You will be asked about it.\n\n"
        middle = _middle(text)
        context = {
            "begin": (head, text),
            "middle": (head + text[:middle].rstrip(), text[middle:]),
            "end": (head, text),
        }[position]
    question = {"begin": f"{asked}\n\n", "middle": f"\n\n{asked}\n\n", "end": f"\n\n{asked}"}[position]
    meta = {"depth": depth, "about": about, **({} if chat else {"stop": ["\n"]})}
    prefix = "" if chat else f"\n{fact.question}"
    return Turn(context, question, (fact.value,), _METRIC, _ANSWER, position, prefix, meta)


def _middle(text: str) -> int:
    """Where a sentence begins next after half of the text; half of it where none does."""
    found = BOUNDARY.search(text, len(text) // 2)
    return len(text) // 2 if found is None else found.end()
