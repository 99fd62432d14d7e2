"""``saccade bench serve`` counts what a server did, whatever it did."""

from __future__ import annotations

import asyncio
import json

import pytest
from engine_helpers import make
from server_helpers import serving

from saccade.bench.serve import LONGBENCH, Load, percentiles, plan, summary, words
from saccade.bench.serve_client import Sample, Target, complete
from saccade.cli.main import main
from saccade.server.keys import Key, KeyRing, digest


@pytest.fixture(scope="module")
def server(tiny_llama):
    keys = KeyRing([Key("one", digest("sk-first-key-of-tests")), Key("few", digest("sk-few"), requests_per_minute=2)])
    with serving(make(tiny_llama), keys=keys) as running:
        yield running


def bench(server, *arguments: str, key: str = "sk-first-key-of-tests") -> int:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "serve", "--url", server.url, "--api-key", key, "--ignore-eos", *arguments])
    return caught.value.code


@pytest.mark.parametrize(("mix", "scale"), [("chat", "0.05"), ("sessions", "0.01")])
def test_a_run_counts_every_token(server, tmp_path, capsys, mix, scale):
    file = tmp_path / "run.json"
    before = server.serving.metrics.generation_tokens._value.get()
    policy = ["--policy", "streaming(sinks=2, window=40)"] if mix == "sessions" else []
    assert (
        bench(server, "--mix", mix, "--requests", "8", "--rate", "200", "--scale", scale, "--json", str(file), *policy)
        == 0
    )
    found = json.loads(file.read_text())
    assert (found["requests"], found["completed"], found["failed"]) == (8, 8, 0)
    made = sum(one["output_tokens"] for one in found["samples"])
    assert made == server.serving.metrics.generation_tokens._value.get() - before > 0
    assert found["output_tokens_per_second"] == pytest.approx(made / found["seconds"])
    for one in found["samples"]:
        assert one["first"] + sum(one["gaps"]) <= one["total"]
    assert (found["cached_tokens"] > 0) == (mix == "sessions")
    if mix == "sessions":
        assert found["density"]["decode"] < 1
    assert "first token seconds" in capsys.readouterr().out


def test_a_trace_and_requests_that_are_turned_away(server, tmp_path, capsys):
    rows = [{"at": 0.01 * index, "prompt_words": 5, "max_tokens": 3} for index in range(5)]
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, rows)))
    file = tmp_path / "run.json"
    trace = ["--trace", str(tmp_path / "trace"), "--json", str(file), "--model", "anything"]
    assert bench(server, *trace) == 1
    assert "does not exist" in capsys.readouterr().out
    model = server.serving.names[0]
    assert bench(server, *trace[:-1], model, key="sk-few") == 0
    found = json.loads(file.read_text())
    assert (found["completed"], found["rejected"]) == (2, 3)
    (tmp_path / "trace").write_text("{}")
    assert bench(server, *trace) == 2


def test_a_server_that_is_not_there(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", "serve", "--url", "http://127.0.0.1:9"])
    assert caught.value.code == 2
    assert "start a server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ('data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}],"usage":{"completion_tokens":2}}', None),
        ("data: [DONE]", None),
        ("", "the stream broke off"),
    ],
)
def test_a_stream_is_whole_where_its_server_says_so(end, error):
    """Some servers end with a reason and no [DONE]; one that just stops was cut off."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        piece = 'data: {"choices":[{"index":0,"delta":{"content":"so"},"finish_reason":null}]}'
        writer.write(f"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{piece}\n\n{end}\n\n".encode())
        await writer.drain()
        writer.close()

    async def ask():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            return await complete(Target(f"http://127.0.0.1:{port}"), {"messages": []}, 0.0, 20)

    found = asyncio.run(ask())
    assert (found.text, found.error) == ("so", error)


def test_plans_texts_and_percentiles_are_what_they_say():
    load = Load(requests=2000, rate=10.0, seed=3)
    assert plan(load) == plan(load)
    assert plan(load)[-1].at == pytest.approx(200, rel=0.1)
    lengths = sorted(one.turns[0][0] for one in plan(load))
    assert lengths[1000] == pytest.approx(160, rel=0.1)
    assert len(plan(Load(mix="sessions", requests=40))) == 10
    eight = plan(Load(mix="longbench", requests=4000))
    for most in {answer for _, answer in LONGBENCH.values()}:
        sets = {own for own, (_, answer) in LONGBENCH.items() if answer == most}
        found = [one.turns[0][0] for one in eight if one.turns[0][1] == most]
        assert len(found) == pytest.approx(500 * len(sets), rel=0.15)
        assert sum(found) / len(found) == pytest.approx(sum(LONGBENCH[own][0] for own in sets) / len(sets), rel=0.1)
    assert words(50, 1) != words(50, 2)
    assert percentiles([float(value) for value in range(1, 101)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    samples = [
        Sample(0, 200, 1.0, [0.05, 0.05], 2.0),
        Sample(0, 200, 3.0, [0.05], 4.0),
        Sample(0, 200, 1.0, [0.5], 2.0),
        Sample(0, 429, error="status 429"),
    ]
    found = summary(samples, 10.0, 2.0, 0.1)
    assert (found["goodput"], found["rejected"], found["completed"]) == (0.1, 1, 3)
