"""What a request really did: its report, and maps of what each head read over the attention it would have paid."""

import json
import sys
from pathlib import Path

from saccade import LLM
from saccade.eval.inspect import inspect

PROMPT = "The secret password of the lighthouse keeper is 7391-XKQ. " + "Boats came and went in the rain. " * 40
PROMPT += "The secret password of the lighthouse keeper is"


def main(out: str = "maps", model: str = "retriever") -> None:
    policy = "flexprefill(min_budget=256)+topk(k=64)"
    with LLM(model) as llm:
        report = llm.generate(PROMPT, policy=policy)[0].report
        shown = ("policy", "tokens", "density", "keys_attended", "keys_causal", "keys_scored", "seconds")
        for phase in ("prefill", "decode"):
            print(phase, json.dumps({name: report[phase][name] for name in shown}))
        paths, _ = inspect(llm, PROMPT, Path(out), policy, layers=[0, 7], max_tokens=9)
        print(*paths, sep="\n")  # heads.csv, and pictures where matplotlib is installed


if __name__ == "__main__":
    main(*sys.argv[1:])
