"""``benchmarks/kv_calls.py`` and ``kv_tasks.py``: what is asked, what counts as right, and what their rows say."""

from __future__ import annotations

import json
import sys
import weakref
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from test_server_tool_formats import TEMPLATES, byte_level

from saccade.eval.answer import COUNTS
from saccade.eval.haystack import PROSE
from saccade.eval.predict import folder_name, stored_as
from saccade.eval.results import CONFIG, PREDICTIONS, SCORES, file_hash, write_json
from saccade.eval.runner import prepare
from saccade.eval.sources import Given
from saccade.models.tokenizer import Tokenizer
from saccade.server.tool_formats import FORMATS, UNKNOWN

TYPES = {"string": str, "integer": int, "boolean": bool}


def imported(name: str, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = __import__(name)
    del sys.modules[name]
    return module


@pytest.fixture
def calls(monkeypatch):
    return imported("kv_calls", monkeypatch)


@pytest.fixture
def tasks(monkeypatch):
    return imported("kv_tasks", monkeypatch)


def prompted(calls, wanted, format) -> str:
    hf = byte_level(TEMPLATES[format.name] if format is not UNKNOWN else "")
    tokenizer = Tokenizer(hf)
    llm = SimpleNamespace(tokenizer=tokenizer, encode=lambda text: hf.encode(text, add_special_tokens=False))
    return str(hf.decode(calls.prompt(llm, wanted, format)))


def test_a_request_says_all_of_its_arguments_which_its_function_takes(calls):
    asked = [calls.request(number, 20) for number in range(40)]
    assert asked == [calls.request(number, 20) for number in range(40)]
    assert {one.name for one in asked} == {*calls.FUNCTIONS}
    for one in asked:
        fields = calls.FUNCTIONS[one.name]
        assert [*one.arguments] == [*fields]
        for name, value in one.arguments.items():
            schema = fields[name]
            assert value in schema["enum"] if "enum" in schema else type(value) is TYPES[schema["type"]]
            assert (str(value).lower() if isinstance(value, bool) else str(value)) in one.question
    assert {one["function"]["name"] for one in calls.TOOLS} == {name for name, _ in calls.SHOWN}


def test_a_longer_document_stands_before_the_same_question(calls):
    short, long = (calls.request(3, length) for length in (20, 200))
    assert short[1:] == long[1:]
    assert len(long.document) > 5 * len(short.document)


def test_a_model_without_tools_in_its_template_sees_a_call_of_each_function_that_is_right(calls):
    wanted = calls.request(0, 20)
    text = prompted(calls, wanted, UNKNOWN)
    assert text.startswith(wanted.document)
    assert text.endswith(f"Request: {wanted.question}\nCall:")
    lines = [line.removeprefix("Call: ") for line in text.split("\n") if line.startswith("Call: ")]
    assert [calls.call(UNKNOWN, line) for line in lines] == [*calls.SHOWN]


def test_a_model_with_tools_in_its_template_reads_them_there(calls):
    wanted = calls.request(0, 20)
    text = prompted(calls, wanted, FORMATS["hermes"])
    assert f"<user>{wanted.document}\n\n{wanted.question}" in text
    assert text.endswith("<assistant>")
    assert all(json.dumps(tool["function"]["name"]) in text for tool in calls.TOOLS)
    assert "Call:" not in text


@pytest.mark.parametrize("name", ["hermes", UNKNOWN.name])
def test_a_call_is_one_whole_call(calls, name):
    arguments = {"city": "Lima", "days": 3}
    made = json.dumps({"name": "get_weather", "arguments": arguments})
    before, after = ("<tool_call>\n", "\n</tool_call>") if name == "hermes" else ("[", "]")
    whole = before + made + after
    read = [calls.call(FORMATS[name], whole[:end]) for end in range(len(whole) + 1)]
    assert read[-1] == ("get_weather", arguments)
    assert all(one in (None, read[-1]) for one in read), "a call that was cut short is none or the whole"
    assert read[: len(before + made) - 2] == [None] * (len(before + made) - 2)
    assert calls.call(FORMATS[name], "It will rain in Lima.") is None
    two = f"{before}{made}, {made}{after}" if name == UNKNOWN.name else whole + "\n" + whole
    assert calls.call(FORMATS[name], two) is None


def test_a_row_counts_the_same_answers_and_pairs_scores(tasks, capsys):
    found = {
        "auto": {
            "a": ("one", 1.0, ["x", "y"]),
            "b": ("one", 0.5, ["z", ""]),
            "c": ("two", 0.0, ["w"]),
            "d": ("two", 1.0, ["v"]),
        },
        "int8": {"a": ("one", 0.5, ["x", "Y"]), "b": ("one", 0.5, ["z", ""]), "c": ("two", 1.0, ["u"])},
    }
    tasks.head(Namespace(model="m", dtype="auto", device="cpu", policy="dense", length=64), "auto")
    tasks.report("auto", "int8", found)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.split("\n")[1:-1]]
    header, _, *body = rows
    assert {len(row) for row in rows} == {len(header)}
    read = {row[0]: dict(zip(header, row)) for row in body}
    assert [*read] == ["one", "two", "all"], "d was not answered under int8"
    assert [read[task]["questions"] for task in read] == ["4", "1", "5"]
    assert [read[task]["same"] for task in read] == ["75 %", "0 %", "60 %"]
    assert [read[task]["better, worse"] for task in read] == ["0, 1", "1, 0", "1, 1"]
    assert [read[task]["minus auto [95 %]"].split()[0] for task in read] == ["-25.00", "+100.00", "+16.67"]
    assert (read["all"]["auto"], read["all"]["points"]) == ("50.0", "66.7")


def test_scores_come_with_the_answers_of_their_sample(tasks, tmp_path):
    predictions = [
        {"id": "b", "turns": [{"prediction": "2"}]},
        {"id": "a", "turns": [{"prediction": "1"}, {"prediction": "0"}]},
    ]
    scored = [{"id": "a", "task": "t", "score": 0.5}, {"id": "b", "task": "t", "score": None}]
    for name, rows in ((PREDICTIONS, predictions), (SCORES, scored)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert tasks.scores(tmp_path) == {"a": ("t", 0.5, ["1", "0"])}


class Engine:
    """Stands for an LLM that takes all of a GPU's memory."""

    alive: ClassVar[list[weakref.ref]] = []

    def __init__(self) -> None:
        self.cycle = self
        assert [one for one in self.alive if one() is not None] == [], "the one before still holds its memory"
        self.alive.append(weakref.ref(self))

    def __enter__(self):
        return self

    def __exit__(self, *exc: object) -> None:
        pass


@pytest.mark.parametrize("script", ["kv_tasks", "kv_calls"])
def test_an_engine_is_gone_before_the_next_one_is_made(script, monkeypatch, tmp_path):
    module = imported(script, monkeypatch)
    monkeypatch.setattr(Engine, "alive", [])
    monkeypatch.setattr(module, "load", lambda config, together: Engine())
    given = ["--model", "m", "--formats", "auto,int8,fp8"]
    if script == "kv_tasks":
        monkeypatch.setattr(module, "given_by", lambda *_, **__: None)
        monkeypatch.setattr(module, "prepare", lambda *_, **__: tmp_path / "data.jsonl")
        monkeypatch.setattr(module, "run_policies", lambda data, llm, *_, **__: [tmp_path])
        monkeypatch.setattr(module, "scores", lambda folder: {"a": ("t", 1.0, ["x"])})
        given += ["--task", "t", "--out", str(tmp_path)]
    else:
        monkeypatch.setattr(module, "answers", lambda llm, wanted, policy: [None] * len(wanted))
        given += ["--count", "3"]
    monkeypatch.setattr(sys, "argv", [script, *given])
    module.main()
    assert len(Engine.alive) == 3


def test_a_format_says_whether_keys_are_turned(tasks, tmp_path):
    """And the folder of its answers is found again under the name that they were written by."""
    asked = Namespace(model="m", dtype="auto", threads=1, device="cpu", kv_memory="9MiB", policy="dense", out=tmp_path)
    data = {"name": "m-9-t", "path": "m-9-t.jsonl", "sha256": "0"}
    for format, kept in (
        ("auto", ("auto", None)),
        ("auto+rotated", ("auto", True)),
        ("int8", ("int8", None)),
        ("int8+as-is", ("int8", False)),
    ):
        config = tasks.config_of(asked, format)
        assert (config.kv_dtype, config.kv_rotate) == kept
        model = {"name": "m"} | {name: value for name, value in stored_as(config).items() if value is not None}
        said = {"model": model, "policy": "dense", "protocol": "A", "history": "self", "data": data}
        folder = tmp_path / folder_name(said)
        folder.mkdir()
        (folder / PREDICTIONS).touch()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tasks, "score_folder", lambda *_: None)
            assert tasks.finished(asked, tmp_path / "m-9-t.jsonl", format) == folder
    with pytest.raises(SystemExit, match="behind '\\+' stands one of rotated, as-is"):
        tasks.config_of(asked, "int8+turned")


def test_rows_of_a_run_that_was_cut_short_need_no_model(tasks, tmp_path, monkeypatch, capsys):
    """What is answered under both formats is compared, scored now where it was not."""

    def count(text: str) -> int:
        return len(text.split())

    name = "m-1024-ruler-niah_single_1"
    samples = prepare(tmp_path, ["ruler:niah_single_1"], [1024], 3, name=name, given=Given(count, None, None, PROSE))
    ids = [json.loads(line)["id"] for line in samples.read_text().splitlines()]
    answers = [json.loads(line)["turns"][0]["answers"][0] for line in samples.read_text().splitlines()]
    for tail, said in (("", answers), ("__int8", [answers[0], "no"])):
        folder = tmp_path / f"m__dense__A__{name}{tail}"
        folder.mkdir()
        cost = {phase: dict.fromkeys(COUNTS, 1) for phase in ("prefill", "decode")} | {"prompt_tokens": 9, "notes": []}
        rows = [
            {"id": one, "task": "ruler:niah_single_1", "length": 1024, "index": at, "protocol": "A", "context": None}
            | {"error": None, "failed": False, "turns": [{"prediction": text, "finish": "stop", **cost}]}
            for at, (one, text) in enumerate(zip(ids, said))
        ]
        (folder / PREDICTIONS).write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_json(folder / CONFIG, {"data": {"sha256": file_hash(samples)}, "protocol": "A"})
    given = ["--model", "x/m", "--task", "ruler:niah_single_1", "--length", "1024", "--out", str(tmp_path), "--report"]
    monkeypatch.setattr(sys, "argv", ["kv_tasks", *given, "--formats", "auto,int8,fp8"])
    tasks.main()
    (row,) = capsys.readouterr().out.splitlines()[3:]
    assert "| 2 | 2 | 100.0 | int8 | 50.0 | -50.00" in row
    monkeypatch.setattr(sys, "argv", ["kv_tasks", *given, "--formats", "bf16"])
    with pytest.raises(SystemExit, match="holds no answers"):
        tasks.main()
