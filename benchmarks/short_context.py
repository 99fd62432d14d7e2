"""What every policy costs at a short context, where most of them read everything: own Python calls and time of a step.

    python benchmarks/short_context.py [--model smollm2] [--tokens 88] [--policies "dense;lfps"] [--rounds 0]

Counts the package's own Python calls in decode steps (their median and their most) and the own frames on the way to a
kernel, as python_overhead.py does, for every method of the registry that decodes and every preset; those that need a
calibration take their prompt instead. With ``--rounds`` it times steps of each policy and of dense in turns instead of
looking at frames, a request each, and prints the median ratio of neighbours. Without ``--model`` the model is a tiny
random Llama of four layers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from python_overhead import Counter, Step, watch_kernels
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.methods.outside import load_outside
from saccade.methods.registry import AROUND, METHODS, PRESETS

FIRST, LAST = 4, -1  # steps that count: all that decode, without the first ones and the one that ends them
UNCALIBRATED = {
    "double_sparsity": "double_sparsity(source=prompt)",
    "hshare": "hshare(source=prompt)",
    "infinigen": "infinigen(skew=off)",
}


def every_policy() -> list[str]:
    """All that may decode, dense first, and all presets."""
    load_outside()
    methods = {**METHODS, **AROUND}
    names = [name for name, method in methods.items() if "decode" in method.phases and name != "dense"]
    return ["dense", *(UNCALIBRATED.get(name, name) for name in names), *PRESETS]


def params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


class Counted:
    """An engine whose steps are counted, from ``make`` on: it may have a thread of its own. ``frames``: whether kernels
    note theirs, in all engines of the process."""

    def __init__(self, make: Callable[[], LLM], frames: bool = False) -> None:
        self._counter = Counter()
        if frames:
            watch_kernels(self._counter)
        self._counter.install()
        try:
            self._llm = make()
            self._llm.generate([[1, 2, 3]], params(4))  # imports the rest
        finally:
            self._counter.remove()

    def steps(self, prompts: list[list[int]], policies: list[str], tokens: int) -> list[Step]:
        """The decode steps of ``prompts`` under ``policies``, one each, together."""
        self._counter.steps.clear()
        outputs = self._llm.generate(prompts, params(tokens), policy=policies)
        if failed := [output.error for output in outputs if output.error is not None]:
            raise SystemExit(f"{policies}: {failed[0]}")
        return self._counter.steps[-tokens:][FIRST:LAST]


def seconds(llm: LLM, prompt: list[int], policy: str, tokens: int) -> float:
    """Median seconds between the tokens of one request."""
    times = []
    for _ in llm.stream(prompt, params(tokens), policy=policy):
        times.append(time.perf_counter())
    return statistics.median(after - before for before, after in zip(times[FIRST:], times[FIRST + 1 :]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name or folder; else a tiny random one of four layers")
    parser.add_argument("--tokens", type=int, default=88, help="of the prompt")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--policies", help="separated by semicolons; else all")
    parser.add_argument("--rounds", type=int, default=0, help="timed requests of each policy, in turns with dense")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or make_checkpoint(
            "llama", Path(scratch, "model"), num_hidden_layers=4, hidden_size=64, max_position_embeddings=2048
        )
        counted = Counted(
            lambda: LLM(model, kv_memory="256MiB", threads=options.threads, enable_prefix_caching=False),
            frames=not options.rounds,
        )
        llm = (
            LLM(model, kv_memory="256MiB", threads=options.threads, enable_prefix_caching=False)
            if options.rounds
            else None
        )
        prompt = random_ids(options.tokens, seed=0)
        policies = options.policies.split(";") if options.policies else every_policy()
        print(f"{'policy':32} {'calls a step':>12} {'most':>6} {'of dense':>9} {'frames':>6}  {'time of dense':>13}")
        dense = statistics.median(step.calls for step in counted.steps([prompt], ["dense"], options.steps))
        for policy in policies:
            steps = counted.steps([prompt], [policy], options.steps)
            frames = max(len(step.chain) for step in steps) or "-"
            ratios = [
                seconds(llm, prompt, policy, options.steps) / seconds(llm, prompt, "dense", options.steps)
                for _ in range(options.rounds)
                if llm is not None
            ]
            took = f"{statistics.median(ratios):13.3f}" if ratios else f"{'-':>13}"
            middle, most = statistics.median(step.calls for step in steps), max(step.calls for step in steps)
            print(f"{policy:32} {middle:12.0f} {most:6} {middle / dense:9.2f} {frames:>6}  {took}", flush=True)


if __name__ == "__main__":
    main()
