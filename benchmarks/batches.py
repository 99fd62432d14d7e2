"""Decode throughput of a batch on this machine: tokens a second of so many requests side by side.

    python benchmarks/batches.py [--model reference] [--prompt 1000] [--tokens 40] [--batches 1,4,16,64] [--threads N]

A row is the batch over the median time of those engine steps in which every request got a token, prompts left out.
Nothing looks on while it runs, so the engine takes the path that a server's requests take.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch

from saccade import LLM, SamplingParams

POLICIES = "dense;quest;psa;lfps;topk(k=64);cis"


def rate(llm: LLM, policy: str, batch: int, prompt: int, tokens: int, vocab: int) -> float:
    """Tokens a second."""
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
        llm.generate(prompts, params, policy=f"prefill=dense, decode={policy}")
    finally:
        del llm.engine.step
    return batch / statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference")
    parser.add_argument("--policies", default=POLICIES, help="decode methods, ';' between them")
    parser.add_argument("--batches", default="1,4,16,64")
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="bfloat16")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    batches = [int(one) for one in chosen.batches.split(",")]
    memory = f"{max(256, 2 * max(batches) * (chosen.prompt + chosen.tokens) // 100)}MiB"
    llm = LLM(chosen.model, dtype=chosen.dtype, threads=chosen.threads, max_requests=max(batches), kv_memory=memory)
    with llm:
        vocab = llm.model.spec.vocab_size
        print(f"tokens/s, {chosen.model}, {chosen.dtype}, {chosen.threads} threads, prompts of {chosen.prompt} tokens")
        print("| policy | " + " | ".join(map(str, batches)) + " |\n|---|" + "---:|" * len(batches))
        for policy in chosen.policies.split(";"):
            rates = [rate(llm, policy, batch, chosen.prompt, chosen.tokens, vocab) for batch in batches]
            print(f"| `{policy}` | " + " | ".join(f"{one:,.0f}" for one in rates) + " |", flush=True)


if __name__ == "__main__":
    main()
