"""A server in a thread, and its clients."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from saccade import LLM
from saccade.server.engines import EngineFace, LocalEngine
from saccade.server.run import Server
from saccade.server.serving import Serving
from saccade.server.settings import ServerConfig


@dataclass
class Running:
    """``ask`` posts JSON; ``events`` posts it and gives the data of what is streamed."""

    llm: LLM  # None where the engine is another process's
    serving: Serving
    url: str
    client: httpx.Client
    server: Server = field(repr=False, default=None)  # type: ignore[assignment]

    def ask(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = json.dumps(body).encode()  # ASCII: halves of surrogate pairs pass, and numbers that are none
        return self.client.post(path, content=content, headers={"content-type": "application/json", **headers})

    def chat(self, text: str = "hello", **fields: Any) -> httpx.Response:
        return self.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **GREEDY, **fields})

    def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        return self.ask("/v1/completions", {"prompt": prompt, **GREEDY, **fields})

    def events(self, path: str, body: Any) -> list[Any]:
        """All events; the last one is ``[DONE]``, as text."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return parsed(response.iter_lines())

    def idle(self, seconds: float = 60) -> None:
        """Wait until nothing is asked of the engine, and nothing is held for anybody."""
        serving = self.serving

        def quiet() -> bool:
            now = serving.engine.statistics()
            return not (now.running or now.waiting or serving.admission.samples or serving.running)

        until(quiet, seconds)


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait for it."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "what was waited for did not come"
        time.sleep(0.005)


def streamed_calls(deltas: list[Any]) -> list[Any]:
    """The calls that a stream's deltas tell piece by piece, as a whole message has them."""
    calls: list[Any] = []
    for piece in [piece for delta in deltas for piece in delta.get("tool_calls", [])]:
        if "id" in piece:
            assert piece["index"] == len(calls)
            calls.append({name: value for name, value in piece.items() if name != "index"})
        else:
            assert set(piece) == {"index", "function"}
            assert piece["index"] == len(calls) - 1
            calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    return calls


GREEDY = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
# Of ``far_llama``, in a cache of FAR_BLOCKS: half a minute and more, for tests that look at what runs, and then end it.
FAR_BLOCKS = 4000
FAR = {**GREEDY, "max_tokens": 100_000}


def parsed(lines: Iterator[str]) -> list[Any]:
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def error(response: httpx.Response) -> tuple[int, str | None, str | None]:
    """(status, code, param) of an error, whose form is OpenAI's."""
    body = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"]
    assert "\n" not in body["message"]
    assert "Traceback" not in response.text
    return response.status_code, body["code"], body["param"]


@contextmanager
def serving(llm: LLM | EngineFace, **settings: Any) -> Iterator[Running]:
    """A server on a free port of this machine. It closes ``llm`` at the end."""
    engine = LocalEngine(llm) if isinstance(llm, LLM) else llm
    state = Serving(engine, ServerConfig(**{"port": 0, "drain_seconds": 5, **settings}))
    server = Server(state)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started or not thread.is_alive())
    assert server.started
    host, port = server.address
    scheme = "https" if server.config.is_ssl else "http"
    with httpx.Client(base_url=f"{scheme}://{host}:{port}", timeout=60, verify=False) as client:
        yield Running(getattr(engine, "llm", None), state, f"{scheme}://{host}:{port}", client, server)
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()
    assert not engine.alive
