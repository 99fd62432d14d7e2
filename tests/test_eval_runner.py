"""Prepare, predict and score: resumable to the byte, true to their protocols, and clear about what went wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from engine_helpers import make
from made_samples import SOURCES, made
from tiny_models import one_thread  # noqa: F401 - a fixture

from saccade.engine.messages import StepOutput
from saccade.engine.settings.config import EngineConfig
from saccade.errors import PolicyError, RequestError
from saccade.eval import runner
from saccade.eval.metrics import METRICS
from saccade.eval.predict import Setting, answer, predict
from saccade.eval.render import Exchange, render
from saccade.eval.results import Log, differences
from saccade.eval.samples import Sample, Turn, read_jsonl
from saccade.eval.score import score_folder, score_record
from saccade.eval.setting import load
from saccade.eval.sources import Given, find_tasks
from saccade.methods.policy import Policy

PSA = "psa(epsilon=0.4, block_size=16, microbatch=1, rank=cuboid)"
FLEX = "flexprefill(gamma=0.5, block_size=64, min_budget=0)"
MODEL = EngineConfig("tiny", dtype="float32", prefill_chunk=64, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def llm(tiny_llama):
    engine = make(tiny_llama, max_model_len=700)
    yield engine
    assert engine.engine.pool.used_blocks == 0


@pytest.fixture
def data(tmp_path) -> Path:
    return runner.prepare(tmp_path / "data", ["made:one", "made:chat", "made:shared"], [200], 2, sources=SOURCES)


def setting(policy: str = "dense", protocol: str = "A", history: str = "self") -> Setting:
    return Setting(Policy.parse(policy), protocol, history)


# --- prepare


def test_samples_are_ordered_by_index_so_that_a_prefix_is_a_smaller_run(tmp_path):
    names = ["made:one", "single"]
    short = runner.prepare(tmp_path / "a", names, [64, 100], 2, sources=SOURCES)
    long = runner.prepare(tmp_path / "b", names, [64, 100], 3, sources=SOURCES)
    ids = [record["id"] for record in read_jsonl(long)]
    assert ids[:5] == ["made:one/64/0/0", "made:one/100/0/0", "single/64/0/0", "single/100/0/0", "made:one/64/0/1"]
    assert long.read_bytes().startswith(short.read_bytes())
    assert len(ids) == 12
    again = runner.prepare(tmp_path / "c", names, [64, 100], 3, sources=SOURCES)
    assert again.read_bytes() == long.read_bytes()
    manifest = json.loads(long.with_suffix(".json").read_text())
    assert manifest["sources"] == {"made": "1", "suite": "7"}
    assert manifest["tasks"] == names


def test_prepare_keeps_what_is_there_and_refuses_to_mix(tmp_path):
    data = runner.prepare(tmp_path, ["single"], [64], 2, sources=SOURCES)
    assert runner.prepare(tmp_path, ["single"], [64], 2, sources=SOURCES) == data
    with pytest.raises(RequestError, match="samples is 2 there, asked for is 3"):
        runner.prepare(tmp_path, ["single"], [64], 3, sources=SOURCES)
    data.write_text(data.read_text().replace("which", "whose"))
    with pytest.raises(RequestError, match="has been changed"):
        runner.prepare(tmp_path, ["single"], [64], 2, sources=SOURCES)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["nowhere:one"], "unknown task source 'nowhere'.*made, suite"),
        (["made:onne"], "did you mean 'one'.*known: one, chat, shared, before, all"),
        (["siingle"], "unknown task 'siingle' of 'suite'"),
        ([], "at least one task"),
    ],
)
def test_unknown_tasks_are_named(tmp_path, names, says):
    with pytest.raises(RequestError, match=says):
        runner.prepare(tmp_path, names, [64], 1, sources=SOURCES)
    assert not list(tmp_path.glob("*"))


def test_all_of_a_source_without_repeats():
    found = find_tasks(["made:chat", "made:all", "single"], sources=SOURCES)
    assert [task.name for task in found] == ["made:chat", "made:one", "made:shared", "made:before", "single"]


def test_other_sources_by_their_names(tmp_path):
    given = Given(count_tokens=lambda text: len(text.split()))
    names = ["ruler:niah_single_1", "mtlb:mtsyn_qa:begin", "facts:single"]
    short = runner.prepare(tmp_path / "a", names, [1024], 1, given=given)
    long = runner.prepare(tmp_path / "b", names, [1024], 2, given=given)
    assert long.read_bytes().startswith(short.read_bytes())
    samples = [Sample.from_dict(record) for record in read_jsonl(long)]
    assert [sample.id for sample in samples[3:]] == [f"{name}/1024/0/1" for name in names]
    assert len(samples[1].turns) == 3
    assert all(turn.position == "begin" for turn in samples[1].turns)
    for names, says in (
        (["ruler:niah_single_1"], "name its model with --model"),
        (["longbench:qasper"], "--longbench DIR"),
        (["mtlb:qasper:end"], "unknown task 'qasper:end' of 'mtlb'"),
    ):
        with pytest.raises(RequestError, match=says):
            runner.prepare(tmp_path / "c", names, [1024], 1)


def test_longbench_files_are_a_source(tmp_path):
    item = {"input": "Who?", "context": "Ida did.", "answers": ["Ida"], "all_classes": ["Ida", "Bo"], "_id": "1"}
    (tmp_path / "trec.jsonl").write_text(json.dumps({**item, "language": "en", "length": 3}) + "\n")
    data = runner.prepare(tmp_path / "out", ["longbench:trec"], [512], 1, given=Given(longbench=tmp_path))
    (sample,) = (Sample.from_dict(record) for record in read_jsonl(data))
    said = {
        "prediction": "\nIda\nnot Bo",
        "finish": "stop",
        "prompt_tokens": 9,
        "notes": [],
        "prefill": {},
        "decode": {},
    }
    head = {"id": sample.id, "task": "t", "length": 1, "index": 0, "protocol": "A", "error": None, "failed": False}
    assert score_record(sample, {**head, "turns": [said]}, METRICS)["score"] == 1.0  # of the first line alone
    with pytest.raises(RequestError, match="has 1 samples; ask for no more"):
        runner.prepare(tmp_path / "more", ["longbench:trec"], [512], 2, given=Given(longbench=tmp_path))


# --- predict


@pytest.mark.parametrize("policy", ["dense", f"{FLEX}+{PSA}"])
def test_resumed_after_a_kill_the_file_is_the_same(tmp_path, llm, data, policy):
    whole = predict(data, llm, MODEL, setting(policy), tmp_path / "whole")
    expected = (whole / "predictions.jsonl").read_bytes()
    lines = expected.splitlines(keepends=True)
    assert [json.loads(line)["id"] for line in lines] == [record["id"] for record in read_jsonl(data)]
    kept = b""
    for number, line in enumerate(lines):
        cut = (0, len(line) // 2, len(line) - 1)[number % 3]
        folder = tmp_path / str(number) / whole.name
        folder.mkdir(parents=True)
        (folder / "config.json").write_bytes((whole / "config.json").read_bytes())
        (folder / "predictions.jsonl").write_bytes(kept + line[:cut])
        (folder / "timings.jsonl").write_bytes(b'{"id": "torn')
        predict(data, llm, MODEL, setting(policy), folder.parent)
        assert (folder / "predictions.jsonl").read_bytes() == expected
        kept += line


def test_interrupted_between_samples_and_limited_runs_are_prefixes(tmp_path, llm, data):
    def stop(done: int, whole: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predict(data, llm, MODEL, setting(), tmp_path, progress=stop)
    folder = predict(data, llm, MODEL, setting(), tmp_path, limit=1)
    first = (folder / "predictions.jsonl").read_bytes()
    assert first.count(b"\n") == 3
    assert predict(data, llm, MODEL, setting(), tmp_path) == folder
    whole = (folder / "predictions.jsonl").read_bytes()
    assert whole.startswith(first)
    assert whole.count(b"\n") == 6
    predict(data, llm, MODEL, setting(), tmp_path, limit=1)  # a smaller request leaves what is there
    assert (folder / "predictions.jsonl").read_bytes() == whole


@pytest.mark.slow  # each process imports and loads for itself
def test_workers_give_the_same_file(tmp_path, tiny_llama, data):
    model = EngineConfig(
        str(tiny_llama),
        dtype="float32",
        max_model_len=700,
        prefill_chunk=64,
        kv_memory="4MiB",
        threads=1,
        enable_prefix_caching=False,
    )
    own = load(model)
    alone, together = (
        predict(data, own, model, setting(PSA), tmp_path / str(workers), workers=workers) for workers in (1, 2)
    )
    assert (together / "predictions.jsonl").read_bytes() == (alone / "predictions.jsonl").read_bytes()
    assert len(list(read_jsonl(together / "timings.jsonl"))) == 6
    with pytest.raises(RequestError, match="workers=0 must be"):
        predict(data, own, model, setting("dense"), tmp_path, workers=0)


def test_samples_that_share_steps_give_the_same_file(tmp_path, tiny_llama, data):
    """In float32 a row does not depend on who shares its step; most of the decode steps are shared."""
    model = EngineConfig(
        str(tiny_llama),
        dtype="float32",
        max_model_len=700,
        prefill_chunk=64,
        kv_memory="4MiB",
        enable_prefix_caching=False,
    )
    llm = load(model, together=3)
    alone = predict(data, llm, model, setting(PSA), tmp_path / "alone")
    engine, rows, step = llm.engine, [], llm.engine.step

    def counting() -> list[StepOutput]:
        outputs = step()
        rows.append(len(engine.scheduler.running))
        return outputs

    engine.step = counting
    shared = predict(data, llm, model, setting(PSA), tmp_path / "shared", together=3)
    assert (shared / "predictions.jsonl").read_bytes() == (alone / "predictions.jsonl").read_bytes()
    assert max(rows) > 1  # three, but for a thread that wakes late
    for words, said in (({"together": 0}, "together=0 must be"), ({"together": 2, "workers": 2}, "one way, not both")):
        with pytest.raises(RequestError, match=said):
            predict(data, llm, model, setting("dense"), tmp_path, **words)


def test_keys_and_values_of_another_format_have_a_folder_of_their_own(tmp_path, llm, data):
    """The config did not say how they are stored: answers under int8 were those of the folder that was there."""
    plain = predict(data, llm, MODEL, setting(), tmp_path, limit=1)
    for options, name in (({"kv_dtype": "int8"}, "int8"), ({"kv_dtype": "int8", "kv_rotate": False}, "int8__as-is")):
        model = replace(MODEL, **options)
        folder = predict(data, llm, model, setting(), tmp_path, limit=1)
        assert folder.name == f"{plain.name}__{name}"
        assert options.items() <= json.loads((folder / "config.json").read_text())["model"].items()
    assert "kv_dtype" not in json.loads((plain / "config.json").read_text())["model"]


def test_a_folder_of_another_setting_is_an_error_that_names_the_difference(tmp_path, llm, data):
    folder = predict(data, llm, MODEL, setting(), tmp_path, limit=1)
    config = json.loads((folder / "config.json").read_text())
    assert config["model"]["weights_sha256"]
    assert config["data"]["sha256"]
    config["history"] = "gold"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match=r"history is 'gold' there, asked for is 'self'.*another --out"):
        predict(data, llm, MODEL, setting(), tmp_path)
    config["history"] = "self"
    config["versions"]["torch"] = "1.0"
    (folder / "config.json").write_text(json.dumps(config))
    predict(data, llm, MODEL, setting(), tmp_path, limit=1)  # complete: nothing is mixed
    with pytest.raises(RequestError, match=r"begun elsewhere: versions\.torch is '1.0'.*--mix"):
        predict(data, llm, MODEL, setting(), tmp_path)
    predict(data, llm, MODEL, setting(), tmp_path, mix=True)
    mixed = json.loads((folder / "config.json").read_text())
    assert mixed.pop("continued_with")[0]["versions"]["torch"] != "1.0"
    assert mixed == config
    predict(data, llm, MODEL, setting(), tmp_path)  # complete now


def test_corrupted_lines_are_named(tmp_path, llm, data):
    folder = predict(data, llm, MODEL, setting(), tmp_path)
    file = folder / "predictions.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    for bad, says in ((b"{torn\n", "is not JSON"), (b"[1]\n", "no record with an id")):
        file.write_bytes(lines[0] + bad + lines[2])
        with pytest.raises(RequestError, match=f"predictions.jsonl, line 2 .*{says}"):
            predict(data, llm, MODEL, setting(), tmp_path)
        with pytest.raises(RequestError, match="line 2"):
            score_folder(folder)
    file.write_bytes(lines[0] + lines[2])
    with pytest.raises(
        RequestError, match="line 2 answers 'made:shared/200/0/0' where the data has 'made:chat/200/0/0'"
    ):
        predict(data, llm, MODEL, setting(), tmp_path)


def test_samples_that_do_not_fit_are_rows_with_an_error(tmp_path, llm):
    data = runner.prepare(tmp_path / "data", ["made:one", "made:shared"], [200, 800], 1, sources=SOURCES)
    folder = predict(data, llm, MODEL, setting(), tmp_path)
    records = list(read_jsonl(folder / "predictions.jsonl"))
    assert [record["error"] is None for record in records] == [True, False, True, False]
    # <bos> <user> 800 letters, 9 of the question, <assistant> and "A:", then 4 for the answer
    assert records[1]["error"] == "the sample needs 818 tokens with its answer, the model takes 700"
    rows = list(read_jsonl(score_folder(folder)))
    assert [row["score"] for row in rows] == [0.0, None, 0.0, None]


def test_a_method_that_fails_scores_nothing_and_the_others_go_on(tmp_path, odd_llama, data, monkeypatch):
    from saccade.methods.psa import PSA as Method

    llm = make(odd_llama, max_model_len=700)  # whose rows are chosen by the method's own hooks
    choose, calls = Method.select_decode, []

    def fail_first(self, query, state):
        calls.append(1)
        return 1 / 0 if len(calls) == 1 else choose(self, query, state)

    monkeypatch.setattr(Method, "select_decode", fail_first)
    folder = predict(data, llm, MODEL, setting(PSA), tmp_path, limit=1)
    first, second, _ = read_jsonl(score_folder(folder))
    assert "ZeroDivisionError" in first["error"]
    assert first["score"] == 0.0
    assert second["error"] is None


# --- protocols


def test_letters_follow_from_the_policy():
    letters = {"dense": "A", PSA: "A", FLEX: "C", f"{FLEX}+{PSA}": "D", "streaming": "D"}
    assert {policy: setting(policy).letter for policy in letters} == letters
    assert setting(PSA, "B").letter == setting("dense", "B").letter == "B"
    with pytest.raises(RequestError, match="protocol B prefills the context densely, but 'streaming'"):
        setting("streaming", "B")
    with pytest.raises(RequestError, match="protocol='E' is unknown; known: A, B"):
        setting(PSA, "E")
    with pytest.raises(RequestError, match="history='mine' is unknown; known: self, gold"):
        setting(PSA, history="mine")


def test_under_b_the_question_runs_through_decode(llm):
    sample = made("one", 200, 0, 0)
    # <bos> <user> and 200 letters are context; the question's 9, <assistant> and "A:" come after
    whole, question = 2 + 200 + 9 + 1 + 2, 9 + 1 + 2
    under_a = answer(llm, sample, setting(PSA))[0]["turns"][0]
    under_b = answer(llm, sample, setting(PSA, "B"))[0]
    turn = under_b["turns"][0]
    assert (under_b["protocol"], turn["question_decoded"]) == ("B", question)
    assert under_a["prefill"]["tokens"] == whole
    assert turn["prefill"]["tokens"] == whole - question
    assert turn["prefill"]["keys_attended"] == turn["prefill"]["keys_causal"]
    answered = turn["output_tokens"] - 1  # the last token is sampled, not computed
    assert turn["decode"]["tokens"] == question + answered
    assert turn["decode"]["keys_causal"] == 3 * sum(range(whole - question + 1, whole + answered + 1))
    assert turn["decode"]["keys_attended"] < turn["decode"]["keys_causal"]
    assert turn["decode"]["retrievals"] == 3 * turn["decode"]["tokens"]
    dense = [answer(llm, sample, setting("dense", letter))[0]["turns"][0]["prediction"] for letter in "AB"]
    assert dense[0] == dense[1]


def test_a_question_before_its_context_is_prefilled_and_says_so(llm):
    record = answer(llm, made("before", 200, 0, 0), setting(PSA, "B"))[0]
    assert (record["protocol"], record["turns"][0]["question_decoded"]) == ("A", 0)


@pytest.mark.parametrize(("policy", "protocol"), [(PSA, "A"), (PSA, "B"), (FLEX, "A"), (f"{FLEX}+{PSA}", "A")])
def test_a_shared_context_is_computed_once(llm, policy, protocol):
    sample = made("shared", 200, 0, 0)
    record = answer(llm, sample, setting(policy, protocol))[0]
    assert record["context"]["prefill"]["tokens"] == 202
    assert record["context"]["decode"]["tokens"] == 0
    for turn, asked in zip(record["turns"], sample.turns):
        question = len(asked.question) + 1 + len(asked.prefix)
        assert turn["cached_tokens"] == 202
        assert turn["prompt_tokens"] == 202 + question
        decoded = question if protocol == "B" else 0
        assert turn["prefill"]["tokens"] == question - decoded
        assert turn["decode"]["tokens"] == decoded + turn["output_tokens"] - 1
    # order does not matter: no question sees another
    swapped = Sample("shared", 200, 0, 0, (sample.turns[0], sample.turns[2], sample.turns[1]), shared=True)
    other = answer(llm, swapped, setting(policy, protocol))[0]
    assert [turn["prediction"] for turn in other["turns"]] == [record["turns"][at]["prediction"] for at in (0, 2, 1)]


@pytest.mark.parametrize("history", ["self", "gold"])
def test_history_is_the_models_own_answer_or_the_references(llm, history):
    sample = made("chat", 200, 0, 0)
    first, second = answer(llm, sample, setting("dense", history=history))[0]["turns"]
    said = first["prediction"] if history == "self" else "gold one"
    messages = [
        {"role": "user", "content": sample.turns[0].message()},
        {"role": "assistant", "content": "A:" + said},
        {"role": "user", "content": "more and?"},
    ]
    ids = [*llm.tokenizer.apply_chat_template(messages), *llm.tokenizer.encode("A:", add_special_tokens=False)]
    assert second["prompt_tokens"] == len(ids)
    assert second["cached_tokens"] >= 2 + 200 + 9 + 1 + 2
    assert second["prediction"] == answer_of(llm, ids)


def answer_of(llm, ids: list[int]) -> str:
    from saccade import SamplingParams

    return llm.generate(ids, SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].text


def test_rendering_without_a_template_is_plain_text(llm):
    class Plain:
        has_chat_template = False
        encode = staticmethod(llm.tokenizer.encode)

    turn = made("chat", 5, 0, 0).turns[1]
    prompt = render(Plain(), [Exchange("hi ", "A: there")], turn)
    assert llm.tokenizer.decode(prompt.ids) == "hi A: there\nmore and?A:"
    assert prompt.cut == 1 + len("hi A: there\nmore ")


# --- score, oracle, target


def test_scores_by_hand(tmp_path):
    turns = (
        Turn(("x",), "q", ("7391",), "exact", 4, meta={"depth": 0.25}),
        Turn((), "q", ("a", "b", "c"), "recall", 4, "begin"),
    )
    said = {
        "finish": "stop",
        "prompt_tokens": 3,
        "notes": ["ran dense"],
        "prefill": {"keys_attended": 5},
        "decode": {"keys_attended": 2},
    }
    record = {
        "id": "t/1/0/0", "task": "t", "length": 1, "index": 0, "protocol": "A", "error": None, "failed": False,
        "turns": [{**said, "prediction": " 7391"}, {**said, "prediction": "c and a"}],
        "context": {"notes": [], "prefill": {"keys_attended": 100}, "decode": {"keys_attended": 0}},
    }  # fmt: skip
    row = score_record(Sample("t", 1, 0, 0, turns), record, METRICS)
    assert row["score"] == pytest.approx((1 + 2 / 3) / 2)
    assert [turn["score"] for turn in row["turns"]] == pytest.approx([1, 2 / 3])
    assert row["turns"][0]["depth"] == 0.25
    assert row["turns"][1]["position"] == "begin"
    assert row["cost"] == {"prefill": {"keys_attended": 110}, "decode": {"keys_attended": 4}}
    assert row["notes"] == ["ran dense"]
    record["turns"][1]["prediction"] = " \n"
    row = score_record(Sample("t", 1, 0, 0, turns), record, METRICS)
    assert (row["score"], row["empty"]) == (0.5, 1)
    with pytest.raises(RequestError, match="metric 'exact', which is unknown; known: other"):
        score_record(Sample("t", 1, 0, 0, turns), record, {"other": METRICS["exact"]})


def test_scoring_needs_the_samples_that_were_answered(tmp_path, llm, data):
    folder = predict(data, llm, MODEL, setting(), tmp_path / "results", limit=1)
    moved = data.rename(tmp_path / "moved.jsonl")
    with pytest.raises(RequestError, match=r"samples\.jsonl of .* do not exist; give them with --data"):
        score_folder(folder)
    assert score_folder(folder, moved).is_file()
    moved.write_text(moved.read_text().replace("which", "whose"))
    with pytest.raises(RequestError, match="its content has changed"):
        score_folder(folder, moved)


def test_dense_and_the_oracle_at_the_measured_budget_run_beside_a_policy(tmp_path, llm, data):
    folders = runner.run_policies(data, llm, MODEL, [PSA, FLEX], tmp_path, limit=1)
    configs = [json.loads((folder / "config.json").read_text()) for folder in folders]
    assert [config["policy"] for config in configs[:3]] == ["dense", PSA, FLEX]
    assert [config["protocol"] for config in configs] == ["A", "A", "C", "A"]
    rows = list(read_jsonl(folders[1] / "scores.jsonl"))
    read, causal = (sum(row["cost"]["decode"][name] for row in rows) for name in ("keys_attended", "keys_causal"))
    assert configs[3]["policy"] == f"topk(k={float(f'{read / causal:.2g}')})"
    alone = runner.run_policies(data, llm, MODEL, [PSA], tmp_path / "alone", limit=1, oracle="none")
    assert [json.loads((folder / "config.json").read_text())["policy"] for folder in alone] == [PSA]
    chance = runner.run_policies(
        data, llm, MODEL, ["random(k=16)", "streaming(window=40)"], tmp_path / "chance", limit=1
    )
    policies = [json.loads((folder / "config.json").read_text())["policy"] for folder in chance]
    assert policies[:3] == ["dense", "random(k=16)", "streaming(window=40)"]
    assert all(policy.startswith("topk(k=0.") for policy in policies[3:])
    assert len(policies) == 5
    with pytest.raises(RequestError, match="oracle='all' is unknown; known: decode, both, none"):
        runner.run_policies(data, llm, MODEL, [PSA], tmp_path, oracle="all")


def test_unwritable_results_and_differences(tmp_path, llm, data):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RequestError, match="cannot be written"):
        predict(data, llm, MODEL, setting(), tmp_path / "file")
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}) == ["a.c is 2 there, asked for is 3"]
    assert differences({"a": {"b": 1, "c": 2}, "c": 1}, {"a": {"b": 1, "c": 3}, "c": 1}, skip=("a.c",)) == []
    assert differences({"a": {"b": 1}, "b": 1}, {"a": {"b": 1}, "b": 2}, skip=("a.b",)) != []


def test_a_folder_that_moved_is_the_same_folder(tmp_path, llm, data):
    """Hashes settle what a model and its samples are, not where they lie."""
    folder = predict(data, llm, MODEL, setting(), tmp_path, limit=1)
    config = json.loads((folder / "config.json").read_text())
    config["model"]["path"], config["data"]["path"] = "elsewhere/model", "elsewhere/data.jsonl"
    config["model"]["name"], config["model"]["weights_sha256"] = "./called", "1" * 64  # of files, saved again since
    (folder / "config.json").write_text(json.dumps(config))
    assert predict(data, llm, MODEL, setting(), tmp_path) == folder
    assert len((folder / "predictions.jsonl").read_bytes().splitlines()) == 6
    for name in ("identity", "tokenizer_hash"):
        other = {**config, "model": {**config["model"], name: "0" * 32}}
        (folder / "config.json").write_text(json.dumps(other))
        with pytest.raises(RequestError, match=rf"model\.{name} is '0000"):
            predict(data, llm, MODEL, setting(), tmp_path)
    for name in ("identity", "tokenizer_hash"):  # as folders were before
        del config["model"][name]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match=r"model\.weights_sha256 is '1111"):
        predict(data, llm, MODEL, setting(), tmp_path)
    with pytest.raises(PolicyError):
        setting("nope")
    with Log(tmp_path / "new.jsonl") as log:
        log.append({"id": "é"})
    assert (tmp_path / "new.jsonl").read_bytes() == b'{"id": "\xc3\xa9"}\n'
