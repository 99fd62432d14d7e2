"""Dense attention by instruction set beside what this machine allows: one decode row, and a whole prompt.

    python benchmarks/instruction_sets.py [--threads 1,2] [--isas avx2,portable] [--context 65536] [--prompt 8192]

Decode reads `--context` keys of 32 query and 8 KV heads of 128 channels in bfloat16; beside it the bandwidth of reading
in order, which the kernels of the same set measure. Prefill is of 4 query heads and 1 KV head over `--prompt` tokens;
beside it, where a C++ compiler is at hand, the rate of fused multiply-adds in registers on one thread, times threads
(benchmarks/fma_limit.cpp), which no fp32 attention exceeds. The best of several rounds, in which sets take turns.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from saccade.bench.inputs import Problem, make
from saccade.bench.limits import READ_BYTES
from saccade.machine import ask_for_huge_pages
from saccade.ops import Call, cpu, run
from saccade.selection import Dense

# Flags, lanes and the kind of register of each set that multiplies in fp32.
SETS = {
    "avx512_bf16": (["-mavx512f", "-mprefer-vector-width=512"], 16, "v"),
    "avx2": (["-mavx2", "-mfma"], 8, "x"),
    "neon": (["-march=armv8-a"], 4, "w"),
    "portable": (
        ["-march=x86-64"] if platform.machine() == "x86_64" else [],
        4,
        "x" if platform.machine() == "x86_64" else "w",
    ),
}


def multiply_adds(isa: str) -> float:
    """GFLOP/s of one thread; 0 where that cannot be measured."""
    if isa not in SETS:
        return 0.0
    flags, lanes, register = SETS[isa]
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "limit")
        source = Path(__file__).with_name("fma_limit.cpp")
        command = [
            "c++",
            "-O2",
            "-std=c++17",
            "-ffp-contract=fast",
            *flags,
            f"-DLANES={lanes}",
            f'-DREGISTER="{register}"',
        ]
        try:
            subprocess.run([*command, "-o", program, source], check=True, capture_output=True)
            return float(subprocess.run([program], check=True, capture_output=True, text=True).stdout)
        except (OSError, subprocess.CalledProcessError):
            return 0.0


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def dense(problem: Problem, layer: int, threads: int) -> Callable[[], object]:
    call = Call.of(problem.q, problem.views[layer % len(problem.views)], Dense(problem.shape), threads=threads)
    return lambda: run(call, "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1")
    parser.add_argument("--isas", default=",".join(cpu.supported_isas()))
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    isas = options.isas.split(",")
    row = make(32, 8, 128, options.context, 1, torch.bfloat16)
    prompt = make(4, 1, 128, options.prompt, options.prompt, torch.bfloat16)
    data = torch.empty(READ_BYTES // 8, dtype=torch.int64)
    ask_for_huge_pages(data)
    data.fill_(1)
    read = 2 * options.context * 8 * 128 * 2
    flops = 4 * prompt.shape.causal_pairs * 128 * 4
    peak = {isa: multiply_adds(isa) for isa in isas}
    print(
        "| threads | set | decode GB/s | of reading | prefill GFLOP/s | of multiply-adds |\n"
        "|---:|---|---:|---:|---:|---:|"
    )
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        best: dict[str, list[float]] = {isa: [9e9, 9e9, 9e9] for isa in isas}
        for layer in range(options.rounds):
            for isa in isas:
                cpu.set_isa(isa)
                taken = [
                    seconds(dense(row, layer, threads)),
                    seconds(partial(cpu.read_pass, data, threads)),
                    seconds(dense(prompt, layer, threads)) if layer < 3 else 9e9,
                ]
                best[isa] = [min(a, b) for a, b in zip(best[isa], taken, strict=True)]
        for isa in isas:
            decode, reading, prefill = (
                read / best[isa][0] / 1e9,
                READ_BYTES / best[isa][1] / 1e9,
                flops / best[isa][2] / 1e9,
            )
            limit = f"{prefill / peak[isa] / threads:.0%}" if peak[isa] else "-"
            print(
                f"| {threads} | `{isa}` | {decode:.1f} | {decode / reading:.0%} | {prefill:.0f} | {limit} |", flush=True
            )


if __name__ == "__main__":
    main()
