"""The made-up text and the facts planted in it."""

from __future__ import annotations

import hashlib
import re
from collections import Counter

import pytest

from saccade.facts import Fact, is_correct, make_facts, plant
from saccade.prose import generate


@pytest.mark.parametrize("chars", [0, 1, 50, 1000, 24_000, 120_000])
def test_length_is_nearly_what_was_asked(chars: int) -> None:
    text = generate(chars, seed=1)
    assert len(text) <= chars
    assert len(text) > chars - 400
    assert text.isascii()


def test_a_seed_fixes_the_text_everywhere() -> None:
    assert generate(5000, 1) == generate(5000, 1)
    assert generate(5000, 1) != generate(5000, 2)
    assert generate(9000, 1).startswith(generate(5000, 1))
    # Held as a constant: other platforms and Python versions must give the same text.
    assert hashlib.sha256(generate(20_000, 1).encode()).hexdigest()[:16] == "cc1b1fd76aeefa20"


def test_sentences_are_whole_and_do_not_repeat() -> None:
    text = generate(60_000, seed=3)
    assert "[" not in text
    assert "<" not in text
    sentences = [sentence for line in text.split("\n") for sentence in re.split(r"(?<=\.) (?=[A-Z\"])", line)]
    assert all(re.fullmatch(r"[A-Z\"].*\.", sentence) for sentence in sentences)
    assert max(Counter(sentences).values()) == 1
    assert len(set(re.findall(r"[a-z]+", text.lower()))) > 350


def test_few_long_passages_repeat() -> None:
    text = generate(60_000, seed=4)
    passages = Counter(text[i : i + 40] for i in range(len(text) - 40))
    assert sum(count - 1 for count in passages.values()) < 0.005 * len(text)


def test_articles_agree() -> None:
    assert not re.search(r"\b[Aa] [aeiou]", generate(60_000, seed=5))


def test_facts_are_distinct() -> None:
    facts = make_facts(160, seed=1)
    assert len({fact.question for fact in facts}) == 160
    assert len({fact.value for fact in facts}) == 160
    assert facts == make_facts(160, seed=1)
    assert all(fact.sentence == f"{fact.question} {fact.value}." for fact in facts)
    assert len({fact.subject for fact in make_facts(10, seed=2)}) == 10
    with pytest.raises(ValueError, match="from 0 to 160"):
        make_facts(161, seed=1)


def test_plant_spreads_facts_over_sentence_boundaries() -> None:
    facts, text = make_facts(10, seed=1), generate(24_000, seed=1)
    planted = plant(text, facts, seed=1)
    depths = sorted(planted.index(fact.sentence) / len(planted) for fact in facts)
    assert all(abs(depth - (i + 0.5) / 10) < 0.07 for i, depth in enumerate(depths))
    for fact in facts:
        before, _, after = planted.partition(fact.sentence)
        assert re.search(r"(^|[.!?]\"?\s)$", before)
        assert re.match(r"(\s|$)", after)
        planted = before + after.removeprefix(" ")
    assert planted.rstrip() == text
    assert plant(text, facts, seed=2) != plant(text, facts, seed=1)


def test_plant_copes_with_short_texts() -> None:
    facts = make_facts(3, seed=1)
    assert plant("", [], seed=1) == ""
    for text in ("", "One", "One. Two.", "no stops at all in here"):
        planted = plant(text, facts, seed=1)
        assert all(fact.sentence in planted for fact in facts)
        assert len(planted) <= len(text) + sum(len(fact.sentence) + 1 for fact in facts) + 1


@pytest.mark.parametrize(
    ("answer", "correct"),
    [(" 7391-XKQ", True), ("7391-XKQ. The", True), ("7391-XKQR", False), ("It is 7391-XKQ", False), ("", False)],
)
def test_is_correct(answer: str, correct: bool) -> None:
    assert is_correct(answer, Fact("password", "The password is", "7391-XKQ")) is correct
