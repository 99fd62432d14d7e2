"""What a server costs beside its engine: tokens a second of 32 streams over HTTP against the same requests in a
process, and how much later a token arrives.

    python benchmarks/server_overhead.py [--model random-8b:8] [--device cuda] [--streams 32] [--prompt 1024]
        [--tokens 256] [--rounds 3] [--policy dense] [--client-cores 2]

The engine by itself answers all prompts in one batch; then ``saccade serve`` (its engine in a process of its own)
answers the same prompts as streams that one client of plain sockets reads, on cores of its own where there are enough.
Rounds of both follow a first one that compiles and fills the shared prefixes. *added*: a gap between two tokens at the
client, less the median step of the engine by itself. Answers are held to letters, since a random model's are hardly
text, and a stream says nothing where there is none.
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
from pathlib import Path

import torch
from server_cpu import PATHS, post

from saccade import LLM, SamplingParams
from saccade.bench.cli import model_folder
from saccade.bench.ttft import prompt
from saccade.models.reference.tokenizer import build_tokenizer

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


def by_itself(given: argparse.Namespace, model: Path, prompts: list[list[int]]) -> tuple[float, float]:
    """Tokens a second of the best round, and the median step in ms."""
    params = SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True, logit_bias=LETTERS)
    rates, steps = [], []
    # What ``saccade serve`` is given below, and what it does by itself.
    settings = {"max_model_len": given.prompt + given.tokens + 64, "max_requests": given.streams}
    settings["enable_prefix_caching"] = True
    with LLM(model, dtype=given.dtype, device=given.device, **settings) as llm:
        for number in range(given.rounds + 1):
            began = time.perf_counter()
            found = llm.generate(prompts, params, policy=given.policy)
            took = time.perf_counter() - began
            assert all(one.error is None for one in found), found[0].error
            if number:
                rates.append(given.streams * given.tokens / took)
                steps += [
                    1000 * (one.metrics.last_token_time - one.metrics.first_token_time) / (given.tokens - 1)
                    for one in found
                    if one.metrics is not None
                ]
    return max(rates), statistics.median(steps)


def served(given: argparse.Namespace, model: Path, prompts: list[list[int]]) -> tuple[float, list[float]]:
    """Tokens a second of the best round, and the gaps between tokens of all rounds in ms."""
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
    rates, gaps = [], []
    try:
        assert server.stderr is not None
        url = next(json.loads(line)["address"] for line in server.stderr if '"serving"' in line)
        host, port = url.removeprefix("http://").split(":")
        common = {"temperature": 0, "ignore_eos": True, "stream": True, "max_tokens": given.tokens}
        common |= {"policy": given.policy, "logit_bias": LETTERS}
        for number in range(given.rounds + 1):
            began = time.perf_counter()
            bodies = [json.dumps({**common, "prompt": ids}).encode() for ids in prompts]
            times = arrivals([post((host, int(port)), PATHS["completions"], one) for one in bodies])
            took = max(one[-1] for one in times) - began
            if number:
                rates.append(given.streams * given.tokens / took)
                gaps += [1000 * (later - sooner) for one in times for sooner, later in itertools.pairwise(one)]
    finally:
        os.sched_setaffinity(0, set(cores))
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    return max(rates), sorted(gaps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policy", default="dense")
    parser.add_argument("--client-cores", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = model_folder(given.model, Path(scratch) / "model", getattr(torch, given.dtype))
        prompts = [prompt(given.prompt, 256, seed=number) for number in range(given.streams)]
        alone, step = by_itself(given, model, prompts)
        rate, gaps = served(given, model, prompts)
    middle, late = gaps[len(gaps) // 2], gaps[int(0.99 * len(gaps))]
    print(f"{given.model}, {given.device}, {given.streams} streams of {given.tokens} tokens after {given.prompt}")
    print(f"engine by itself     {alone:10.0f} tokens/s, a step {step:.2f} ms (median)")
    print(f"served               {rate:10.0f} tokens/s, {rate / alone:.3f} of it")
    print(f"gaps at the client   {middle:10.2f} ms (median), {late:.2f} ms (99th percentile)")
    print(f"added                {middle - step:10.2f} ms (median), {late - step:.2f} ms (99th percentile)")


if __name__ == "__main__":
    main()
