"""Steps of decode with a model's file as an engine takes them, and llama.cpp's, by turns.

    python benchmarks/quantised_steps.py FILE.gguf --threads 16 [--contexts 512,8192] [--policies "dense;lfps"]
        [--synthetic-kv] [--tokens 40] [--turns 2] [--peer "llama-bench -fa 1"] [--ik "llama-bench -fa 1 -rtr 1"]

For each context and policy: seconds to the fourth token, the median step and the fastest tenth, the time in which the
weights are read at the reading rate of the moment, and the share of time that the hypervisor took away. ``--peer`` and
``--ik`` are commands of llama.cpp's and ik_llama.cpp's ``llama-bench``, which get the file, threads and contexts.
Unlike ``saccade bench generate``, which times the parts of a step one by one, a step here is one call of the kernels.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import time
from pathlib import Path

import torch

from saccade import LLM, SamplingParams
from saccade.bench.generate_kv import synthesize
from saccade.bench.ttft import prompt
from saccade.methods.policy import Policy

WARM = 4  # tokens before steps count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--contexts", default="512,8192")
    parser.add_argument("--policies", default="dense;lfps")
    parser.add_argument("--synthetic-kv", action="store_true")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--peer", default="")
    parser.add_argument("--ik", default="")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    contexts = [int(context) for context in given.contexts.split(",")]
    began = time.perf_counter()
    llm = LLM(
        given.file, device="cpu", max_model_len=max(contexts) + given.tokens + 2 * WARM, enable_prefix_caching=False
    )
    weights = llm.model.matrix_bytes
    print(f"loaded in {time.perf_counter() - began:.2f} s; a step reads {weights / 1e6:.0f} MB", flush=True)
    for _ in range(given.turns):
        for context in contexts:
            for policy in given.policies.split(";"):
                print(_ours(llm, context, policy, given.tokens, given.synthetic_kv, weights), flush=True)
            common = ["-m", str(given.file), "-t", str(given.threads), "-r", "1", "-p", "0"]
            if given.peer:
                _peer([*shlex.split(given.peer), *common, "-n", str(given.tokens), "-d", str(context)])
            if given.ik:
                _peer([*shlex.split(given.ik), *common, "-n", "0", "-gp", f"{context},{given.tokens}"])


def _ours(llm: LLM, context: int, policy: str, tokens: int, synthetic: bool, weights: int) -> str:
    engine, ids = llm.engine, prompt(context, llm.model.spec.vocab_size)
    made = synthesize(llm, ids) if synthetic else None
    began = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    request = engine.add(ids, params, Policy.parse(policy))
    if made is not None:
        made.fill(request.sequence)
    while not request.finished and len(request.output_ids) < WARM:
        engine.step()
    first, rate = time.perf_counter() - began, _reading_rate()
    stolen, times = _stolen(), []
    while not request.finished:
        known, start = len(request.output_ids), time.perf_counter()
        engine.step()
        took = time.perf_counter() - start
        new = (len(request.final_ids) if request.finished else len(request.output_ids)) - known
        times += [took / max(new, 1)] * new
    if request.error is not None or not times:
        return f"{context:7,} {policy}: {request.error or 'no step was timed'}"
    away = [after - before for before, after in zip(stolen, _stolen(), strict=True)]
    median, fast = 1000 * statistics.median(times), 1000 * sorted(times)[len(times) // 10]
    return (
        f"{context:7,} {policy}: {median:.2f} ms a token ({1000 / median:.1f} tokens/s), a tenth within {fast:.2f}; "
        f"weights alone {weights / rate / 1e6:.2f} at {rate:.0f} GB/s; {first:.2f} s to token {WARM}; "
        f"taken away {100 * away[0] / max(away[1], 1):.1f} %"
    )


def _reading_rate() -> float:
    """GB/s of two passes over 2 GiB."""
    data = torch.ones(1 << 28, dtype=torch.int64)
    data.sum()
    start = time.perf_counter()
    data.sum()
    data.sum()
    return 2 * data.numel() * data.element_size() / (time.perf_counter() - start) / 1e9


def _stolen() -> tuple[int, int]:
    """Ticks that the hypervisor gave to others, and all ticks."""
    ticks = [int(one) for one in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return ticks[7], sum(ticks)


def _peer(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [line for line in done.stdout.splitlines() if "tg" in line]
    print("\n".join(rows) or f"{command[0]} ended with {done.returncode}: {done.stderr[-300:]}", flush=True)


if __name__ == "__main__":
    main()
