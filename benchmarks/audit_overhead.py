"""What audits cost: time of a decode step without and with them.

    python benchmarks/audit_overhead.py [--model random|random-8b:8|FOLDER] [--policy "psa(epsilon=0.9)"]
        [--context 32768] [--batch 1] [--rates 0.1,0.01] [--steps 0.1,0.02] [--pairs 8] [--block 24]
        [--device auto] [--clock cpu|wall]

Random models of a 125M or an 8B shape read made-up keys. The same requests decode on and on, audited for ``--block``
steps, then not for as many, which comes first alternates; so what drifts falls on both. The first steps of a block are
not counted: a GPU may have launched them as the others were. For each rate of places, and of dense replays, the
overhead of all pairs of blocks is held against what was drawn in them, times the time of a dense step, which is
measured before and after: ``ratio``, with an interval of 95 % from how unlike the pairs are. Pairs that differ from
the others by six times what most do are left out and counted. ``--clock cpu`` counts the processor time of all
threads, which other work on a machine does not lengthen much; ``wall``, the default on a GPU, the time that passes.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from lossless import filling

from saccade import LLM, SamplingParams
from saccade.bench.cli import model_folder
from saccade.bench.ttft import prompt
from saccade.engine.request import Request
from saccade.methods.policy import Policy

WARM = 6  # steps before the first that counts: graphs are recorded
SKIPPED = 2  # steps of a block that do not count
FAR = 6.0  # times the median distance of pairs from their median


def numbers(text: str) -> list[float]:
    return [float(one) for one in text.split(",") if one]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random")
    parser.add_argument("--policy", default="psa(epsilon=0.9)")
    for name, value in (("context", 32768), ("batch", 1), ("block", 24), ("pairs", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rates", type=numbers, default=[0.1, 0.01], help="of places")
    parser.add_argument("--steps", type=numbers, default=[], help="rates of dense replays")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--clock", choices=("cpu", "wall"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    room = given.context + 2 * given.block * (given.pairs + 1) + WARM + 64
    with tempfile.TemporaryDirectory() as made:
        folder = model_folder(given.model, Path(made), torch.bfloat16, room)
        llm = LLM(
            folder,
            dtype="bfloat16",
            max_model_len=room,
            max_requests=given.batch,
            device=given.device,
            enable_prefix_caching=False,
        )
        rounds = Rounds(llm, given)
        gc.collect()
        gc.freeze()  # as the server does: a collection walks over all prompts
        dense = [rounds.dense()]
        asked = [(rate, 0.0) for rate in given.rates] + [(0.0, rate) for rate in given.steps]
        found = [rounds.audited(*rates) for rates in asked]
        dense.append(rounds.dense())
    step = sum(dense) / len(dense)
    print(
        f"{given.policy}, {given.context} keys, batch {given.batch}, {given.pairs} pairs of {given.block} steps, "
        f"{rounds.clock} time: dense {', '.join(f'{1e3 * one:.3f}' for one in dense)} ms a step"
    )
    for one in found:
        print("  " + one.told(step), flush=True)


@dataclass
class Overhead:
    """``pairs``: seconds that an audited block took beyond the other, and the shares that its steps drew, added up.
    ``plain``: seconds of a step that is not audited; ``counted`` steps of a block."""

    what: str
    pairs: list[tuple[float, float]]
    plain: float
    counted: int

    def told(self, dense: float) -> str:
        more = [seconds for seconds, _ in self.pairs]
        middle = statistics.median(more)
        spread = statistics.median(abs(one - middle) for one in more)
        kept = [pair for pair in self.pairs if abs(pair[0] - middle) <= FAR * spread]
        share = sum(drawn for _, drawn in kept)
        ratio = sum(seconds for seconds, _ in kept) / (share * dense) if share else math.nan
        off = sum((seconds - ratio * drawn * dense) ** 2 for seconds, drawn in kept)
        half = 2.0 * math.sqrt(off * len(kept) / max(1, len(kept) - 1)) / (share * dense) if share else math.nan
        overhead = sum(seconds for seconds, _ in kept) / (len(kept) * self.counted)
        return (
            f"{self.what}: drawn {share / (len(kept) * self.counted):.4f}, step {1e3 * self.plain:.3f} ms, overhead "
            f"{1e3 * overhead:.4f} ms, {100 * overhead / self.plain:.2f} %; ratio to drawn x dense {ratio:.2f} "
            f"+-{half:.2f}; {len(self.pairs) - len(kept)} pairs left out"
        )


class Rounds:
    """Decode steps of the same prompts under several policies."""

    def __init__(self, llm: LLM, given: argparse.Namespace) -> None:
        self.llm, self.given = llm, given
        self.clock = given.clock or ("wall" if llm.model.runner.device.type == "cuda" else "cpu")
        self.now = time.process_time if self.clock == "cpu" else time.perf_counter
        self.prompts = [prompt(given.context, llm.model.spec.vocab_size, number) for number in range(given.batch)]
        self.fill = filling(llm, self.prompts[0], given.model)

    def dense(self) -> float:
        """Seconds of a step."""
        requests = self._begin("dense", {})
        seconds = statistics.median(self._block(requests)[0] for _ in range(3)) / (self.given.block - SKIPPED)
        self._end(requests)
        return seconds

    def audited(self, rate: float, steps: float) -> Overhead:
        """Blocks of steps with and without audits at these rates."""
        requests = self._begin(self.given.policy, {"audit": rate, "audit_steps": steps, "seed": 1})
        audits = [request.audit for request in requests]
        pairs, plain, counted = [], [], self.given.block - SKIPPED
        for pair in range(-1, self.given.pairs):  # the first makes what is made once
            took, drawn = {}, 0.0
            for on in (True, False) if pair % 2 else (False, True):
                for request, audit in zip(requests, audits):
                    request.audit = audit if on else None
                took[on], share = self._block(requests)
                drawn += share
            if pair >= 0:
                pairs.append((took[True] - took[False], drawn))
                plain.append(took[False] / counted)
        self._end(requests)
        what = f"rate {rate}" if rate else f"replays of {steps}"
        return Overhead(what, pairs, statistics.median(plain), counted)

    def _begin(self, policy: str, audit: dict) -> list[Request]:
        engine, requests = self.llm.engine, []
        for ids in self.prompts:
            most = 2 * self.given.block * (self.given.pairs + 1) + WARM + 8
            params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, **audit)
            request = engine.add(list(ids), params, Policy.parse(f"prefill=dense, decode={policy}"))
            self.fill(request)
            requests.append(request)
        for _ in range(WARM):
            engine.step()
        return requests

    def _block(self, requests: list[Request]) -> tuple[float, float]:
        """Seconds of the steps of a block that count, and the shares of them that were drawn, added up."""
        engine, spec, drawn = self.llm.engine, self.llm.model.spec, 0.0
        began = 0.0
        for step in range(self.given.block):
            if step == SKIPPED:
                began = self.now()
            before = sum(one.audit.agreement.samples for one in requests if one.audit is not None)
            engine.step()
            if step >= SKIPPED:
                places = sum(len(heads) for one in engine.watch.audits.values() for heads in one.drawn.values())
                drawn += places / (len(requests) * spec.layers * spec.kv_heads)
                after = sum(one.audit.agreement.samples for one in requests if one.audit is not None)
                drawn += (after - before) / len(requests)
        seconds = self.now() - began
        for request in requests:
            if request.error or request.finished:
                raise SystemExit(f"a request ended: {request.error}")
        return seconds, drawn

    def _end(self, requests: list[Request]) -> None:
        for request in requests:
            if request.audit is not None:
                request.audit.settle()
            self.llm.engine.cancel(request)


if __name__ == "__main__":
    main()
