"""What a server costs beside its engine: tokens a second of 32 streams over HTTP against the same requests in a
process, and how much later a token arrives.

    python benchmarks/server_overhead.py [--model random-8b:8] [--device cuda] [--streams 32] [--prompt 1024]
        [--tokens 256] [--warm 8] [--rounds 3] [--policy dense] [--client-cores 2]

The engine by itself answers all prompts in one batch; then ``saccade serve`` (its engine in a process of its own)
answers the same prompts as streams that one client of plain sockets reads, on cores of its own where there are enough.
Rounds of both follow some that compile, record steps and fill the shared prefixes. *added*: the 99th percentile of gaps
between two tokens at the client, less the median step of the engine by itself, and less its own 99th percentile.
Answers are held to letters, since a random model's are hardly text, and a stream says nothing where there is none.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from server_cpu import PATHS, address, post

from saccade import LLM, SamplingParams
from saccade.bench.cli import model_folder
from saccade.bench.ttft import prompt
from saccade.engine.core import new_request_id
from saccade.engine.messages import AddRequest, StepOutput
from saccade.engine.stream import Stream
from saccade.methods.policy import Policy
from saccade.models.reference.tokenizer import build_tokenizer


@dataclass
class Seen:
    """Rounds as their reader saw them: tokens a second, ms to first tokens, ms between tokens."""

    rates: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def add(self, began: float, times: list[list[float]]) -> None:
        """One round: when tokens came, by stream."""
        self.rates.append(sum(map(len, times)) / (max(one[-1] for one in times) - began))
        self.first += [1000 * (one[0] - began) for one in times]
        self.gaps += [1000 * (later - sooner) for one in times for sooner, later in itertools.pairwise(one)]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


LETTERS = dict.fromkeys(build_tokenizer().encode("abcdefghijklmnopqrstuvwxyz", add_special_tokens=False), 1e4)


def arrivals(clients: list[socket.socket]) -> list[list[float]]:
    """When each event with text came, by stream."""
    chosen, times = selectors.DefaultSelector(), {client: [] for client in clients}
    rest = dict.fromkeys(clients, b"")
    for client in clients:
        chosen.register(client, selectors.EVENT_READ)
    left = len(clients)
    while left:
        for key, _ in chosen.select():
            client, data = key.fileobj, key.fileobj.recv(1 << 16)
            now = time.perf_counter()
            if not data:
                chosen.unregister(client)
                left -= 1
                continue
            *lines, rest[client] = (rest[client] + data).split(b"\n")
            times[client] += [now for line in lines if b'"finish_reason":null' in line]
    return list(times.values())


class Clocked(Stream):
    """A stream that notes when outputs with tokens come, on the engine's own thread."""

    def __init__(self, request_id: int) -> None:
        super().__init__(request_id)
        self.times: list[float] = []

    def put(self, output: StepOutput) -> None:
        if output.new_tokens:
            self.times.append(time.perf_counter())
        super().put(output)


def by_itself(given: argparse.Namespace, model: Path, prompts: list[list[int]]) -> Seen:
    """All prompts in one letter, as ``LLM.generate`` writes it."""
    params = SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True, logit_bias=LETTERS)
    policy, seen = Policy.parse(given.policy), Seen()
    # What ``saccade serve`` is given below, and what it does by itself.
    settings = {"max_model_len": given.prompt + given.tokens + 64, "max_requests": given.streams}
    settings["enable_prefix_caching"] = True
    with LLM(model, dtype=given.dtype, device=given.device, **settings) as llm:
        for number in range(given.warm + given.rounds):
            began = time.perf_counter()
            messages = [AddRequest(new_request_id(), ids, params, policy) for ids in prompts]
            streams = [Clocked(one.request_id) for one in messages]
            llm.loop.post(messages, streams).result()
            for stream in streams:
                while not (last := stream.wait()).finished:
                    pass
                error = None if last.outcome is None else last.outcome.error
                assert error is None, error
            if number >= given.warm:
                seen.add(began, [one.times for one in streams])
    return seen


def served(given: argparse.Namespace, model: Path, prompts: list[list[int]]) -> Seen:
    """The same prompts as streams over HTTP, as one client sees them."""
    command = [sys.executable, "-m", "saccade", "serve", str(model), "--port", "0", "--device", given.device]
    command += ["--dtype", given.dtype, "--max-requests", str(given.streams)]
    command += ["--max-model-len", str(given.prompt + given.tokens + 64)]
    cores = sorted(os.sched_getaffinity(0))
    own = set(cores[-given.client_cores :]) if len(cores) > 2 * given.client_cores else set(cores)
    others = set(cores) - own or own
    server = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: os.sched_setaffinity(0, others)
    )
    os.sched_setaffinity(0, own)
    seen = Seen()
    try:
        host, port = address(server).removeprefix("http://").split(":")
        common = {"temperature": 0, "ignore_eos": True, "stream": True, "max_tokens": given.tokens}
        common |= {"policy": given.policy, "logit_bias": LETTERS}
        bodies = [json.dumps({**common, "prompt": ids}).encode() for ids in prompts]
        for number in range(given.warm + given.rounds):
            began = time.perf_counter()
            times = arrivals([post((host, int(port)), PATHS["completions"], one) for one in bodies])
            if number >= given.warm:
                seen.add(began, times)
    finally:
        os.sched_setaffinity(0, set(cores))
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--warm", type=int, default=8, help="rounds before those that count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policy", default="dense")
    parser.add_argument("--client-cores", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = model_folder(given.model, Path(scratch) / "model", getattr(torch, given.dtype))
        prompts = [prompt(given.prompt, 256, seed=number) for number in range(given.streams)]
        alone, over = by_itself(given, model, prompts), served(given, model, prompts)
    print(f"{given.model}, {given.device}, {given.streams} streams of {given.tokens} tokens after {given.prompt}")
    print(f"{'':<18}{'tokens/s':>10}{'first token, ms':>24}{'between tokens, ms':>24}")
    print(f"{'':<18}{'best round':>10}{'median':>12}{'last':>12}{'median':>12}{'99th':>12}")
    for name, seen in (("engine by itself", alone), ("served", over)):
        first, gaps = sorted(seen.first), seen.gaps
        print(
            f"{name:<18}{max(seen.rates):10.0f}{statistics.median(first):12.1f}{first[-1]:12.1f}"
            f"{percentile(gaps, 0.5):12.2f}{percentile(gaps, 0.99):12.2f}"
        )
    late, step = percentile(over.gaps, 0.99), percentile(alone.gaps, 0.5)
    print(f"served / by itself: {max(over.rates) / max(alone.rates):.3f} of the tokens a second")
    print(
        f"added, 99th percentile: {late - step:.2f} ms to a step (median), "
        f"{late - percentile(alone.gaps, 0.99):.2f} ms to the engine's own 99th percentile"
    )


if __name__ == "__main__":
    main()
