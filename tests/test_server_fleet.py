"""Routing, the ingress and replicas, without Ray: what is promised to clients while replicas come, drain and die."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine_helpers import make
from server_helpers import FAR, FAR_BLOCKS, GREEDY, parsed
from tiny_models import random_ids

from saccade.engine.settings.config import EngineConfig
from saccade.server import ingress
from saccade.server.engines import LocalEngine
from saccade.server.errors import ApiError
from saccade.server.ingress import Forwarded, Head, Ingress, Part, ReplicaLost
from saccade.server.replica import Replica
from saccade.server.routing import is_route, route_of
from saccade.server.settings import ServerConfig

DEPLOY = Path(__file__).parents[1] / "deploy"
JSON_TYPE = (b"content-type", b"application/json")


def route(path: str, body: Any = None, **headers: str) -> str:
    named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return route_of(path, named, b"" if body is None else json.dumps(body).encode())


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    roles = ["system", *["user", "assistant"] * len(texts)]
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts)], **fields}


def test_routes_follow_what_a_replica_may_have_stored():
    path = "/v1/chat/completions"
    first = route(path, chat("be brief", "a long question " * 500))
    assert is_route(first)
    assert first == route(path, chat("be brief", "a long question " * 500, "an answer", "more"))  # later turns
    assert first == route(path, chat("be brief", "a long question " * 500 + "about something else"))  # same document
    assert first != route(path, chat("be brief", "another question"))  # a system prompt in common is not enough
    assert first != route(path, chat("be brief", "a long question " * 500), authorization="Bearer other")
    for one in ("session_id", "prompt_cache_key", "cache_salt"):
        same = {route(path, chat("x", text, **{one: "k"})) for text in "abc"}
        assert len(same) == 1
        assert same != {route(path, chat("x", "a", **{one: "l"}))}
    marked = [[{"type": "text", "text": "hello", **more}] for more in ({}, {"cache_control": {"type": "ephemeral"}})]
    turns = [{"messages": [{"role": "user", "content": said}], "system": str(said)} for said in marked]
    assert len({route("/v1/messages", one, x_api_key="k") for one in turns}) == 1  # marks move from turn to turn
    assert route("/v1/messages", turns[0], x_api_key="k") != route("/v1/messages", turns[0], x_api_key="l")
    named = route(path, chat("x", "a"), x_session_id="s")
    assert named == route("/v1/completions", {"prompt": "b", "session_id": "s", "prompt_cache_key": "k"})
    assert named == route("/v1/sessions/s")
    assert route("/v1/responses/resp_0123456789abcdef-77") == "0123456789abcdef"
    assert route("/v1/responses", {"previous_response_id": "resp_0123456789abcdef-77", "input": "x"}) == (
        "0123456789abcdef"
    )
    assert route("/v1/completions", {"prompt": random_ids(900, 1)[:800]}) == route(
        "/v1/completions", {"prompt": random_ids(900, 1)}
    )
    for odd in (
        b"",
        b"[",
        b"[" * 10_000,
        b'{"prompt": {"a": 1}}',
        b'"x"',
        b'{"messages": [3, null], "input": "\\ud800"}',
    ):
        assert is_route(route_of("/v1/completions", {b"authorization": b"\xff"}, odd))


class Called:
    """One request to an ASGI application, and what it sends."""

    def __init__(self, app: Any, path: str, body: Any = None, method: str = "POST") -> None:
        content = b"" if body is None else json.dumps(body).encode()
        self.sent: list[dict[str, Any]] = []
        self.left = asyncio.Event()
        self._content: bytes | None = content
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": [(b"host", b"localhost"), JSON_TYPE, (b"content-length", str(len(content)).encode())],
            "client": ("127.0.0.1", 1),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._content is not None:
            content, self._content = self._content, None
            return {"type": "http.request", "body": content, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    async def result(self) -> tuple[int, bytes]:
        await asyncio.wait_for(self.task, 30)
        assert [one["type"] for one in self.sent].count("http.response.start") == 1
        assert self.sent[-1]["more_body"] is False if "more_body" in self.sent[-1] else True
        return self.sent[0]["status"], b"".join(one.get("body", b"") for one in self.sent[1:])

    async def events(self) -> list[Any]:
        status, body = await self.result()
        assert status == 200, body
        return parsed(iter(body.decode().splitlines()))


class Fleet:
    """Replicas by name, in this process. ``breaks``: after how many parts the next answers break."""

    def __init__(self, replicas: dict[str, Replica]) -> None:
        self.replicas, self.breaks, self.asked = replicas, list[int](), list[str]()

    async def send(self, request: Forwarded, route: str) -> AsyncIterator[Part]:
        name = sorted(self.replicas)[int(route, 16) % len(self.replicas)]
        self.asked.append(name)
        left = self.breaks.pop(0) if self.breaks else -1
        if left == 0:
            raise ReplicaLost("before anything")
        async for part in self.replicas[name].answer(request):
            yield part
            left -= 1
            if left == 0:
                raise ReplicaLost("in the middle")


@pytest.fixture(scope="module")
def llms(far_llama):
    made = [make(far_llama, FAR_BLOCKS, enable_prefix_caching=True) for _ in range(2)]
    yield made
    for one in made:
        one.close()


@pytest.fixture
def fleet(llms, monkeypatch):
    monkeypatch.setattr(ingress, "PAUSE", 0.01)
    return Fleet({f"r{number}": Replica(LocalEngine(llm), ServerConfig()) for number, llm in enumerate(llms)})


def test_answers_are_the_replicas_and_sessions_keep_to_theirs(fleet):
    async def ask() -> None:
        app = Ingress(fleet)
        for session in range(6):
            ids, cached, asked = random_ids(100, session), [], len(fleet.asked)
            for turn in range(3):
                prompt = ids + random_ids(turn * 30, 100 + session)
                body = {"prompt": prompt, **GREEDY, "session_id": f"s{session}"}
                status, answer = await Called(app, "/v1/completions", body).result()
                assert status == 200
                cached.append(json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert len(set(fleet.asked[asked:])) == 1
            assert cached[1] >= 99
            assert cached[2] >= 129
            status, _ = await Called(app, f"/v1/sessions/s{session}", method="DELETE").result()
            assert status == 200
        assert set(fleet.asked) == {"r0", "r1"}
        first = json.loads((await Called(app, "/v1/responses", {"input": "hello", "max_output_tokens": 4}).result())[1])
        more = {"input": "and", "previous_response_id": first["id"], "max_output_tokens": 4}
        assert (await Called(app, "/v1/responses", more).result())[0] == 200
        assert (await Called(app, f"/v1/responses/{first['id']}", method="GET").result())[0] == 200
        assert (await Called(app, "/v1/nothing", {}).result())[0] == 404
        assert (await Called(app, "/ready", method="GET").result())[0] == 200

    asyncio.run(ask())


def test_a_replica_goes_on_with_the_later_turn_that_another_one_stored(tiny_llama, tmp_path, monkeypatch):
    made = [make(tiny_llama, session_dir=tmp_path, session_shared=True) for _ in range(2)]
    replicas = [Replica(LocalEngine(llm), ServerConfig()) for llm in made]
    prompt, cached, restored = random_ids(60, 1), [], []

    async def ask() -> None:
        nonlocal prompt
        for at in (0, 0, 1, 1, 0, 0):
            app = Ingress(Fleet({f"r{at}": replicas[at]}))
            status, answer = await Called(
                app, "/v1/completions", {"prompt": prompt, **GREEDY, "session_id": "talk"}
            ).result()
            assert status == 200
            cached.append(json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"] - len(prompt))
            await asyncio.to_thread(made[at].sessions.flush)
            restored.append(sum(llm.sessions.counts["restores"] for llm in made))
            prompt = prompt + random_ids(20, len(prompt))

    asyncio.run(ask())
    assert cached[0] == -60
    assert set(cached[1:]) == {-20}, cached  # all but what the turn adds
    assert restored == [0, 0, 1, 1, 2, 2]  # and nobody reads what it has already
    for replica in replicas:
        replica.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_broken_replica_is_retried_before_the_first_token_and_told_of_after_it(fleet, path):
    field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path)
    body = {field: "x"} if field else {"messages": [{"role": "user", "content": "x"}]}
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body |= {"temperature": 0, "ignore_eos": True, limit: 60, "stream": True}
    end: list[Any] = ["[DONE]"]
    if path == "/v1/messages":
        body, end = body | {"model": next(iter(fleet.replicas.values())).serving.names[0]}, []

    async def ask() -> None:
        app = Ingress(fleet)
        whole = await Called(app, path, body).events()
        fleet.breaks = [0, 1]  # before the head, and between the head and the first event
        assert len(await Called(app, path, body).events()) > 1
        assert len(fleet.asked) == 4
        fleet.breaks = [3]
        broken = await Called(app, path, body).events()
        assert broken[len(broken) - len(end) :] == whole[len(whole) - len(end) :] == end
        broken = broken[: len(broken) - len(end)]
        assert broken[-1]["error"]["code"] == "replica_lost"
        assert not any(choice.get("finish_reason") for one in broken for choice in one.get("choices", []))
        assert not any(one.get("type") in ("response.completed", "message_stop") for one in broken)
        if path == "/v1/responses":
            assert [one["sequence_number"] for one in broken] == list(range(len(broken)))
        if path == "/v1/messages":
            assert (broken[-1]["type"], whole[-1]["type"]) == ("error", "message_stop")
        body["stream"] = False
        fleet.breaks = [0, 1, 2]  # nothing of an answer that is no stream has been sent by then
        status, answer = await Called(app, path, {**body, limit: 5}).result()
        assert status == 200
        assert json.loads(answer)["usage"]
        fleet.breaks = [0] * ingress.ATTEMPTS
        status, answer = await Called(app, path, body).result()
        assert (status, json.loads(answer)["error"]["code"]) == (503, "replica_lost")

    asyncio.run(ask())


def test_half_an_event_is_closed_before_the_error():
    class Half:
        async def send(self, request: Forwarded, route: str) -> AsyncIterator[Part]:
            yield Head(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
            yield b'data: {"choices": [{"te'
            raise ReplicaLost("gone")

    async def ask() -> list[bytes]:
        _, body = await Called(Ingress(Half()), "/v1/completions", {"prompt": "x"}).result()
        return body.split(b"\n\n")

    half, said, done, _ = asyncio.run(ask())
    assert half == b'data: {"choices": [{"te'
    assert json.loads(said[6:])["error"]["code"] == "replica_lost"
    assert done == b"data: [DONE]"


def test_clients_that_leave_and_replicas_that_drain(fleet, llms):
    async def ask() -> None:
        app = Ingress(fleet, max_body=100_000)
        asked = Called(app, "/v1/completions", {"prompt": "x", **FAR, "stream": True})
        while len(asked.sent) < 2:
            await asyncio.sleep(0.005)
        asked.left.set()
        await asyncio.wait_for(asked.task, 5)
        while any(llm.loop.running for llm in llms):
            await asyncio.sleep(0.005)
        assert sum(one.serving.admission.samples for one in fleet.replicas.values()) == 0
        assert (await Called(app, "/v1/completions", {"prompt": "x" * 100_000}).result())[0] == 413

        owner = fleet.asked[-1]
        fleet.replicas[owner].serving.drain()
        drained = fleet.replicas[owner]
        answer = asyncio.ensure_future(Called(app, "/v1/completions", {"prompt": "x", **GREEDY}).result())
        await asyncio.sleep(0)
        fleet.replicas[owner] = next(one for name, one in fleet.replicas.items() if name != owner)
        assert (await answer)[0] == 200  # the drained one said 503, and the ring knows better by now
        drained.check()  # it lives on, for those that it has at work

    asyncio.run(ask())


def test_a_websocket_is_refused_where_replicas_answer():
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def ask() -> None:
        await Ingress(Fleet({}))({"type": "websocket", "path": "/v1/responses", "headers": []}, None, send)

    asyncio.run(ask())
    assert [one["type"] for one in sent] == ["websocket.http.response.start", "websocket.http.response.body"]
    assert (sent[0]["status"], json.loads(sent[1]["body"])["error"]["code"]) == (501, "not_supported")


def test_a_probe_of_an_empty_fleet_is_answered_in_time():
    class Nobody:
        async def send(self, request: Forwarded, route: str) -> AsyncIterator[Part]:
            await asyncio.sleep(60)
            yield Head(200, [])

    async def ask() -> tuple[int, bytes]:
        return await Called(Ingress(Nobody(), probe_seconds=0.05), "/ready", method="GET").result()

    status, body = asyncio.run(ask())
    assert (status, json.loads(body)["error"]["code"]) == (503, "not_ready")
    assert ApiError(503, "x").kind == "server_error"


def test_the_manifest_names_settings_that_exist_and_waits_long_enough():
    """Ray's own schema and the application itself are held to in server_ray.py."""
    service = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    (app,) = config["applications"]
    args = app["args"]
    EngineConfig.of(**args["engine"])
    assert set(args["server"]) <= {one.name for one in fields(ServerConfig)}
    longest = args["server"]["deadline"] + 30
    assert config["http_options"]["request_timeout_s"] >= longest
    (workers,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= longest
    mounts = {one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    assert str(Path(args["api_keys"]).parent) in mounts
    module = app["import_path"].partition(":")[0].replace(".", "/")
    assert "def build(" in (DEPLOY.parent / f"{module}.py").read_text()
    docker = (DEPLOY / "Dockerfile").read_text()
    assert args["api_keys"] in docker
    for copied in re.findall(r"^COPY (?!--from)(.+) \S+$", docker, re.MULTILINE):
        assert all((DEPLOY.parent / name).exists() for name in copied.split())
