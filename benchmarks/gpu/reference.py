"""The reference model on the GPU: a few samples of the suite under each policy, what they score and how long they take.

A handful of samples says that policies answer on this device as they do on a CPU, not how well; ``saccade eval`` says
that.
"""

from __future__ import annotations

import time

from harness import Results

from saccade.eval.answer import answer
from saccade.eval.metrics import METRICS
from saccade.eval.score import score_record
from saccade.eval.setting import Model, Setting
from saccade.eval.suite import make
from saccade.methods.policy import Policy

POLICIES = (
    "dense",
    "flexprefill(block_size=64,min_budget=256)",
    "loopserve",
    "psa(epsilon=0.9)",
    "quest(budget=1024)",
    "cis",
    "lfps",
)
TASKS, LENGTHS, SAMPLES = ("single", "multivalue", "span_copy"), (4096, 16384), 2
SECONDS = 38.0


def main() -> None:
    results = Results("reference")
    began = time.perf_counter()
    llm = Model(device="cuda").load()
    spec = llm.model.spec
    results.facts = {"layers": spec.layers, "heads": spec.heads, "kv_heads": spec.kv_heads, "head_dim": spec.head_dim}
    for length in LENGTHS:
        samples = [make(task, length, index) for task in TASKS for index in range(SAMPLES)]
        answer(llm, samples[0], Setting(Policy.parse("dense")))  # compiles
        for text in POLICIES:
            if time.perf_counter() - began > SECONDS:
                results.add(failed=f"{text} at {length}", error="no time was left")
                continue

            def ask(text: str = text, samples: list = samples, length: int = length) -> None:
                setting = Setting(Policy.parse(text))
                answer(llm, samples[0], setting)
                answered = [answer(llm, sample, setting) for sample in samples]
                scores = [
                    score_record(sample, record, METRICS)["score"] for sample, (record, _) in zip(samples, answered)
                ]
                costs = [part["decode"] for record, _ in answered for part in record["turns"]]
                costs += [part["prefill"] for record, _ in answered for part in record["turns"]]
                results.add(
                    context=length,
                    policy=text,
                    samples=len(samples),
                    score=sum(score or 0.0 for score in scores) / len(scores),
                    density=sum(cost["keys_attended"] for cost in costs) / sum(cost["keys_causal"] for cost in costs),
                    prefill_seconds=sum(timing["prefill"] for _, timing in answered),
                    decode_seconds=sum(timing["decode"] for _, timing in answered),
                )

            results.attempt(f"{text} at {length}", ask)


main()
