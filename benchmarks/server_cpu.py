"""CPU time that a server spends for each token that it streams, by process, while clients on one side read.

    python benchmarks/server_cpu.py [--streams 32] [--tokens 400] [--rounds 3] [--one-process] [--endpoint chat]
    python benchmarks/server_cpu.py --endpoint completions --prompt 30000 --streams 8 --tokens 1

Starts ``saccade serve`` with a tiny random Llama, has that many streams read by one client of plain sockets, and
divides the CPU seconds of the server's process, and of the engine's, by the tokens and by the requests. They are read
off /proc: on Linux alone. With ``--tokens 1`` it is requests that cost: ``--prompt`` says how many token ids each of
``completions`` has. The text of every stream is compared with that of the same request without streaming.
"""

from __future__ import annotations

import argparse
import json
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from tiny_models import make_checkpoint, random_ids

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "responses": "/v1/responses"}


def seconds(pid: int) -> float:
    """CPU seconds of a process so far, user and system."""
    return sum(int(one.read_text().split()[0]) for one in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def address(server: subprocess.Popen[str]) -> str:
    """Where a server answers, once it does. What it logs afterwards is read and dropped: a full pipe would stop it."""
    assert server.stderr is not None
    found: str = next(json.loads(line)["address"] for line in server.stderr if '"serving"' in line)
    threading.Thread(target=deque, args=(server.stderr, 0), daemon=True).start()
    return found


def body(endpoint: str, seed: int, tokens: int, stream: bool, prompt: int = 50) -> bytes:
    common = {"temperature": 0, "ignore_eos": True, "stream": stream}
    if endpoint == "completions":
        asked = {"prompt": random_ids(prompt, seed), "max_tokens": tokens}
    elif endpoint == "responses":
        asked = {"input": f"number {seed}", "max_output_tokens": tokens, "store": False}
    else:
        asked = {"messages": [{"role": "user", "content": f"number {seed}"}], "max_tokens": tokens}
    return json.dumps({**common, **asked}).encode()


def post(address: tuple[str, int], path: str, content: bytes) -> socket.socket:
    client = socket.create_connection(address)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    client.sendall(f"{head}connection: close\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
    return client


def read_all(clients: list[socket.socket]) -> list[bytes]:
    """Everything that servers send, read as it comes."""
    chosen, got = selectors.DefaultSelector(), {client: bytearray() for client in clients}
    for client in clients:
        chosen.register(client, selectors.EVENT_READ)
    left = len(clients)
    while left:
        for key, _ in chosen.select():
            data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            got[key.fileobj] += data  # type: ignore[index]
            if not data:
                chosen.unregister(key.fileobj)
                left -= 1
    return [bytes(got[client]) for client in clients]


def text_of(endpoint: str, events: bytes) -> str:
    said = ""
    for line in events.split(b"\n"):
        line = line.strip()
        if not line.startswith(b"data: {"):
            continue
        one = json.loads(line[6:])
        if endpoint == "responses":
            said += one["delta"] if one["type"] == "response.output_text.delta" else ""
        else:
            choice = one["choices"][0]
            said += choice["text"] if endpoint == "completions" else choice["delta"].get("content", "")
    return said


def whole_text(endpoint: str, url: str, content: bytes) -> str:
    asked = urllib.request.Request(url + PATHS[endpoint], content, {"content-type": "application/json"})
    with urllib.request.urlopen(asked) as answer:
        got = json.loads(answer.read())
    if endpoint == "responses":
        return got["output"][0]["content"][0]["text"]
    return got["choices"][0]["text"] if endpoint == "completions" else got["choices"][0]["message"]["content"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--prompt", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one-process", action="store_true")
    parser.add_argument("--endpoint", choices=list(PATHS), default="chat")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint("llama", Path(folder), max_position_embeddings=given.prompt + given.tokens + 1024)
        command = [sys.executable, "-m", "saccade", "serve", folder, "--port", "0", "--kv-memory", "256MiB"]
        command += ["--threads", "1", "--max-requests", str(given.streams)]
        command += ["--one-process"] if given.one_process else []
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            url = address(server)
            measure(given, url, server.pid)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def measure(given: argparse.Namespace, url: str, server: int) -> None:
    host, port = url.removeprefix("http://").split(":")
    endpoint, tokens = given.endpoint, given.streams * given.tokens
    engine = children(server)
    print(f"{'':8}{'tokens/s':>10}{'server us/token':>18}{'engine us/token':>18}{'server ms/request':>20}")
    for number in range(given.rounds + 1):
        before, began = [seconds(one) for one in (server, *engine)], time.perf_counter()
        clients = [
            post((host, int(port)), PATHS[endpoint], body(endpoint, seed, given.tokens, True, given.prompt))
            for seed in range(given.streams)
        ]
        got = read_all(clients)
        took = time.perf_counter() - began
        spent = [(seconds(one) - was) / tokens * 1e6 for one, was in zip((server, *engine), before)]
        if number == 0:  # the first round warms up; it is the one that is checked
            for seed in range(0, given.streams, 8):
                want = whole_text(endpoint, url, body(endpoint, seed, given.tokens, False, given.prompt))
                assert text_of(endpoint, got[seed]) == want, "a stream differs from the answer"
            continue
        other = f"{spent[1]:18.0f}" if engine else f"{'the same process':>18}"
        each = spent[0] * given.tokens / 1000
        print(f"round {number:<2}{tokens / took:10.0f}{spent[0]:18.0f}{other}{each:20.2f}", flush=True)


if __name__ == "__main__":
    main()
