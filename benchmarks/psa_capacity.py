"""PSA's Fig. 6 by its protocol, by costs: the most requests a second under a bound on the time between tokens.

    python benchmarks/psa_capacity.py [--requests 400] [--seed 0] [--hits 0.977]

Requests are those of ``saccade bench serve --mix longbench``: eight sets of LongBench in one Poisson trace, first come,
first served. A rate is sustained if the 99th percentile of the time between tokens is within 5 (strict) or 25 (relaxed)
times a decoding iteration, as the paper states both, and the median request waits for at most 2 s. Each system prefills
in chunks of the size that serves it best. No model runs: an iteration takes what its bytes and operations take on the
paper's machine (A100 of 40 GB, PCIe 4), by the shares of peak below. ``dense`` keeps whole sequences on the GPU; the
others keep KV in host memory and admit by what one iteration reads. What they read for 98 % of dense accuracy is
measured on the reference model (docs/results/claims-decode.md, protocol A), or as the paper says (``paper``); hits as
benchmarks/tier_traces.py finds them.
"""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import dataclass, replace

from saccade.bench.serve import Load, plan

TOKENS_A_WORD = 1.3
HBM, MEMORY, FLOPS, LINK = 1.555e12 * 0.8, 40e9 * 0.9 - 2e9, 312e12 * 0.5, 32e9 * 0.8  # bytes, bytes/s, operations/s
HOST = 96e9  # bytes of host memory for KV
OVERHEAD = 2e-3  # seconds of an iteration that are neither bytes nor operations
SUMMARY = 1 / 32  # of the KV: two vectors for the keys and values of 32 tokens
ROOM = 0.75  # of the slots that working sets may fill (engine/scheduling/batch_control.py)
MOST = 256  # requests that run at once
CHUNKS = (128, 512, 2048, 1 << 20)
QUEUE = 2.0  # seconds that the median request may wait


@dataclass(frozen=True)
class Model:
    name: str
    weights: float  # bytes, and operations of a token
    token: float  # bytes of KV
    width: int  # heads * head_dim * layers
    strict: float  # seconds, as the paper says
    relaxed: float
    paper: float  # how many times PSA's keys vllm-sparse reads


MODELS = (
    Model("LWM-Text-7B (MHA)", 13.5e9, 512 * 1024, 4096 * 32, 0.150, 0.750, 2.1),
    Model("Llama-3.1-8B (GQA)", 16.1e9, 128 * 1024, 4096 * 32, 0.100, 0.500, 2.4),
)


@dataclass(frozen=True)
class System:
    """``keys``: that a decode step reads, 0 for all. ``pipelined``: loads hide behind computation. ``uneven``: of a
    pool a layer, as large as the greediest layer needs: its keys over the mean layer's."""

    name: str
    keys: float = 0.0
    pipelined: bool = True
    uneven: float = 1.0
    summary: float = SUMMARY


class Running:
    """A request: ``done`` tokens of its prompt are computed, ``told`` of its answer."""

    __slots__ = ("answer", "at", "done", "last", "prompt", "told")

    def __init__(self, prompt: int, answer: int, at: float) -> None:
        self.prompt, self.answer, self.at = prompt, answer, at
        self.done = self.told = 0
        self.last = 0.0


def fits(model: Model, system: System, running: list[Running], new: Running) -> bool:
    """Whether ``new`` may begin: whole sequences, or what an iteration reads and the one that is prefilled. One that is
    alone may, whatever it needs."""
    if not running:
        return True
    memory = MEMORY - model.weights
    whole = sum(one.prompt + one.answer for one in running) + new.prompt + new.answer
    if not system.keys:
        return whole * model.token <= memory
    working = sum(min(one.prompt, system.keys) for one in (*running, new)) * system.uneven / ROOM
    prefilled = max([one.prompt for one in running if one.done < one.prompt] + [new.prompt])
    return whole * model.token <= HOST and (working + prefilled + whole * system.summary) * model.token <= memory


def seconds(
    model: Model, system: System, decoding: list[Running], first: Running | None, rows: int, hits: float
) -> float:
    """What an iteration takes: rows of answers, and of a prompt."""
    read = known = 0.0
    for one in decoding:
        length = one.prompt + one.told
        known += length
        read += min(length, system.keys) if system.keys else length
    work, moved = model.weights * (len(decoding) + rows), 0.0
    if system.keys:
        moved = (1 - hits) * read + rows
        read += known * system.summary
    if first is not None:
        work += 4 * model.width * rows * (first.done + rows / 2)
        read += first.done
    compute = max((model.weights + read * model.token) / HBM, work / FLOPS) + OVERHEAD
    link = moved * model.token / LINK
    return max(compute, link) if system.pipelined else compute + link


def sustains(model: Model, system: System, bound: float, chunk: int, rate: float, options: argparse.Namespace) -> bool:
    """Whether a trace keeps both bounds: it ends as soon as it cannot."""
    queue = deque(
        Running(max(64, round(one.turns[0][0] * TOKENS_A_WORD)), one.turns[0][1], one.at)
        for one in plan(Load("longbench", options.requests, rate, seed=options.seed))
    )
    may_wait, may_gap = len(queue) / 2, 0.01 * sum(one.answer - 1 for one in queue)
    waited = gaps = 0
    now, running = 0.0, list[Running]()
    while queue or running:
        while queue and queue[0].at <= now and len(running) < MOST and fits(model, system, running, queue[0]):
            one = queue.popleft()
            running.append(one)
            waited += now - one.at > QUEUE
        if waited > may_wait:
            return False
        if not running:
            now = queue[0].at
            continue
        decoding = [one for one in running if one.done == one.prompt]
        first = next((one for one in running if one.done < one.prompt), None)
        rows = 0 if first is None else min(chunk, first.prompt - first.done)
        now += seconds(model, system, decoding, first, rows, options.hits)
        if first is not None:
            first.done += rows
            if first.done == first.prompt:
                decoding.append(first)
        for one in decoding:
            gaps += one.told > 0 and now - one.last > bound
            one.told += 1
            one.last = now
        if gaps > may_gap:
            return False
        running = [one for one in running if one.told < one.answer]
    return True


def capacity(model: Model, system: System, bound: float, options: argparse.Namespace) -> tuple[float, int]:
    """The most requests a second, to 2 %, and the chunk that allows it."""
    best, with_chunk = 0.0, 0
    for chunk in CHUNKS:
        low, high = best, max(0.02, best * 1.02)
        if not sustains(model, system, bound, chunk, high, options):
            continue
        while sustains(model, system, bound, chunk, high, options):
            low, high = high, high * 1.5
        while high > low * 1.02:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if sustains(model, system, bound, chunk, middle, options) else (low, middle)
        best, with_chunk = low, chunk
    return best, with_chunk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hits", type=float, default=0.977, help="share of what a step reads that is on the GPU")
    parser.add_argument("--psa-keys", type=float, default=2110, help="measured, all eleven tasks")
    parser.add_argument("--arkvale-keys", type=float, default=2531)
    parser.add_argument("--moments-keys", type=float, default=856, help="protocol B")
    parser.add_argument("--uneven", type=float, default=2.0, help="the greediest layer's keys over the mean layer's")
    options = parser.parse_args()
    psa = System("psa", options.psa_keys)
    print("| model | system | keys a step | strict, requests/s | chunk | over dense | relaxed | chunk | over dense |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model in MODELS:
        systems = (
            System("dense"),
            System("arkvale", options.arkvale_keys, pipelined=False),
            psa,
            replace(psa, name="psa, not pipelined", pipelined=False),
            replace(psa, name="psa, a pool a layer", uneven=options.uneven),
            System("psa, blocks of 16 by moments", options.moments_keys, summary=2 * SUMMARY),
            System("arkvale, paper's ratio", options.psa_keys * model.paper, pipelined=False),
        )
        base: list[float] = []
        for system in systems:
            cells = []
            for at, bound in enumerate((model.strict, model.relaxed)):
                rate, chunk = capacity(model, system, bound, options)
                base += [rate] if len(base) < 2 else []
                over = f"{rate / base[at]:.2f}x" if base[at] else "-"
                cells.append(f"{rate:.3f} | {chunk if chunk < 1 << 20 else 'whole'} | {over}")
            print(f"| {model.name} | {system.name} | {system.keys:.0f} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
