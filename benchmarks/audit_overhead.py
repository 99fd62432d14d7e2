"""What audits cost: time of a decode step without and with them.

    python benchmarks/audit_overhead.py [--model random|random-8b:8|FOLDER] [--policy "psa(epsilon=0.9)"]
        [--context 32768] [--batch 1] [--tokens 64] [--rate 0.01] [--steps 0] [--device auto] [--clock cpu|wall]

Random models of a 125M or an 8B shape read made-up keys. Rounds of dense, sparse and audited decoding take turns, each
of ``--tokens`` steps. A triple gives one overhead (audited over sparse time, of all its steps together) and one bound
of its own times, 1.3 x rate x dense/sparse, with the share that was drawn for the rate; the medians over all triples
are printed, and how many triples stay within theirs. ``--clock cpu`` counts the processor time of all threads, which
other work on a machine does not lengthen much; ``wall``, the default on a GPU, the time that passes. A high ``--rate``
shows the cost above the noise: it grows with the rate, and so does the bound.
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
    for name, value in (("context", 32768), ("batch", 1), ("tokens", 64), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--steps", type=float, default=0.0, help="rate of dense replays")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--clock", choices=("cpu", "wall"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    room = given.context + given.tokens + WARM + 64
    with tempfile.TemporaryDirectory() as made:
        folder = model_folder(given.model, Path(made), torch.bfloat16, room)
        llm = LLM(folder, dtype="bfloat16", max_model_len=room, max_requests=given.batch, device=given.device)
        rounds = Rounds(llm, given)
        rounds.decode("dense", {})  # products are prepared, kernels compiled
        triples = [rounds.triple(seed) for seed in range(given.repeats)]
    overheads = [audited / sparse - 1 for _, sparse, audited, _ in triples]
    bounds = [1.3 * share * dense / sparse for dense, sparse, _, share in triples]
    ms = [1e3 * statistics.median(times) for times in list(zip(*triples))[:3]]
    per_place = [(audited - sparse) / (share * dense) for dense, sparse, audited, share in triples if share]
    per_place = per_place or [float("nan")]
    print(
        f"{given.policy}, {given.context} keys, batch {given.batch}, rate {given.rate} and {given.steps}; "
        f"{rounds.clock} ms a step, medians of {given.repeats} rounds of {given.tokens} steps:"
    )
    print(f"  dense {ms[0]:.2f}, sparse {ms[1]:.2f}, audited {ms[2]:.2f}")
    print(
        f"  overhead {100 * statistics.median(overheads):.2f} %; 1.3 x rate x dense/sparse = "
        f"{100 * statistics.median(bounds):.2f} %; overhead over rate x dense/sparse: median "
        f"{statistics.median(per_place):.2f}, {min(per_place):.2f} to {max(per_place):.2f}; "
        f"{sum(map(float.__le__, overheads, bounds))} of {given.repeats} rounds within the bound"
    )


class Rounds:
    """Decode steps of the same prompts under several policies."""

    def __init__(self, llm: LLM, given: argparse.Namespace) -> None:
        self.llm, self.given = llm, given
        self.clock = given.clock or ("wall" if llm.model.runner.device.type == "cuda" else "cpu")
        self.now = time.process_time if self.clock == "cpu" else time.perf_counter
        self.prompts = [prompt(given.context, llm.model.spec.vocab_size, number) for number in range(given.batch)]
        self.keys = synthesize(llm, self.prompts[0])

    def triple(self, seed: int) -> tuple[float, float, float, float]:
        """Mean seconds of a dense, a sparse and an audited step, and the share of places or steps that was drawn."""
        audit = {"audit": self.given.rate, "audit_steps": self.given.steps, "seed": seed}
        policy = self.given.policy
        return self.decode("dense", {})[0], self.decode(policy, {})[0], *self.decode(policy, audit)

    def decode(self, policy: str, audit: dict) -> tuple[float, float]:
        """Mean seconds of a decode step of all prompts together, and the share of it that was audited."""
        engine, requests = self.llm.engine, []
        for ids in self.prompts:
            params = SamplingParams(temperature=0, max_tokens=self.given.tokens + WARM, ignore_eos=True, **audit)
            request = engine.add(list(ids), params, Policy.parse(f"prefill=dense, decode={policy}"))
            self.keys.fill(request.sequence)
            requests.append(request)
        for _ in range(WARM):
            engine.step()
        began, steps = self.now(), 0
        while engine.busy:
            engine.step()
            steps += 1
        seconds = (self.now() - began) / steps
        if request.error:
            raise SystemExit(request.error)
        told = [request.audit for request in requests if request.audit is not None]
        for one in told:
            one.settle()
        places, steps = (sum(getattr(one, name) for one in told) for name in ("places", "steps"))
        share = sum(one.error.samples for one in told) / max(1, places)
        return seconds, share + sum(one.agreement.samples for one in told) / max(1, steps)


if __name__ == "__main__":
    main()
