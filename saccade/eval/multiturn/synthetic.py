"""LongBench-shaped files of our own (``mtsyn_*``), so that the builder runs whole where no data is.

Prose from a grammar, or a text file of the user's, with facts planted in it; no fact, subject or value stands in two
items. Over a file each item's prose is from another part of it, and examples are the text's own questions
where it has some.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saccade import prose
from saccade.errors import RequestError
from saccade.eval.haystack import PROSE, file_of, read_text
from saccade.eval.multiturn.questions import Asked, questions_of
from saccade.eval.multiturn.rng import Stream
from saccade.eval.multiturn.segments import words
from saccade.eval.samples import write_jsonl
from saccade.facts import Fact, make_facts, plant

NAMES = ("mtsyn_qa", "mtsyn_multidoc", "mtsyn_summary", "mtsyn_fewshot")
MOST_ITEMS = 40
KEY_FACTS = 4  # of a summary
SHOTS = 12
PASSAGES = 6
PARAGRAPH = 4  # sentences of a user's text

_KINDS = ("secret password", "telephone number", "favourite dish", "birthplace")
_ASKED = (
    "What is the {subject}?",
    "Does anybody know the {subject}?",
    "Where can I read the {subject}?",
    "Who wrote down the {subject}?",
    "Could you tell me the {subject}?",
)


@dataclass(frozen=True)
class _Texts:
    """Where an item's prose is from: a stretch of ``sentences`` from ``begin`` on, or the grammar where there are none.
    ``characters``: of prose in the item."""

    sentences: tuple[str, ...]
    begin: int
    stretch: int
    characters: int

    def prose(self, stream: Stream, characters: int, facts: Sequence[Fact], part: int = 0, parts: int = 1) -> str:
        """Paragraphs between blank lines, with ``facts`` among their sentences: one of ``parts`` texts of the item."""
        if self.sentences:
            share = max(1, self.stretch // parts)
            text = self._real(self.begin + part * share + stream.below(share), characters)
        else:
            text = prose.generate(characters, stream.next())
        return plant(text, facts, stream.next()).replace("\n", "\n\n")

    def _real(self, begin: int, characters: int) -> str:
        """Sentences from ``begin`` on, as many as begin within ``characters``; the text goes on with its beginning."""
        lines: list[str] = []
        size = 0
        while size < characters:
            lines.append(self.sentences[(begin + len(lines)) % len(self.sentences)])
            size += len(lines[-1]) + 1
        return "\n".join(" ".join(lines[at : at + PARAGRAPH]) for at in range(0, len(lines), PARAGRAPH))


def generate(
    name: str, folder: Path, *, items: int = 24, seed: int = 0, characters: int = 4000, haystack: str = PROSE
) -> Path:
    """Write ``folder/{name}.jsonl`` with LongBench's fields and return its path; the same bytes for the same arguments.

    ``items``: 1 to 40; ``characters``: of prose in an item, at least 500; ``haystack``: "prose", or "file:PATH"
    (UTF-8). Raises RequestError for values out of range, and for a text without enough sentences.
    """
    if name not in NAMES:
        raise RequestError(f"unknown set '{name}'; known: {', '.join(NAMES)}")
    if not 1 <= items <= MOST_ITEMS:
        raise RequestError(f"items={items} must be from 1 to {MOST_ITEMS}")
    if characters < 500:
        raise RequestError(f"characters={characters} must be at least 500")
    if seed < 0:
        raise RequestError(f"seed={seed} must not be negative")
    path = file_of(haystack)
    if path is None and haystack != PROSE:
        raise RequestError(f"haystack={haystack!r} is unknown; known: {PROSE}, file:PATH")
    sentences = () if path is None else read_text(path)
    if path is not None and len(sentences) < MOST_ITEMS:
        raise RequestError(f"{haystack} has {len(sentences)} sentences; at least {MOST_ITEMS} are needed")
    facts = make_facts(KEY_FACTS * items, seed)
    records = []
    for number in range(items):
        stream = Stream(f"mtsyn-1|{seed}|{name}|{number}|item")
        own = facts[number::items]  # KEY_FACTS of them
        texts = _Texts(sentences, number * len(sentences) // items, len(sentences) // items, characters)
        records.append(_ITEMS[name](own, stream, texts))
    path = folder / f"{name}.jsonl"
    write_jsonl(path, [_finished(name, seed, number, record) for number, record in enumerate(records)])
    return path


def _finished(name: str, seed: int, number: int, record: dict[str, Any]) -> dict[str, Any]:
    return {
        "input": record["input"],
        "context": record["context"],
        "answers": record["answers"],
        "length": words(record["context"]),
        "dataset": name,
        "language": "en",
        "all_classes": record.get("all_classes"),
        "_id": hashlib.blake2b(f"{name}|{seed}|{number}".encode(), digest_size=12).hexdigest(),
    }


def _qa(facts: Sequence[Fact], stream: Stream, texts: _Texts) -> dict[str, Any]:
    return {
        "input": f"What is the {facts[0].subject}?",
        "context": texts.prose(stream, texts.characters, facts[:1]),
        "answers": [facts[0].value],
    }


def _multidoc(facts: Sequence[Fact], stream: Stream, texts: _Texts) -> dict[str, Any]:
    gold = stream.below(PASSAGES)
    passages = [
        f"Passage {number + 1}:\n{_title(stream)}\n"
        + texts.prose(stream, texts.characters // PASSAGES, facts[:1] if number == gold else (), number, PASSAGES)
        for number in range(PASSAGES)
    ]
    return {**_qa(facts, stream, replace(texts, characters=500)), "context": "\n\n".join(passages)}


def _summary(facts: Sequence[Fact], stream: Stream, texts: _Texts) -> dict[str, Any]:
    """The summary is what the planted facts say: the rest of the text has no point."""
    return {
        "input": "",
        "context": texts.prose(stream, texts.characters, facts),
        "answers": [" ".join(fact.sentence for fact in facts)],
    }


def _few_shot(facts: Sequence[Fact], stream: Stream, texts: _Texts) -> dict[str, Any]:
    """Questions about facts; the class is the kind of fact, which the question names in the middle of a sentence. Of
    a user's text that has some, its own questions; the class is what they ask for."""
    own = questions_of(texts.sentences, stream, texts.characters) if texts.sentences else None
    if own is not None:
        return _shots(*own)
    asked = [make_facts(1, stream.next())[0] for _ in range(SHOTS)]
    shots = [Asked(_ask(fact, stream), _kind(fact)) for fact in asked]
    return _shots(Asked(_ask(facts[0], stream), _kind(facts[0])), shots, _KINDS)


def _shots(question: Asked, shots: Sequence[Asked], classes: Sequence[str]) -> dict[str, Any]:
    return {
        "input": f"Question: {question.text}\nType:",
        "context": "\n".join(f"Question: {shot.text}\nType: {shot.kind}" for shot in shots),
        "answers": [question.kind],
        "all_classes": list(classes),
    }


def _ask(fact: Fact, stream: Stream) -> str:
    return _ASKED[stream.below(len(_ASKED))].format(subject=fact.subject)


def _kind(fact: Fact) -> str:
    return next(kind for kind in _KINDS if fact.subject.startswith(kind))


def _title(stream: Stream) -> str:
    return prose.generate(60, stream.next()).rstrip(".") or "A note"


_ITEMS = {"mtsyn_qa": _qa, "mtsyn_multidoc": _multidoc, "mtsyn_summary": _summary, "mtsyn_fewshot": _few_shot}
