"""RULER's question answering: documents in random order, one or two of which hold the answer.

From SQuAD's or HotpotQA's own files, which the user supplies, or about a made-up world of people and institutions.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from saccade.errors import RequestError
from saccade.eval.ruler.drafts import Draft, Plan, halves
from saccade.eval.ruler.words import ADJECTIVES, GIVEN_NAMES, NOUNS
from saccade.eval.suite.rng import Rng


@dataclass(frozen=True)
class Item:
    """A question, its answers (any is right), and numbers of documents: with the answer, and on the same subject."""

    question: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Corpus:
    items: tuple[Item, ...]
    documents: tuple[str, ...]


@lru_cache(maxsize=4)
def read_squad(path: Path) -> Corpus:
    """SQuAD v2's JSON: answerable questions in file order; the other paragraphs of an article are near."""
    items: list[Item] = []
    documents: list[str] = []
    try:
        for article in _read_json(path)["data"]:
            start = len(documents)
            documents += [paragraph["context"] for paragraph in article["paragraphs"]]
            everything = range(start, len(documents))
            for gold, paragraph in zip(everything, article["paragraphs"]):
                near = tuple(number for number in everything if number != gold)
                for question in paragraph["qas"]:
                    answers = tuple(dict.fromkeys(answer["text"] for answer in question["answers"]))
                    if answers and not question.get("is_impossible", False):
                        items.append(Item(question["question"], answers, (gold,), near))
    except (KeyError, TypeError) as error:
        raise RequestError(f"{path} is not SQuAD's JSON: {error!r}") from None
    return Corpus(tuple(items), tuple(documents))


@lru_cache(maxsize=4)
def read_hotpot(path: Path) -> Corpus:
    """HotpotQA's JSON (distractor setting): a question's ten paragraphs all belong to it."""
    items: list[Item] = []
    numbers: dict[str, int] = {}
    try:
        for record in _read_json(path):
            texts = [f"{title}\n{''.join(sentences)}" for title, sentences in record["context"]]
            gold = tuple(dict.fromkeys(numbers.setdefault(text, len(numbers)) for text in texts))
            items.append(Item(record["question"], (record["answer"],), gold))
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(f"{path} is not HotpotQA's JSON: {error!r}") from None
    return Corpus(tuple(items), tuple(numbers))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"data={str(path)!r} cannot be read as JSON: {error}") from None


def from_corpus(corpus: Corpus, rng: Rng, index: int) -> Plan:
    """Question ``index`` of the corpus among other documents: near ones first, then any.

    Raises RequestError beyond the last question.
    """
    if index >= len(corpus.items):
        raise RequestError(f"index={index} is beyond the {len(corpus.items)} questions of the data")
    item = corpus.items[index]
    near = list(item.near)
    rng.shuffle(near)
    taken = {*item.gold, *near}
    any_order = rng.distinct(len(corpus.documents), len(corpus.documents))
    others = [*near, *(number for number in any_order if number not in taken)]
    more = [corpus.documents[number] for number in others]
    gold = [corpus.documents[number] for number in item.gold]
    return _plan(rng, index, item.question, item.answers, gold, lambda size: more[:size], len(more))


def _plan(
    rng: Rng,
    index: int,
    question: str,
    answers: tuple[str, ...],
    gold: Sequence[str],
    others: Callable[[int], Sequence[str]],
    most: int | None,
) -> Plan:
    """Each document has a place in 0..1 of its own, so that one more moves no other. The size counts ``others``."""
    places = [(index % 10 + rng.random()) / 10, *(rng.random() for _ in gold[1:])]
    more_places: list[float] = []
    head = "Read the documents and answer the question after them, as briefly as you can.\n\n"
    asked = f"\n\nQuestion: {question} Give the answer only, without any other words."

    def render(size: int) -> Draft:
        texts = [*gold, *others(size)]
        while len(more_places) < size:
            more_places.append(rng.random())
        order = sorted(range(len(texts)), key=[*places, *more_places[:size]].__getitem__)
        documents = [f"Document {rank}:\n{texts[number]}" for rank, number in enumerate(order, 1)]
        depth = [round(order.index(number) / len(order), 4) for number in range(len(gold))]
        joint = f"\n\nDocument {len(order) + 1}:\n"
        return Draft(halves(head, documents, "\n\n"), asked, "Answer:", answers, {"depth": depth}, joint)

    return Plan(render, 0, most)


_TOWN = (
    "Bel Cor Dun Fal Gar Hol Jor Kel Lan Mor Nor Pem Quil Ros Sel Tor Ver Wen Yar Zel",
    "bury wick mouth stead combe haven minster bridge gate ness cliff dale moor brook ley pool worth cote hythe march",
)
_FAMILY = (
    "Ash Black Brad Crow Day Elm Far Green Hart Kirk Lock Marsh North Oak Pres Red Sand Thorn Under Whit",
    "field ton wood land more croft shaw ridge hurst by",
)
_KINDS = ("Museum", "Library", "School", "Theatre", "Hospital", "Brewery")
_TRADES = ("glazier", "printer", "surveyor", "botanist", "cook", "watchmaker", "translator", "weaver", "pianist")
_HOBBIES = ("keeps bees", "sails at weekends", "collects stamps", "plays chess", "grows roses", "paints", "sings")

PEOPLE = (
    "{name}, whom friends call {alias}, was born in {town} in {year}. After an apprenticeship as a {trade}, "
    "{family} came to the {place} and works there to this day. In the evening {family} {hobby}.",
    "Everyone at the {place} knows {name}, or {alias}, as the letters home are signed. The {trade}, a native of "
    "{town}, has worked there since {year}. {family} {hobby} and has no plans to retire.",
    "The {trade} {name} comes from {town}, where the family had lived since {year}. Colleagues at the {place}, where "
    "{family} works, say {alias} and mean the same person, who {hobby}.",
)
PLACES = (
    "The {place} stands in {town}. It was founded in {year} by a {trade} and is known for its bronze {thing}.",
    "Visitors to {town} seldom miss the {place}, which opened in {year}. The sign of the {thing} hangs above its door.",
    "Since {year} the {place} has been the pride of {town}. A {trade} paid for the building and the bronze {thing}.",
)


class World:
    """People and the institutions they work at, made as they are needed; no name comes twice."""

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        self._used: set[str] = set()

    def person(self) -> tuple[dict[str, str], str, str]:
        """A person's facts, the paragraph on them and the one on the institution, whose facts are ``place_...``."""
        name = self._new(lambda: f"{self._rng.choice(GIVEN_NAMES)} {self._letter()}. {self._joined(_FAMILY)}")
        facts = {
            "name": name,
            "family": name.split()[-1],
            "alias": self._new(lambda: f"the {self._word(ADJECTIVES)} {self._word(NOUNS)}"),
            "place": self._new(lambda: f"{self._word(ADJECTIVES)} {self._word(NOUNS)} {self._rng.choice(_KINDS)}"),
            **self._common(),
        }
        about = {**self._common(), "place": facts["place"], "thing": self._rng.choice(NOUNS)}
        facts["place_town"] = about["town"]
        person = self._rng.choice(PEOPLE).format(**facts)
        return facts, person, self._rng.choice(PLACES).format(**about)

    def _common(self) -> dict[str, str]:
        return {
            "town": self._joined(_TOWN),
            "year": str(self._rng.between(1850, 1999)),
            "trade": self._rng.choice(_TRADES),
            "hobby": self._rng.choice(_HOBBIES),
        }

    def _joined(self, parts: tuple[str, str]) -> str:
        return self._rng.choice(parts[0].split()) + self._rng.choice(parts[1].split())

    def _letter(self) -> str:
        return self._rng.choice(string.ascii_uppercase)

    def _word(self, words: Sequence[str]) -> str:
        return self._rng.choice(words).capitalize()

    def _new(self, make: Callable[[], str]) -> str:
        while (item := make()) in self._used:
            pass
        self._used.add(item)
        return item


def from_world(hops: int, rng: Rng, world_rng: Rng, index: int) -> Plan:
    """qa_syn_1: a person's native town, in one document. qa_syn_2: the town of the institution a person works at, in
    two. Half of the questions name the person by the alias."""
    world = World(world_rng)
    facts, person, place = world.person()
    while facts["town"] == facts["place_town"]:
        facts, person, place = world.person()
    who = facts["alias" if rng.random() < 0.5 else "name"]
    if hops == 1:
        question, answer, gold = f"In which town was {who} born?", facts["town"], [person]
    else:
        question = f"In which town is the institution where {who} works?"
        answer, gold = facts["place_town"], [person, place]
    more: list[str] = []

    def others(size: int) -> Sequence[str]:
        while len(more) < size:
            more.extend(world.person()[1:])
        return more[:size]

    return _plan(rng, index, question, (answer,), gold, others, None)
