"""RULER's tasks in our wording: samples are solved by little readers that know only how the text is phrased."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache

import pytest

from saccade.errors import RequestError
from saccade.eval.haystack import split_sentences
from saccade.eval.lengths import Lengths
from saccade.eval.metrics import METRICS
from saccade.eval.ruler import DATA_TASKS, TASKS, make
from saccade.eval.ruler.drafts import SENTENCES, place
from saccade.eval.ruler.questions import _FAMILY, _TOWN
from saccade.eval.ruler.words import ADJECTIVES, GIVEN_NAMES, NOUNS
from saccade.eval.samples import Sample

NEW_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}


def count_tokens(text: str) -> int:
    """A stand-in for a tokenizer: pieces of at most four letters or digits, and single signs."""
    return len(re.findall(r"\w{1,4}|[^\w\s]", text))


LENGTHS = Lengths(count_tokens)


@cache
def sample(task: str, index: int = 0, length: int = 4096, seed: int = 0) -> Sample:
    return make(task, length, index, seed, lengths=LENGTHS)


def noted(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"Note: the (?:access number|security code) of (\S+) is (\S+)\.", text):
        found.setdefault(key, []).append(value)
    return found


def solve(task: str, context: str, question: str) -> list[str]:
    """The answers, by reading the text."""
    if task.startswith("niah"):
        asked = re.split(r",? and |, ", re.search(r"note for (.+?)\?", question)[1])
        facts = noted(context)
        return [value for key in asked for value in facts[key]]
    if task == "vt":
        value = re.search(r"hold (\d+)\?", question)[1]
        held = dict(re.findall(r"Let ([A-Z]+) = (\w+)\.", context))

        def follow(name: str) -> str:
            return follow(held[name]) if name in held else name

        return [name for name in held if follow(name) == value]
    if task == "cwe":
        last_list = context.rsplit("Keep count.", 1)[1]
        return [word for word, _ in Counter(re.findall(r"\d+\. (\S+)", last_list)).most_common(10)]
    if task == "fwe":
        words = Counter(context.split("Count the code words.")[1].split())
        del words["..."]
        return [word for word, _ in words.most_common(3)]
    who = re.search(r"(?:In which town was (.+) born|where (.+) works)\?", question)
    documents = re.split(r"Document \d+:\n", context)[1:]
    (about,) = [text for text in documents if (who[1] or who[2]) in text]
    if who[2]:
        institution = re.search(r"the ([A-Z]\w+ [A-Z]\w+ (?:Museum|Library|School|Theatre|Hospital|Brewery))", about)[1]
        (about,) = [text for text in documents if institution in text and text != about]
        return re.findall(r"stands in (\w+)\.|Visitors to (\w+) seldom|the pride of (\w+)\.", about)[0]
    return re.findall(r"was born in (\w+) in|a native of (\w+),|comes from (\w+),", about)[0]


@pytest.mark.parametrize("task", TASKS)
def test_a_reader_finds_the_answers(task):
    for index in range(12):
        (turn,) = sample(task, index).turns
        found = [answer for answer in solve(task, "".join(turn.context), turn.question) if answer]
        assert sorted(found) == sorted(turn.answers)
        if task not in ("niah_multivalue_prose", "cwe"):  # several values have no order, nor have equal counts
            assert found == list(turn.answers)
        assert METRICS[turn.metric](turn.prefix + " " + ", ".join(found), turn.answers) == 1.0
        # The question and the answer cue do not give the answer away; vt's and the counts' stand in the text often.
        assert METRICS[turn.metric](turn.question + turn.prefix, turn.answers) == 0.0


@pytest.mark.parametrize("task", [task for task in TASKS if task.startswith("niah")])
def test_a_needle_stands_once_and_where_meta_says(task):
    for index in range(10):
        (turn,) = sample(task, index).turns
        text = turn.message()
        depths = turn.meta["depth"]
        assert len(depths) == len(turn.answers)
        for value in turn.answers:
            assert text.count(value) == 1
        for value, depth in zip(turn.answers, depths) if len(depths) == 1 else []:
            assert text.index(value) / len(text) == pytest.approx(depth, abs=0.07)
            assert index % 10 / 10 <= depth < index % 10 / 10 + 0.1
        if task.startswith("niah_multi") and "key" not in task:
            assert sorted(int(4 * depth) for depth in depths) == [0, 1, 2, 3]


def test_number_of_needles_and_distractors():
    assert len(noted(sample("niah_single_1").turns[0].message())) == 1
    assert len(noted(sample("niah_multikey_1_prose").turns[0].message())) == 4
    assert len(noted(sample("niah_multiquery_prose").turns[0].message())) == 4
    assert len(sample("niah_multiquery_prose").turns[0].answers) == 4
    facts = noted(sample("niah_multivalue_prose").turns[0].message())
    assert [len(values) for values in facts.values()] == [4]
    for task in ("niah_multikey_2", "niah_multikey_3"):
        one = sample(task)
        facts = noted(one.turns[0].message())
        assert len(facts) == one.meta["haystack"] + 1  # keys are all different
        values = [value for found in facts.values() for value in found]
        assert len(set(values)) == len(facts)


def test_counts_are_rulers():
    (turn,) = sample("cwe", length=8192).turns
    context = "".join(turn.context)
    example, task = context.split("Keep count.")[1:]
    counts = Counter(re.findall(r"\d+\. (\S+)", task))
    assert sorted(set(counts.values())) == [3, 30]
    assert {word for word, count in counts.items() if count == 30} == set(turn.answers)
    shown = Counter(re.findall(r"\d+\. (\S+)", example.split("Which")[0]))
    assert Counter(shown.values()) == {10: 10, 3: 30}
    assert not set(shown) & set(counts)
    small = "".join(sample("cwe", length=8191).turns[0].context).split("Keep count.")[2]
    assert set(Counter(re.findall(r"\d+\. (\S+)", small)).values()) == {6, 1}

    one = sample("fwe")
    counts = Counter("".join(one.turns[0].context).split("Count the code words.")[1].split())
    size = one.meta["haystack"]
    expected = [int(size / (1.6449340668482264 * rank**2)) for rank in range(1, 4096 // 50 + 1)]
    assert [count for _, count in counts.most_common()] == [count for count in expected if count]
    assert counts["..."] == expected[0]


def test_a_chain_stands_in_order_after_an_example():
    for index in range(5):
        (turn,) = sample("vt", index).turns
        text = turn.message()
        names = re.findall(r"Let ([A-Z]{5}) = ", text)
        assert names == list(turn.answers)
        assert len(re.findall(r"Let ([A-Z]{3}) = ", text)) == 5
        example = re.search(r"that hold (\d+) are ([A-Z, ]+)\.", text)
        assert solve("vt", text.split("\n\nWhich")[0], f"hold {example[1]}?") == example[2].split(", ")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [3000, 4096, 16384])
def test_length_reached(task, length):
    one = sample(task, 1, length)
    (turn,) = one.turns
    tokens = count_tokens(turn.message() + " " + turn.prefix)
    assert turn.max_new_tokens == next(new for name, new in NEW_TOKENS.items() if task.startswith(name))
    assert one.meta["tokens"] == tokens + turn.max_new_tokens
    assert 0.99 * length <= one.meta["tokens"] <= length


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_depends_on_its_key_alone(task):
    one = sample(task, 2)
    again = make(task, 4096, 2, 0, lengths=LENGTHS)
    assert json.dumps(one.as_dict()) == json.dumps(again.as_dict())
    others = [sample(task, 3), sample(task, 2, seed=1), sample(task, 2, length=4097)]
    assert len({one.turns[0].answers, *(other.turns[0].answers for other in others)}) == 4
    assert (one.task, one.length, one.index, one.seed) == (task, 4096, 2, 0)
    assert Sample.from_dict(json.loads(json.dumps(one.as_dict()))) == one


class Templated:
    """A tokenizer whose chat template takes 40 tokens, or that has none; tokens are those of ``count_tokens``."""

    def __init__(self, template: bool) -> None:
        self.has_chat_template = template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * (count_tokens(text) + (2 if add_special_tokens else 0))

    def apply_chat_template(self, messages) -> list[int]:
        return [0] * (40 + sum(count_tokens(message["content"]) for message in messages))


@pytest.mark.parametrize("length", [1500, 4096])
@pytest.mark.parametrize("task", TASKS)
def test_the_length_is_that_of_the_prompt_as_rendered(task, length):
    for tokenizer, more in ((Templated(True), 40), (Templated(False), 2)):
        one = make(task, length, 3, lengths=Lengths(count_tokens, tokenizer))
        (turn,) = one.turns
        tokens = count_tokens(turn.message()) + count_tokens(turn.prefix) + more + turn.max_new_tokens
        assert one.meta["tokens"] == tokens
        assert 0.99 * length <= tokens <= length
        assert turn.prefix.startswith("\n") != tokenizer.has_chat_template  # else it stands right behind the question


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_2", "niah_multivalue_prose", "vt", "qa_syn_2"])
def test_sentences_that_fill_up_change_nothing_that_is_asked(task):
    """Some samples of these tasks are filled up, after the haystack."""
    filled = [one for index in range(12) if (one := sample(task, index, 1000)).meta["filled"]]
    assert filled
    for one in filled:
        (turn,) = one.turns
        text = "".join(turn.context)
        wanted = " ".join(SENTENCES[at % len(SENTENCES)] for at in range(one.meta["filled"]))
        assert re.search(rf"[.\n:][ \n]{re.escape(wanted)}$", text)
        found = [answer for answer in solve(task, text, turn.question) if answer]
        assert sorted(found) == sorted(turn.answers)


def test_lists_are_shuffled_afresh_in_every_sample():
    places = set()
    for index in range(4):
        text = "".join(sample("cwe", index).turns[0].context).split("Keep count.")[2]
        words = re.findall(r"\d+\. (\S+)", text)
        places.add(tuple(place for place, word in enumerate(words) if word in sample("cwe", index).turns[0].answers))
    assert len(places) == 4


def test_bytes_as_tokens_fit_too():
    for task in TASKS:
        one = make(task, 12_000, 0, lengths=Lengths(lambda text: len(text.encode())))
        assert 11_880 <= one.meta["tokens"] <= 12_000


def test_words():
    assert (len(set(ADJECTIVES)), len(set(NOUNS)), len(set(GIVEN_NAMES))) == (200, 300, 50)
    towns = [(first + last).lower() for first in _TOWN[0].split() for last in _TOWN[1].split()]
    families = {(first + last).lower() for first in _FAMILY[0].split() for last in _FAMILY[1].split()}
    assert len(set(towns)) == 400
    assert not families & set(towns)
    # An answer is looked for as a substring, so no town may hide in another.
    assert not [(one, other) for one in towns for other in towns if one != other and one in other]


def test_placing():
    assert place(["a", "b"], ["X"], [0.0]) == ["X", "a", "b"]
    assert place(["a", "b"], ["X"], [0.99]) == ["a", "b", "X"]
    assert place(["a", "b"], ["Y", "X"], [0.9, 0.4]) == ["a", "X", "b", "Y"]
    assert place(["a"], ["Y", "X"], [0.2, 0.2]) == ["Y", "X", "a"]


def test_sentences_of_a_users_text(tmp_path):
    text = 'He said: "Go on!" Then  he\nleft. Dr. No? It was 3.5 km. end'
    assert split_sentences(text) == ['He said: "Go on!"', "Then he left.", "Dr.", "No?", "It was 3.5 km.", "end"]
    path = tmp_path / "book.txt"
    path.write_text(" ".join(f"This is sentence number {number} of the book." for number in range(900)))
    one = make("niah_single_2_file", 4096, 4, lengths=LENGTHS, haystack=f"file:{path}")
    assert one.task == "niah_single_2_file"
    (turn,) = one.turns
    assert solve("niah", turn.message(), turn.question) == list(turn.answers)
    numbers = [int(number) for number in re.findall(r"sentence number (\d+)", turn.message())]
    start = numbers[0]
    assert numbers == [(start + step) % 900 for step in range(len(numbers))]
    with pytest.raises(RequestError, match="run out"):
        make("niah_single_2_file", 65536, 0, lengths=LENGTHS, haystack=f"file:{path}")


def squad(tmp_path):
    articles = [
        {
            "title": f"T{article}",
            "paragraphs": [
                {
                    "context": f"Article {article} paragraph {number} tells of A{article}x{number} " + "and more " * 20,
                    "qas": [
                        {"question": "Q?", "answers": [], "is_impossible": True},
                        {
                            "question": f"What of {article}.{number}?",
                            "answers": [{"text": answer} for answer in (f"A{article}x{number}",) * 2 + ("B",)],
                            "is_impossible": False,
                        },
                    ],
                }
                for number in range(4)
            ],
        }
        for article in range(60)
    ]  # fmt: skip
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"version": "v2.0", "data": articles}))
    return path


def test_squad_questions_in_file_order_with_the_articles_own_paragraphs(tmp_path):
    path = squad(tmp_path)
    for index in (0, 5):
        one = make("qa_1", 4096, index, lengths=LENGTHS, data=path)
        (turn,) = one.turns
        article, number = divmod(index, 4)
        assert f"What of {article}.{number}?" in turn.question
        assert turn.answers == (f"A{article}x{number}", "B")
        documents = re.split(r"Document \d+:\n", "".join(turn.context))[1:]
        assert len(documents) == one.meta["haystack"] + 1 == len(set(documents))
        (gold,) = [place for place, text in enumerate(documents) if turn.answers[0] in text]
        assert turn.meta["depth"] == [round(gold / len(documents), 4)]
        assert all(any(f"Article {article} paragraph {near} " in text for text in documents) for near in range(4))
    with pytest.raises(RequestError, match="beyond the 240 questions"):
        make("qa_1", 4096, 240, lengths=LENGTHS, data=path)


def test_hotpot_questions_keep_their_ten_paragraphs(tmp_path):
    records = [
        {
            "question": f"Who is {record}?",
            "answer": f"Answer{record}",
            "context": [[f"Title {record}.{n}", [f"One {record}.{n}.", " Two " * 30]] for n in range(10)],
        }
        for record in range(40)
    ]
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps(records))
    one = make("qa_2", 8192, 3, lengths=LENGTHS, data=path)
    text = one.turns[0].message()
    assert all(f"Title 3.{number}\nOne 3.{number}." in text for number in range(10))
    assert one.turns[0].answers == ("Answer3",)
    assert len(one.turns[0].meta["depth"]) == 10


@pytest.mark.parametrize(
    ("task", "length", "options", "message"),
    [
        ("niah_single_2", 4096, {}, "niah_single_2_prose and niah_single_2_file"),
        ("niah_single_9", 4096, {}, "unknown; known: niah_single_1, niah_single_2_prose"),
        ("niah_single_2_file", 4096, {}, "haystack='file:PATH', not 'prose'"),
        ("niah_single_2_file", 4096, {"haystack": "file:/nowhere/x.txt"}, "cannot be read"),
        ("qa_1", 4096, {}, "data=PATH"),
        ("qa_2", 4096, {"data": "/nowhere/x.json"}, "cannot be read as JSON"),
        ("cwe", 500, {}, "do not fit"),
        ("fwe", 300, {}, "at least 400"),
        ("niah_single_1", 150, {}, "do not fit the 150"),
    ],
)
def test_bad_requests(task, length, options, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        make(task, length, 0, lengths=LENGTHS, **options)


def test_wrong_data_is_named(tmp_path):
    for task, content in (("qa_1", "[1]"), ("qa_2", '{"data": []}'), ("qa_1", "{}")):
        path = tmp_path / f"{task}{len(content)}.json"
        path.write_text(content)
        with pytest.raises(RequestError, match=r"is not|beyond the 0"):
            make(task, 4096, 0, lengths=LENGTHS, data=path)
    assert set(DATA_TASKS) == {*(f"{name}_file" for name in
                                 ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue",
                                  "niah_multiquery")), "qa_1", "qa_2"}  # fmt: skip
