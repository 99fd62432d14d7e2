"""Facts to plant in a long text and to ask for: the needles of the demo and of the retrieval tests.

A fact is asked for by the beginning of its sentence, so a model that merely continues text can answer, and the
retriever of ``saccade.models.reference`` answers exactly. What tells two facts apart stands near the question's end.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar


def _listed(names: str) -> tuple[str, ...]:
    return tuple(names.split(","))


_PEOPLE = _listed(
    "lighthouse keeper,harbour master,night watchman,old librarian,ferry pilot,museum guard,head gardener,bell ringer,"
    "northern lighthouse keeper,southern lighthouse keeper,stable boy,court painter,village doctor,railway porter,"
    "opera singer,glass blower,bee inspector,river surveyor,army cook,clock repairer,palace archivist,tea merchant,"
    "wine taster,mountain guide,second violinist,chief astronomer,fishing champion,travelling dentist,map engraver,"
    "retired admiral,crown prosecutor,circus acrobat,bridge engineer,school inspector,eastern gatekeeper,"
    "western gatekeeper,silk weaver,apprentice baker,town crier,royal chemist"
)
_TOWNS = _listed(
    "Łódź,Århus,Nîmes,Šibenik,Málaga,Zürich,Győr,Tromsø,Čakovec,Évora,Münster,Kraków,Reykjavík,Liège,Plzeň,Córdoba,"
    "São Tomé,İzmir,Visby,Tartu,Bergen,Leuven,Siena,Oulu,Bath,Ghent,Delft,Turku,Lucca,Perth,Arles,Cádiz,Trier,Piran,"
    "Žilina,Pécs,Kemi,Ronda,Narva,Bruges"
)
_DISHES = _listed("trout,dumplings,lentils,mushrooms,cabbage,herring,noodles,turnips,beans,quail")
_SAUCES = _listed(
    "sorrel,plum jam,burnt butter,mustard,horseradish,wild thyme,sour cream,chestnuts,black pepper,fennel"
)

T = TypeVar("T")
Pick = Callable[[Sequence[str]], str]


def _code(pick: Pick) -> str:
    return (
        "".join(pick("0123456789") for _ in range(4))
        + "-"
        + "".join(pick("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(3))
    )


def _telephone(pick: Pick) -> str:
    return (
        pick("23456789")
        + "".join(pick("0123456789") for _ in range(2))
        + " "
        + "".join(pick("0123456789") for _ in range(4))
    )


_KINDS: tuple[tuple[str, Callable[[Pick], str]], ...] = (
    ("secret password", _code),
    ("telephone number", _telephone),
    ("favourite dish", lambda pick: f"{pick(_DISHES)} with {pick(_SAUCES)}"),
    ("birthplace", lambda pick: pick(_TOWNS)),
)


@dataclass(frozen=True)
class Fact:
    """``sentence`` is ``question`` + " " + ``value`` + "."; ``subject`` says in words what the fact is about."""

    subject: str
    question: str
    value: str

    @property
    def sentence(self) -> str:
        return f"{self.question} {self.value}."


def make_facts(count: int, seed: int) -> list[Fact]:
    """``count`` facts with distinct questions and distinct values; people repeat only when all have been used."""
    limit = len(_PEOPLE) * len(_KINDS)
    if not 0 <= count <= limit:
        raise ValueError(f"count={count} must be from 0 to {limit}")
    rng = random.Random(seed)
    people = _shuffled(rng, _PEOPLE)
    turn = int(rng.random() * len(_KINDS))
    facts: list[Fact] = []
    values: set[str] = set()
    for index in range(count):
        # Person i meets kind i + turn, one further each round: all pairs are different. Towns are as many as people.
        lap, place = divmod(index, len(people))
        kind, make = _KINDS[(place + lap + turn) % len(_KINDS)]
        value = make(lambda options: options[int(rng.random() * len(options))])
        while value in values:
            value = make(lambda options: options[int(rng.random() * len(options))])
        values.add(value)
        subject = f"{kind} of the {people[place]}"
        facts.append(Fact(subject, f"The {subject} is", value))
    return facts


# Where a sentence begins: after a full stop, a closing quote it may have, and white space.
BOUNDARY = re.compile(r"[.!?][\"'”’)]?\s+(?=\S)")


def plant(text: str, facts: Sequence[Fact], seed: int) -> str:
    """``text`` with every fact's sentence put between two of its sentences, or at its end.

    Depths are stratified: the text is cut into as many stretches as there are facts, and each stretch gets one, at a
    random sentence boundary. Which fact lies where is random as well.
    """
    if not facts:
        return text
    rng = random.Random(seed)
    order = _shuffled(rng, facts)
    boundaries = [match.end() for match in BOUNDARY.finditer(text)]
    if text and not text[-1].isspace():
        text += " "
    places = []
    for index in range(len(order)):
        low, high = len(text) * index // len(order), len(text) * (index + 1) // len(order)
        inside = [place for place in boundaries if low <= place < high]
        nearest = min(boundaries, key=lambda place: abs(place - (low + high) // 2), default=len(text))
        places.append(inside[int(rng.random() * len(inside))] if inside else nearest)
    pieces, done = [], 0
    for place, fact in sorted(zip(places, order, strict=True), key=lambda item: item[0]):
        pieces += [text[done:place], fact.sentence, " "]
        done = place
    return "".join([*pieces, text[done:]]).rstrip(" ")


def is_correct(answer: str, fact: Fact) -> bool:
    """Whether ``answer`` begins with the fact's value, and the value ends there."""
    answer = answer.strip()
    rest = answer[len(fact.value) :]
    return answer.startswith(fact.value) and not rest[:1].isalnum()


def _shuffled(rng: random.Random, items: Sequence[T]) -> list[T]:
    """A permutation drawn with ``rng.random`` only, whose stream is the same everywhere."""
    return [item for _, _, item in sorted((rng.random(), index, item) for index, item in enumerate(items))]
