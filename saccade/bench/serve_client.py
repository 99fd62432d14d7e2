"""One streamed completion over HTTP, timed where its bytes arrive. The standard library alone, so that the client costs
little beside the server that it measures."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from saccade.errors import SaccadeError, shown


@dataclass(frozen=True)
class Target:
    """An OpenAI server: its address, and what goes with every request."""

    url: str
    model: str | None = None
    api_key: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SaccadeError(f"url={shown(self.url)} must be like http://localhost:8000")


@dataclass
class Sample:
    """One request. Times in seconds: ``arrived`` from the run's begin, ``gaps`` between two pieces of text. ``first``:
    until the first piece, ``total`` until the end. ``error``: why it failed, None where it did not."""

    arrived: float
    status: int = 0
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    total: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    density: dict[str, float | None] = field(default_factory=dict)
    error: str | None = None


async def complete(target: Target, body: dict[str, Any], began: float, limit: float) -> Sample:
    """Ask for a streamed chat and time it. Whatever goes wrong is the sample's ``error``."""
    sample = Sample(time.perf_counter() - began)
    start = time.perf_counter()
    try:
        async with asyncio.timeout(limit):
            await _ask(target, body, sample, start)
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    sample.total = time.perf_counter() - start
    return sample


async def get(target: Target, path: str) -> Any:
    """The JSON of a GET. SaccadeError where there is none."""
    try:
        async with asyncio.timeout(30):
            status, lines = await _open(target, "GET", path, None)
            text = "".join([line async for line in lines])
            if status == 200:
                return json.loads(text)
            raise SaccadeError(f"{target.url}{path} answers {status}: {text[:200]}")
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
        if isinstance(error, SaccadeError):
            raise
        raise SaccadeError(f"{target.url} does not answer: {error or type(error).__name__}; start a server") from error


async def _ask(target: Target, body: dict[str, Any], sample: Sample, start: float) -> None:
    whole = {**body, **target.fields, "stream": True, "stream_options": {"include_usage": True}}
    if target.model is not None:
        whole["model"] = target.model
    sample.status, lines = await _open(target, "POST", "/v1/chat/completions", whole)
    if sample.status != 200:
        sample.error = f"status {sample.status}: " + "".join([line async for line in lines])[:200]
        return
    last, done = 0.0, False
    async for line in lines:
        if not line.startswith("data: "):
            continue
        data = line[6:].strip()
        if data == "[DONE]":
            done = True
            continue
        event = json.loads(data)
        if "error" in event:
            sample.error = str(event["error"].get("message"))
        # some servers (transformers serve) end after the last reason, without [DONE]
        done |= any(choice.get("finish_reason") for choice in event.get("choices", []))
        text = "".join(_said(choice.get("delta", {})) for choice in event.get("choices", []))
        if text:
            now = time.perf_counter()
            if sample.first is None:
                sample.first = now - start
            else:
                sample.gaps.append(now - last)
            last = now
            sample.text += text
        _count(sample, event.get("usage"))
    if not done and sample.error is None:
        sample.error = "the stream broke off"


def _said(delta: dict[str, Any]) -> str:
    return (delta.get("reasoning") or delta.get("reasoning_content") or "") + (delta.get("content") or "")


def _count(sample: Sample, usage: dict[str, Any] | None) -> None:
    if usage:
        sample.prompt_tokens = usage.get("prompt_tokens", 0)
        sample.output_tokens = usage.get("completion_tokens", 0)
        sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        sample.density = (usage.get("saccade") or {}).get("density", {})


async def _open(target: Target, method: str, path: str, body: Any) -> tuple[int, AsyncIterator[str]]:
    """Send a request on a connection of its own: its status, and the lines of its answer."""
    parts = urlsplit(target.url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    assert parts.hostname is not None
    context = ssl.create_default_context() if secure else None
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=context, limit=2**22)
    data = b"" if body is None else json.dumps(body).encode()
    head = [f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1", f"host: {parts.netloc}", "connection: close"]
    head += ["content-type: application/json", f"content-length: {len(data)}"]
    if target.api_key is not None:
        head.append(f"authorization: Bearer {target.api_key}")
    try:
        writer.write(("\r\n".join(head) + "\r\n\r\n").encode() + data)
        await writer.drain()
        top = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        status = int(top.split(" ", 2)[1])
    except BaseException:
        writer.close()
        raise
    return status, _lines(reader, writer, "transfer-encoding: chunked" in top)


async def _lines(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chunked: bool) -> AsyncIterator[str]:
    """The lines of a body, each as soon as it is whole."""
    held = b""
    try:
        while True:
            if chunked:
                size = int((await reader.readline()).split(b";")[0] or b"0", 16)
                part = (await reader.readexactly(size + 2))[:-2]
            else:
                part = await reader.read(2**16)
            if not part:
                break
            *whole, held = (held + part).split(b"\n")
            for line in whole:
                yield line.decode("utf-8", "replace") + "\n"
        if held:
            yield held.decode("utf-8", "replace")
    finally:
        writer.close()
