"""Whole builds over our own LongBench-shaped files: what every instance must hold."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from saccade.errors import RequestError
from saccade.eval.metrics import score
from saccade.eval.metrics.longbench import normalize_answer
from saccade.eval.multiturn import SETS, build, generate, render
from saccade.eval.multiturn.sets import SUMMARY
from saccade.eval.multiturn.synthetic import NAMES
from saccade.eval.samples import POSITIONS, Sample, read_jsonl

COUNT = 25
DRAWN = ("mtsyn_qa", "mtsyn_multidoc", "mtsyn_summary")


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("longbench")
    return {name: generate(name, folder) for name in NAMES}


@pytest.fixture(scope="module")
def built(sources, tmp_path_factory) -> tuple[Path, dict[str, dict], dict[str, list[dict]]]:
    """(folder, manifests, records) of all four sets; the files' hashes are known, so nothing has to be allowed."""
    out = tmp_path_factory.mktemp("mtlb")
    counts = {name: None if name == "mtsyn_fewshot" else COUNT for name in NAMES}
    manifests = {name: build(name, sources[name], out, instances=counts[name]) for name in NAMES}
    return out, manifests, {name: list(read_jsonl(out / f"{name}.jsonl")) for name in NAMES}


def items_of(path: Path) -> dict[str, dict]:
    return {item["_id"]: item for item in read_jsonl(path)}


def normal(text: str) -> str:
    return f" {normalize_answer(text)} "


def owned(turn: dict, owner: int | None) -> list[dict]:
    return [segment for segment in turn["segments"] if segment["owner"] == owner]


@pytest.mark.parametrize("name", NAMES)
def test_generated_files_have_the_fields_of_longbench(sources, name):
    items = items_of(sources[name])
    assert len(items) == 24
    for item in items.values():
        assert set(item) == {"input", "context", "answers", "length", "dataset", "language", "all_classes", "_id"}
        assert item["length"] == len(item["context"].split())
        assert item["answers"]
        if name in ("mtsyn_qa", "mtsyn_multidoc"):
            assert item["context"].count(item["answers"][0]) == 1
            others = [other["context"] for other in items.values() if other is not item]
            assert not any(item["answers"][0] in context for context in others)
        if name == "mtsyn_fewshot":
            assert item["answers"][0] in item["all_classes"]
            assert item["input"].endswith("Type:")


@pytest.mark.parametrize("name", DRAWN)
def test_every_turn_has_its_evidence_once_and_in_order(sources, built, name):
    items = items_of(sources[name])
    for record in built[2][name]:
        assert len(record["turns"]) == len(record["items"]) == (2 if name == "mtsyn_summary" else 3)
        assert len(set(record["items"])) == len(record["items"])
        for number, (turn, identity) in enumerate(zip(record["turns"], record["items"]), 1):
            homes = [at for at, other in enumerate(record["turns"], 1) if owned(other, number)]
            assert homes == turn["relevant_turns"]
            assert set(homes) <= set(range(1, number + 1))
            spans = [one["context_span"] for other in record["turns"] for one in owned(other, number)]
            assert spans == sorted(spans)
            context = items[identity]["context"]
            assert (
                not "".join(context[a:b] for a, b in _gaps(spans, len(context)))
                .replace("Passage", "")
                .strip("\n :0123456789")
            )
            assert turn["answers"] == items[identity]["answers"]


def _gaps(spans: list[list[int]], length: int) -> list[tuple[int, int]]:
    edges = [0, *(edge for span in spans for edge in span), length]
    return list(zip(edges[::2], edges[1::2]))


@pytest.mark.parametrize("name", NAMES)
def test_recorded_spans_are_true(sources, built, name):
    items = items_of(sources[name])
    for record in built[2][name]:
        for position in POSITIONS:
            for turn, rendered in zip(record["turns"], render(record, position).turns):
                context, message = "".join(rendered.context), rendered.message()
                assert len(rendered.meta["spans"]) == len(turn["segments"])
                for segment, (start, stop) in zip(turn["segments"], rendered.meta["spans"]):
                    assert message[start:stop] == segment["text"]
                    assert context[slice(*segment["span"])] == segment["text"]
                    source = items[segment["item"]]["context"][slice(*segment["context_span"])]
                    assert segment["text"].endswith(source)
                    label = segment["text"].removesuffix(source)
                    assert bool(label) == (name == "mtsyn_summary")


@pytest.mark.parametrize("name", ["mtsyn_qa", "mtsyn_multidoc"])
def test_a_question_cannot_be_answered_without_its_relevant_turns(built, name):
    for record in built[2][name]:
        for number, turn in enumerate(record["turns"], 1):
            (gold,) = (normal(answer) for answer in turn["answers"])
            for at, other in enumerate(record["turns"], 1):
                for segment in other["segments"]:
                    found = gold in normal(segment["text"])
                    assert found <= (segment["owner"] == number and at in turn["relevant_turns"])
                    assert found == (segment["owner"] == number and segment["answer"])
            everywhere = [one for other in record["turns"] for one in owned(other, number)]
            assert sum(one["answer"] for one in everywhere) == 1


@pytest.mark.parametrize("name", DRAWN)
def test_noise_is_foreign_enough_and_holds_no_answer(built, name):
    share = {"mtsyn_summary": 0.15}.get(name, 0.10)
    seen = 0
    for record in built[2][name]:
        golds = [normalize_answer(answer) for turn in record["turns"] for answer in turn["answers"]]
        places = [(s["item"], *s["context_span"]) for turn in record["turns"] for s in owned(turn, None)]
        assert len(set(places)) == len(places)  # without replacement
        for turn in record["turns"]:
            irrelevant = owned(turn, None)
            sizes = [_words(one) for one in irrelevant]
            wanted = share * sum(_words(one) for one in turn["segments"] if one["owner"] is not None)
            assert sum(sizes) >= wanted
            assert sum(sizes) - max(sizes, default=0) <= wanted  # none was drawn in excess
            for one in irrelevant:
                seen += 1
                assert one["item"] not in record["items"]
                assert not any(gold in normalize_answer(one["text"]) for gold in golds)
    assert seen > COUNT


def _words(segment: dict) -> int:
    """Without the label of a summary's segment."""
    words = segment["text"].split()
    return len(words) - words[0].startswith("[")


@pytest.mark.parametrize("name", NAMES)
def test_positions_differ_only_in_where_the_question_stands(built, name):
    free = 0
    for record in built[2][name]:
        samples = {position: render(record, position) for position in POSITIONS}
        assert len({sample.id for sample in samples.values()}) == 3
        for turn, *rendered in zip(record["turns"], *(samples[position].turns for position in POSITIONS)):
            begin, middle, end = rendered
            context, question = "".join(begin.context), begin.question
            half = "".join(begin.context[: len(begin.context) // 2])
            assert begin.message() == question + context
            assert middle.message() == half + question + context[len(half) :]
            assert end.message() == context + question
            assert turn["position_free"] == (not context)
            if not context:
                free += 1
                assert begin.message() == middle.message() == end.message() == question
            same = [(one.context, one.question, one.answers, one.prefix, one.max_new_tokens) for one in rendered]
            assert same[0] == same[1] == same[2]
            assert question.startswith(turn["question"])
        for sample in samples.values():
            assert Sample.from_dict(json.loads(json.dumps(sample.as_dict()))) == sample
    assert (free > 0) == (name != "mtsyn_fewshot")
    with pytest.raises(RequestError, match="position='top' is not one of begin, middle, end"):
        render(record, "top")


def test_runs_stay_together_and_stand_with_the_noise_in_any_order(built):
    ends, orders = set(), set()
    for record in built[2]["mtsyn_qa"]:
        for turn in record["turns"]:
            owners = [segment["owner"] for segment in turn["segments"]]
            ends |= {(place, owners[place] is None) for place in (0, -1) if owners}
            kept = [owner for owner in owners if owner is not None]
            order = list(dict.fromkeys(kept))
            for owner in order:
                first = owners.index(owner)
                assert owners[first : first + owners.count(owner)] == [owner] * owners.count(owner)
            orders.add(tuple(order))
    assert ends == {(0, True), (0, False), (-1, True), (-1, False)}
    assert {(1, 2), (2, 1)} <= orders


def test_summary_sources_are_labelled_and_the_first_stands_in_turn_one(built):
    whole = set()
    for record in built[2]["mtsyn_summary"]:
        first, second = record["turns"]
        assert first["relevant_turns"] == [1]
        whole.add(tuple(second["relevant_turns"]))
        assert "[A-1]" in first["question"]
        assert "[B-1]" in second["question"]
        for owner, letter in ((1, "A"), (2, "B"), (None, "N")):
            texts = [one["text"] for turn in record["turns"] for one in owned(turn, owner)]
            labels = [text.split("]")[0] for text in texts]
            order = labels if owner else sorted(labels, key=lambda label: int(label.split("-")[1]))
            assert order == [f"[{letter}-{n + 1}" for n in range(len(texts))]
    assert whole == {(1,), (2,), (1, 2)}


def test_few_shot_examples_are_halved_and_the_question_is_asked_twice(sources, built):
    items = items_of(sources["mtsyn_fewshot"])
    records = built[2]["mtsyn_fewshot"]
    assert sorted(record["items"][0] for record in records) == sorted(items)  # every item once
    for record in records:
        source = items[record["items"][0]]
        first, second = record["turns"]
        assert [len(first["segments"]), len(second["segments"])] == [6, 6]
        shots = [one["text"] for turn in (first, second) for one in turn["segments"]]
        assert "\n".join(shots) == source["context"]
        assert first["question"].startswith(source["input"].removesuffix("\nType:"))
        assert (
            second["question"] == first["question"] + " Reconsider your answer with the help of the further examples."
        )
        assert first["answers"] == second["answers"] == source["answers"]
        assert (first["prefix"], first["metric"]) == ("Type:", "classification_score")
        assert first["meta"]["all_classes"] == source["all_classes"]
        assert [first["relevant_turns"], second["relevant_turns"]] == [[1], [1, 2]]


def test_summaries_are_scored_as_the_paper_prints_it_and_samsum_as_a_summary():
    metrics = {one.metric for one in SETS.values() if one.kind == SUMMARY}
    assert metrics == {SETS["samsum"].metric} == {"rouge_l_recall"}  # LCS / |R|
    assert score("rouge_l_recall", "the red boat is here", ["a red boat was here today"]) == pytest.approx(3 / 6)


def test_an_odd_number_of_examples_favours_turn_one(tmp_path):
    shots = [f"Question: q{n} ?\nType: t{n}" for n in range(5)]
    base = {"input": "Question: Why ?\nType:", "answers": ["t1"], "all_classes": ["t1", "t2"]}
    items = [
        {**base, "context": "\n".join(shots), "_id": "b"},
        {**base, "context": "\n".join(shots[:3]), "_id": "a"},
        {**base, "context": "\n".join([*shots, "Question: q"]), "_id": "c"},
        {**base, "context": "\n".join(shots), "_id": "d", "answers": [" "]},
    ]
    source = tmp_path / "trec.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in items))
    manifest = build("trec", source, tmp_path / "out", allow_unknown=True)
    (record,) = read_jsonl(tmp_path / "out" / "trec.jsonl")
    assert [len(turn["segments"]) for turn in record["turns"]] == [3, 2]
    assert record["items"] == ["b", "b"]
    assert manifest["rejects"] == {
        "fewer than 4 examples": 1,
        "an example that does not parse": 1,
        "no answers": 1,
    }
    assert (manifest["items"], manifest["instances"], manifest["source"]["known"]) == (3, 1, False)
    assert manifest["paper_mean_tokens"] == 2294


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bytes_come_out_again_and_a_short_build_is_a_prefix(sources, built, tmp_path, name):
    out, manifests, records = built
    short = build(name, sources[name], tmp_path / "short", instances=7)
    again = build(name, sources[name], tmp_path / "again", instances=len(records[name]))
    whole = (out / f"{name}.jsonl").read_bytes()
    assert (tmp_path / "again" / f"{name}.jsonl").read_bytes() == whole
    assert again == manifests[name]
    assert short["instances"] == 7
    part = (tmp_path / "short" / f"{name}.jsonl").read_bytes()
    assert whole.startswith(part)
    assert part.count(b"\n") == 7
    other = build(name, sources[name], tmp_path / "other", instances=7, seed=1)
    assert other["sha256"] != short["sha256"]
    assert generate(name, tmp_path).read_bytes() == sources[name].read_bytes()


def test_the_manifest_says_what_was_built_from_what(sources, built):
    out, manifests, records = built
    kept = json.loads((out / "manifest.json").read_text())
    assert kept["version"] == "mtlb-2"
    assert kept["sets"] == json.loads(json.dumps(manifests))
    for name, manifest in manifests.items():
        assert manifest["sha256"] == hashlib.sha256((out / f"{name}.jsonl").read_bytes()).hexdigest()
        assert manifest["source"] == {
            "name": f"{name}.jsonl",
            "sha256": hashlib.sha256(sources[name].read_bytes()).hexdigest(),
            "known": True,
        }
        turns = [turn for record in records[name] for turn in record["turns"]]
        texts = [text for turn in turns for text in [turn["question"], *(s["text"] for s in turn["segments"])]]
        assert manifest["mean_tokens_per_turn"] == pytest.approx(
            sum(len(t.split()) for t in texts) / len(turns), abs=0.01
        )
        assert manifest["tokenizer"] == "words"
        assert manifest["instances"] == len(records[name])


@pytest.mark.parametrize("name", NAMES)
def test_a_window_drops_noise_first_and_never_an_answer(sources, built, tmp_path, name):
    window = {"mtsyn_fewshot": 340, "mtsyn_summary": 1800}.get(name, 2600)
    manifest = build(name, sources[name], tmp_path, instances=COUNT, window=window)
    records = {record["instance"]: record for record in read_jsonl(tmp_path / f"{name}.jsonl")}
    chosen = SETS[name]
    dropped = 0
    for whole in built[2][name]:
        record = records.get(whole["instance"])
        if record is None:
            continue
        fixed = sum(len(turn["question"].split()) + 1 for turn in record["turns"])
        count = len(record["turns"])
        budget = (window - fixed - count * (chosen.max_new_tokens + 32)) // count
        for turn, full in zip(record["turns"], whole["turns"]):
            kept = [one["text"] for one in turn["segments"]]
            before = [one["text"] for one in full["segments"]]
            assert sum(len(one.split()) for one in kept) <= budget
            assert turn["trimmed"] == (len(kept) < len(before)) == (sum(len(one.split()) for one in before) > budget)
            rest = iter(before)
            assert all(any(one == other for other in rest) for one in kept)  # in the order of the whole
            gone = [one for one in full["segments"] if one["text"] not in kept]
            dropped += len(gone)
            assert not any(one["answer"] for one in gone)
            if any(one["owner"] is not None for one in gone):
                assert not owned(turn, None)
            assert {one["owner"] for one in full["segments"]} - {None} <= {one["owner"] for one in turn["segments"]}
    assert dropped > 0
    assert manifest["trimmed"] == sum(any(turn["trimmed"] for turn in record["turns"]) for record in records.values())
    assert manifest["window"] == window


def test_instances_that_cannot_fit_are_counted(sources, tmp_path):
    with pytest.raises(RequestError, match=r"gives no instance of 'mtsyn_qa'.*does not fit the window"):
        build("mtsyn_qa", sources["mtsyn_qa"], tmp_path, instances=3, window=400)
    manifest = build("mtsyn_qa", sources["mtsyn_qa"], tmp_path, instances=20, window=1300)
    assert manifest["rejects"]["does not fit the window"] > 0
    assert 0 < manifest["instances"] <= 20


def test_tokens_are_counted_as_the_caller_says(sources, tmp_path):
    manifest = build(
        "mtsyn_qa",
        sources["mtsyn_qa"],
        tmp_path,
        instances=5,
        count_tokens=lambda text: len(text.encode()),
        tokenizer="bytes",
    )
    records = list(read_jsonl(tmp_path / "mtsyn_qa.jsonl"))
    turns = [turn for record in records for turn in record["turns"]]
    total = sum(len(one["text"].encode()) + 2 for turn in turns for one in turn["segments"])
    total += sum(len(turn["question"].encode()) + 2 for turn in turns)
    assert manifest["mean_tokens_per_turn"] == pytest.approx(total / len(turns), abs=0.01)
    assert manifest["tokenizer"] == "bytes"


def test_unknown_data_and_values_out_of_range_are_refused(sources, tmp_path):
    changed = tmp_path / "mtsyn_qa.jsonl"
    changed.write_bytes(sources["mtsyn_qa"].read_bytes() + b"\n")
    digest = hashlib.sha256(changed.read_bytes()).hexdigest()
    with pytest.raises(
        RequestError, match=rf"SHA-256 {digest}, which is not among the 1 files known .*--allow-unknown"
    ):
        build("mtsyn_qa", changed, tmp_path)
    assert build("mtsyn_qa", changed, tmp_path, instances=1, allow_unknown=True)["source"]["sha256"] == digest
    twice = tmp_path / "qasper.jsonl"
    twice.write_bytes(sources["mtsyn_qa"].read_bytes() * 2)
    with pytest.raises(RequestError, match="two items with the _id"):
        build("qasper", twice, tmp_path, allow_unknown=True)
    for options, message in (
        ({"instances": 0}, "instances=0 must be at least 1"),
        ({"noise": -0.1}, "noise=-0.1 must be from 0 to 10"),
        ({"window": 0}, "window=0 must be at least 1 token"),
        ({"seed": -1}, "seed=-1 must not be negative"),
    ):
        with pytest.raises(RequestError, match=message):
            build("mtsyn_qa", sources["mtsyn_qa"], tmp_path, **options)
    with pytest.raises(RequestError, match="must be 0 for few-shot sets"):
        build("mtsyn_fewshot", sources["mtsyn_fewshot"], tmp_path, noise=0.1)
    with pytest.raises(RequestError, match="unknown multi-turn set 'trivia'; known: narrativeqa"):
        build("trivia", sources["mtsyn_qa"], tmp_path)
    with pytest.raises(RequestError, match="gives no instance of 'mtsyn_qa': 2 items"):
        build("mtsyn_qa", generate("mtsyn_qa", tmp_path / "few", items=2), tmp_path, allow_unknown=True)
    for options in ({"items": 0}, {"items": 41}, {"characters": 10}, {"seed": -1}):
        with pytest.raises(RequestError, match=next(iter(options))):
            generate("mtsyn_qa", tmp_path, **options)
