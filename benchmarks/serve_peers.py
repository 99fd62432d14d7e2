"""The same load on several OpenAI servers, one after the other: tokens a second, and how long clients wait.

    python benchmarks/serve_peers.py [--model reference] [--mix chat] [--requests 32] [--concurrency 8] [--scale 1]
        [--policy dense --policy "flexprefill+psa"] [--transformers BIN] [--llama-server BIN] [--threads N]
        [--device cpu]

``--transformers`` is the ``transformers`` command of an environment with ``transformers[serving]``, ``--llama-server``
llama.cpp's server, for which the model is written with the ``gguf`` package (``benchmarks/llama_gguf.py``). Each server
has the machine to itself but for the client, which is ``saccade bench serve``; a run of a few requests comes before the
one that counts. Answers are as long as the model makes them: greedy, so nearly the same everywhere (transformers
refuses ``ignore_eos``).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import torch

from saccade.bench.cli import model_folder

HOST = "127.0.0.1"
LONGEST = 32768  # tokens of a request that llama.cpp has room for


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


@contextmanager
def running(command: list[str], port: int, log: Path, wait: float = 300.0):
    """A server in a process group of its own, answering /health; it is gone afterwards."""
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        end = time.monotonic() + wait
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{command[0]} did not come up:\n{log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


def load(
    options: argparse.Namespace, port: int, model: str, requests: int, policy: str | None, folder: Path, seed: int = 0
) -> dict:
    """What ``saccade bench serve`` saw."""
    saccade = str(Path(sys.executable).with_name("saccade"))
    file = folder / "run.json"
    command = [saccade] if Path(saccade).exists() else [sys.executable, "-m", "saccade"]
    command += ["bench", "serve", "--url", f"http://{HOST}:{port}", "--model", model, "--mix", options.mix]
    command += ["--requests", str(requests), "--concurrency", str(options.concurrency), "--scale", str(options.scale)]
    command += ["--seed", str(seed), "--json", str(file), *(["--policy", policy] if policy else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not file.exists():
        raise SystemExit(done.stdout + done.stderr)
    found = json.loads(file.read_text())
    file.unlink()
    return found


def percent(values: dict | None, which: str) -> str:
    found = (values or {}).get(which)
    return "-" if found is None else f"{1000 * found:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference")
    parser.add_argument("--mix", default="chat")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--transformers", help="the transformers command")
    parser.add_argument("--llama-server", help="llama.cpp's server")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of Saccade and llama.cpp")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        path = str(model_folder(options.model, folder / "model", getattr(torch, options.dtype)))
        port = free_port()
        serve = [sys.executable, "-m", "saccade", "serve", path, "--port", str(port), "--device", options.device]
        serve += ["--threads", str(options.threads)]
        servers = [("saccade", [*serve, "--dtype", options.dtype], options.policy or ["dense"], None)]
        if options.transformers:
            command = [options.transformers, "serve", path, "--host", HOST, "--port", str(port)]
            command += ["--device", options.device, "--dtype", options.dtype]
            servers.append(("transformers serve", command, [None], path))
        if options.llama_server:
            from llama_gguf import write_gguf

            write_gguf(Path(path), folder / "gguf", "bf16" if options.dtype == "bfloat16" else "f32")
            command = [options.llama_server, "--model", str(folder / "gguf"), "--host", HOST, "--port", str(port)]
            command += ["--parallel", str(options.concurrency), "--ctx-size", str(options.concurrency * LONGEST)]
            command += ["--threads", str(options.threads), "--threads-batch", str(options.threads)]
            command += ["--flash-attn", "on", "--jinja"]
            servers.append(("llama.cpp", command, [None], "model"))
        for name, command, policies, model in servers:
            if shutil.which(command[0]) is None:
                raise SystemExit(f"{command[0]} is not there")
            with running(command, port, folder / "log"):
                for policy in policies:
                    known = model or _first_model(port)
                    load(options, port, known, min(4, options.requests), policy, folder, seed=1)  # shares no prefix
                    found = load(options, port, known, options.requests, policy, folder)
                    rows.append((name, policy, found))
                    print(name, policy or "", {k: v for k, v in found.items() if k != "samples"}, flush=True)
    shape = f"{options.mix} x {options.scale}, {options.requests} requests, {options.concurrency} at once"
    print(f"\n{options.model}, {options.device}, {options.dtype}, {shape}")
    print("| server | policy | answered | tokens/s | first token p50 / p99, ms | between tokens p50 / p99, ms |")
    print("|---|---|---|---|---|---|")
    for name, policy, found in rows:
        first, gap = found["first_token_seconds"], found["inter_token_seconds"]
        print(
            f"| {name} | {policy or ''} | {found['completed']} of {found['requests']} "
            f"| {found['output_tokens_per_second']:.1f} | {percent(first, 'p50')} / {percent(first, 'p99')} "
            f"| {percent(gap, 'p50')} / {percent(gap, 'p99')} |"
        )


def _first_model(port: int) -> str:
    with urllib.request.urlopen(f"http://{HOST}:{port}/v1/models", timeout=30) as answer:
        return json.load(answer)["data"][0]["id"]


if __name__ == "__main__":
    main()
