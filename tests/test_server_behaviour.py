"""What a server does when clients leave, wait, come in crowds or outstay their time, and when it is told to end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import chain

import httpx
import pytest
from engine_helpers import make
from server_helpers import GREEDY, error, parsed, serving, until
from tiny_models import random_ids

from saccade import SamplingParams
from saccade.engine.stream import AsyncOutputs
from saccade.server.errors import ApiError

LONG = {**GREEDY, "max_tokens": 700}


@pytest.fixture
def server(tiny_llama):
    with serving(make(tiny_llama, max_requests=2), max_queue=2, ping_seconds=0.1, drain_seconds=2) as running:
        yield running
        running.idle()
        until(lambda: running.llm.pool.used_blocks == 0)


@pytest.fixture
def held(server, monkeypatch):
    """The engine makes no step until this is set."""
    gate, real = threading.Event(), server.llm.engine.step

    def step():
        gate.wait(30)
        return real()

    monkeypatch.setattr(server.llm.engine, "step", step)
    yield gate
    gate.set()


@pytest.fixture
def slowly(server, monkeypatch):
    real = server.llm.engine.step
    monkeypatch.setattr(server.llm.engine, "step", lambda: (time.sleep(0.01), real())[1])


def aborted(server) -> float:
    name = 'saccade:request_success_total{finished_reason="abort"'
    return sum(
        float(line.split()[-1]) for line in server.client.get("/metrics").text.splitlines() if line.startswith(name)
    )


def statuses(server, route: str) -> set[str]:
    """Of requests that have ended."""
    found = re.findall(r'http_requests_total\{.*route="(.*)",status="(\d+)"\}', server.client.get("/metrics").text)
    return {status for path, status in found if path == route}


def post(server, body, path="/v1/completions") -> socket.socket:
    """A client that sends and does not read yet."""
    client = socket.create_connection(server.server.address)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    client.sendall(f"{head}\r\n\r\n".encode() + data)
    return client


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": False}, {"stream": True, "n": 2}])
def test_a_client_that_goes_away_ends_its_request(server, fields):
    client = post(server, {"prompt": random_ids(200, 1), **LONG, **fields})
    until(lambda: server.llm.loop.running)
    if fields["stream"]:
        assert b"200 OK" in client.recv(100)
    client.close()
    server.idle()
    assert aborted(server) == fields.get("n", 1)
    assert statuses(server, "/v1/completions") == {"200" if fields["stream"] else "499"}


def test_a_client_that_goes_away_before_its_first_token_ends_its_request(server, held):
    clients = [post(server, {"prompt": [5, 6], **LONG, "stream": stream}) for stream in (True, False)]
    received = b""
    while b": ping" not in received:
        received += clients[0].recv(100)
    until(lambda: server.serving.admission.samples == 2)
    for client in clients:
        client.close()
    until(lambda: aborted(server) == 2)
    held.set()
    server.idle()
    assert statuses(server, "/v1/completions") == {"200", "499"}


def test_a_reader_that_is_slow_holds_up_nobody_and_loses_nothing(server):
    ids = random_ids(50, 2)
    want = server.complete(ids, max_tokens=900).json()["choices"][0]["text"]
    body = {"prompt": ids, **GREEDY, "max_tokens": 900, "logprobs": 20, "stream": True}
    client = post(server, body)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
    for seed in range(3):
        assert server.complete(random_ids(20, seed)).status_code == 200
    received = b""
    while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
        received += client.recv(1 << 20)
    client.close()
    lines = [line for line in received.decode().split("\n") if line.startswith("data: {")]
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines) == want


def test_a_full_queue_turns_away_and_says_when_to_come_back(server, held):
    waiting = [post(server, {"prompt": [5, 6, index], **GREEDY, "n": 2}) for index in range(2)]
    until(lambda: server.serving.admission.samples == 4)
    assert error(server.complete([1], n=5))[::2] == (400, "n")  # would never be let in
    refused = server.complete([1])
    assert error(refused)[:2] == (429, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) >= 1
    held.set()
    for client in waiting:
        assert b"200 OK" in client.recv(100)
        client.close()
    server.idle()
    assert server.complete([1]).status_code == 200


def test_a_quiet_stream_gives_signs_of_life(server, held):
    with server.client.stream("POST", "/v1/completions", json={"prompt": "x", **GREEDY, "stream": True}) as response:
        lines = response.iter_lines()
        assert next(line for line in lines if line) == ": ping"
        assert next(line for line in lines if line) == ": ping"
        held.set()
        events = parsed(lines)
    assert events[-1] == "[DONE]"
    assert [one["choices"][0]["finish_reason"] for one in events[:-1]].count("length") == 1


@pytest.mark.usefixtures("slowly")
def test_a_request_ends_at_its_deadline(server):
    assert error(server.complete([5, 6], max_tokens=700, deadline_seconds=0.2))[:2] == (408, "deadline_exceeded")
    events = server.events("/v1/completions", {"prompt": [5, 6], **LONG, "deadline_seconds": 0.7})
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == "deadline_exceeded"
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-2])
    assert len(events) > 3


@pytest.mark.usefixtures("slowly")
def test_the_servers_own_deadline_is_another_status(server, monkeypatch):
    monkeypatch.setattr(server.serving, "config", replace(server.serving.config, deadline=0.2))
    assert error(server.complete([5, 6], max_tokens=700))[:2] == (504, "deadline_exceeded")
    assert error(server.complete([5, 6], max_tokens=700, deadline_seconds=0.1))[0] == 408


@pytest.mark.usefixtures("slowly")
def test_a_failure_has_a_status_before_the_first_token_and_an_event_after_it(server, in_the_next_pass):
    def fail():
        raise RuntimeError("planted, RanksLost: RequestError: ")  # whose text says nothing of its kind

    in_the_next_pass(fail, "prefill")
    assert error(server.complete([5, 6], stream=True))[:2] == (500, "generation_failed")
    asked = {"messages": [{"role": "user", "content": "x"}], **GREEDY, "max_tokens": 600, "stream": True}
    with server.client.stream("POST", "/v1/chat/completions", json=asked) as response:
        lines = response.iter_lines()
        first = next(line for line in lines if line.startswith("data: "))
        in_the_next_pass(fail, "decode")
        events = parsed(chain([first], lines))
    assert events[-1] == "[DONE]"
    assert "planted" in events[-2]["error"]["message"]
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-2])
    assert server.complete([5, 6]).status_code == 200


def test_tokens_and_the_failure_after_them_are_told_apart_when_they_come_together(
    server, monkeypatch, in_the_next_pass
):
    failed = threading.Event()

    def fail():
        failed.set()
        raise RuntimeError("planted")

    take = AsyncOutputs.take

    async def late(outputs):
        while not failed.is_set() or server.llm.engine.busy:
            await asyncio.sleep(0.01)
        return await take(outputs)

    monkeypatch.setattr(AsyncOutputs, "take", late)
    in_the_next_pass(fail, "decode")
    said, failure, done = server.events("/v1/completions", {"prompt": [5, 6], **GREEDY, "logprobs": 1})
    assert len(said["choices"][0]["logprobs"]["tokens"]) == 1
    assert ("planted" in failure["error"]["message"], done) == (True, "[DONE]")


def test_what_goes_wrong_in_the_server_is_told_without_its_traceback(server, monkeypatch):
    def fail(*_):
        raise KeyError("secret")

    monkeypatch.setattr(server.serving, "policy", fail)
    response = server.complete("x")
    assert error(response)[:2] == (500, "internal_error")
    assert "secret" not in response.text


def test_a_busy_session_says_so(server, held):
    client = post(server, {"prompt": [5, 6], **GREEDY, "session_id": "s"})
    until(lambda: server.serving.admission.samples == 1)
    assert error(server.complete([5], session_id="s"))[:2] == (409, "session_busy")
    held.set()
    assert b"200 OK" in client.recv(100)
    client.close()
    server.idle()
    assert server.complete([5], session_id="s").status_code == 200
    server.client.delete("/v1/sessions/s")
    server.complete([5])  # whoever answers this has forgotten the session


@pytest.mark.usefixtures("slowly")
def test_a_server_that_ends_lets_requests_end_and_tells_those_that_do_not(tiny_llama):
    with serving(make(tiny_llama), drain_seconds=1.5) as server:
        real = server.llm.engine.step
        server.llm.engine.step = lambda: (time.sleep(0.01), real())[1]
        answers: dict[int, list] = {}

        def ask(most: int) -> None:
            body = {"prompt": [5, 6], **GREEDY, "max_tokens": most, "stream": True}
            with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as response:
                answers[most] = parsed(response.iter_lines())

        threads = [threading.Thread(target=ask, args=(most,)) for most in (30, 1500)]
        for thread in threads:
            thread.start()
        until(lambda: server.llm.loop.running == 2)
        server.server.handle_exit(signal.SIGTERM, None)
        for thread in threads:
            thread.join(20)
        assert answers[30][-2]["choices"][0]["finish_reason"] == "length"
        assert answers[1500][-2]["error"]["code"] == "shutting_down"
        with pytest.raises(httpx.HTTPError):  # it listens to its end, and no longer
            until(lambda: server.client.get("/ready").json() != {"status": "ending"}, 10)
        with pytest.raises(ApiError) as caught:  # whoever still comes over an open connection
            server.serving.admission.enter(None, 1)
        assert caught.value.status == 503


def test_the_command_answers_and_ends_in_order():
    """From a clone, with the model that is built in."""
    process = subprocess.Popen(
        [sys.executable, "-m", "saccade", "serve", "--port", "0", "--policy", "psa", "--drain", "20"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SACCADE_API_KEY": "a-key-that-tests-use"},
        start_new_session=True,
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if '"serving"' in line:
            break
    url = json.loads(lines[-1])["address"]
    secret = "the harbour master counts boats"
    body = {"prompt": f"{secret}\n" * 4, **GREEDY, "max_tokens": 120, "stream": True}
    client = httpx.Client(base_url=url, headers={"authorization": "Bearer a-key-that-tests-use"}, timeout=60)
    with client, client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        events = response.iter_lines()
        first = next(events)
        os.killpg(process.pid, signal.SIGTERM)  # as supervisors do: the engine's process gets it too
        got = parsed(iter([first, *events]))
    assert got[-1] == "[DONE]"
    assert got[-2]["choices"][0]["finish_reason"] == "length"
    rest = process.stderr.read()  # until the engine's process, which writes there too, has ended
    assert process.wait(120) == 0
    assert "Traceback" not in rest
    assert "leaked" not in rest  # as nanobind says where what is frozen is never collected
    assert secret not in rest
    assert '"path": "/v1/completions", "status": 200' in rest


def test_the_engine_is_told_how_many_more_requests_are_on_their_way(server, monkeypatch):
    """Those that are all here and not with the engine yet; refused ones count for none in the end."""
    engine, told = server.serving.engine, []
    real = engine.submit

    async def submit(asked, coming=0):
        told.append(coming)
        return await real(asked, coming)

    monkeypatch.setattr(engine, "submit", submit)
    prompts = [random_ids(9, seed=number) for number in range(3)]
    bodies = [{**GREEDY, "prompt": prompt, "max_tokens": 2} for prompt in prompts]

    async def ask() -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            asked = [client.post("/v1/completions", json=one) for one in [*bodies, {"prompt": [1], "n": 99}]]
            return [one.status_code for one in await asyncio.gather(*asked)]

    assert asyncio.run(ask()) == [200, 200, 200, 400]
    assert len(told) == 3
    assert all(0 <= count <= 3 for count in told)
    assert server.serving.admission.coming == 0


def test_answers_are_the_librarys_while_many_ask(server):
    """Every policy at once, more requests than run at once, some of whom leave."""
    from concurrent.futures import ThreadPoolExecutor

    policies = ("dense", "streaming(sinks=2, window=40)", "topk(k=24)")
    prompts = [random_ids(60 + 10 * index, seed=index) for index in range(6)]
    wanted = {}
    for index, ids in enumerate(prompts):
        for policy in policies:
            params = SamplingParams(**GREEDY)
            wanted[index, policy] = server.llm.generate([ids], params, policy=policy)[0].outputs[0].text

    def ask(number: int) -> None:
        index, policy = number % 6, policies[number % 3]
        body = {"prompt": prompts[index], **GREEDY, "policy": policy}
        while True:
            if number % 5 == 4:
                post(server, {**body, "max_tokens": 700, "stream": True}).close()
                return
            response = server.ask("/v1/completions", body)
            if response.status_code != 429:
                break
            time.sleep(0.02)
        assert response.json()["choices"][0]["text"] == wanted[index, policy]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(60)))
