"""Sets over a text of the user's: LoopServe's conversations with its questions, InfiniteBench's kinds of tasks."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from saccade.errors import RequestError
from saccade.eval.haystack import split_sentences
from saccade.eval.infinite_prose import TASKS, make
from saccade.eval.lengths import Lengths
from saccade.eval.metrics import score
from saccade.eval.multiturn import generate
from saccade.eval.samples import read_jsonl
from saccade.eval.sources import Given, find_tasks

ASKED = {"Who": "person", "Where": "place", "Why": "reason", "Did": "yes or no", "Which": "thing"}


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Path:
    """300 sentences, no two alike, a sixth of them questions; some quote one, which are none."""
    lines = []
    for number in range(60):
        word = list(ASKED)[number % 5]
        quote = '"' if number % 2 else ""
        lines += [f"Line {number} {part} of the book goes on for {number} words." for part in ("a", "b", "c")]
        lines.append(f"{quote}{word} told you of number {number}?{quote}")
        lines.append(f'He said: "Who was number {number}?"')
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def count(text: str) -> int:
    return len(text) // 4 + 1


def test_conversations_over_a_text_hold_its_sentences_in_its_order(book, tmp_path):
    sentences = split_sentences(book.read_text())
    starts = []
    for name in ("mtsyn_qa", "mtsyn_multidoc", "mtsyn_summary"):
        path = generate(name, tmp_path, items=6, characters=900, haystack=f"file:{book}")
        assert (
            path.read_bytes() == generate(name, tmp_path, items=6, characters=900, haystack=f"file:{book}").read_bytes()
        )
        for item in read_jsonl(path):
            body = "\n".join(line for line in item["context"].splitlines() if not line.startswith(("Passage", "A ")))
            found = [one for one in split_sentences(body) if one in sentences]
            places = [sentences.index(one) for one in found]
            steps = [(after - before) % len(sentences) for before, after in pairwise(places)]
            assert steps.count(1) >= len(steps) - 5  # a passage's text goes on where it stopped
            assert all(value in item["context"] or name == "mtsyn_summary" for value in item["answers"])
            starts.append((name, places[0]))
    assert len(set(starts)) >= len(starts) - 2  # items have texts of their own


def test_few_shot_examples_are_the_texts_questions_and_their_first_word_is_the_class(book, tmp_path):
    items = list(read_jsonl(generate("mtsyn_fewshot", tmp_path, items=5, characters=600, haystack=f"file:{book}")))
    for item in items:
        shots = re.findall(r"^Question: (.*)\nType: (.*)$", item["context"], re.MULTILINE)
        asked = item["input"].removeprefix("Question: ").removesuffix("\nType:")
        assert 400 < len(item["context"]) < 1200
        for text, kind in [*shots, (asked, item["answers"][0])]:
            assert ASKED[text.split()[0]] == kind
            assert re.fullmatch(r"\w+ told you of number \d+\?", text)
        assert asked not in dict(shots)
        assert {kind for _, kind in shots} == set(item["all_classes"]) == set(ASKED.values())
    assert len({item["input"] for item in items}) > 1


def test_texts_that_are_too_short_or_unknown_are_refused(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("One. Two. Three.")
    with pytest.raises(RequestError, match="3 sentences; at least 40"):
        generate("mtsyn_qa", tmp_path, haystack=f"file:{short}")
    with pytest.raises(RequestError, match="'novel' is unknown; known: prose"):
        generate("mtsyn_qa", tmp_path, haystack="novel")


def test_a_conversation_over_a_text_comes_as_a_task(book):
    given = Given(count, None, haystack=f"file:{book}")
    (task,) = find_tasks(["mtlb:mtsyn_qa:middle"], given)
    said = " ".join(turn.message() for turn in task.sample(2048, 0, 0).turns)
    assert sum(one in said for one in split_sentences(book.read_text())) > 20


@pytest.mark.parametrize("name", TASKS)
def test_an_infinite_kind_holds_its_answer_once_and_reaches_its_length(book, name):
    lengths = Lengths(count)
    for haystack, length in (("prose", 4000), (f"file:{book}", 2400)):
        sample = make(name, length, 1, lengths=lengths, haystack=haystack)
        (turn,) = sample.turns
        assert sample == make(name, length, 1, lengths=lengths, haystack=haystack)
        assert sample != make(name, length, 2, lengths=lengths, haystack=haystack)
        assert 0.98 * length <= lengths.of(sample.turns) <= length
        gold = turn.answers[-1] if turn.meta["label"] == "En.MC" else turn.answers[0]
        assert score(turn.metric, gold, turn.answers) == pytest.approx(1.0)
        assert score(turn.metric, "Z", turn.answers) == 0.0
        check(name, turn)


def check(name, turn):
    text, (answer, *_) = turn.message(), turn.answers
    if name == "math_find":
        numbers = json.loads(re.search(r"\[.*\]", text)[0])
        assert int(answer) == (max if "largest" in text else min)(numbers)
    elif name == "kv_retrieval":
        pairs = json.loads(re.search(r"\{.*\}", text)[0])
        assert pairs[re.search(r'Key: "(\w+)"', text)[1]] == answer
        assert len(pairs) > 20
    elif name in ("passkey", "number_string"):
        assert set(re.findall(r"\b\d{5,}\b", text)) == {answer}
    elif name == "longbook_choice_eng":
        options = re.findall(r"^([A-D])\. (.*)$", text, re.MULTILINE)
        subject = re.search(r"What is the (.*)\?", text)[1]
        assert f"The {subject} is {answer}." in text
        assert [letter for letter, option in options if option == answer] == [turn.answers[1]]
        assert len({option for _, option in options}) == 4
    elif name == "longdialogue_qa_eng":
        said = re.search(r"\$\$MASK\$\$: As I told you before: (.*)", text)[1]
        assert re.findall(rf"^(\w+): Let me tell you: {re.escape(said)}$", text, re.MULTILINE) == [answer]
    elif name == "longbook_qa_eng":
        assert f"The {re.search(r'Question: What is the (.*)[?]', text)[1]} is {answer}." in text
    else:
        assert all(fact in text for fact in answer.split("\n"))
