"""What a server costs beside its engine: tokens a second of 32 streams over HTTP against the same requests in a
process, and how much later a token arrives.

    python benchmarks/server_overhead.py [--model random-8b:32] [--device cuda] [--streams 32] [--prompt 1024]
        [--tokens 256] [--warm 4] [--rounds 5] [--policy dense] [--client-cores 2] [--kv-memory 16GiB] [--steps]

One process has the engine by itself, which answers all prompts in one batch; ``saccade serve`` (its engine in a process
of its own) answers the same prompts as streams, which one client of plain sockets reads on cores of its own where there
are enough. Both are loaded at once and have the same cores; rounds of one and the other alternate, in turned order each
time, after some that compile, record steps and fill the shared prefixes.

*steady*: tokens a second from the last stream's first token to the first stream's end. *late*: from the end of the step
that chose a token until the client has it. ``--steps`` tells what the engines did between two steps, and the slow ones.
Answers are held to letters, since a random model's are hardly text, and a stream says nothing where there is none.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from engine_clock import Clock, load, mark
from server_cpu import PATHS, address, post

from saccade import LLM, SamplingParams
from saccade.bench.cli import model_folder
from saccade.bench.ttft import prompt
from saccade.engine.core import new_request_id
from saccade.engine.messages import AddRequest
from saccade.engine.stream import Stream
from saccade.methods.policy import Policy
from saccade.models.reference.tokenizer import build_tokenizer

LETTERS = dict.fromkeys(build_tokenizer().encode("abcdefghijklmnopqrstuvwxyz", add_special_tokens=False), 1e4)
SLOW = 1.5  # times the median, from which on a step is told


@dataclass
class Seen:
    """Rounds as their reader saw them: tokens a second, of the whole and of what is steady, ms to first tokens, ms
    between tokens; when each began and ended."""

    rates: list[float] = field(default_factory=list)
    steady: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    rounds: list[tuple[float, float]] = field(default_factory=list)
    times: list[list[list[float]]] = field(default_factory=list)  # of each round and stream

    def add(self, began: float, times: list[list[float]]) -> None:
        """One round: when tokens came, by stream."""
        last = max(one[-1] for one in times)
        self.rounds.append((began, last))
        self.times.append(times)
        self.rates.append(sum(map(len, times)) / (last - began))
        full, ends = max(one[0] for one in times), min(one[-1] for one in times)
        within = sum(full < at <= ends for one in times for at in one)
        self.steady.append(within / (ends - full) if ends > full else float("nan"))
        self.first += [1000 * (one[0] - began) for one in times]
        self.gaps += [1000 * (later - sooner) for one in times for sooner, later in itertools.pairwise(one)]


def percentile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


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
                client.close()
                left -= 1
                continue
            *lines, rest[client] = (rest[client] + data).split(b"\n")
            times[client] += [now for line in lines if b'"finish_reason":null' in line]
    return list(times.values())


def by_itself(
    given: argparse.Namespace, model: Path, prompts: list[list[int]], cores: set[int], to: Connection
) -> None:
    """A process with the engine: all prompts in one letter, as ``LLM.generate`` writes it, each time it is told."""
    os.sched_setaffinity(0, cores)
    params = SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True, logit_bias=LETTERS)
    policy, clock = Policy.parse(given.policy), Clock()
    # What ``saccade serve`` is given below, and what it does by itself.
    settings = {"max_model_len": given.prompt + given.tokens + 64, "max_requests": given.streams}
    settings |= {"enable_prefix_caching": True, "kv_memory": given.kv_memory}
    with LLM(model, dtype=given.dtype, device=given.device, **settings) as llm:
        clock.watch(llm)
        to.send(None)
        while to.recv():
            began = time.perf_counter()
            messages = [AddRequest(new_request_id(), ids, params, policy) for ids in prompts]
            streams = [Stream(one.request_id) for one in messages]
            llm.loop.post(messages, streams).result()
            for stream in streams:
                while not (last := stream.wait()).finished:
                    pass
                error = None if last.outcome is None else last.outcome.error
                assert error is None, error
            tokens = clock.between(began, time.perf_counter()).tokens
            to.send((began, [tokens[mark(ids)] for ids in prompts]))
        to.send(clock)


def start_server(given: argparse.Namespace, model: Path, cores: set[int], notes: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).with_name("engine_clock.py")), "serve", str(model), "--port", "0"]
    command += ["--device", given.device, "--dtype", given.dtype, "--max-requests", str(given.streams)]
    command += ["--max-model-len", str(given.prompt + given.tokens + 64), "--kv-memory", given.kv_memory]
    return subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "ENGINE_CLOCK": str(notes)},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )


def measure(given: argparse.Namespace, scratch: Path) -> tuple[Seen, Seen, Clock, Clock]:
    """Rounds of the engine by itself and served, and what both engines did."""
    model = model_folder(given.model, scratch / "model", getattr(torch, given.dtype))
    prompts = [prompt(given.prompt, 256, seed=number) for number in range(given.streams)]
    cores = sorted(os.sched_getaffinity(0))
    own = set(cores[-given.client_cores :]) if len(cores) > 2 * given.client_cores else set(cores)
    others = set(cores) - own or own
    server = start_server(given, model, others, scratch / "clock.json")
    processes = multiprocessing.get_context("spawn")
    here, there = processes.Pipe()
    alone = processes.Process(target=by_itself, args=(given, model, prompts, others, there))
    alone.start()
    try:
        host, port = address(server).removeprefix("http://").split(":")
        here.recv()
        os.sched_setaffinity(0, own)
        common = {"temperature": 0, "ignore_eos": True, "stream": True, "max_tokens": given.tokens}
        common |= {"policy": given.policy, "logit_bias": LETTERS}
        bodies = [json.dumps({**common, "prompt": ids}).encode() for ids in prompts]
        engine, served = Seen(), Seen()
        for number in range(given.warm + given.rounds):
            for over in (False, True) if number % 2 else (True, False):
                if over:
                    began = time.perf_counter()
                    times = arrivals([post((host, int(port)), PATHS["completions"], one) for one in bodies])
                else:
                    here.send(True)
                    began, times = here.recv()
                if number >= given.warm:
                    (served if over else engine).add(began, times)
            if number >= given.warm:
                said = (
                    f"round {number - given.warm + 1}: {engine.rates[-1]:.0f} by itself, {served.rates[-1]:.0f} served"
                )
                print(said, file=sys.stderr, flush=True)
        here.send(False)
        clock = here.recv()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        alone.join(10)
        alone.kill()
    return engine, served, clock, load(scratch / "clock.json")


def lateness(served: Seen, clock: Clock, names: list[str]) -> tuple[list[float], int]:
    """ms from the end of the step that chose a token until the client had it, and how many streams had tokens that came
    together, whose times say nothing."""
    late, joined = [], 0
    for (began, ended), streams in zip(served.rounds, served.times):
        there = clock.between(began, ended).tokens
        for name, times in zip(names, streams):
            chosen = there.get(name, [])
            if len(chosen) == len(times):
                late += [1000 * (came - at) for at, came in zip(chosen, times)]
            else:
                joined += 1
    return late, joined


def tell_steps(name: str, seen: Seen, clock: Clock) -> None:
    """What lies between steps that only decode, and the steps that took long."""
    rounds = [clock.between(*one).steps for one in seen.rounds]
    decode = [one for steps in rounds for one in steps if not one[4]]
    pairs = [pair for steps in rounds for pair in itertools.pairwise(steps) if not (pair[0][4] or pair[1][4])]
    parts = {
        "step": [1000 * (one[1] - one[0]) for one in decode],
        "to its readers": [1000 * (one[2] - one[1]) for one in decode],
        "until the next": [1000 * (later[0] - sooner[2]) for sooner, later in pairs],
    }
    print(f"\n{name}: {len(rounds[-1])} steps a round")
    for part, values in parts.items():
        shares = ", ".join(f"{share:.0%} {percentile(values, share):.3f}" for share in (0.1, 0.5, 0.9, 0.99))
        print(
            f"  {part:<16} ms: {shares}, longest {max(values, default=0):.3f}, in all {sum(values) / len(rounds):.1f}"
        )
    usual = percentile(parts["step"], 0.5)
    print(f"  of the last round, with prompts or over {SLOW:g} medians, ms (began: rows that decode+prompts, took):")
    began = seen.rounds[-1][0]
    slow = [one for one in rounds[-1] if one[4] or 1000 * (one[2] - one[0]) > SLOW * usual]
    print("  " + "; ".join(f"{1e3 * (b - began):.0f}: {d}+{p}, {1e3 * (r - b):.1f}" for b, _, r, d, p in slow))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--warm", type=int, default=4, help="rounds before those that count")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--policy", default="dense")
    parser.add_argument("--client-cores", type=int, default=2)
    parser.add_argument("--kv-memory", default="16GiB", help="of each engine")
    parser.add_argument("--steps", action="store_true", help="what lies between two steps")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        alone, over, own_clock, clock = measure(given, Path(scratch))
    names = [mark(prompt(given.prompt, 256, seed=number)) for number in range(given.streams)]
    late, joined = lateness(over, clock, names)
    print(f"{given.model}, {given.device}, {given.streams} streams of {given.tokens} tokens after {given.prompt}")
    print(f"{'':<18}{'tokens/s, median':>18}{'':>8}{'first token, ms':>20}{'between tokens, ms':>20}")
    print(f"{'':<18}{'whole':>10}{'steady':>10}{'median':>16}{'last':>10}{'median':>10}{'99th':>10}")
    for name, seen in (("engine by itself", alone), ("served", over)):
        print(
            f"{name:<18}{statistics.median(seen.rates):10.0f}{statistics.median(seen.steady):10.0f}"
            f"{statistics.median(seen.first):16.1f}{max(seen.first):10.1f}"
            f"{percentile(seen.gaps, 0.5):10.2f}{percentile(seen.gaps, 0.99):10.2f}"
        )
    whole = [ours / theirs for ours, theirs in zip(over.rates, alone.rates)]
    steady = [ours / theirs for ours, theirs in zip(over.steady, alone.steady)]
    for name, ratios in (("whole rounds", whole), ("steady", steady)):
        middle = statistics.median(ratios)
        print(f"served / by itself, {name}: median {middle:.3f}, {min(ratios):.3f} to {max(ratios):.3f}")
    shares = ", ".join(f"{share:.0%} {percentile(late, share):.2f}" for share in (0.5, 0.9, 0.99))
    left = f" ({joined} of {len(over.rates) * given.streams} streams left out: tokens came together)" if joined else ""
    print(f"late, ms: {shares}{left}")
    added = percentile(over.gaps, 0.99) - percentile(alone.gaps, 0.99)
    print(f"99th percentile of gaps: {added:+.2f} ms to the engine's own")
    if given.steps:
        tell_steps("engine by itself", alone, own_clock)
        tell_steps("served", over, clock)


if __name__ == "__main__":
    main()
