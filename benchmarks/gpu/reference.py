"""The reference model on the GPU: a few samples of the suite under each policy, what they score and how long they take.

A handful of samples says that policies answer on this device as they do on a CPU, not how well; ``saccade eval`` says
that.
"""

from __future__ import annotations

import time

from harness import Results

from saccade.engine.settings.config import EngineConfig
from saccade.eval.answer import answer
from saccade.eval.metrics import METRICS
from saccade.eval.score import score_record
from saccade.eval.setting import Setting, load
from saccade.eval.suite import make
from saccade.methods.policy import Policy

FAST = ("dense", "flexprefill(block_size=64,min_budget=256)", "psa(epsilon=0.9)", "quest(budget=1024)")
ONE_BY_ONE = ("lfps", "cis", "loopserve")  # a layer and request at a time in decode
CASES = tuple((text, length) for length in (4096, 16384) for text in FAST + ONE_BY_ONE)
TASKS = ("single", "multivalue", "span_copy")
SECONDS = 46.0


def main() -> None:
    results = Results("reference")
    began = time.perf_counter()
    llm = load(EngineConfig("reference", device="cuda"))
    spec = llm.model.spec
    results.facts = {"layers": spec.layers, "heads": spec.heads, "kv_heads": spec.kv_heads, "head_dim": spec.head_dim}
    for text, length in CASES:
        if time.perf_counter() - began > SECONDS:
            results.add(failed=f"{text} at {length}", error="no time was left")
            continue

        def ask(text: str = text, length: int = length) -> None:
            setting = Setting(Policy.parse(text))
            samples = [make(task, length, 0) for task in TASKS]
            for sample in samples:
                answer(llm, sample, setting)  # compiles
            answered = [answer(llm, sample, setting) for sample in samples]
            scores = [score_record(sample, record, METRICS)["score"] for sample, (record, _) in zip(samples, answered)]
            turns = [turn for record, _ in answered for turn in record["turns"]]
            costs = [turn[phase] for turn in turns for phase in ("prefill", "decode")]
            results.add(
                context=length,
                policy=text,
                samples=len(samples),
                score=sum(score or 0.0 for score in scores) / len(scores),
                density=sum(cost["keys_attended"] for cost in costs) / sum(cost["keys_causal"] for cost in costs),
                prefill_seconds=sum(timing["prefill"] for _, timing in answered),
                decode_seconds=sum(timing["decode"] for _, timing in answered),
                errors=sum(record["error"] is not None for record, _ in answered),
                on_torch=sorted({note for turn in turns for note in turn["notes"] if note.endswith("torch did")}),
            )

        results.attempt(f"{text} at {length}", ask)


if __name__ == "__main__":
    main()
