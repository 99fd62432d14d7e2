"""/v1/responses over a WebSocket, and conversations in short."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from engine_helpers import make
from response_events import follow
from server_helpers import error, serving, until
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from saccade.server import responses_socket
from saccade.server.keys import Key, KeyRing, digest
from saccade.server.responses_items import summary_of

SECRET, OTHER = "sk-first-key-of-tests", "sk-second-key-of-tests"
ASK = {"temperature": 0, "max_output_tokens": 6, "ignore_eos": True}
LAST = ("response.completed", "response.incomplete", "response.failed", "error")


@pytest.fixture(scope="module")
def server(tiny_llama):
    keys = KeyRing([Key("one", digest(SECRET)), Key("two", digest(OTHER), requests_per_minute=2)])
    with serving(
        make(tiny_llama, max_requests=2), keys=keys, max_body=20_000, cors=("https://page.example",)
    ) as running:
        running.client.headers["authorization"] = f"Bearer {SECRET}"
        yield running
        running.idle()
        until(lambda: not running.serving.sockets)  # a client that leaves is noticed a moment later


@contextmanager
def opened(server, key: str | None = SECRET, path: str = "/v1/responses", **headers: str) -> Iterator[ClientConnection]:
    given = headers if key is None else {"authorization": f"Bearer {key}", **headers}
    with connect(server.url.replace("http", "ws", 1) + path, additional_headers=given, proxy=None) as socket:
        yield socket


def create(given: Any, **fields: Any) -> str:
    return json.dumps({"type": "response.create", "input": given, **ASK, **fields})


def turn(socket: ClientConnection) -> list[dict[str, Any]]:
    """The events of one turn."""
    events = [json.loads(socket.recv(timeout=60))]
    while events[-1]["type"] not in LAST:
        events.append(json.loads(socket.recv(timeout=60)))
    return events


def ask(socket: ClientConnection, given: Any, **fields: Any) -> dict[str, Any]:
    socket.send(create(given, **fields))
    return turn(socket)[-1]


def code(event: dict[str, Any]) -> tuple[int, str]:
    assert event["type"] == "error"
    assert event["error"]["message"]
    return event["status"], event["error"]["code"]


def text(event: dict[str, Any]) -> str:
    return event["response"]["output"][0]["content"][0]["text"]


def test_a_turn_is_told_as_over_http(server):
    over_http = server.ask("/v1/responses", {"input": "hello", **ASK}).json()
    with opened(server) as socket:
        socket.send(create("hello"))
        events = turn(socket)
        follow([*events, "[DONE]"])
        assert text(events[-1]) == over_http["output"][0]["content"][0]["text"]
        assert events[-1]["response"]["usage"]["input_tokens"] == over_http["usage"]["input_tokens"]
        stored = server.client.get(f"/v1/responses/{events[-1]['response']['id']}")
        assert stored.json()["output"] == events[-1]["response"]["output"]


def test_what_is_stored_nowhere_goes_on_on_its_own_connection_alone(server):
    with opened(server) as socket:
        first = ask(socket, "hello", store=False)["response"]
        second = ask(socket, "and?", store=False, previous_response_id=first["id"])["response"]
        said = text({"response": first})
        talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": said}]
        whole = server.ask("/v1/responses", {"input": [*talk, {"role": "user", "content": "and?"}], **ASK}).json()
        assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        assert text({"response": second}) == whole["output"][0]["content"][0]["text"]
        assert code(ask(socket, "x", previous_response_id=first["id"])) == (404, "previous_response_not_found")
        again = ask(socket, "x", store=False, previous_response_id=second["id"])["response"]
    with opened(server) as socket:
        assert code(ask(socket, "x", previous_response_id=again["id"])) == (404, "previous_response_not_found")
        assert ask(socket, "x")["type"] == "response.incomplete"


def test_a_turn_that_fails_forgets_what_it_went_on_from(server):
    unasked = [{"type": "function_call_output", "call_id": "call_1", "output": "none"}]
    with opened(server) as socket:
        first = ask(socket, "hello", store=False)["response"]["id"]
        assert code(ask(socket, unasked, store=False, previous_response_id=first)) == (400, "call_not_found")
        assert code(ask(socket, "x", previous_response_id=first)) == (404, "previous_response_not_found")
    assert error(server.ask("/v1/responses", {"input": unasked, **ASK})) == (400, "call_not_found", "input")
    odd = [{**unasked[0], "call_id": []}, {"role": "tool", "content": "x"}]
    for given in odd:
        assert server.ask("/v1/responses", {"input": [given], **ASK}).status_code in (200, 400)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("{", (400, "invalid_json")),
        (b"\xff\x00", (400, "invalid_json")),
        ("[]", (400, "invalid_type")),
        ('{"type": "response.cancel"}', (400, "invalid_type")),
        ("[" * 100, (400, "too_deep")),
        ('{"type": "response.create"}', (400, "invalid_request_error")),
        (create("x", stream=True), (400, "unsupported_field")),
        (create("x", background=False), (400, "unsupported_field")),
        (create("x", nonsense=1), (400, "unsupported_field")),
        (create("\ud800 half a pair"), (400, "invalid_request_error")),
        (create("x", model="other"), (404, "model_not_found")),
        (create("x", policy="nonsense"), (400, "invalid_request_error")),
        (create("x" * 9000), (400, "context_length_exceeded")),
    ],
)
def test_what_is_wrong_is_told_and_the_connection_goes_on(server, message, expected):
    with opened(server) as socket:
        socket.send(message)
        assert code(turn(socket)[-1]) == expected
        assert ask(socket, "hello")["type"] == "response.incomplete"


def test_messages_are_neither_too_long_nor_too_many(server):
    with opened(server) as socket:
        socket.send("x" * 30_000)
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=60)
        assert closed.value.rcvd.code == 1009
    with opened(server) as socket:
        socket.send(create("x", max_output_tokens=300))
        for _ in range(20):
            socket.send(create("y"))
        events = [turn(socket)[-1] for _ in range(21)]
        refused = [one for one in events if one["type"] == "error"]
        assert 3 <= len(refused) <= 4
        assert {code(one) for one in refused} == {(429, "rate_limit_exceeded")}
        assert [one["response"]["usage"]["output_tokens"] for one in events if "response" in one][:2] == [300, 6]
    with opened(server, OTHER) as socket:
        ends = [ask(socket, "x") for _ in range(3)]
        assert [one["type"] for one in ends[:2]] == ["response.incomplete"] * 2
        assert code(ends[2]) == (429, "rate_limit_exceeded")


def test_a_burst_is_queued_as_messages_one_by_one_are(server):
    """All of one packet is read before anything is answered: the first message is none that waits behind it."""
    with opened(server) as socket:
        with socket.protocol_mutex:
            for given in [create("x", max_output_tokens=300), *[create("y")] * 20]:
                socket.protocol.send_text(given.encode())
            socket.socket.sendall(b"".join(socket.protocol.data_to_send()))
        events = [turn(socket)[-1] for _ in range(21)]
        refused = [one for one in events if one["type"] == "error"]
        assert len(refused) == 20 - responses_socket.MOST_WAITING
        assert {code(one) for one in refused} == {(429, "rate_limit_exceeded")}
        assert all("16 messages wait already" in one["error"]["message"] for one in refused)


def refusals(server) -> dict[str, int]:
    """How many handshakes were refused, by status."""
    found = re.findall(r'_total\{.*route="none",status="(\d+)"\} (\S+)', server.client.get("/metrics").text)
    return {status: int(float(count)) for status, count in found}


def test_who_may_open_one(server, caplog):
    before, lines = refusals(server), []
    caplog.set_level("INFO", logger="saccade.server")
    for key, origin, path, status in (
        (None, None, "/v1/responses", 401),
        ("sk-nobody-has-this-key", None, "/v1/responses", 401),
        (SECRET, "https://evil.example", "/v1/responses", 403),
        (SECRET, "null", "/v1/responses", 403),
        (SECRET, None, "/v1/models", 403),
    ):
        asked = {"x-request-id": f"refused-{len(lines)}", **({"origin": origin} if origin else {})}
        with pytest.raises(InvalidStatus) as refused, opened(server, key, path, **asked):
            pass
        assert refused.value.response.status_code == status
        lines.append((asked["x-request-id"], path, status))

    def logged():  # the question for metrics before may be logged late
        said = [one.fields for one in caplog.records if one.getMessage() == "request"]
        return [(one["request_id"], one["path"], one["status"]) for one in said if one["path"] != "/metrics"]

    until(lambda: len(logged()) >= len(lines))
    assert logged() == lines
    after = refusals(server)
    assert {status: after[status] - before.get(status, 0) for status in ("401", "403")} == {"401": 2, "403": 3}
    assert [one.getMessage() for one in caplog.records if one.levelname in ("WARNING", "ERROR")] == []
    for origin in ("https://page.example", server.url):
        with opened(server, origin=origin) as socket:
            assert ask(socket, "x")["type"] == "response.incomplete"


def test_a_client_that_leaves_ends_its_turn(server):
    with opened(server) as socket:
        socket.send(create("x", max_output_tokens=1900))
        assert json.loads(socket.recv())["type"] == "response.created"
    until(lambda: not server.serving.admission.samples)
    server.idle()


def test_a_connection_lasts_for_so_long_alone(server, monkeypatch):
    monkeypatch.setattr(responses_socket, "SECONDS", 0.3)
    with opened(server) as socket:
        assert code(turn(socket)[-1]) == (400, "websocket_connection_limit_reached")
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=60)


def test_a_server_that_ends_finishes_the_turn(tiny_llama):
    with serving(make(tiny_llama), drain_seconds=20) as server, opened(server, None) as socket, opened(server, None):
        step = server.llm.engine.step
        server.llm.engine.step = lambda: (time.sleep(0.005), step())[1]  # it must still run when the end comes
        socket.send(create("x", max_output_tokens=200))
        assert json.loads(socket.recv())["type"] == "response.created"
        socket.send(create("too late"))
        time.sleep(0.05)
        server.server.handle_exit(signal.SIGTERM, None)
        assert turn(socket)[-1]["response"]["usage"]["output_tokens"] == 200
        assert code(turn(socket)[-1]) == (503, "shutting_down")
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=60)
        assert closed.value.rcvd.code == 1012


def test_a_conversation_in_short(server):
    named = {"model": server.serving.names[0]}
    talk = [{"role": "user", "content": "my name is Ada"}, {"role": "assistant", "content": "hello Ada"}]
    asked = {**named, "input": talk, "max_output_tokens": 12, "ignore_eos": True, "seed": 3}
    short = server.ask("/v1/responses/compact", asked)
    assert short.status_code == 200, short.text
    assert short.json()["object"] == "response.compaction"
    assert short.json()["usage"]["output_tokens"] == 12
    [item] = short.json()["output"]
    assert (item["type"], set(item)) == ("compaction", {"type", "id", "encrypted_content"})
    more = server.ask("/v1/responses", {"input": [item, {"role": "user", "content": "who am I?"}], **ASK}).json()
    summary = summary_of(item, "input[0]")
    asked = f"Summary of our conversation so far:\n{summary}\n\nwho am I?"
    plain = server.ask("/v1/responses", {"input": asked, **ASK}).json()
    assert more["output"][0]["content"] == plain["output"][0]["content"]
    assert more["usage"]["input_tokens"] == plain["usage"]["input_tokens"]
    kept = server.client.get(f"/v1/responses/{more['id']}/input_items").json()["data"]
    assert kept[0]["encrypted_content"] == item["encrypted_content"]
    behind = server.ask("/v1/responses/compact", {**named, "previous_response_id": more["id"], "max_output_tokens": 4})
    assert behind.status_code == 200
    for body, expected in (
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "x", "stream": True}, "stream"),
        ({"input": [{**item, "encrypted_content": "AAAA"}]}, "input"),
        ({"input": [{**item, "encrypted_content": "saccade1:?"}]}, "input"),
        ({"input": [{"type": "compaction"}]}, "input"),
    ):
        status, _, param = error(server.ask("/v1/responses/compact", named | body))
        assert (status, param) == (400, expected)
    assert error(server.ask("/v1/responses/compact", {"input": "x"})) == (400, None, "model")
    assert error(server.ask("/v1/responses/compact", {"model": "other", "input": "x"}))[0] == 404
