"""What audits cost: seconds of a request's decode without and with them, on one model.

    python benchmarks/audit_overhead.py --model reference --policy 'psa(epsilon=0.9)' --tokens 32768 --rate 0.01

The bound beside the measured share is 1.3 x rate x dense/sparse, from the same run's decode times. Runs are
interleaved, and the least of each kind counts.
"""

from __future__ import annotations

import argparse

import torch

from saccade import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference")
    parser.add_argument("--policy", default="psa(epsilon=0.9)")
    parser.add_argument("--tokens", type=int, default=32768, help="of the prompt")
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--steps", type=float, default=0.0, help="rate of dense replays")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    llm = LLM(given.model, max_model_len=given.tokens + given.answer + 1, enable_prefix_caching=True)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, min(llm.model.spec.vocab_size, 30000), (given.tokens,), generator=generator).tolist()
    kinds = {
        "dense": ("dense", {}),
        "sparse": (given.policy, {}),
        "audited": (given.policy, {"audit": given.rate, "audit_steps": given.steps, "seed": 1}),
    }
    best = dict.fromkeys(kinds, float("inf"))
    for _ in range(given.repeats):
        for name, (policy, audit) in kinds.items():
            params = SamplingParams(temperature=0, max_tokens=given.answer, ignore_eos=True, **audit)
            report = llm.generate(ids, params, policy=f"prefill=dense, decode={policy}")[0].report
            best[name] = min(best[name], report["decode"]["seconds"])
    step = {name: 1e3 * seconds / (given.answer - 1) for name, seconds in best.items()}
    share = best["audited"] / best["sparse"] - 1
    bound = 1.3 * (given.rate + given.steps) * best["dense"] / best["sparse"]
    print(f"ms a step: dense {step['dense']:.2f}, sparse {step['sparse']:.2f}, audited {step['audited']:.2f}")
    print(f"overhead {100 * share:.2f} % of the sparse step; 1.3 x rate x dense/sparse = {100 * bound:.2f} %")


if __name__ == "__main__":
    main()
