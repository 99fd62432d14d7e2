"""Whether ``lossless`` answers prompts of the suite token for token as dense attention does, in float32.

    python tests/lossless_suite.py [COUNT] [--length 1024] [--exact] [--model reference]

Prompts of all tasks of the suite in turn, eight in a batch, each with the next of the drafts below; each is answered by
at most 40 tokens, end tokens ignored. ``--exact`` runs every row by itself; without it rows are packed, and verified in
one pass. Exits with 1 where an answer differs, and says by how much dense attention preferred its own token.
"""

from __future__ import annotations

import argparse
import sys
import time

from saccade import LLM, SamplingParams
from saccade.eval.render import render
from saccade.eval.suite.tasks import TASKS, make

DRAFTS = (
    *("psa(epsilon=0.3, rank=cuboid)", "quest(budget=256, dense_layers=0)", "streaming(window=256)", "lfps"),
    *("cis(k=64)", "snapkv(capacity=128)", "h2o", "topk(k=32)"),
)
BATCH = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=500)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--model", default="reference")
    parser.add_argument("--exact", action="store_true")
    chosen = parser.parse_args()
    llm = LLM(
        chosen.model,
        dtype="float32",
        max_model_len=chosen.length + 64,
        max_requests=BATCH,
        exact=chosen.exact,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2)
    names, differ, drafted, accepted, began = list(TASKS), 0, 0, 0, time.perf_counter()
    with llm:
        for first in range(0, chosen.count, BATCH):
            numbers = range(first, min(first + BATCH, chosen.count))
            samples = [make(names[at % len(names)], chosen.length, at // len(names)) for at in numbers]
            prompts = [render(llm.tokenizer, [], sample.turns[0]).ids for sample in samples]
            policies = [f"lossless(draft={DRAFTS[at // len(names) % len(DRAFTS)]}, tokens=4)" for at in numbers]
            dense = llm.generate(prompts, params)
            ours = llm.generate(prompts, params, policy=policies)
            for sample, policy, one, other in zip(samples, policies, ours, dense):
                drafted += one.report["drafted_tokens"]
                accepted += one.report["accepted_tokens"]
                left, right = one.outputs[0].token_ids, other.outputs[0].token_ids
                if one.error is None and left == right:
                    continue
                differ += 1
                at = next((at for at, (a, b) in enumerate(zip(left, right)) if a != b), 0)
                best = sorted((entry.logprob for entry in other.outputs[0].logprobs[at].values()), reverse=True)
                print(f"{sample.id} {policy}: token {at} differs, margin {best[0] - best[1]:.2e}; {one.error}")
            seconds = time.perf_counter() - began
            print(f"{numbers[-1] + 1} prompts, {differ} differ, {seconds:.0f} s", flush=True)
    print(f"{chosen.count} prompts: {differ} answers differ; {accepted} of {drafted} drafted tokens stayed")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
