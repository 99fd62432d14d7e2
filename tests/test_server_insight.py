"""What a server tells of its requests: spans, logs, what runs, selection maps, and the dashboard's metrics."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_helpers import BLOCK_BYTES, make
from server_helpers import FAR, FAR_BLOCKS, GREEDY, error, serving

from saccade.engine.messages import EngineStatistics
from saccade.errors import SaccadeError
from saccade.kv.states import StateFormat, StatePart, StatePool
from saccade.methods.policy import Policy
from saccade.server.engine_metrics import EngineMetrics
from saccade.server.keys import Key, KeyRing, digest
from saccade.server.logs import JsonLines
from saccade.server.settings import ServerConfig
from saccade.server.tracing import Tracing

ONE, TWO = "sk-first-key-of-tests", "sk-second-key-of-tests"
POLICY = "streaming(sinks=2, window=40)+topk(k=24)"


@pytest.fixture(scope="module")
def server(far_llama):
    with serving(make(far_llama, FAR_BLOCKS), selection_maps=300) as running:
        yield running
        running.idle()


@pytest.fixture
def spans(server, monkeypatch):
    """Spans of requests that have ended."""
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    provider = trace.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    monkeypatch.setattr(server.serving, "tracing", Tracing(provider, "tiny"))

    def ended(count):
        server.idle()
        for _ in range(200):
            if len(memory.get_finished_spans()) >= count:
                break
            time.sleep(0.01)
        return memory.get_finished_spans()

    return ended


def test_a_request_is_a_span_in_the_trace_of_its_client_and_its_samples_are_spans_in_it(server, spans):
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    response = server.client.post(
        "/v1/completions",
        json={"prompt": "a secret", **GREEDY, "n": 2, "policy": POLICY},
        headers={"traceparent": f"00-{trace}-{parent}-01", "x-request-id": "mine"},
    )
    assert response.status_code == 200
    made = spans(9)
    assert {f"{span.context.trace_id:032x}" for span in made} == {trace}
    (http,) = [span for span in made if span.name == "POST /v1/completions"]
    assert f"{http.parent.span_id:016x}" == parent
    assert http.attributes["http.response.status_code"] == 200
    assert http.attributes["saccade.request_id"] == "mine"
    samples = [span for span in made if span.name == "llm_request"]
    assert len(samples) == 2
    assert "secret" not in "".join(span.to_json() for span in made)
    for sample in samples:
        assert sample.parent.span_id == http.context.span_id
        assert sample.attributes["gen_ai.usage.output_tokens"] == GREEDY["max_tokens"]
        assert sample.attributes["saccade.policy"] == Policy.parse(POLICY).text
        inside = [span for span in made if span.parent is not None and span.parent.span_id == sample.context.span_id]
        assert [span.name for span in inside] == ["queue", "prefill", "decode"]
        times = [moment for span in inside for moment in (span.start_time, span.end_time)]
        assert times == sorted(times)
        assert sample.start_time <= times[0]
        assert times[-1] <= sample.end_time <= http.end_time
        assert 0 < inside[2].attributes["saccade.density"] <= 1


def test_spans_call_an_estimate_of_coverage_one(server, spans):
    policy = "psa(epsilon=0.5, block_size=16, microbatch=1, rank=cuboid, rest=last_max)"
    answer = server.complete(list(range(5, 205)), policy=policy).json()
    (decode,) = (span for span in spans(5) if span.name == "decode")
    estimated = answer["usage"]["saccade"]["coverage_estimated"]["decode"]
    assert decode.attributes["saccade.coverage_estimated"] == pytest.approx(estimated)
    assert "saccade.coverage" not in decode.attributes


def test_a_failure_marks_its_span_and_probes_have_none(server, spans, monkeypatch):
    def fail(*_):
        raise KeyError("planted")

    monkeypatch.setattr(server.serving, "policy", fail)
    assert server.complete("x").status_code == 500
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/nowhere").status_code == 404
    found = {span.name: span.status.status_code.name for span in spans(2)}
    assert found == {"POST /v1/completions": "ERROR", "GET": "UNSET"}


def test_tracing_says_what_it_lacks(monkeypatch):
    with pytest.raises(SaccadeError, match="is no address of a collector"):
        Tracing.to("collector:4317", "tiny")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(SaccadeError, match=r"saccade-llm\[otel\]"):
        Tracing.to("http://collector:4317", "tiny")


def test_the_log_has_a_line_for_each_request_with_its_id_and_its_costs(server):
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(JsonLines().format(record))

    logger, handler = logging.getLogger("saccade.server"), Keep()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        body = {"prompt": [5, 6, 7], **GREEDY, "n": 2, "stream": True, "policy": POLICY}
        with server.client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "mine"}) as response:
            response.read()
        server.idle()
        server.client.get("/nowhere", headers={"x-request-id": 'odd" id'})
        for _ in range(500):  # a line is written after the answer has gone
            if len(lines) == 2:
                break
            time.sleep(0.01)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    first, second = sorted((json.loads(line) for line in lines), key=lambda line: line["status"])
    assert (first["request_id"], first["status"], first["message"]) == ("mine", 200, "request")
    assert (first["samples"], first["prompt_tokens"], first["output_tokens"]) == (2, 6, 20)
    assert first["finish_reason"] == "length"
    assert 0 < first["density"]["decode"] <= 1
    assert second["status"] == 404
    assert re.fullmatch("[0-9a-f]{32}", second["request_id"])


def test_what_runs_and_what_ended_is_told_by_layer_and_head(server):
    prompt = list(range(5, 205))
    body = {"prompt": prompt, **FAR, "stream": True, "policy": POLICY}
    with server.client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "runs"}) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        found = server.client.get("/v1/requests").json()
        (running,) = found["running"]
        assert (running["id"], running["finish_reason"], running["prompt_tokens"]) == ("runs", None, 200)
        assert [len(heads) for heads in running["decode"]["density_per_head"]] == [4] * found["layers"]
        assert running["decode"]["density_per_head"][1][2] < 0.13
    server.idle()
    server.client.post(
        "/v1/completions", json={"prompt": prompt, **GREEDY, "policy": "dense"}, headers={"x-request-id": "ended"}
    )
    found = server.client.get("/v1/requests").json()
    assert found["running"] == []
    last = found["ended"][0]
    assert (last["id"], last["finish_reason"], last["output_tokens"]) == ("ended", "length", 10)
    assert last["prefill"]["density_per_head"] == [[1.0] * 4] * 3


def test_requests_of_other_keys_are_not_told(tiny_llama):
    keys = KeyRing([Key("one", digest(ONE)), Key("two", digest(TWO))])
    with serving(make(tiny_llama), keys=keys) as server:
        first, second = ({"authorization": f"Bearer {secret}"} for secret in (ONE, TWO))
        assert server.ask("/v1/completions", {"prompt": "x", **GREEDY}, **first).status_code == 200
        assert error(server.client.get("/v1/requests"))[:2] == (401, "invalid_api_key")
        assert len(server.client.get("/v1/requests", headers=first).json()["ended"]) == 1
        assert server.client.get("/v1/requests", headers=second).json()["ended"] == []
        refused = server.ask("/v1/selection_maps", {"prompt": "x"}, **first)
        assert error(refused)[:2] == (403, "maps_not_allowed")


def test_an_answer_has_a_selection_map_where_a_server_allows_it(server):
    messages = [{"role": "user", "content": "one two three " * 8}]
    asked = {"messages": messages, "policy": POLICY, "max_tokens": 6}
    plain = server.ask("/v1/chat/completions", {**asked, "temperature": 0}).json()
    drawn = server.ask("/v1/selection_maps", {**asked, "layers": [2, 0], "pixels": 48})
    assert drawn.status_code == 200, drawn.text
    found = drawn.json()
    assert found["text"] == plain["choices"][0]["message"]["content"]
    assert found["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert [(part["phase"], part["layer"]) for part in found["maps"]] == [
        ("decode", 0), ("decode", 2), ("prefill", 0), ("prefill", 2),
    ]  # fmt: skip
    assert found["usage"]["saccade"]["density"]["decode"] < 0.5
    for wrong, said in (
        ({"prompt": "x" * 400}, "context_length_exceeded"),
        ({"prompt": "x", "layers": [3]}, None),
        ({"prompt": "x", "layers": []}, None),
        ({"prompt": "x", "pixels": 10**6}, None),
        ({}, None),
        ({**asked, "prompt": "x"}, None),
    ):
        assert error(server.ask("/v1/selection_maps", wrong))[:2] == (400, said), wrong
    server.serving.mapping = True
    assert error(server.ask("/v1/selection_maps", asked))[0] == 429
    server.serving.mapping = False


def exported(server) -> dict[str, set[str]]:
    """Names of samples in /metrics, and the labels of each."""
    found: dict[str, set[str]] = {}
    for line in server.client.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, labels = line.partition("{")
            found.setdefault(name.split(" ")[0], set()).update(re.findall(r'(\w+)="', labels))
    return found


def test_every_metric_of_the_dashboard_is_exported(server):
    server.complete(list(range(5, 205)), policy="psa(epsilon=0.4, block_size=16, microbatch=1)", audit=1.0)
    board = json.loads((Path(__file__).parent.parent / "deploy/grafana/saccade.json").read_text())
    names = exported(server)
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(queries) >= 15
    for query in queries:
        used = re.findall(r"saccade:\w+", query)
        assert used, query
        for name in used:
            assert name in names, query
        for label in re.findall(r"by \(([\w, ]+)\)", query):
            assert set(label.split(", ")) <= {"le"} | set().union(*(names[name] for name in used)), query
        for label in re.findall(r"(\w+)=~?\"", query):
            assert all(label in names[name] for name in used), query
    wanted = {variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"}
    assert wanted == {"label_values(saccade:num_requests_running, model_name)"}
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in board["panels"]]
    for number, (x, y, w, h) in enumerate(places):
        assert x + w <= 24
        for ox, oy, ow, oh in places[:number]:
            assert x + w <= ox or ox + ow <= x or y + h <= oy or oy + oh <= y, "panels overlap"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_drafts_are_counted_by_draft(server):
    server.complete(list(range(5, 205)), policy="lossless(draft=streaming(sinks=2, window=40), tokens=2)", max_tokens=7)
    text = server.client.get("/metrics").text
    counts = {
        name: float(found.group(1))
        for name in ("drafts", "draft_tokens", "accepted_tokens", "stops")
        if (found := re.search(rf'spec_decode_num_{name}_total\{{.*method="streaming".*\}} (\S+)', text))
    }
    assert counts["drafts"] >= 2
    assert counts["draft_tokens"] > counts["accepted_tokens"] >= 0
    assert counts["draft_tokens"] <= 2 * counts["drafts"] + 16
    assert counts["stops"] == 0


def test_bytes_are_told_by_tier(tiny_llama, tmp_path):
    """The tier behind memory too, and what moved to it and back."""
    with serving(make(tiny_llama, blocks=24, kv_disk=f"{tmp_path}:1MiB")) as server:
        answer = server.complete(list(range(5, 245)) * 3, session_id="s")
        assert answer.status_code == 200, answer.text
        text = server.client.get("/metrics").text
        taken, room = (
            {
                tier: float(value)
                for tier, value in re.findall(rf'^saccade:{name}\{{.*tier="(\w+)"\}} (\S+)$', text, re.M)
            }
            for name in ("kv_cache_bytes", "kv_cache_capacity_bytes")
        )
        assert set(taken) == set(room) == {"host", "disk"}
        assert room["host"] == 23 * BLOCK_BYTES
        assert 0 < taken["disk"] <= room["disk"] <= 2**20
        for name in ("bytes_written", "evicted", "hits"):
            assert float(re.search(rf"^saccade:kv_disk_{name}\{{.*\}} (\S+)$", text, re.M)[1]) > 0, name


def test_settings_of_what_is_told_are_checked():
    with pytest.raises(SaccadeError, match="selection_maps=-1 must be"):
        ServerConfig(selection_maps=-1)


def test_audits_are_told_in_usage_and_added_up_in_metrics(server):
    asked = {"prompt": "x" * 120, **GREEDY, "max_tokens": 9, "n": 2, "seed": 1, "policy": "topk(k=24)"}
    got = server.client.post(
        "/v1/completions",
        json={**asked, "audit": 1.0, "audit_steps": 1.0, "target": 0.5, "bounds": 1.0, "report": True},
    )
    bounds = got.json()["usage"]["saccade"]["bounds"]["certificates"]["dropped"]
    assert bounds["pairs"] == sum(
        choice["report"]["bounds"]["certificates"]["dropped"]["pairs"] for choice in got.json()["choices"]
    )
    assert bounds["bound"] >= bounds["error"] > 0
    audit = got.json()["usage"]["saccade"]["audit"]
    parts = [choice["report"]["audit"] for choice in got.json()["choices"]]
    assert audit["places"] == sum(part["places"] for part in parts) == audit["output_error"]["samples"]
    for name in ("retained_mass", "output_error", "agreement"):
        assert audit[name]["mean"] == pytest.approx(sum(part[name]["mean"] for part in parts) / 2, abs=1e-5)
        assert audit[name]["low"] <= audit[name]["mean"] <= audit[name]["high"]
    assert audit["target"]["option"] == "k"
    text = server.client.get("/metrics").text
    found = dict(re.findall(r'saccade:(audit\w+)\{[^}]*method="topk"[^}]*?\} (\S+)', text.replace('bound="mean",', "")))
    assert float(found["audited_groups_total"]) == audit["output_error"]["samples"]
    assert float(found["audited_steps_total"]) == audit["agreement"]["samples"]
    shown = re.search(r'saccade:audit_output_error\{bound="mean",method="topk",.*\} (\S+)', text)
    assert float(shown[1]) == pytest.approx(audit["output_error"]["mean"], abs=1e-5)
    assert (
        server.client.post("/v1/completions", json={**asked, "policy": "dense"}).json()["usage"]["saccade"]["audit"]
        is None
    )
    assert error(server.client.post("/v1/completions", json={**asked, "audit": 2})) == (400, None, "audit")
    sure = {
        **asked,
        "max_tokens": 3,
        "policy": "vattention(sinks=4, local=16, heavy=16, block_size=8)",
        "certify": [0.2, 0.1],
    }
    told = server.client.post("/v1/completions", json=sure).json()["usage"]["saccade"]["certified"]
    assert told["heads"] == told["bounds"] + told["sample"] + told["exact"] == 2 * 2 * 3 * 4  # samples, steps, layers


def test_an_estimate_that_an_audit_contradicts_is_told_everywhere(server, caplog):
    wrong = "psa(epsilon=0.95, block_size=16, microbatch=1, rank=cuboid, rest=min)"
    asked = {"prompt": list(range(5, 255)) * 2, **GREEDY, "max_tokens": 12, "audit": 1.0, "report": True}

    def counted() -> float:
        found = re.search(
            r'saccade:audit_contradictions_total\{method="psa",.*\} (\S+)', server.client.get("/metrics").text
        )
        return 0.0 if found is None else float(found[1])

    before = counted()
    with caplog.at_level(logging.WARNING, "saccade.engine.watch.contradiction"):
        for count in (1, 2):
            got = server.client.post("/v1/completions", json={**asked, "policy": wrong, "n": count}).json()
            said, parts = got["usage"]["saccade"], [choice["report"] for choice in got["choices"]]
            found = [part["audit"]["contradiction"] for part in parts]
            assert said["audit"]["contradiction"] == max(found, key=lambda one: one["estimated"] - one["mean"])
            assert said["coverage_estimated"]["decode"] > 0.95 > found[0]["mean"] + 0.02
            assert f"estimated that {found[0]['estimated']:.3f} of the attention weight was read" in said["notes"][0]
    assert counted() == before + 3
    (line,) = (record for record in caplog.records if record.name == "saccade.engine.watch.contradiction")
    told = json.loads(JsonLines().format(line))
    assert (told["level"], told["policy"]) == ("warning", Policy.parse(wrong).text)
    ended = server.client.get("/v1/requests").json()["ended"]
    assert ended[0]["contradiction"] in found
    assert ended[0]["decode"]["coverage_estimated"] == pytest.approx(said["coverage_estimated"]["decode"], abs=0.02)
    right = wrong.replace("rank=cuboid, rest=min", "rank=keys, rest=estimate")
    for policy in (right, "dense", "topk(k=24)"):
        got = server.client.post("/v1/completions", json={**asked, "policy": policy}).json()["usage"]["saccade"]
        assert got["audit"]["contradiction"] is None
        assert (got["coverage_estimated"]["decode"] is None) == (policy != right)
        assert not any("estimated that" in note for note in got["notes"])
    assert counted() == before + 3
    text = server.client.get("/metrics").text
    assert "saccade:coverage_estimated_bucket{" in text
    assert "saccade:coverage_bucket{" not in text


def test_recorded_steps_are_shown_where_there_are_any():
    def shown(graphs) -> dict[str, float]:
        engine = SimpleNamespace(statistics=lambda: EngineStatistics(0, 0, 0, 8, 0, graphs=graphs))
        found = EngineMetrics(engine, "tiny").collect()
        return {one.name: one.samples[0].value for one in found if one.samples and "recorded" in one.name}

    assert shown((3, 64)) == {"saccade:recorded_steps": 3, "saccade:recorded_steps_max": 64}
    assert shown(None) == {}


def test_states_are_shown_of_models_that_keep_some():
    def shown(states) -> dict[str, float]:
        engine = SimpleNamespace(statistics=lambda: EngineStatistics(0, 0, 0, 8, 0, states=states))
        found = EngineMetrics(engine, "tiny").collect()
        return {one.name: one.samples[0].value for one in found if "layer_states" in one.name}

    pool = StatePool(StateFormat(2, (StatePart("conv0", (3,), torch.float32),)), 5)
    pool.take()
    assert shown(pool.numbers()) == {
        "saccade:layer_states_slots": 5,
        "saccade:layer_states_in_use": 1,
        "saccade:layer_states_snapshots": 0,
        "saccade:layer_states_given_up": 0,
        "saccade:layer_states_orphaned": 0,
        "saccade:layer_states_bytes": 5 * 2 * 3 * 4,
    }
    assert shown(None) == {}
