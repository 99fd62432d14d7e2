"""InfiniteBench's kinds of tasks over prose, made up or from a file of the user's: no data is needed.

Eight of the ten, in its layout and with its scores. Zh.QA needs a Chinese book and Code.Debug a body of code. Books are
stretches of the text with facts planted in them, as ``saccade.facts`` makes them; in the dialogue what a masked
speaker says tells who it is. A summary is asked in 128 tokens, as it is four sentences long.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from saccade.errors import RequestError
from saccade.eval import infinitebench
from saccade.eval.haystack import PROSE
from saccade.eval.lengths import LEAST, Lengths, fit
from saccade.eval.natural.texts import Words
from saccade.eval.samples import Sample
from saccade.eval.suite.rng import Rng
from saccade.facts import Fact, make_facts, plant

VERSION = "1"
FACTS, KINDS, SPEAKERS = 8, 4, 4  # facts of a book, of so many kinds in turn; speakers of a dialogue
_SUMMARY = 128  # tokens
_NAMES = ("ADA", "BERTRAM", "CLARA", "DUNCAN", "EDITH", "FELIX", "GRETA", "HUGO")
_LINE = 12  # words of a speaker's line
_HEX = "0123456789abcdef"


def make(task: str, length: int, index: int, seed: int = 0, *, lengths: Lengths, haystack: str = PROSE) -> Sample:
    """Sample ``index`` of a task (a name of ``TASKS``), of 98 to 100 % of ``length`` tokens as ``lengths`` counts them;
    a function of its arguments alone. Raises RequestError for an unknown task, and for a text that runs out."""
    if task not in TASKS:
        raise RequestError(f"task={task!r} is unknown; known: {', '.join(TASKS)}")
    key = Rng("ibsyn", VERSION, task, length, seed, index).below(2**32)
    text = Words(haystack, length, Rng("ibsyn", VERSION, length, seed, index).below(2**32))

    def turn(size: int) -> Any:
        item = TASKS[task](Rng("ibsyn", key), text, size)
        made = infinitebench.make_turn(task, {"context": "", "input": "", "options": [], **item})
        return replace(made, max_new_tokens=_SUMMARY) if task == "longbook_sum_eng" else made

    size, tokens = fit(lambda size: lengths.of((turn(size),)), length, 8, text.most if task in _OF_PROSE else None)
    if tokens < (LEAST - 0.01) * length:
        raise RequestError(f"{task} reaches only {tokens} of length={length} tokens: its text runs out")
    return Sample(f"ibsyn:{task}", length, index, seed, (turn(size),), meta={"version": VERSION, "tokens": tokens})


def _digits(rng: Rng, count: int) -> str:
    return "".join(str(1 + rng.below(9)) for _ in range(count))


def _key(rng: Rng) -> str:
    return "".join(_HEX[rng.below(16)] for _ in range(12))


def _passkey(rng: Rng, text: Words, size: int) -> dict[str, Any]:
    key = _digits(rng, 5)
    said = Fact("pass key", "The pass key is", f"{key}. Remember it. {key} is the pass key")
    return {
        "context": plant(text.first(size), [said], rng.below(2**32)),
        "input": "What is the pass key?",
        "answer": key,
    }


def _number(rng: Rng, text: Words, size: int) -> dict[str, Any]:
    key = _digits(rng, 10)
    said = Fact("sequence", "The sequence of digits is", f"{key}. Remember it. {key} is the sequence of digits")
    asked = "What is the sequence of digits?"
    return {"context": plant(text.first(size), [said], rng.below(2**32)), "input": asked, "answer": key}


def _pairs(rng: Rng, text: Words, size: int) -> dict[str, Any]:
    pairs = {_key(rng): _key(rng) for _ in range(size)}
    wanted = list(pairs)[rng.below(len(pairs))]
    asked = f'Key: "{wanted}"\nThe value associated with the specified key is:'
    return {"context": f"JSON data:\n{json.dumps(pairs)}", "input": asked, "answer": pairs[wanted]}


def _find(rng: Rng, text: Words, size: int) -> dict[str, Any]:
    numbers = [1 + rng.below(98) for _ in range(size)]
    name, pick = (("largest", max), ("smallest", min))[rng.below(2)]
    asked = f"You answer with one number. The {name} number of the list is"
    return {"context": json.dumps(numbers), "input": asked, "answer": pick(numbers)}


def _book(rng: Rng, text: Words, size: int) -> tuple[list[Fact], str]:
    facts = make_facts(FACTS, rng.below(2**32))
    return facts, plant(text.first(size), facts, rng.below(2**32))


def _question(rng: Rng, text: Words, size: int) -> dict[str, Any]:
    facts, book = _book(rng, text, size)
    fact = facts[rng.below(FACTS)]
    return {"context": book, "input": f"What is the {fact.subject}?", "answer": fact.value}


def _choice(rng: Rng, text: Words, size: int) -> dict[str, Any]:
    """The other options are of the same kind: one stands in the book too, of another person."""
    facts, book = _book(rng, text, size)
    number = rng.below(FACTS)
    fact, options = facts[number], [facts[(number + KINDS) % FACTS].value]
    kind = fact.subject.split(" of the ")[0]
    for other in make_facts(8 * KINDS, rng.below(2**32)):
        if other.subject.startswith(kind) and other.value not in (*options, fact.value) and len(options) < 3:
            options.append(other.value)
    options.insert(rng.below(4), fact.value)
    return {"context": book, "input": f"What is the {fact.subject}?", "answer": fact.value, "options": options}


def _summary(rng: Rng, text: Words, size: int) -> dict[str, Any]:
    facts = make_facts(KINDS, rng.below(2**32))
    book = plant(text.first(size), facts, rng.below(2**32))
    return {"context": book, "answer": "\n".join(fact.sentence for fact in facts)}


def _dialogue(rng: Rng, text: Words, size: int) -> dict[str, Any]:
    """Lines of four speakers, each of whom says once whose something is; one says it again under the mask."""
    words = text.first(size).split()
    lines = [" ".join(words[at : at + _LINE]) for at in range(0, len(words), _LINE)]
    names = list(_NAMES)
    rng.shuffle(names)
    facts = make_facts(KINDS, rng.below(2**32))
    said = [f"{names[at % SPEAKERS]}: {line}" for at, line in enumerate(lines)]
    for number, fact in enumerate(facts):
        said.insert(rng.below(len(said) + 1), f"{names[number]}: Let me tell you: {fact.sentence}")
    who = rng.below(SPEAKERS)
    said.append(f"$$MASK$$: As I told you before: {facts[who].sentence}")
    return {"context": "\n".join(said), "answer": names[who]}


TASKS: dict[str, Callable[[Rng, Words, int], dict[str, Any]]] = {
    "longbook_sum_eng": _summary,
    "longbook_qa_eng": _question,
    "longbook_choice_eng": _choice,
    "longdialogue_qa_eng": _dialogue,
    "math_find": _find,
    "passkey": _passkey,
    "number_string": _number,
    "kv_retrieval": _pairs,
}
_OF_PROSE = {name for name in TASKS if name not in ("math_find", "kv_retrieval")}
