"""Milliseconds a decode step of greedy requests, with steps launched before they are asked for and without.

python benchmarks/gpu/ahead.py    (the reference model, and eight layers of the 8B shape; the better of two runs each)
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from saccade import LLM, SamplingParams
from saccade.bench.cli import model_folder
from saccade.bench.ttft import prompt

STEPS = 128


def step_ms(llm: LLM, prompts: list[list[int]], policy: str, ahead: bool) -> tuple[float, list[list[int]]]:
    """From the last request's first token to the last token of all, over the steps between; and the answers."""
    device = llm.engine.worker.device
    assert device is not None
    device.runs_ahead = ahead
    params = SamplingParams(temperature=0, max_tokens=STEPS + 1, ignore_eos=True)
    outputs = llm.generate(prompts, params, policy=policy)
    firsts, lasts = [], []
    for output in outputs:
        assert output.metrics is not None
        firsts.append(output.metrics.first_token_time or 0.0)
        lasts.append(output.metrics.last_token_time or 0.0)
    return 1000 * (max(lasts) - max(firsts)) / STEPS, [one.outputs[0].token_ids for one in outputs]


def rows(llm: LLM, name: str, length: int, policies: tuple[str, ...]) -> None:
    for policy in policies:
        for batch in (1, 8):
            prompts = [prompt(length, llm.model.spec.vocab_size, seed=seed) for seed in range(batch)]
            taken: dict[bool, list[float]] = {False: [], True: []}
            answers = []
            for turn in range(3):  # the first one compiles and records
                for ahead in taken:
                    ms, tokens = step_ms(llm, prompts, policy, ahead)
                    answers.append(tokens)
                    taken[ahead] += [ms] if turn else []
            equal = all(one == answers[0] for one in answers)
            times = f"{min(taken[False]):.3f} ms waiting, {min(taken[True]):.3f} ms ahead"
            print(f"{name}, {length} x {batch}, {policy}: {times}; answers equal: {equal}", flush=True)


def main() -> None:
    llm = LLM("reference", device="cuda", max_model_len=16384, enable_prefix_caching=False)
    rows(llm, "reference", 4096, ("dense", "arkvale(budget=512)", "streaming"))
    llm.close()
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder("random-8b:8", Path(scratch), torch.bfloat16, 16384)
        llm = LLM(folder, dtype="bfloat16", device="cuda", max_model_len=16384, enable_prefix_caching=False)
    rows(llm, "8B shape, 8 layers", 8192, ("dense", "arkvale(budget=2048)"))


if __name__ == "__main__":
    main()
