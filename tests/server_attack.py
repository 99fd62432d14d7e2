"""Requests that cost a server more than they cost whoever sends them, and what must hold meanwhile: `/health` answers
within ``LIMIT`` seconds, and memory stays where it was.

By hand, against a server of its own: ``make attack-server SIZE=32MiB CLIENTS=500``. As a test, small and without a
clock: tests/test_server_attack.py.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LIMIT = 0.3  # seconds of /health
GROWTH = 1024  # MiB that the server's process may hold beyond what it held before: max_bodies, and what is made of them
MIB = 2**20
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = b'"messages":[{"role":"user","content":"x"}],"max_tokens":1'
Address = tuple[str, int]


def filled(before: bytes, unit: bytes, after: bytes, size: int) -> bytes:
    """``unit`` again and again, so that the whole has ``size`` bytes about."""
    return before + unit * max(1, (size - len(before) - len(after)) // len(unit)) + after


def bodies(size: int) -> Iterator[tuple[str, str, bytes]]:
    """Name, path and body."""
    quotes = b'\\"['
    yield "brackets in a text without end", CHAT, filled(b'{"a":"' + b"[" * 99, quotes, b"", size)
    yield "backslashes", CHAT, filled(b'{"a":["' + b"[" * 99 + b'","', b"\\", b"", size)
    yield "quotes", CHAT, filled(b'{"a":["' + b"[" * 99 + b'"', b'"', b"", size)
    yield "deep", CHAT, filled(b'{"messages":', b"[", b"", size)
    yield "empty lists", CHAT, filled(b"{" + MESSAGES + b',"metadata":{"a":[', b"[],", b"[]]}}", size)
    yield "keys", CHAT, filled(b"{" + MESSAGES + b',"metadata":{', b'"a":1,', b'"b":1}}', size)
    yield "unknown fields", CHAT, b"{" + b",".join(b'"f%d":1' % n for n in range(size // 14)) + b"}"
    yield (
        "biases",
        TEXT,
        b'{"prompt":"x","logit_bias":{' + b",".join(b'"%d":"x"' % n for n in range(size // 14)) + b"}}",
    )
    for path, name, more in (
        (CHAT, b"messages", b""),
        (CHAT, b"tools", MESSAGES + b","),
        (TEXT, b"stop", b'"prompt":"x",'),
        (TEXT, b"stop_token_ids", b'"prompt":"x",'),
        (TEXT, b"bad_words", b'"prompt":"x",'),
        (RESPONSES, b"input", b""),
    ):
        unit = b'"x",' if name == b"stop_token_ids" else b"1,"
        yield (
            f"ones as {name.decode()}",
            path,
            filled(b"{" + more + b'"' + name + b'":[', unit, unit[:-1] + b"]}", size),
        )
    yield "fields without end of one list", CHAT, filled(b'{"messages":[', b'{"a":1},', b"1]}", size)
    yield "a long text", CHAT, filled(b'{"messages":[{"role":"user","content":"', b"word ", b'"}]}', size)
    yield "a text of escapes", TEXT, filled(b'{"prompt":"', b"\\n\\u4e2d", b'"}', size)
    yield (
        "a long field of a message",
        CHAT,
        filled(b'{"messages":[{"role":"user","content":"x","name":"', b"y", b'"}]}', size),
    )
    yield (
        "arguments",
        CHAT,
        filled(
            b'{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"',
            b"[],",
            b'"}}]}]}',
            size,
        ),
    )
    yield "a schema", TEXT, filled(b'{"prompt":"x","structured_outputs":{"json":{"enum":["', b"x", b'"]}}}', size)
    yield "a long number", TEXT, filled(b'{"prompt":"x","seed":1', b"0", b"}", size)
    yield "a token prompt", TEXT, filled(b'{"prompt":[', b"7,", b"7]}", size)
    yield "no UTF-8 at its end", TEXT, filled(b'{"prompt":"', b"x", b'\xff"}', size)


def head(path: str, length: int | None, more: str = "") -> bytes:
    given = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    said = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{said}{more}{given}\r\n\r\n".encode()


def send(address: Address, data: bytes, wait: float = 120) -> int:
    """The status of the answer; 0 where the server closes without one."""
    received = b""
    with suppress(OSError), socket.create_connection(address, timeout=wait) as client:
        with suppress(ConnectionError):
            client.sendall(data)
        while b"\r\n" not in received and (part := client.recv(4096)):
            received += part
    found = re.match(rb"HTTP/1.1 (\d+)", received)
    return int(found[1]) if found else 0


def over_socket(address: Address, message: bytes) -> int:
    """The status of the error that a message over a WebSocket gets; 0 where it is closed."""
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import connect

    where = f"ws://{address[0]}:{address[1]}{RESPONSES}"
    with suppress(WebSocketException, OSError), connect(where, proxy=None, max_size=None) as client:
        client.send(message.decode("latin-1"))
        return int(json.loads(client.recv(timeout=120)).get("status", 200))
    return 0


def at_once(count: int, work: Callable[[], int]) -> Counter[int]:
    """The statuses of ``count`` clients at the same time."""
    found: Counter[int] = Counter()
    threads = [threading.Thread(target=lambda: found.update([work()])) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def slowly(address: Address, count: int, seconds: float) -> Counter[int]:
    """Clients that send a byte now and then, of their headers, a body, and a body in chunks without an end."""
    begun = [b"POST / HTTP/1.1\r\nx: ", head(CHAT, 10**6) + b"{", head(CHAT, None) + b"1\r\n{\r\n"]
    parts = [b"y", b" ", b"1\r\n \r\n"]
    clients = []
    with suppress(OSError):
        for number in range(count):
            client = socket.create_connection(address, timeout=5)
            client.sendall(begun[number % 3])
            clients.append((client, parts[number % 3]))
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for client, part in clients:
            with suppress(OSError):
                client.sendall(part)
        time.sleep(0.1)
    for client, _ in clients:
        client.close()
    return Counter({0: len(clients)})


@dataclass
class Row:
    """What an attack met. ``began``, ``ended`` by the monotonic clock."""

    name: str
    statuses: Counter[int]
    began: float
    ended: float
    peak: int = 0  # MiB that the server held
    latencies: list[tuple[float, float]] = field(default_factory=list)  # seconds, and the server's own


def attacks(size: int, clients: int, slow: float) -> Iterator[tuple[str, Callable[[Address], Counter[int]]]]:
    """Name, and what it does to a server."""
    few = max(2, clients // 60)
    for name, path, body in bodies(size):
        yield (
            name,
            lambda address, path=path, body=body: at_once(2, lambda: send(address, head(path, len(body)) + body)),
        )
    for name, path, body in bodies(size // 2):
        if path == RESPONSES or name in ("brackets in a text without end", "empty lists", "unknown fields"):
            yield f"{name}, WebSocket", lambda address, body=body: at_once(2, lambda: over_socket(address, body))
    tiny = b"1\r\n \r\n" * (size // 60)
    yield "chunks of a byte", lambda address: at_once(2, lambda: send(address, head(CHAT, None) + tiny + b"0\r\n\r\n"))
    packed = head(CHAT, 200, "content-encoding: gzip\r\n") + b"\x1f\x8b\x08" + bytes(197)
    yield "gzip", lambda address: at_once(2, lambda: send(address, packed))
    long = head(CHAT, 2, f"x: {'y' * min(size, 300_000)}\r\n") + b"{}"
    yield "long headers", lambda address: at_once(few, lambda: send(address, long))
    trailers = head(CHAT, None) + b"2\r\n{}\r\n0\r\n" + b"x: y\r\n" * (size // 12)
    yield "trailers without end", lambda address: at_once(2, lambda: send(address, trailers))
    ones = filled(b'{"messages":[', b"1,", b"1]}", size)
    yield (
        f"ones, {few * 4} at once",
        lambda address: at_once(few * 4, lambda: send(address, head(CHAT, len(ones)) + ones)),
    )
    small = filled(b'{"messages":[', b"1,", b"1]}", min(size, 100_000))
    yield (
        f"{clients} clients at once",
        lambda address: at_once(clients, lambda: send(address, head(CHAT, len(small)) + small)),
    )
    yield f"{clients} slow clients", lambda address: slowly(address, clients, slow)


def attack(address: Address, size: int, clients: int, slow: float = 3.0) -> Iterator[Row]:
    """Each attack in turn."""
    for name, work in attacks(size, clients, slow):
        began = time.monotonic()
        statuses = work(address)
        yield Row(name, statuses, began, time.monotonic())


# --- by hand


def processor(pid: int) -> float:
    """Processor seconds of another process (clock_getcpuclockid)."""
    return time.clock_gettime((~pid << 3) | 2)


def poll(pid: int, address: Address, results: Any, ending: Any) -> None:
    """Ask for /health 50 times a second, from a process of its own, until told to end: (when, seconds, the server's
    own) of each. Its own are those that its process computed meanwhile: a machine that is busy with others makes a
    client wait longer, and not because of the server."""
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    while not ending.is_set():
        began, received, used = time.monotonic(), b"", processor(pid)
        with suppress(OSError), socket.create_connection(address, timeout=30) as client:
            client.sendall(request)
            while part := client.recv(4096):
                received += part
        waited = time.monotonic() - began if received.startswith(b"HTTP/1.1 200") else float("inf")
        results.put((began, waited, min(waited, processor(pid) - used) if waited < 30 else waited))
        time.sleep(0.02)


def memory(pid: int, name: str = "VmRSS") -> int:
    """MiB of a process."""
    found = re.search(rf"{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) // 1024 if found else 0


@contextmanager
def served(*options: str) -> Iterator[tuple[int, Address]]:
    """The process and the address of a server with the model that is built in."""
    command = [sys.executable, "-m", "saccade", "serve", "--port", "0", "--log-level", "info", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if '"serving"' in line)
        threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True).start()
        host, _, port = json.loads(line)["address"].rpartition("/")[2].rpartition(":")
        yield process.pid, (host, int(port))
    finally:
        process.terminate()
        process.wait(60)


class Watch:
    """Latencies and memory while attacks run."""

    def __init__(self, pid: int, address: Address) -> None:
        self.pid, self.seen, self.ending = pid, [], multiprocessing.Event()
        self._queue: Any = multiprocessing.Queue()
        self._process = multiprocessing.Process(target=poll, args=(pid, address, self._queue, self.ending), daemon=True)
        self._process.start()
        self.held: list[tuple[float, int]] = []
        threading.Thread(target=self._hold, daemon=True).start()

    def _hold(self) -> None:
        while not self.ending.is_set():
            with suppress(OSError):
                self.held.append((time.monotonic(), memory(self.pid)))
            time.sleep(0.05)

    def between(self, began: float, ended: float) -> tuple[list[tuple[float, float]], int]:
        """(seconds, the server's own) of the answers that were asked for meanwhile, and the most memory."""
        time.sleep(0.1)
        while not self._queue.empty():
            self.seen.append(self._queue.get())
        asked = [(seconds, own) for when, seconds, own in self.seen if began <= when <= ended]
        return asked, max((held for when, held in self.held if began <= when <= ended), default=0)


def main(size: int, clients: int) -> int:
    with served() as (pid, address):
        watch = Watch(pid, address)
        began = time.monotonic()
        time.sleep(3)
        quiet, before = watch.between(began, time.monotonic())
        load = " ".join(f"{one:.1f}" for one in os.getloadavg())
        print(f"{size / MIB:g} MiB, {clients} clients; before: {shown(quiet)}, {before} MiB; load {load}\n")
        print(
            f"{'attack':34} {'statuses':24} {'seconds':>8} {'health: median':>15} {'longest':>8} {'own':>6} {'MiB':>6}"
        )
        broken = []
        for row in attack(address, size, clients):
            row.latencies, row.peak = watch.between(row.began, row.ended)
            waited, own = (sorted(one) or [0.0] for one in (zip(*row.latencies) if row.latencies else ((), ())))
            statuses = " ".join(f"{status}:{count}" for status, count in sorted(row.statuses.items()))
            print(
                f"{row.name:34} {statuses:24} {row.ended - row.began:8.2f} "
                f"{waited[len(waited) // 2]:15.3f} {waited[-1]:8.3f} {own[-1]:6.3f} {row.peak:6}",
                flush=True,
            )
            if (
                own[-1] > LIMIT
                or row.peak > before + GROWTH
                or any(status >= 500 and status != 503 for status in row.statuses)
            ):
                broken.append(row.name)
        time.sleep(2)
        after = memory(pid)
        watch.ending.set()
        load = " ".join(f"{one:.1f}" for one in os.getloadavg())
        print(f"\nafter: {after} MiB, at most {memory(pid, 'VmHWM')} MiB; load {load}")
        if broken:
            print(f"over {LIMIT} s of its own, {GROWTH} MiB more, or a 5xx: {', '.join(broken)}")
        return 1 if broken else 0


def shown(latencies: list[tuple[float, float]]) -> str:
    ordered = sorted(waited for waited, _ in latencies) or [0.0]
    return f"median {ordered[len(ordered) // 2]:.3f} s, longest {ordered[-1]:.3f} s of {len(ordered)}"


if __name__ == "__main__":
    from saccade.machine import parse_bytes

    given = [*sys.argv[1:], *["32MiB", "500"][len(sys.argv) - 1 :]]
    sys.exit(main(parse_bytes(given[0]), int(given[1])))
