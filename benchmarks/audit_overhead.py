"""What audits cost: seconds of a decode step without and with them.

    python benchmarks/audit_overhead.py [--model random|random-8b:8|FOLDER] [--policy "psa(epsilon=0.9)"]
        [--context 32768] [--batch 1] [--tokens 64] [--rate 0.01] [--steps 0] [--device auto]

Random models of a 125M or an 8B shape read made-up keys. The bound beside the measured share is 1.3 x rate x
dense/sparse, of the same run's times. Rounds are interleaved, and the median of the steps of each kind counts for dense
and sparse, the mean for audited ones, whose cost comes in few steps; so does a mean of sparse ones that it is held to.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from saccade import LLM, SamplingParams
from saccade.bench.cli import model_folder
from saccade.bench.generate_kv import synthesize
from saccade.bench.ttft import prompt
from saccade.methods.policy import Policy

WARM = 6  # steps before the first that counts: graphs are recorded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random")
    parser.add_argument("--policy", default="psa(epsilon=0.9)")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--steps", type=float, default=0.0, help="rate of dense replays")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    room = given.context + given.tokens + WARM + 64
    audit = {"audit": given.rate, "audit_steps": given.steps}
    kinds = {"dense": ("dense", {}), "sparse": (given.policy, {}), "audited": (given.policy, audit)}
    with tempfile.TemporaryDirectory() as made:
        folder = model_folder(given.model, Path(made), torch.bfloat16, room)
        llm = LLM(folder, dtype="bfloat16", max_model_len=room, max_requests=given.batch, device=given.device)
        ids = [prompt(given.context, llm.model.spec.vocab_size, number) for number in range(given.batch)]
        keys = synthesize(llm, ids[0])
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for repeat in range(given.repeats):
            for name, (policy, asked) in kinds.items():
                steps = decode(llm, ids, keys, policy, given.tokens, {**asked, "seed": repeat} if asked else {})
                times[name].append(statistics.fmean(steps))
    dense, sparse, audited = (min(times[name]) for name in kinds)
    bound = 1.3 * (given.rate + given.steps) * dense / sparse
    print(f"{given.policy}, {given.context} keys, batch {given.batch}: ms a step, best round of {given.repeats}:")
    print(f"  dense {1e3 * dense:.2f}, sparse {1e3 * sparse:.2f}, audited {1e3 * audited:.2f}")
    print(f"  overhead {100 * (audited / sparse - 1):.2f} %; 1.3 x rate x dense/sparse = {100 * bound:.2f} %")


def decode(llm: LLM, prompts: list[list[int]], keys, policy: str, tokens: int, audit: dict) -> list[float]:
    """Seconds of each decode step of all prompts together."""
    engine, requests = llm.engine, []
    for ids in prompts:
        params = SamplingParams(temperature=0, max_tokens=tokens + WARM, ignore_eos=True, **audit)
        requests.append(engine.add(list(ids), params, Policy.parse(f"prefill=dense, decode={policy}")))
        keys.fill(requests[-1].sequence)
    steps: list[float] = []
    while engine.busy:
        began = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - began)
        if failed := [one.error for one in requests if one.error]:
            raise SystemExit(failed[0])
    return steps[WARM:]


if __name__ == "__main__":
    main()
