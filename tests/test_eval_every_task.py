"""Every task of every source goes all the way: samples, answers, scores, and a real report of them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from test_eval_infinitebench import item
from test_eval_report import config
from tiny_models import byte_tokenizer

from saccade import prose
from saccade.eval import longbench, runner
from saccade.eval.answer import COUNTS
from saccade.eval.infinitebench import TASKS as INFINITEBENCH
from saccade.eval.render import gold_answer
from saccade.eval.report import print_summary, write_report
from saccade.eval.results import file_hash, write_json
from saccade.eval.samples import Sample, read_jsonl, write_jsonl
from saccade.eval.score import score_folder
from saccade.eval.sources import SOURCES, Given, find_tasks
from saccade.eval.summary import Run, depth_table
from saccade.models.tokenizer import Tokenizer

LENGTH = 12_000  # bytes, the tokens of these tests; the least that cwe's worked example fits


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> Given:
    """Small files of the formats that sources read, and a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("given")
    for name in longbench.sets():
        text = "\n".join(f"Passage {number}:\n{prose.generate(300, number)}" for number in range(3))
        answer = "Paragraph 2" if name == "passage_retrieval_en" else "2" if name == "passage_count" else "Ida"
        one = {"input": "Who?", "context": text, "answers": [answer], "all_classes": ["Ida", "Bo"], "_id": "1"}
        (folder / f"{name}.jsonl").write_text(json.dumps({**one, "language": "en", "length": 3}) + "\n")
    infinite = folder / "infinite"
    infinite.mkdir()
    for name in INFINITEBENCH:
        (infinite / f"{name}.jsonl").write_text(json.dumps(item(name)) + "\n")
    (folder / "book.txt").write_text(prose.generate(30_000, 5))
    squad = {"context": "Ida lives in Oulu. " * 9, "qas": [{"question": "Who?", "answers": [{"text": "Ida"}]}]}
    many = [{"context": f"{prose.generate(200, number)}", "qas": []} for number in range(60)]
    (folder / "qa_1.json").write_text(json.dumps({"data": [{"paragraphs": [squad, *many]}]}))
    pages = [[f"Title {number}", [prose.generate(150, number)]] for number in range(10)]
    hotpot = [
        {"question": "Who?", "answer": "Ida", "context": [[f"{number} {title}", text] for title, text in pages]}
        for number in range(9)
    ]
    (folder / "qa_2.json").write_text(json.dumps(hotpot))
    codec = Tokenizer(byte_tokenizer())

    def count(text: str) -> int:
        return len(codec.encode(text, add_special_tokens=False))

    return Given(count, lambda: codec, folder, f"file:{folder / 'book.txt'}", folder / "qa_1.json", True, infinite)


def names(given: Given) -> list[str]:
    found = [task.name for task in find_tasks([f"{source}:all" for source in SOURCES if source != "mtlb"], given)]
    return [name for name in found if name != "ruler:qa_2"]  # which has a file of its own


@cache
def cost(tokens: int, dense: bool) -> dict[str, int]:
    counts = dict.fromkeys(COUNTS, 0)
    return {**counts, "tokens": tokens, "keys_causal": 100 * tokens, "keys_attended": (100 if dense else 9) * tokens}


def answered(sample: Sample, right: bool, dense: bool) -> dict:
    """A line of predictions.jsonl, as if every turn had been answered with its reference, or with nothing of it."""
    turns = [
        {
            "prediction": gold_answer(turn) if right else "%",
            "finish": "stop",
            "question_decoded": 0,
            "prompt_tokens": sample.length,
            "cached_tokens": 0,
            "output_tokens": 3,
            "prefill": cost(sample.length, True),
            "decode": cost(3, dense),
            "notes": [],
        }
        for turn in sample.turns
    ]
    head = {"id": sample.id, "task": sample.task, "length": sample.length, "index": sample.index, "protocol": "A"}
    return {**head, "turns": turns, "context": None, "error": None, "failed": False}


def reported(data: Path, out: Path) -> tuple[list[Run], list[Path]]:
    """The report over dense, which is right, and psa, which never is."""
    samples = [Sample.from_dict(record) for record in read_jsonl(data)]
    for policy in ("dense", "psa"):
        folder = out / "results" / policy
        folder.mkdir(parents=True)
        described = {"path": str(data), "sha256": file_hash(data), "name": data.stem, "seed": 0, "sources": {}}
        write_json(folder / "config.json", config(policy, data=described))
        dense = policy == "dense"
        write_jsonl(folder / "predictions.jsonl", (answered(sample, dense, dense) for sample in samples))
        score_folder(folder, data)
    files = write_report([out / "results"], out / "report")
    return [Run.load(out / "results" / policy) for policy in ("dense", "psa")], files


def check(data: Path, out: Path, tasks: list[str], capsys) -> Run:
    (dense, _), files = reported(data, out)
    assert dense.tasks == tasks
    assert all(row["error"] is None and row["score"] is not None for row in dense.rows.values())
    page, markdown = files[0].read_text(), files[1].read_text()
    for task in tasks:
        assert f"| `{task}` |" in markdown
        assert f"<td class=label>{task}</td>" in page
    print_summary([out / "results"])
    assert "psa" in capsys.readouterr().out
    assert all(0 <= bin_ < 10 for _, bin_ in depth_table(dense))
    return dense


def test_every_task_of_every_source_reaches_the_report(given, tmp_path, capsys):
    tasks = names(given)
    assert {name.partition(":")[0] for name in tasks if ":" in name} == {*SOURCES} - {"suite", "mtlb"}
    assert len(tasks) > 60
    data = runner.prepare(tmp_path / "data", tasks, [LENGTH], 1, given=given)
    dense = check(data, tmp_path, tasks, capsys)
    # What is the reference is right by every metric, but where a reference alone is no answer.
    wrong = {row["task"] for row in dense.rows.values() if row["score"] < 0.99}
    assert wrong <= {"infinitebench:code_debug"}


def test_hotpots_ten_places_reach_the_report_too(given, tmp_path, capsys):
    """A turn with many depths has a score of its own and stands at no depth."""
    own = Given(given.count_tokens, given.codec, corpus=given.longbench / "qa_2.json")
    data = runner.prepare(tmp_path / "data", ["ruler:qa_2"], [LENGTH], 2, given=own)
    dense = check(data, tmp_path, ["ruler:qa_2"], capsys)
    assert all(len(turn["depth"]) == 10 for row in dense.rows.values() for turn in row["turns"])
    assert depth_table(dense) == {}


def test_multi_turn_sets_reach_the_report(given, tmp_path, capsys):
    tasks = [f"mtlb:{name}:{position}" for name in ("mtsyn_qa", "mtsyn_fewshot") for position in ("begin", "end")]
    data = runner.prepare(tmp_path / "data", tasks, [4000], 1, given=Given(given.count_tokens))
    check(data, tmp_path, tasks, capsys)


def test_one_needle_stands_at_its_depth(given, tmp_path):
    tasks = ["ruler:niah_single_1", "ruler:vt"]
    data = runner.prepare(tmp_path / "data", tasks, [3000], 10, given=Given(given.count_tokens))
    (dense, psa), _ = reported(data, tmp_path)
    assert depth_table(dense) == {(3000, bin_): 1.0 for bin_ in range(10)}  # vt's five places are none
    assert depth_table(psa) == {(3000, bin_): 0.0 for bin_ in range(10)}
