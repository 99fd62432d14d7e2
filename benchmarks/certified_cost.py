"""What a certificate costs: certified ``vattention`` beside ``psa`` at equal error, on the reference model's own steps.

    python benchmarks/certified_cost.py [--length 4096] [--tasks single,multikey,vt,span_copy,table_copy,legend]
        [--repeats 3] [--threads 1]

Decode steps of all layers without windows are taken down as dense attention ran them, and each method attends to the
same queries and keys. An error is that of attention's output over the sum of weight times norm of value, in float64;
``mean`` and ``p90`` are over all (head, step) pairs: a certificate with delta 0.1 promises epsilon for nine in ten.
``values`` and ``logits``: shares of the keys whose values were read and whose logits were computed exactly. ``us``: a
call with its selection, the median of the steps' best of ``--repeats``. Behind each certified row stands the ``psa``
that reads least with a p90 as low.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from saccade.engine.observing import observing
from saccade.engine.settings.config import EngineConfig
from saccade.engine.watch.observe import AttentionCall
from saccade.eval.answer import answer
from saccade.eval.setting import Setting, load
from saccade.eval.sources import find_tasks
from saccade.kv.view import KVView
from saccade.methods import Chunk, Method, parse_method
from saccade.methods.base import Query
from saccade.methods.policy import Policy
from saccade.ops import Call, run

CERTIFIED = [f"vattention(certify=true, epsilon={epsilon}, delta=0.1)" for epsilon in (0.1, 0.3, 0.5, 0.9)]
COVERAGES = 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999
LEAST = 512  # keys of a step that counts


@dataclass
class Row:
    """Of one policy, over all steps."""

    errors: list[Tensor] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    logits: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def p90(self) -> float:
        return float(torch.cat(self.errors).quantile(0.9))

    def text(self, name: str) -> str:
        return (
            f"{name:52} error: mean {float(torch.cat(self.errors).mean()):.4f}, p90 {self.p90:.4f}; values "
            f"{100 * statistics.fmean(self.values):.1f} %, logits {100 * statistics.fmean(self.logits):.1f} %; "
            f"{1e6 * statistics.median(self.seconds):.0f} us"
        )


@dataclass
class Step:
    """One call: ``q`` [heads, 1, d], its keys, and what is true of it in float64."""

    q: Tensor
    kv: KVView
    scale: float
    out: Tensor
    norm: Tensor

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Step:
        weights = torch.softmax(q[:, 0].double().unflatten(0, (k.shape[0], -1)) @ k.double().mT * scale, -1)
        norm = (weights @ v.double().norm(dim=-1)[..., None]).flatten()
        return cls(q, KVView.from_tensors(k, v, 32), scale, (weights @ v.double()).flatten(0, 1), norm)

    def add(self, row: Row, method: Method, repeats: int) -> None:
        state, took = method.begin(Chunk.of(self.q, self.kv, self.scale)), []
        for _ in range(repeats):
            query = Query.of(self.q, self.kv, self.scale)
            began = time.perf_counter()
            result = run(Call.of(self.q, self.kv, method.select_decode(query, state), scale=self.scale))
            took.append(time.perf_counter() - began)
        n = self.kv.length
        row.errors.append((result.out[:, 0].double() - self.out).norm(dim=-1) / self.norm)
        row.values.append(float(result.used.pairs().double().mean()) / n)
        row.logits.append(max(row.values[-1], query.cost.scored / n))
        row.seconds.append(min(took))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--tasks", default="single,multikey,vt,span_copy,table_copy,legend")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    llm = load(EngineConfig("reference", dtype="float32", threads=args.threads))
    steps: list[Step] = []

    def take(call: AttentionCall) -> None:
        shape = call.selection.shape
        if call.phase == "decode" and shape.q_len == 1 and call.spec.window is None and shape.k_len >= LEAST:
            keys, values = call.kv.keys(0, shape.k_len), call.kv.values(0, shape.k_len)
            steps.append(Step.of(call.q.clone(), keys.clone(), values.clone(), call.spec.scale))

    for task in find_tasks(tuple(args.tasks.split(","))):
        with observing(llm.engine, take):
            answer(llm, task.sample(args.length, 0, 0), Setting(Policy(), "A"))
    rows: dict[str, Row] = {}
    for name in ["dense", *CERTIFIED, *(f"psa(epsilon={coverage})" for coverage in COVERAGES)]:
        rows[name], method = Row(), parse_method(name)
        for step in steps:
            step.add(rows[name], method, args.repeats)
    print(
        f"{len(steps)} steps of a layer, {len(torch.cat(rows['dense'].errors))} (head, step) pairs, {args.length} keys"
    )
    print(rows.pop("dense").text("dense"))
    plain = [(name, row) for name, row in rows.items() if name not in CERTIFIED]
    for name in CERTIFIED:
        print(rows[name].text(name))
        enough = [(statistics.fmean(row.values), other) for other, row in plain if row.p90 <= rows[name].p90]
        print("  " + (rows[min(enough)[1]].text(min(enough)[1]) if enough else "no psa here is as near"))


if __name__ == "__main__":
    main()
