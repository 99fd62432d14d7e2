"""Replicas on Ray Serve under load: throughput, what sessions find cached, and what a killed replica costs.

    python benchmarks/scale_out.py [--replicas 1,2,4] [--sessions 16] [--turns 4] [--tokens 40] [--ingresses 1]
        [--kill]

Starts ``saccade serve --ray`` with a tiny random Llama for each number of replicas, and has that many clients hold
conversations of several turns, each turn streamed and of some hundred new tokens. All of them join one Ray, which this
script starts; *up* is how long a server took until it served. ``--kill`` sends SIGKILL to one
replica in the middle of each run and counts how its clients' streams ended: complete, with an error event, or cut off
unmarked, of which there must be none (exit code 1). *cores*: CPU seconds a second of each part, all its processes
together: what is at 1.00 a process is the limit. A client whose turn failed asks again, as OpenAI's own do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import httpx
import ray
from tiny_models import make_checkpoint, random_ids

ENGINE = "ServeReplica:saccade:engine"
ROLES = {ENGINE: "engines", "ServeReplica:saccade": "ingress", "ProxyActor": "proxy"}
TRIES = 8
LINES = 40  # that are told of a server that does not start


@dataclass
class Run:
    """What clients saw. ``ends``: how streams ended; ``again``: turns that were asked anew until they were answered."""

    ends: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)  # seconds to the first token
    tokens: int = 0
    prompt: int = 0
    cached: int = 0
    again: int = 0
    lost: int = 0  # turns that were never answered


async def turn(client: httpx.AsyncClient, session: str, prompt: list[int], tokens: int, run: Run) -> bool:
    """Ask once; whether the answer was complete."""
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    asked |= {"session_id": session, "stream_options": {"include_usage": True}}
    began, first, finished, failed, done = time.perf_counter(), 0.0, False, False, False
    try:
        async with client.stream("POST", "/v1/completions", json=asked) as response:
            if response.status_code != 200:
                run.ends[f"status {response.status_code}"] += 1
                return False
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                first = first or time.perf_counter() - began
                if line == "data: [DONE]":
                    done = True
                    continue
                one = json.loads(line[6:])
                failed |= "error" in one
                finished |= any(choice["finish_reason"] for choice in one.get("choices", []))
                if one.get("usage"):
                    run.tokens += one["usage"]["completion_tokens"]
                    run.prompt += one["usage"]["prompt_tokens"]
                    run.cached += one["usage"]["prompt_tokens_details"]["cached_tokens"]
    except httpx.HTTPError as error:  # a connection that breaks is an error to every client, and no end of an answer
        run.ends[f"connection: {type(error).__name__}"] += 1
        return False
    run.ends["complete" if finished and done else "error event" if failed else "CUT OFF UNMARKED"] += 1
    run.waits.append(first)
    return finished and done


async def converse(client: httpx.AsyncClient, number: int, given: argparse.Namespace, run: Run) -> None:
    draw, prompt = random.Random(number), []
    for place in range(given.turns):
        prompt = [*prompt, *random_ids(draw.randrange(100, 200), 1000 * number + place)]
        for _ in range(TRIES):
            if await turn(client, f"session-{number}", prompt, given.tokens, run):
                break
            run.again += 1
            await asyncio.sleep(0.5)
        else:
            run.lost += 1


def engines() -> list[int]:
    """Processes of engine replicas."""
    return [one for one in descendants() if ENGINE in _command(one)]


def descendants() -> list[int]:
    """Processes that descend from this one, and itself."""
    parents: dict[int, int] = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(place.name)] = int((place / "stat").read_text().rsplit(")", 1)[1].split()[1])
    own, more = {os.getpid()}, {os.getpid()}
    while more:
        more = {one for one, parent in parents.items() if parent in more} - own
        own |= more
    return sorted(own)


def seconds_by_role() -> dict[str, float]:
    """CPU seconds so far of the client, which is this process, Ray's proxy, our ingress and the engines."""
    found = dict.fromkeys(["client", *ROLES.values()], 0.0)
    for one in descendants():
        role = "client" if one == os.getpid() else next((ROLES[part] for part in ROLES if part in _command(one)), None)
        with suppress(OSError):
            if role is not None:
                user, system = Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
                found[role] += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return found


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


async def load(url: str, given: argparse.Namespace) -> tuple[Run, float]:
    run, began = Run(), time.perf_counter()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        talks = [asyncio.ensure_future(converse(client, number, given, run)) for number in range(given.sessions)]
        if given.kill:
            while run.ends["complete"] < given.sessions:
                await asyncio.sleep(0.05)
            os.kill(engines()[0], signal.SIGKILL)
        await asyncio.gather(*talks)
    return run, time.perf_counter() - began


def address(server: subprocess.Popen[str]) -> str:
    """Where a server answers, once it does. SystemExit with what it said where it ends before."""
    assert server.stderr is not None
    said: deque[str] = deque(maxlen=LINES)
    for line in server.stderr:
        if line.startswith('{"message": "serving"'):
            found: str = json.loads(line)["address"]
            return found
        said.append(line)
    sys.exit(f"the server ended with {server.wait()} before it served; its last words:\n{''.join(said)}")


def measure(replicas: int, folder: str, given: argparse.Namespace) -> Run:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "saccade", "serve", folder, "--ray", "--port", str(port), "--one-process"]
    command += ["--replicas", str(replicas), "--replica-cpus", str(given.cpus), "--kv-memory", "64MiB"]
    command += ["--ingresses", str(given.ingresses)]
    began = time.perf_counter()
    server = subprocess.Popen(
        [*command, "--threads", "1", "--log-level", "error"], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        url = address(server)
        up = time.perf_counter() - began
        before = seconds_by_role()
        run, seconds = asyncio.run(load(url, given))
        cores = {role: (spent - before[role]) / seconds for role, spent in seconds_by_role().items()}
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=120)
    waits = sorted(run.waits)
    ends = ", ".join(f"{count} {name}" for name, count in sorted(run.ends.items()))
    print(
        f"{replicas:8} {up:6.1f} {seconds:6.1f} {run.tokens / seconds:10.0f} {1000 * waits[len(waits) // 2]:12.0f} "
        f"{1000 * waits[int(0.95 * len(waits))]:12.0f} {run.cached / max(1, run.prompt):9.0%}   {ends}; "
        f"{run.again} asked again, {run.lost} never answered; cores: "
        + ", ".join(f"{role} {used:.2f}" for role, used in cores.items()),
        flush=True,
    )
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="1,2,4")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--cpus", type=float, default=0.25, help="of each replica, as Ray counts them")
    parser.add_argument("--ingresses", type=int, default=1)
    parser.add_argument("--kill", action="store_true")
    given = parser.parse_args()
    print(
        f"{'replicas':>8} {'up, s':>6} {'run, s':>6} {'tokens/s':>10} {'TTFT p50 ms':>12} {'TTFT p95 ms':>12} "
        f"{'cached':>9}   how streams ended",
        flush=True,
    )
    counts = [int(count) for count in given.replicas.split(",")]
    needed = math.ceil(max(counts) * given.cpus) + given.ingresses  # an ingress takes a tenth
    ray.init(num_cpus=max(needed, os.cpu_count() or 1), include_dashboard=False, logging_level="error")
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    try:
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint("llama", Path(folder), max_position_embeddings=2048)
            runs = [measure(count, folder, given) for count in counts]
    finally:
        ray.shutdown()
    if any(run.ends["CUT OFF UNMARKED"] or run.lost for run in runs):
        sys.exit("an answer was cut off unmarked, or never came")


if __name__ == "__main__":
    main()
