"""Tasks of long generation: every answer is found again by a reader of the text, and damaged answers score less."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import pairwise

import pytest

from saccade.errors import RequestError
from saccade.eval.lengths import Lengths
from saccade.eval.longgen import TASKS, VERSION, make
from saccade.eval.longgen.tasks import SHOWN
from saccade.eval.metrics import METRICS
from saccade.eval.metrics.longgen import last_line
from saccade.eval.render import gold_answer, render
from saccade.eval.runner import prepare
from saccade.eval.samples import Sample, Turn
from saccade.eval.score import score_record
from saccade.eval.sources import Given, find_tasks

LENGTHS = (1024, 2048, 4096, 16384)


def count_tokens(text: str) -> int:
    """A stand-in for a tokenizer: pieces of at most four letters, single digits, signs and line breaks."""
    return len(re.findall(r"[^\W\d]{1,4}|\d|[^\w\s]|\n", text))


class Templated:
    """A tokenizer of the same pieces whose template adds 29 tokens."""

    has_chat_template = True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [5] * count_tokens(text)

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        return [1] * 29 + [5] * sum(count_tokens(one["content"]) for one in messages)


@cache
def sample(task: str, index: int = 0, length: int = 4096, seed: int = 0) -> Sample:
    return make(task, length, index, seed, lengths=Lengths(count_tokens))


def one_turn(*key) -> Turn:
    (turn,) = sample(*key).turns
    return turn


def scored(turn: Turn, text: str) -> float:
    return METRICS[turn.metric](text, turn.answers)


def solve(task: str, text: str) -> list[str]:
    """All lines of the answer, from the user's message alone."""
    if task == "arithmetic":
        total = int(re.search(r"Its total is (\d+) before the first entry", text)[1])
        lines = []
        for number, name, step in re.findall(r"^(\d+)\. (\w+): (\d)$", text, re.M):
            lines.append(f"{number}. {name}: {total} + {step} = {total + int(step)}")
            total += int(step)
        return lines
    if task == "tracing":
        program = re.search(r"^x = .*?(?=\n\n)", text, re.M | re.S)[0]
        data = [(name, kind, int(n)) for name, kind, n in re.findall(r"^\d+\. (\w+) (plus|minus) (\d)$", text, re.M)]
        printed: list[str] = []
        exec(program, {"data": data, "print": printed.append})
        return printed
    if task == "sorting":
        cards = dict(re.findall(r"^([A-Z]\w+ [A-Z]\w+): (\w+ \w+, \w+ \w+)$", text, re.M))
        order = re.findall(r"^\d+\. (\w+ \w+)$", text, re.M)
        assert sorted(order) == sorted(cards)
        return [f"{number}. {who}: {cards[who]}" for number, who in enumerate(order, 1)]
    record = re.search(r"^Record:\n(.*)\nEnd of the record\.$", text, re.M | re.S)[1].split("\n")
    return [f"{number}. {line.replace('lantern', 'teapot')}" for number, line in enumerate(record, 1)]


@pytest.mark.parametrize("task", TASKS)
def test_a_reader_of_the_prompt_finds_the_answer(task):
    for key in [(task, index, 4096) for index in range(6)] + [(task, 0, length) for length in LENGTHS]:
        turn = one_turn(*key)
        lines = solve(task, turn.message())
        assert turn.prefix == "".join(f"{line}\n" for line in lines[:SHOWN])
        assert turn.answers == tuple(lines[SHOWN:])
        assert turn.meta["steps"] == len(turn.answers) >= 8
        assert gold_answer(turn).splitlines() == lines[SHOWN:]
        assert scored(turn, gold_answer(turn)) == last_line(gold_answer(turn), turn.answers) == 1.0
        # The material itself and the lines that are shown are no answer.
        assert scored(turn, turn.message() + turn.prefix) == 0.0


@pytest.mark.parametrize("task", TASKS)
def test_length_is_reached_within_one_percent(task, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text(" ".join(f"This is sentence number {number} of a zebra book." for number in range(3000)))
    tokenizer = Templated()
    for length in LENGTHS:
        for chat, options in ((False, {}), (True, {}), (False, {"haystack": f"file:{book}"})):
            one = make(task, length, 1, lengths=Lengths(count_tokens, tokenizer if chat else None), **options)
            (turn,) = one.turns
            if chat:
                tokens = len(render(tokenizer, [], turn).ids)
            else:
                tokens = count_tokens(turn.message() + turn.prefix)
            assert 0.99 * length <= tokens + turn.max_new_tokens <= length
            assert one.meta == {"version": VERSION, "tokens": tokens + turn.max_new_tokens}
            answer = count_tokens(turn.meta["gold"])
            assert answer < turn.max_new_tokens <= length / 2
            assert length < 2048 or answer >= 400
            assert ("zebra book" in turn.message()) == ("haystack" in options)


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_depends_on_its_key_alone(task):
    one = sample(task, 2)
    again = make(task, 4096, 2, 0, lengths=Lengths(count_tokens))
    assert json.dumps(one.as_dict()) == json.dumps(again.as_dict())
    others = [sample(task, 3), sample(task, 2, 4096, 1), sample(task, 2, 4097)]
    assert len({one.turns[0].answers, *(other.turns[0].answers for other in others)}) == 4
    assert Sample.from_dict(json.loads(json.dumps(one.as_dict()))) == one


@pytest.mark.parametrize("task", TASKS)
def test_material_lies_where_meta_says(task):
    depths = set()
    for index in range(10):
        turn = one_turn(task, index, 16384)
        text = turn.message()
        found = [
            match.start()
            for match in re.finditer(r"^(?:(?:Ledger|Data|Record).*:$|[A-Z][a-z]+ [A-Z][a-z]+: )", text, re.M)
        ]
        assert len(found) == len(turn.meta["depth"])
        for place, depth in zip(found, turn.meta["depth"]):  # depths are shares of the text around the material
            assert place / len(text) == pytest.approx(depth, abs=0.15)
        depths.add(int(10 * turn.meta["depth"][0]))
        if task == "sorting":
            gaps = [after - before for before, after in pairwise([0.0, *turn.meta["depth"], 1.0])]
            assert 0 <= min(gaps) <= max(gaps) < 2.01 / len(found)
    assert len(depths) == (1 if task == "sorting" else 10)


def test_a_longer_run_begins_as_a_shorter_one(tmp_path):
    given = Given(count_tokens)
    short = prepare(tmp_path / "a", ["long:all"], [2048], 1, given=given).read_text().splitlines()
    long = prepare(tmp_path / "b", ["long:all"], [2048], 2, given=given).read_text().splitlines()
    assert len(short) == 4
    assert long[:4] == short
    assert [task.name for task in find_tasks(["long:all"], given)] == [f"long:{task}" for task in TASKS]


@pytest.mark.parametrize("task", TASKS)
def test_what_stands_around_the_answer_neither_helps_nor_hurts(task):
    turn = one_turn(task)
    gold = gold_answer(turn)
    dressed = (
        f"Sure! Here are the {len(turn.answers)} lines you asked for:\n\n```text\n{gold}```\n\nIs there more I can do?"
    )
    assert scored(turn, dressed) == last_line(dressed, turn.answers) == 1.0
    assert scored(turn, gold.replace("\n", "  \r\n").upper()) == 1.0
    assert scored(turn, re.sub(r"^(\d+)\.", r"- **\1.**", gold, flags=re.M)) == 1.0
    assert scored(turn, turn.prefix + gold) == 1.0  # begun again


@pytest.mark.parametrize("task", TASKS)
def test_no_credit_for_nothing_or_for_loops(task):
    turn = one_turn(task)
    lines, n = list(turn.answers), len(turn.answers)
    for empty in (
        "",
        " \n",
        "Sure! Here it is:",
        "I cannot do that.",
        "\n".join(f"{number}." for number in range(200)),
    ):
        assert scored(turn, empty) == last_line(empty, lines) == 0.0
    assert scored(turn, "\n".join(lines[:1] * 200)) == pytest.approx(1 / n)
    assert scored(turn, "\n".join(lines[:5] * 50)) == pytest.approx(5 / n)
    content = lines[0].partition(". ")[2]
    counted = "\n".join(f"{number}. {content}" for number in range(SHOWN + 1, SHOWN + 1 + n))
    assert scored(turn, counted) <= 2 / n
    assert last_line(counted, lines) == 0.0
    assert scored(turn, "\n".join(turn.prefix.splitlines() * 60)) == 0.0
    assert scored(turn, "\n".join(reversed(lines))) <= 1 / n
    assert scored(turn, " ".join(lines)) <= 1 / n


@pytest.mark.parametrize("task", TASKS)
def test_credit_is_how_far_the_answer_got(task):
    turn = one_turn(task)
    lines, n = list(turn.answers), len(turn.answers)
    for kept in (0, 1, n // 2, n - 1):
        text = "\n".join(lines[:kept])
        assert scored(turn, text) == pytest.approx(kept / n)
        assert last_line(text, lines) == 0.0
    other = list(one_turn(task, 1).answers)
    half = lines[: n // 2] + other[n // 2 :]  # lost on the way, and gone on with other material
    assert scored(turn, "\n".join(half)) == pytest.approx((n // 2) / n, abs=0.05)
    assert last_line("\n".join(half), lines) == 0.0
    wrong = list(lines)
    wrong[3] = re.sub(r"\w+$", "nothing", wrong[3].rstrip("."))
    assert scored(turn, "\n".join(wrong)) == pytest.approx((n - 1) / n)
    assert last_line("\n".join(wrong), lines) == 1.0
    left_out = lines[:3] + lines[4:]  # numbers and all
    assert (n - 2) / n <= scored(turn, "\n".join(left_out)) < 1


@pytest.mark.parametrize("task", TASKS)
def test_numbers_off_by_one(task):
    turn = one_turn(task)
    lines, n = list(turn.answers), len(turn.answers)
    texts = [line.partition(". ")[2] for line in lines]
    shifted = "\n".join(f"{number}. {text}" for number, text in enumerate(texts, SHOWN + 2))
    skipped = "\n".join(f"{number}. {text}" for number, text in enumerate(texts[:3] + texts[4:], SHOWN + 1))
    assert last_line(shifted, lines) == last_line(skipped, lines) == 0.0
    assert scored(turn, "\n".join(texts)) == 0.0
    if turn.metric == "aligned_lines":  # a line left out costs one line
        assert scored(turn, skipped) == pytest.approx((n - 1) / n)
        assert scored(turn, shifted) == pytest.approx((n - 1) / n)  # the first line's number is wrong
    else:
        assert scored(turn, shifted) <= 1 / n
        assert scored(turn, skipped) == pytest.approx(3 / n, abs=1.01 / n)


def test_one_slip_of_a_running_total_costs_one_step():
    references = ["5. oak: 20 + 3 = 23", "6. elm: 23 + 9 = 32", "7. ash: 32 + 1 = 33", "8. fir: 33 - 2 = 31"]

    def score(*lines: str) -> float:
        return METRICS["running_lines"]("\n".join(lines), references)

    assert score(*references) == 1.0
    slipped = ("5. oak: 20 + 3 = 23", "6. elm: 23 + 9 = 31", "7. ash: 31 + 1 = 32", "8. fir: 32 - 2 = 30")
    assert score(*slipped) == 0.75
    assert last_line("\n".join(slipped), references) == 0.0
    assert score("5. oak: 20 + 3 = 23", "6. elm: 24 + 9 = 33", "7. ash: 33 + 1 = 34") == 0.5  # the total was lost
    assert score("5. oak: 20 + 4 = 24", "6. elm: 24 + 9 = 33") == 0.25  # a step that is not listed
    assert score("5. elm: 20 + 3 = 23") == 0.0  # another entry's name
    assert score("6. elm: 10 + 9 = 19") == 0.0  # begins nowhere
    assert score("6. elm: 23 + 9 = 32") == 0.25
    assert score("8. fir: 33 + 2 = 35", "8. fir: 33 - 2 = 31") == 0.0  # a wrong sign, and only the first try counts
    assert score("**7. ash:** `32+1=33`") == 0.25
    assert score("5. oak: 3", "6. elm: +9: 32") == 0.0


def test_an_unedited_copy_loses_the_lines_with_edits():
    turn = one_turn("copying")
    unedited = turn.meta["gold"].replace("teapot", "lantern")
    edited = sum("teapot" in line for line in turn.answers)
    assert 0.3 < edited / len(turn.answers) < 0.7
    assert scored(turn, unedited) == pytest.approx(1 - edited / len(turn.answers))


def test_bad_requests(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("It ends soon. Here.")
    longer = tmp_path / "longer.txt"
    longer.write_text("This one goes on. " * 40)
    for task, length, haystack, message in (
        ("adding", 4096, "prose", "unknown; known: arithmetic, tracing, sorting, copying"),
        ("copying", 256, "prose", "ask for at least 1024"),
        ("sorting", 4096, f"file:{book}", "has 2 sentences.* at least 12"),
        ("sorting", 4096, f"file:{longer}", "reaches only .* runs out after 160 words; ask for a shorter"),
        ("sorting", 4096, "novel", "unknown; known: prose, file:PATH"),
    ):
        with pytest.raises(RequestError, match=message):
            make(task, length, 0, lengths=Lengths(count_tokens), haystack=haystack)
    with pytest.raises(RequestError, match="--model"):
        find_tasks(["long:copying"])


def test_score_rows_say_whether_the_end_is_right():
    one = sample("copying")
    (turn,) = one.turns
    half = "\n".join(turn.answers[: len(turn.answers) // 2])
    for said, end in ((gold_answer(turn), 1.0), (half, 0.0)):
        answered = {
            **{"prediction": said, "finish": "stop", "prompt_tokens": 9, "notes": []},
            **{phase: {"tokens": 1} for phase in ("prefill", "decode")},
        }
        record = {
            **{"id": one.id, "task": one.task, "length": 4096, "index": 0, "protocol": "A"},
            **{"turns": [answered], "context": None, "error": None, "failed": False},
        }
        row = score_record(one, record, METRICS)
        assert row["turns"][0]["end"] == end
        assert row["score"] == scored(turn, said)
