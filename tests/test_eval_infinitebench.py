"""InfiniteBench: its ten tasks from files, how their answers are scored, and files that are none."""

from __future__ import annotations

import json

import pytest
from tiny_models import byte_tokenizer

from saccade.cli.main import main
from saccade.errors import RequestError
from saccade.eval.infinitebench import TASKS, load, task_of, templates
from saccade.eval.metrics import METRICS, score
from saccade.eval.samples import Sample, read_jsonl
from saccade.models.tokenizer import Tokenizer

OPTIONS = ["run_{x}", "load", "save", "stop"]
ITEMS = {
    "longbook_sum_eng": ("", ["A man sails.\nHe returns."]),
    "longbook_qa_eng": ("Who {context} it?", ["Ida", "the painter Ida"]),
    "longbook_choice_eng": ("Which?", ["load"]),
    "longdialogue_qa_eng": ("Which character?", ["BOND"]),
    "longbook_qa_chn": ("谁？", ["小明"]),
    "code_debug": ("Which?", ["save", "C"]),
    "math_find": ("You answer with one number. The 2nd largest number of the list is", 7),
    "passkey": ("What is the pass key?", ["0519"]),
    "number_string": ("What is the sequence?", "7773331"),
    "kv_retrieval": ('Key: "a-1"\nThe value:', "b-2"),
}


def item(name, **changes):
    asked, answer = ITEMS[name]
    options = OPTIONS if TASKS[name].chooses else []
    return {
        "id": 3,
        "context": "[3, 7, 9] {input} text",
        "input": asked,
        "answer": answer,
        "options": options,
        **changes,
    }


def write(folder, name, *items):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in items), encoding="utf-8")
    return folder / f"{name}.jsonl"


def turn_of(folder, name, **changes):
    return next(load(write(folder, name, item(name, **changes)))).turns[0]


def test_ten_tasks_ask_for_what_they_score(tmp_path):
    assert [TASKS[name].label.partition(".")[0] for name in TASKS] == ["En"] * 4 + ["Zh", "Code", "Math"] + ["Retr"] * 3
    for name in TASKS:
        turn = turn_of(tmp_path, name)
        assert turn.metric in METRICS
        assert turn.meta["chat"] is False
        assert "[3, 7, 9] {input} text" in turn.context[0], "a context's braces are data"
        assert "{" not in turn.question.replace("{context}", "").replace("run_{x}", ""), "every field is filled"
        assert score(turn.metric, turn.answers[-1], turn.answers) == (name != "code_debug")
    assert "{context}" in turn_of(tmp_path, "longbook_qa_eng").question
    assert turn_of(tmp_path, "longbook_choice_eng").answers == ("load", "B")
    assert turn_of(tmp_path, "code_debug").question.count("\nC. save") == 1
    assert turn_of(tmp_path, "math_find").context[0].startswith("What is the 2nd largest number in the following list?")
    assert turn_of(tmp_path, "math_find").answers == ("7",)


@pytest.mark.parametrize(
    ("metric", "references", "right", "wrong"),
    [
        ("first_digits", ["0519"], ["is 0519.", "key=0519, not 3"], ["519", "3 0519", ""]),
        ("first_number", ["7.5"], ["7.5", "about 7.50 of 9"], ["7", "9 7.5", "none"]),
        ("first_number", ["7"], ["is 7.", "-7", "7.0"], ["77", "7.5"]),
        ("holds_word", ["b-2"], ['{"a": "b-2"}', "b-2."], ["b-22", "b -2", "B-2"]),
        ("names_word", ["BOND"], ["james Bond.", "BOND: no"], ["BONDS", ""]),
        ("option_letter", ["load", "B"], ["B", "B. load", "load", "The answer is B", "I say B or C"], ["", "A, not B"]),
        ("option_letter", ["load", "B"], ["the answer: load, I think"], ["answer is: C, B", "I say C or B", "nothing"]),
        ("marked_option", ["save", "C"], ["C.", "C: save", "The answer is: C", "correct option is: `save`"], ["C", ""]),
        ("marked_option", ["save", "C"], ["answer: Option C"], ["D. C.", "is: load, C", "answer is:"]),
    ],
)
def test_answers_are_right_or_wrong(metric, references, right, wrong):
    assert [score(metric, said, references) for said in right] == [1.0] * len(right)
    assert [score(metric, said, references) for said in wrong] == [0.0] * len(wrong)


def test_chinese_answers_count_characters():
    assert score("qa_f1_characters", "小明。", ["小明"]) == 1.0
    assert score("qa_f1_characters", "小红", ["大明", "小明"]) == pytest.approx(0.5)
    assert score("qa_f1_characters", "", ["小明"]) == 0.0


def test_rouge_lsum_counts_unions_and_no_word_twice():
    # Lin's example: w1 w2 of one sentence and w1 w3 w5 of the other make four of five words.
    said = "w1 w2 w6 w7 w8\nW1, w3 w8 w9 w5"
    assert score("rouge_lsum", said, ["w1 w2 w3 w4 w5"]) == pytest.approx(2 * (4 / 10) * (4 / 5) / (4 / 10 + 4 / 5))
    assert score("rouge_lsum", "the", ["the the the\nthe"]) == pytest.approx(2 / 5)  # one hit of 1 and of 4
    assert score("rouge_lsum", "b a", ["a b"]) == pytest.approx(0.5)  # order counts within a line
    assert score("rouge_lsum", "b\na", ["a b"]) == pytest.approx(1.0)  # and not between lines
    assert score("rouge_lsum", "", ["a"]) == score("rouge_lsum", "!", ["a"]) == 0.0


def test_a_long_prompt_leaves_room_for_its_answer(tmp_path):
    path = write(tmp_path, "passkey", item("passkey", context="x" * 900), item("passkey"))
    codec = Tokenizer(byte_tokenizer())  # one token a byte
    long, short = (sample.turns[0] for sample in load(path, codec=codec, length=300))
    assert (long.meta["truncated"], short.meta["truncated"]) == (True, False)
    assert long.message().endswith("What is the pass key?\n\nThe pass key is")
    assert len(codec.encode(long.message())) + long.max_new_tokens <= 300
    with pytest.raises(RequestError, match="length=20 must be above 23 for passkey, whose answers take 6"):
        list(load(path, codec=codec, length=20))


def test_the_benchmarks_own_prompts_are_read_and_nothing_is_run(tmp_path):
    said = {name: f"Mine: {{context}} {name}" for name in TASKS}
    (tmp_path / "prompt.py").write_text(
        f"raise SystemExit\ngpt4_templates = {{}}\nyarn_mistral_templates = {said!r}\n", encoding="utf-8"
    )
    assert templates(tmp_path) == said
    path = write(tmp_path, "kv_retrieval", item("kv_retrieval"))
    turn = next(load(path, template=said["kv_retrieval"])).turns[0]
    assert turn.message() == "Mine: [3, 7, 9] {input} text kv_retrieval"
    for text, says in (
        ("yarn_mistral_templates = {'passkey': '{context}'}", r"KeyError.*src/prompt\.py as it is"),
        ("yarn_mistral_templates = open('x')", "ValueError"),
        ("x = (", "SyntaxError"),
        ("", "StopIteration"),
        (f"yarn_mistral_templates = {dict.fromkeys(TASKS, 'no')!r}", r"longbook_sum_eng must have \{context\} once"),
    ):
        (tmp_path / "prompt.py").write_text(text, encoding="utf-8")
        with pytest.raises(RequestError, match=says):
            templates(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("passkey", {"context": 3}, "context must be text"),
        ("passkey", {"answer": None}, "answer must be a text or a number"),
        ("passkey", {"answer": []}, "answer must be a text or a number"),
        ("math_find", {"input": "Which one?"}, "input must name a number"),
        ("code_debug", {"options": ["save", "load"]}, "options must be a list of four texts"),
        ("longbook_choice_eng", {"answer": ["halt"]}, "answer 'halt' is none of the options"),
    ],
)
def test_a_line_that_is_no_item_is_named(tmp_path, name, changes, says):
    path = write(tmp_path, name, item(name), item(name, **changes))
    with pytest.raises(RequestError, match=rf"{name}\.jsonl, line 2 is no item of {name}: {says}"):
        list(load(path))


def test_bad_files_and_folders_are_one_line(tmp_path, capsys):
    with pytest.raises(
        RequestError, match=r"book\.jsonl is not the file of an InfiniteBench task; known: longbook_sum"
    ):
        task_of(tmp_path / "book.jsonl")
    with pytest.raises(RequestError, match=r"passkey\.jsonl does not exist"):
        list(load(tmp_path / "passkey.jsonl"))
    with pytest.raises(RequestError, match="line 1 is no item of passkey: it has no input, answer"):
        list(load(write(tmp_path, "passkey", {"context": "x"})))
    with pytest.raises(RequestError, match="it is no object"):
        list(load(write(tmp_path, "passkey", [1])))
    for folder, says in ((tmp_path / "none", "--infinitebench DIR"), (tmp_path / "out", "holds no InfiniteBench file")):
        (tmp_path / "out").mkdir(exist_ok=True)
        with pytest.raises(SystemExit):
            main(["eval", "prepare", "-t", "infinitebench:all", "--infinitebench", str(folder), "-o", str(tmp_path)])
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert says in line


def test_they_are_a_source_of_tasks(tmp_path, capsys):
    write(tmp_path, "passkey", item("passkey"), item("passkey", answer=["12"]))
    write(tmp_path, "math_find", item("math_find"), item("math_find", answer=3.5))
    task = ["-t", "infinitebench:all", "--infinitebench", str(tmp_path), "--length", "512"]
    with pytest.raises(SystemExit):
        main(["eval", "prepare", *task, "--samples", "2", "-o", str(tmp_path / "data")])
    data = next((tmp_path / "data").glob("*.jsonl"))
    samples = [Sample.from_dict(record) for record in read_jsonl(data)]
    assert [sample.task for sample in samples] == ["infinitebench:math_find", "infinitebench:passkey"] * 2
    assert [sample.turns[0].answers for sample in samples] == [("7",), ("0519",), ("3.5",), ("12",)]
