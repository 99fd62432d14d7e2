"""What papers say of attention itself, asked of the true attention of a model that answers samples of the suite:

* LFPS, Fig. 2: how many of a step's heaviest 2 % of the keys were among the step before's, also with the neighbours of
  those (offsets -1, 0, 1, 2); and how many lie within distance 2 of another one.
* PSA, Fig. 2: blocks of 32 keys that hold 95 % of a step's weight, by layer.
* LoopServe, Observation 1: the weight that the heaviest tenth of all columns and diagonals holds in prefill.

python benchmarks/recorded_attention.py --length 4096 --samples 2
"""

from __future__ import annotations

import argparse

import paper_stats as stats
import torch
from torch import Tensor

from saccade.engine.observing import observing
from saccade.engine.settings.config import EngineConfig
from saccade.engine.watch.observe import AttentionCall
from saccade.engine.watch.truth import true_rows
from saccade.eval.answer import answer
from saccade.eval.setting import Setting, load
from saccade.eval.sources import find_tasks
from saccade.methods.policy import Policy

SHARE, BLOCK, ROWS = 0.02, 32, 64
TASKS = ("single", "multikey", "vt", "words", "legend", "span_copy", "table_copy", "common")


class Recorder:
    """Takes its measures call by call. Lists hold one number a head and step (or chunk)."""

    def __init__(self) -> None:
        self.before: dict[int, Tensor] = {}  # layer -> the last step's heaviest keys, bool [heads, n]
        self.overlap: list[Tensor] = []
        self.expanded: list[Tensor] = []
        self.near: list[Tensor] = []
        self.blocks: dict[int, list[Tensor]] = {}
        self.lines: list[Tensor] = []

    def __call__(self, call: AttentionCall) -> None:
        rows = call.selection.shape.q_len
        if call.phase == "decode" and rows == 1:
            self.step(call.layer, torch.cat([true.weights() for true in true_rows(call)])[:, 0])
        elif call.phase == "prefill" and rows > 1024:
            self.chunk(call, torch.randperm(rows, generator=torch.Generator().manual_seed(0))[:ROWS].sort().values)

    def step(self, layer: int, weights: Tensor) -> None:
        """``weights`` fp32 [heads, n] of one decode step."""
        heads, n = weights.shape
        heavy = stats.heaviest(weights, max(1, round(SHARE * n)))
        before = self.before.get(layer)
        if before is not None and before.shape[1] == n - 1:
            before = torch.nn.functional.pad(before, (0, 1))
            self.overlap.append(stats.held(heavy, before))
            self.expanded.append(stats.held(heavy, stats.spread(before, stats.NEIGHBOURS)))
        self.near.append(stats.near(heavy, 2))
        self.before[layer] = heavy
        held = torch.nn.functional.pad(weights, (0, -n % BLOCK)).view(heads, -1, BLOCK).sum(-1)
        reached = held.sort(1, descending=True).values.cumsum(1)
        self.blocks.setdefault(layer, []).append((reached < 0.95 * weights.sum(1, keepdim=True)).sum(1) + 1)

    def chunk(self, call: AttentionCall, rows: Tensor) -> None:
        """The weight of sampled rows that lies on the heaviest tenth of their columns and diagonals."""
        start = call.selection.shape.q_start
        for head in range(call.selection.shape.kv_heads):
            parts = [true for true in true_rows(call, rows) if true.heads.start == head * call.selection.shape.group]
            weights = torch.cat([true.weights() for true in parts], 1)  # [group, r, n]
            distance = (start + rows)[:, None] - torch.arange(weights.shape[-1])
            self.lines += [torch.tensor([stats.line_share(own, distance, 0.1)]) for own in weights]


def said(name: str, values: list[Tensor]) -> str:
    """Mean and the tenth, middle and ninetieth hundredth over heads and steps."""
    whole = torch.cat([value.float() for value in values])
    low, middle, high = torch.quantile(whole[torch.randperm(len(whole))[:200_000]], torch.tensor([0.1, 0.5, 0.9]))
    return (
        f"{name}: mean {whole.mean():.3g}, 10 % {low:.3g}, median {middle:.3g}, 90 % {high:.3g} ({len(whole)} values)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=2, help="of each task")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    llm = load(EngineConfig(args.model, dtype="bfloat16", threads=args.threads))
    recorder = Recorder()
    for index in range(args.samples):
        for task in find_tasks(TASKS):
            recorder.before.clear()
            with observing(llm.engine, recorder):
                answer(llm, task.sample(args.length, index, 0), Setting(Policy(), "B"))
    print(f"{args.model}, {len(TASKS)} tasks of {args.length} tokens, {args.samples} samples each, dense, protocol B")
    print(said("LFPS: heaviest 2 % of a step that were the step before's", recorder.overlap))
    print(said("LFPS: the same with neighbours -1, 0, 1, 2 of those", recorder.expanded))
    print(said("LFPS: heaviest 2 % within distance 2 of another", recorder.near))
    for layer, values in sorted(recorder.blocks.items()):
        print(said(f"PSA: blocks of {BLOCK} that hold 95 %, layer {layer}", values))
    print(said("LoopServe: weight on the heaviest tenth of columns and diagonals", recorder.lines))


if __name__ == "__main__":
    main()
