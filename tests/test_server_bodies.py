"""What a request may cost before anybody knows what it asks for: time that is linear in it, and bounded memory."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
from engine_helpers import make
from server_helpers import GREEDY, error, serving, until
from tiny_models import random_ids

from saccade.engine.messages import StepOutput
from saccade.engine.stream import Stream
from saccade.errors import LONGEST, SaccadeError, shown
from saccade.server import shape
from saccade.server.bodies import Room
from saccade.server.errors import ApiError
from saccade.server.responses_store import ResponseStore
from saccade.server.routing import route_of
from saccade.server.run import MOST_HEADER_BYTES
from saccade.server.shape import check_shape
from saccade.server.weight import weight

MIB = 2**20
NESTED = b'["' + b"[" * 70 + b'",'  # so that no count alone lets a body pass


def seconds(work, *given) -> float:
    """The least of three times."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        work(*given)
        times.append(time.perf_counter() - began)
    return min(times)


def refused(body: bytes) -> str | None:
    """The code of the error that a body gets."""
    try:
        check_shape(body, 64)
    except ApiError as error:
        return error.code
    return None


@pytest.mark.parametrize(
    "unit",
    [b'\\"[', b'\\"', b"\\", b"x", b'x"', b'"', b"\\\\[", b'"\\', b" ", b"1 ", b"]", b'"a" '],
    ids=lambda unit: unit.decode(),
)
@pytest.mark.parametrize("begin", [NESTED, NESTED + b'"'], ids=["outside", "inside"])
def test_the_shape_of_a_body_is_told_in_time_linear_in_it(begin, unit):
    """What freezes a server is a scan that begins anew at each quote; a doubled body takes twice as long."""
    small, large = (begin + unit * (size // len(unit)) for size in (MIB // 16, MIB // 4))
    assert seconds(refused, large) < 12 * seconds(refused, small) + 0.02


def test_the_shape_that_is_told_is_the_one_that_is_decoded():
    plain = {"a": [1, {"b": [[], "]}[{,:\\", 'x"\\"']}], "c": "[" * 100 + "\\", "d": "\u4e2d\n"}
    deep: Any = 1
    for _ in range(62):
        deep = [deep]
    for value in (plain, [plain, deep], [deep, "[" * 9]):
        for ascii_only in (True, False):
            assert refused(json.dumps(value, ensure_ascii=ascii_only).encode()) is None
    assert refused(json.dumps([[[deep]]]).encode()) == "too_deep"
    assert refused(json.dumps({"a": "\\", "b": [[[deep]]]}).encode()) == "too_deep"
    assert refused(b"[[]," * 65) == "too_deep"
    assert refused(b"[],]" * 65) is None, "is for the decoder to refuse"
    for cut in ("", " " * 300_000, "\n"):
        whole = json.dumps([plain, ["["] * 99, 1]) + cut
        assert refused(whole.encode()) is None
    for cut in (1, 3, 40, 499):
        assert refused(whole.encode()[: -cut - 1]) == "invalid_json", "no decoder need read it to its end"
    assert refused(json.dumps([["["] * 99, "x"]).encode()[:-3]) == "invalid_json"
    assert refused(json.dumps([["["] * 99, "x\\"]).encode()[:-3]) == "invalid_json"


def test_what_is_made_of_a_body_is_bounded(monkeypatch):
    assert (shape.MOST_VALUES, shape.MOST_KEYS, shape.MOST_CONTAINERS) == (2**21, 2**17, 2**16)
    values, keys, containers = 6000, 900, 700
    monkeypatch.setattr(shape, "MOST_VALUES", values)
    monkeypatch.setattr(shape, "MOST_KEYS", keys)
    monkeypatch.setattr(shape, "MOST_CONTAINERS", containers)
    for body, most in (
        (b"1,", values),
        (b'"",', values),
        (b'"a":1,', keys),
        (b"[],", containers),
        (b"{},", containers),
    ):
        assert refused(b"[" + body * (most - 2) + b"1]") is None
        assert refused(b"[" + body * (most + 2) + b"1]") == "too_many_values"
    assert refused(b'["' + b"[{,:" * values + b'"]') is None, "text may be anything"


def test_a_step_of_the_scan_is_bounded(monkeypatch):
    """The regex engine holds the interpreter's lock: a long text is looked at bit by bit."""
    monkeypatch.setattr(shape, "_STEP", 7)
    for text in ('x"' * 20, "\\" * 19, 'a\\"b' * 9, "[" * 70, "é" * 30):
        for value in ([text, 1], {"k" * 30: text, text: [text]}, [[" " * 30]]):
            body = json.dumps(value).replace("1", " " * 40 + "1").encode()
            assert refused(NESTED + body + b"]") is None
            assert refused(NESTED + body[:-1] + b"," + b"[" * 70) == "too_deep"


# --- through the server


@pytest.fixture(scope="module")
def server(tiny_llama):
    with serving(make(tiny_llama), max_body=8 * MIB, max_bodies=12 * MIB) as running:
        yield running
        running.idle()
        until(lambda: running.serving.room.used == 0)


ONES: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": ("/v1/chat/completions", {}),
    "stop": ("/v1/completions", {"prompt": "x"}),
    "tools": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    "input": ("/v1/responses", {}),
    "prompt": ("/v1/completions", {}),
    "stop_token_ids": ("/v1/completions", {"prompt": "x"}),
    "bad_words": ("/v1/completions", {"prompt": "x"}),
    "certify": ("/v1/completions", {"prompt": "x"}),
    "include": ("/v1/responses", {"input": "x"}),
    "allowed_token_ids": ("/v1/completions", {"prompt": "x"}),
    "logits_processors": ("/v1/completions", {"prompt": "x"}),
    "modalities": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    "functions": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    "documents": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    "tokens": ("/detokenize", {}),
    "layers": ("/v1/selection_maps", {"prompt": "x"}),
}


@pytest.mark.parametrize("field", ONES)
def test_a_long_list_of_what_does_not_fit_makes_one_error(server, field, monkeypatch):
    """Counted: as many errors as the field has types, however many elements do not fit."""
    from saccade.server import app

    found = []
    real = app.from_validation
    monkeypatch.setattr(app, "from_validation", lambda errors: (found.append(len(errors)), real(errors))[1])
    path, body = ONES[field]
    for wrong in ([1.5], [None], [[]], [{}]):
        answer = server.ask(path, {**body, field: wrong * 3_000})
        if answer.status_code == 404:  # selection maps
            continue
        assert error(answer)[0] in (400, 403), field
        assert len(answer.content) < 2 * LONGEST
    assert max(found, default=0) <= 4


@pytest.mark.parametrize(
    "body",
    [
        {"logit_bias": {str(number): "x" for number in range(50_000)}},
        {"logit_bias": {str(number): 10**400 for number in range(50)}},
        {f"field{number}": 1 for number in range(50_000)},
        {"stream_options": {f"field{number}": 1 for number in range(50_000)}},
        {"response_format": {"type": "json_schema", "json_schema": {f"f{number}": 1 for number in range(50_000)}}},
        {"x" * 100_000: 1},
        {"policy": "x" * 100_000},
        {"policy": {"prefill": "x" * 100_000}},
        {"tool_choice": "x" * 100_000},
        {"tool_choice": {"type": "x" * 100_000}},
        {"model": "\ud800" * 100_000},
        {"session_id": "x" * 100_000},
        {"stop": [["x" * 1000] * 100]},
        {"tools": [{"type": "function", "function": {"name": ["x"] * 60_000}}]},
        {"messages": [{"role": "user", "content": [{"type": ["x"] * 60_000}]}]},
        {"messages": [{"role": "x" * 100_000}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}]},
        {"structured_outputs": {"json": {"enum": ["x" * 300_000]}}},
        {"structured_outputs": {"json": "[" * 300_000}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [1] * 300_000}}}},
        {"chat_template_kwargs": {"chat_template": "x" * 100_000}},
    ],
    ids=lambda body: f"{next(iter(body))[:12]}",
)
def test_an_error_is_short_whatever_it_is_about(server, body):
    answer = server.ask(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **body}
    )
    assert error(answer)[0] in (400, 404)
    assert len(answer.content) < 12 * LONGEST  # what is no ASCII is spelt out in JSON


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/completions"])
def test_large_bodies_leave_the_event_loop(server, path, monkeypatch):
    """Counted by size: whatever they hold, not their texts alone. What is small stays."""
    import threading

    seen = []
    for module, name in (("gate", "check_shape"), ("bodies", "decoded")):
        place = f"saccade.server.{module}.{name}"
        real = getattr(__import__(f"saccade.server.{module}", fromlist=[name]), name)
        monkeypatch.setattr(
            place, lambda *given, real=real: (seen.append(threading.current_thread().name), real(*given))[1]
        )
    for size, off in ((10, False), (300_000, True)):
        seen.clear()
        server.ask(path, {"metadata": {"a": "x" * size}, "max_tokens": 1})
        assert len(seen) == 2
        assert {"parser" in name for name in seen} == {off}


def test_a_template_is_rendered_elsewhere_whatever_makes_it_long(server, monkeypatch):
    sizes, real = [], server.serving.off_loop

    async def off_loop(size, work):
        sizes.append(size)
        return await real(size, work)

    monkeypatch.setattr(server.serving, "off_loop", off_loop)
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 9000}}
    long = (
        {"content": "x" * 9000},
        {"content": "x", "name": "y" * 9000},
        {"content": [{"type": "text", "text": "x"}] * 90},
    )
    for message in long:
        sizes.clear()
        server.ask("/tokenize", {"messages": [{"role": "user", **message}]})
        assert sizes
        assert max(sizes) > 4096
    sizes.clear()
    server.ask("/tokenize", {"messages": [{"role": "user", "content": "x"}], "tools": [tool]})
    assert max(sizes) > 4096


def test_bodies_together_are_bounded(server):
    """Clients who send what they announced, and no end of it, hold bytes that others cannot have; they are told."""
    head = (
        f"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {8 * MIB}\r\n"
    )
    held = socket.create_connection(server.server.address)
    held.sendall(head.encode() + b'\r\n"' + b"x" * (7 * MIB))
    until(lambda: server.serving.room.used > 6 * MIB)
    answer = server.ask("/v1/completions", {"prompt": "x", "metadata": {"a": "x" * (7 * MIB)}})
    assert error(answer)[:2] == (503, "overloaded")
    assert int(answer.headers["retry-after"]) >= 1
    assert server.complete("x").status_code == 200, "on the same connection, whose last body was passed over"
    held.close()
    until(lambda: server.serving.room.used == 0)


def raw(server, data: bytes) -> bytes:
    with socket.create_connection(server.server.address, timeout=20) as client:
        received = b""
        try:
            client.sendall(data)
            while part := client.recv(65536):
                received += part
        except ConnectionError:
            pass
        return received


def test_headers_are_bounded_wherever_they_stand(server):
    """In one read with the whole request, in the address, and behind a body in chunks."""
    head, body = (
        b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n",
        b"{}",
    )
    fits = b"x: " + b"y" * (MOST_HEADER_BYTES - 400) + b"\r\n"
    ends = b"content-length: 2\r\n\r\n" + body
    assert b" 400 " in raw(server, head + fits + ends)[:20]
    assert b" 431 " in raw(server, head + fits * 2 + ends)[:20]
    assert b" 431 " in raw(server, head + b"a: b\r\n" * 12_000 + ends)[:20]
    assert b" 431 " in raw(server, b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n")[:20]
    chunked = head + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    assert b" 431 " in raw(server, chunked + fits * 3 + b"\r\n")[:20]


def test_a_body_in_small_chunks_is_handed_over_at_once(server, monkeypatch):
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    parts, real = [], HttpToolsProtocol.on_body
    monkeypatch.setattr(HttpToolsProtocol, "on_body", lambda self, body: (parts.append(len(body)), real(self, body))[1])
    body = json.dumps({"prompt": "x" * 3000}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    answer = raw(server, head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
    assert b" 200 " in answer[:20]
    assert sum(parts) == len(body)
    assert len(parts) < 100
    many = raw(server, head + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 50_000)
    assert b" 400 " in many[:20] or not many, "closed before all was sent"


def test_gzip_is_not_unpacked(server):
    import gzip

    body = gzip.compress(b'{"prompt": "' + b"x" * 100_000 + b'"}')
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = server.client.post("/tokenize", content=body, headers=headers)
    assert error(answer)[:2] == (415, "unsupported_media_type")
    assert "content-encoding 'gzip' is not unpacked" in answer.json()["error"]["message"]
    plain = server.client.post(
        "/tokenize", content=b'{"prompt": "x"}', headers={**headers, "content-encoding": "identity"}
    )
    assert plain.status_code == 200


def test_numbers_that_are_too_long_are_refused(server):
    for digits in (400, 5000, 100_000):
        body = b'{"prompt": "x", "seed": 1' + b"0" * digits + b"}"
        answer = server.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert error(answer)[0] == 400
        assert len(answer.content) < 2 * LONGEST


# --- parts


def test_a_value_is_shown_at_no_more_cost_than_one_that_fits():
    small = [None, 1.5, "a'b", b"x", [1, [2, "x"]], (1,), (), {"a": [1], "b": {}}, [[]] * 3, {1: 2}]
    for value in small:
        assert shown(value) == repr(value)
    for value in (
        [1] * 1000,
        ["abc"] * 1000,
        {n: [n] * 9 for n in range(1000)},
        "x" * 1000,
        [["y" * 999]] * 9,
        (2,) * 999,
    ):
        assert shown(value) == repr(value)[:197] + "..."
        assert shown(value, 60) == repr(value)[:57] + "..."

    class Counted(list):
        pass

    tracemalloc.start()
    try:
        shown([["x" * 50] * 1000] * 1000)
        shown({"x" * 10**6: 1})
        str(SaccadeError("\ud800" * 10**6))
        assert tracemalloc.get_traced_memory()[1] < 12 * 10**6  # the texts themselves
    finally:
        tracemalloc.stop()
    assert len(str(SaccadeError("\U000f0000" * 10**5))) < LONGEST + 10


def test_outputs_that_nobody_takes_are_joined_in_pairs(monkeypatch):
    """A reader that sleeps while an answer grows costs n log n, not the square; nothing is lost."""
    copied, real = [0], StepOutput.joined

    def joined(first, later):
        copied[0] += len(first.new_tokens) + len(later.new_tokens)
        return real(first, later)

    monkeypatch.setattr(StepOutput, "joined", joined)
    costs = []
    for count in (1000, 2000):
        copied[0], stream = 0, Stream(1)
        for number in range(count):
            stream.put(StepOutput(1, f"{number},", [number], 3, 3))
        output = stream.take()
        assert output.new_tokens == list(range(count))
        assert output.new_text == "".join(f"{number}," for number in range(count))
        assert stream.take() is None
        costs.append(copied[0])
    assert costs[1] < 3 * costs[0]
    assert costs[1] < 2000 * 40


def test_room_is_given_back():
    room = Room(100)
    one, two = room.share(), room.share()
    one.take(60)
    two.take(40)
    with pytest.raises(ApiError, match="100 is the most"):
        two.take(1)
    one.give_back()
    one.give_back()
    assert room.used == 40
    two.take(60)


def test_a_stored_response_counts_with_all_that_it_holds(monkeypatch):
    monkeypatch.setattr("saccade.server.responses_store.MOST_CHARACTERS", 100_000)
    store, caller = ResponseStore(100), SimpleNamespace(name="")
    for number in range(20):
        store.put(caller, {"id": str(number), "metadata": {"a": "x" * 9000}}, [], [])
    assert len(store) <= 11
    store.put(caller, {"id": "y"}, [{"content": [{"text": "x" * 99_000}]}], [])
    assert len(store) <= 1


def test_weighing_ends_where_it_is_enough():
    assert weight({"abc": ["de", 1]}) == 4 * 64 + 5
    many = [{"a": "x"}] * 10**6
    assert 1000 < weight(many, 1000) < 1200
    assert seconds(weight, [many, "x"], 1000) < 1


def test_an_ingress_routes_what_it_cannot_read():
    for body in (b"[" * 10**6, b"[" + b"[]," * 10**6, b"{" + b'"a":1,' * 10**6, b"nix", b""):
        assert len(route_of("/v1/completions", {}, body)) == 16


def test_long_trace_headers_are_left_out():
    """OpenTelemetry's pattern is quadratic in their spaces."""
    from saccade.server.tracing import Tracing

    given = {}
    tracer = SimpleNamespace(start_span=lambda *args, **kwargs: None)
    propagator = SimpleNamespace(extract=lambda carrier: given.update(carrier))
    tracing = Tracing.__new__(Tracing)
    tracing._tracer, tracing._propagator = tracer, propagator
    headers = {b"traceparent": b"00-1", b"tracestate": b"a" + b" " * 60_000 + b"b"}
    pytest.importorskip("opentelemetry")
    tracing.request("POST", "/v1/completions", "id", headers)
    assert given == {"traceparent": "00-1"}


def test_a_session_goes_on_beside_large_bodies(server):
    ids = random_ids(50, 1)
    assert server.complete(ids, session_id="s", metadata={"a": "x" * 300_000}).status_code == 200
    usage = server.complete([*ids, 5], session_id="s", metadata={"a": "x" * 300_000}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 49
    assert server.ask("/v1/completions", {"prompt": "x", **GREEDY}).status_code == 200
    asyncio.run(server.serving.parse(1, lambda: None))
