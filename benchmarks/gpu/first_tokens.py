"""Time to first token with FlashAttention-4's kernels and FP8 products over own dense in bfloat16, in one run.

    python benchmarks/gpu/first_tokens.py [--lengths 32768,131072] [--repeats 3] [--fp8-dense | --own]

A random Llama of 8B shape, as in ``endtoend.py``; needs ``saccade-llm[fa4]`` but for ``--own``, which leaves FP8 out,
too. Budgets are 8,192 tokens and a 16th of the prompt, which is a density of some 12 % at any length. Each row is the
median of ``--repeats`` prompts after one that warms up; own dense has no warm-up of its own beyond the first prompt of
all.
"""

from __future__ import annotations

import argparse
import statistics

import engine_steps
import torch

SPARSE = "flexprefill(lines=block, max_budget={})"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="32768,131072")
    parser.add_argument("--repeats", type=int, default=3)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--fp8-dense", action="store_true", help="dense with FP8 products, too")
    either.add_argument("--own", action="store_true", help="our own kernels in bfloat16 alone")
    given = parser.parse_args()
    lengths = [int(length) for length in given.lengths.split(",")]
    torch.manual_seed(0)
    engine_steps.FA4 = False
    bench = engine_steps.Bench("first_tokens")
    bench.room(max(lengths) + 64)
    bench.warm_up("dense")
    own = {length: timed(bench, length, "dense", given.repeats) for length in lengths}
    for length, seconds in own.items():
        print(f"{length} own dense, bfloat16: {seconds:.3f} s", flush=True)
    engine_steps.FA4 = not given.own
    for quantize in (None,) if given.own else (None, "fp8"):
        bench.serve(quantize)
        for length in lengths:
            policies = [SPARSE.format(budget) for budget in sorted({length // 16, 8192})]
            for policy in (*policies, *(["dense"] if quantize and given.fp8_dense else [])):
                bench.first_token(length, policy, None)
                seconds = timed(bench, length, policy, given.repeats)
                density = bench.results.rows[-1]["density"]
                print(
                    f"{length} {policy}, density {density:.3f}, {'own kernels' if given.own else 'FlashAttention-4'}, "
                    f"{quantize or 'bfloat16'}: {seconds:.3f} s, {own[length] / seconds:.2f} x own dense",
                    flush=True,
                )


def timed(bench: engine_steps.Bench, length: int, policy: str, repeats: int) -> float:
    return statistics.median(bench.first_token(length, policy, None) for _ in range(repeats))


if __name__ == "__main__":
    main()
