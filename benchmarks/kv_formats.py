"""What attention costs over keys and values of 8 bits, against those of 16: the same calls over two pools, in turn, so
that both meet the same machine. Medians, and of each pair its ratio; first what reading both pools takes, in order.

    python benchmarks/kv_formats.py --contexts 32768,131072 --threads 1,16 --repeats 9
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from saccade.bench.decode import decoding, opened, query_rows
from saccade.bench.inputs import Problem, make, problem_of, random_blocks
from saccade.kv.row_formats import INT8
from saccade.methods import Query
from saccade.ops import Call, cpu, run
from saccade.selection import Dense, Shape, Tokens

TAIL = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", default="32768,131072")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--threads", default="1")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--densities", default="0.02,0.05,0.12")
    parser.add_argument("--methods", default="quest(budget=0.05);psa;topk(k=0.02)")
    parser.add_argument("--prefill", type=int, default=4096, help="tokens, dense and in a quarter of the blocks; 0: no")
    asked = parser.parse_args()
    densities = [float(one) for one in asked.densities.split(",") if one]
    methods = [one for one in asked.methods.split(";") if one]
    print(f"{cpu.isa()}, heads {asked.heads}/{asked.kv_heads}, head_dim {asked.head_dim}; ms of bf16, of int8, ratio")
    with torch.inference_mode():
        for context in map(int, asked.contexts.split(",")):
            plain = make(asked.heads, asked.kv_heads, asked.head_dim, context, 1, torch.bfloat16)
            coded = problem_of(plain.q, plain.k, plain.v, len(plain.views), INT8)
            for threads in map(int, asked.threads.split(",")):
                torch.set_num_threads(threads)
                if cpu.available():
                    report(f"read {context} {threads}t", asked.repeats, plain, coded, passing(threads))
                for name in (
                    "dense",
                    *(f"blocks({one})" for one in densities),
                    *(f"tokens({one})" for one in densities),
                ):
                    report(f"decode {context} {threads}t {name}", asked.repeats, plain, coded, reading(name, threads))
                for name in methods:
                    report(f"decode {context} {threads}t {name}", asked.repeats, plain, coded, deciding(name, threads))
        if asked.prefill:
            plain = make(asked.heads, asked.kv_heads, asked.head_dim, asked.prefill, asked.prefill, torch.bfloat16)
            coded = problem_of(plain.q, plain.k, plain.v, 1, INT8)
            for threads in map(int, asked.threads.split(",")):
                torch.set_num_threads(threads)
                for name in ("dense", "blocks(0.25)"):
                    report(f"prefill {asked.prefill} {threads}t {name}", 3, plain, coded, reading(name, threads))


def report(
    name: str, repeats: int, plain: Problem, coded: Problem, step: Callable[[Problem], Callable[[int], object]]
) -> None:
    calls = step(plain), step(coded)
    pairs = []
    for turn in range(repeats + 1):
        took = []
        for call in calls:
            began = time.perf_counter()
            call(turn)
            took.append(1000 * (time.perf_counter() - began))
        pairs.append(took)
    pairs = pairs[1:]
    ours, theirs = (statistics.median(column) for column in zip(*pairs))
    ratio = statistics.median(first / second for first, second in pairs)
    print(f"{name:44s} {ours:9.3f} {theirs:9.3f} {ratio:6.2f}x", flush=True)


def reading(name: str, threads: int) -> Callable[[Problem], Callable[[int], object]]:
    """The call over everything, random blocks or random tokens."""

    def made(problem: Problem) -> Callable[[int], object]:
        shape = problem.shape
        kind, _, share = name.rstrip(")").partition("(")
        if kind == "blocks":
            chosen = random_blocks(shape, 32 if shape.q_len == 1 else 128, float(share), shape.kv_heads)
        elif kind == "tokens":
            chosen = random_tokens(shape, float(share))
        else:
            chosen = Dense(shape)
        return lambda turn: run(Call.of(problem.q, problem.views[turn % len(problem.views)], chosen, threads=threads))

    return made


def passing(threads: int) -> Callable[[Problem], Callable[[int], object]]:
    """Reading as many bytes as the call over everything does, in order."""

    def made(problem: Problem) -> Callable[[int], object]:
        layout = problem.sequence.pool.format
        data = torch.ones(layout.blocks(problem.shape.k_len) * layout.block_bytes, dtype=torch.uint8)
        return lambda turn: cpu.read_pass(data, threads)

    return made


def random_tokens(shape: Shape, share: float) -> Tokens:
    """The same number of tokens for each KV head."""
    rng, count = torch.Generator().manual_seed(0), max(1, int(share * shape.k_len))
    lists = [torch.randperm(shape.k_len, generator=rng)[:count] for _ in range(shape.kv_heads)]
    return Tokens.from_lists(shape, lists)


def deciding(name: str, threads: int) -> Callable[[Problem], Callable[[int], object]]:
    """A method's step: what it chooses by, what it reads, and what it learns."""

    def made(problem: Problem) -> Callable[[int], object]:
        method, _ = decoding(name)
        rows = query_rows(problem, 1.0)
        states = [opened(method, problem, view, rows, 0.0, copy) for copy, view in enumerate(problem.views)]

        def step(turn: int) -> None:
            which = turn % len(problem.views)
            view, state, q = problem.views[which], states[which], rows[:, TAIL // 2 + turn % (TAIL // 2)][:, None]
            query = Query.of(q, view, step=turn // len(problem.views))
            call = Call.of(
                q, view, method.select_decode(query, state), threads=threads, want_weights=method.wants_weights
            )
            ran = run(call)
            method.observe(query, ran.used, ran.weights, state)

        return step

    return made


if __name__ == "__main__":
    main()
