"""Policies side by side: one batch, a policy for each request, and what each one read."""

import sys

from saccade import LLM, SamplingParams

POLICIES = [
    "dense",
    "streaming(window=256)",
    "flexprefill(min_budget=256)",
    "flexprefill(min_budget=256)+psa",
    "topk(k=64)",
]
FACT = "The secret password of the lighthouse keeper is 7391-XKQ. "
PROMPT = FACT + "Rain fell, and nobody spoke of the storm. " * 40 + "The secret password of the lighthouse keeper is"


def main(model: str = "retriever") -> None:
    params = SamplingParams(temperature=0, max_tokens=9)
    with LLM(model) as llm:
        outputs = llm.generate([PROMPT] * len(POLICIES), params, policy=POLICIES)
        print(f"{'policy':34} {'answer':14} prefill  decode")
        for policy, output in zip(POLICIES, outputs):
            read = [output.report[phase]["density"] for phase in ("prefill", "decode")]
            print(f"{policy:34} {output.outputs[0].text!r:14} {read[0]:7.1%} {read[1] or 0:7.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
