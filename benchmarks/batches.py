"""Decode throughput of a batch on this machine: tokens a second of so many requests side by side.

    python benchmarks/batches.py [--model reference] [--prompt 1000] [--tokens 40] [--batches 1,4,16,64] [--threads N]

A row is the batch over the median time of those engine steps in which every request got a token, prompts left out;
with --mean over their mean time, for methods whose steps differ, and with the share of steps that searched anew behind
it. Nothing looks on while it runs, so the engine takes the path that a server's requests take.

    python benchmarks/batches.py --mean --prefixes --prompt 4096 --tokens 34 --batches 8,16 --policies "dense;cis"
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch

from saccade import LLM, SamplingParams

POLICIES = "dense;quest;psa;lfps;topk(k=64);cis"


def rate(
    llm: LLM, policy: str, batch: int, prompt: int, tokens: int, vocab: int, mean: bool = False
) -> tuple[float, float | None]:
    """Tokens a second, and the share of steps that searched for keys anew."""
    rng = random.Random(batch)
    prompts = [[rng.randrange(8, vocab) for _ in range(prompt)] for _ in range(batch)]
    real, times = llm.engine.step, []

    def step():
        began = time.perf_counter()
        outputs = real()
        if sum(len(output.new_tokens) for output in outputs) == batch:
            times.append(time.perf_counter() - began)
        return outputs

    llm.engine.step = step  # type: ignore[method-assign]
    try:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs = llm.generate(prompts, params, policy=f"prefill=dense, decode={policy}")
    finally:
        del llm.engine.step
    ratios = [output.report["decode"]["search_ratio"] for output in outputs]
    typical = statistics.fmean if mean else statistics.median
    return batch / typical(times[1:]), None if None in ratios else statistics.fmean(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference")
    parser.add_argument("--policies", default=POLICIES, help="decode methods, ';' between them")
    parser.add_argument("--batches", default="1,4,16,64")
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--mean", action="store_true")
    parser.add_argument("--prefixes", action="store_true", help="prefill a prompt once for all policies that may share")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    batches = [int(one) for one in chosen.batches.split(",")]
    memory = f"{max(256, 2 * max(batches) * (chosen.prompt + chosen.tokens) // 100)}MiB"
    shared = {"kv_memory": memory, "enable_prefix_caching": chosen.prefixes}
    with LLM(chosen.model, dtype=chosen.dtype, threads=chosen.threads, max_requests=max(batches), **shared) as llm:
        vocab = llm.model.spec.vocab_size
        print(f"tokens/s, {chosen.model}, {chosen.dtype}, {chosen.threads} threads, prompts of {chosen.prompt} tokens")
        print("| policy | " + " | ".join(map(str, batches)) + " |\n|---|" + "---:|" * len(batches))
        for policy in chosen.policies.split(";"):
            print(f"| `{policy}` |", end="", flush=True)
            for batch in batches:
                one, ratio = rate(llm, policy, batch, chosen.prompt, chosen.tokens, vocab, chosen.mean)
                print(f" {one:,.0f}" + (f" ({ratio:.2f})" if chosen.mean and ratio else "") + " |", end="", flush=True)
            print()


if __name__ == "__main__":
    main()
