"""More of what papers say of attention itself (recorded_attention.py has the rest), asked of the true attention of a
model that answers samples of the suite densely:

* LoopServe, Fig. 4a and 5: the keys that a whole answer looks at most, and how many of them the prompt's last rows, or
  eight rows of the answer, would have chosen; and how many two stretches of an answer share, by their distance.
* LoopServe, Observations 2 and 3: how many of a head's heaviest tenth of lines another input has too, and how many the
  first half of a chunk's rows shares with the second.
* PrHS, Table VII: whether queries or keys say better that two steps want the same keys.

python benchmarks/recorded_windows.py --length 4096 --samples 2
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import torch
from recorded_attention import said
from torch import Tensor
from torch.nn.functional import cosine_similarity

from saccade.engine.observing import observing
from saccade.engine.settings.config import EngineConfig
from saccade.engine.watch.observe import AttentionCall
from saccade.engine.watch.truth import true_rows
from saccade.eval.answer import answer
from saccade.eval.setting import Setting, load
from saccade.eval.sources import find_tasks
from saccade.methods.policy import Policy

LONG = ("words", "span_copy", "table_copy", "common")  # answers of many tokens
PLACES = ("three_turn_begin", "three_turn_middle", "three_turn_end")
BUDGET, BLOCK, WINDOW, ROWS, SHARED = 256, 8, 16, 64, 88


class Recorder:
    """Measures of a turn are taken when it has ended. ``place``: where its question stands."""

    def __init__(self) -> None:
        self.place = "end"
        self.found: dict[str, list[Tensor]] = defaultdict(list)
        self.lines: dict[tuple[int, int], Tensor] = {}  # (layer, head) of the sample before
        self.clear()

    def clear(self) -> None:
        self.steps: dict[int, list[Tensor]] = defaultdict(list)  # layer -> weights [heads, n] of each step
        self.asked: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)  # query and key of each step
        self.window: dict[int, Tensor] = {}  # layer -> weights of the prompt's last rows [heads, n]
        self.now: dict[tuple[int, int], Tensor] = {}

    def __call__(self, call: AttentionCall) -> None:
        shape = call.selection.shape
        if call.phase == "decode" and shape.q_len == 1:
            self.steps[call.layer].append(torch.cat([true.weights() for true in true_rows(call)])[:, 0])
            key = call.kv.keys(call.kv.length - 1)[:, -1].float().repeat_interleave(shape.group, 0)
            self.asked[call.layer].append((call.q[:, 0].float(), key))
        elif call.phase == "prefill":
            last = torch.arange(max(0, shape.q_len - WINDOW), shape.q_len)
            if call.layer == 0 and self.steps:
                self.turn()
            self.window[call.layer] = sum_rows(list(true_rows(call, last)), shape.heads)
            if shape.q_len > 1024:
                self.chunk(call)

    def chunk(self, call: AttentionCall) -> None:
        """Lines of the two halves of a chunk's rows, and of the sample before."""
        shape = call.selection.shape
        drawn = torch.randperm(shape.q_len // 2, generator=torch.Generator().manual_seed(0))[: ROWS // 2].sort().values
        halves = [lines_of(call, drawn), lines_of(call, drawn + shape.q_len // 2)]
        common = shape.q_len // 2  # columns and distances that both halves may see
        for head in range(shape.heads):
            first, second = (half[head, :, :common].flatten() for half in halves)
            self.found["halves"].append(shared(first, second, len(first) // 10))
            whole = (halves[0] + halves[1])[head]
            before = self.lines.get((call.layer, head))
            if before is not None:
                both = min(before.shape[1], whole.shape[1])
                parts = [one[:, :both].flatten() for one in (before, whole)]
                self.found["inputs"].append(shared(parts[0], parts[1], 2 * both // 10))
            self.now[call.layer, head] = whole

    def turn(self) -> None:
        for layer, steps in self.steps.items():
            n = self.window[layer].shape[1] if layer in self.window else 0
            if len(steps) < 4 or n < 2 * BUDGET:
                continue
            rows = torch.stack([step[:, :n] for step in steps], 1)  # [heads, steps, prompt keys]
            for head, weights in enumerate(rows):
                truth = weights.sum(0)
                self.found[f"window, {self.place}"].append(shared(self.window[layer][head], truth, BUDGET))
                if len(weights) < 2 * BLOCK:
                    continue
                self.found["window, long"].append(self.found[f"window, {self.place}"][-1])
                blocks = [part.sum(0) for part in weights.split(BLOCK) if len(part) == BLOCK]
                self.found["answer, long"].append(shared(blocks[0], truth, BUDGET))
                for distance in (1, 2, 4):
                    for one, other in zip(blocks, blocks[distance:]):
                        self.found[f"blocks {distance} apart"].append(shared(one, other, BUDGET))
            self.alike(rows, self.asked[layer])
        self.lines |= self.now
        self.clear()

    def alike(self, rows: Tensor, asked: list[tuple[Tensor, Tensor]]) -> None:
        """Cosines of the queries, and of the keys, of steps up to 8 apart, beside how many of their keys they share."""
        queries, keys = (torch.stack(side, 1) for side in zip(*asked))  # [heads, steps, d]
        best = torch.zeros(rows.shape, dtype=torch.bool).scatter_(2, rows.topk(SHARED, -1).indices, True)
        for apart in range(1, BLOCK):
            if apart >= rows.shape[1]:
                break
            self.found["overlap"].append(((best[:, apart:] & best[:, :-apart]).sum(-1) / SHARED).flatten())
            for name, side in (("query", queries), ("key", keys)):
                self.found[name].append(cosine_similarity(side[:, apart:], side[:, :-apart], dim=-1).flatten())


def sum_rows(parts: list, heads: int) -> Tensor:
    """fp32 [heads, n]: the weights of some rows, summed."""
    n = max(true.weights().shape[-1] for true in parts)
    out = torch.zeros(heads, n)
    for true in parts:
        weights = true.weights()
        out[true.heads, : weights.shape[-1]] += weights.sum(1)
    return out


def lines_of(call: AttentionCall, rows: Tensor) -> Tensor:
    """fp32 [heads, 2, n]: the weight of ``rows`` by key, and by distance."""
    shape = call.selection.shape
    out = torch.zeros(shape.heads, 2, shape.k_len)
    for true in true_rows(call, rows):
        weights = true.weights()
        n = weights.shape[-1]
        distance = ((shape.q_start + rows)[-weights.shape[1] :, None] - torch.arange(n)).clamp(min=0)
        for at, own in enumerate(weights):
            head = range(shape.heads)[true.heads][at]
            out[head, 0, :n] += own.sum(0)
            out[head, 1].index_add_(0, distance.flatten(), own.flatten())
    return out


def shared(one: Tensor, other: Tensor, count: int) -> Tensor:
    """Of the ``count`` heaviest entries of one, the share that is among the other's: [1]."""
    first, second = (set(side.topk(count).indices.tolist()) for side in (one, other))
    return torch.tensor([len(first & second) / count])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=2, help="of each task")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    llm = load(EngineConfig(args.model, dtype="bfloat16", threads=args.threads))
    recorder = Recorder()
    for task in find_tasks((*LONG, *PLACES)):
        recorder.place = task.name.removeprefix("three_turn_") if task.name in PLACES else "end"
        recorder.lines = {}
        for index in range(args.samples):
            with observing(llm.engine, recorder):
                answer(llm, task.sample(args.length, index, 0), Setting(Policy(), "A"))
            recorder.turn()
    print(f"{args.model}, {args.length} tokens, {args.samples} samples of {len(LONG) + len(PLACES)} tasks, dense")
    names = {
        "inputs": "LoopServe, Obs. 2: a head's heaviest tenth of lines that the input before had",
        "halves": "LoopServe, Obs. 3: the first half's heaviest tenth of lines that the second half has",
    }
    for name in recorder.found:
        if name.startswith(("window", "answer")):
            what = f"the prompt's last {WINDOW} rows" if name.startswith("window") else f"the answer's first {BLOCK}"
            where = f"answers of {2 * BLOCK} tokens and more" if "long" in name else f"question at {name.split()[-1]}"
            names[name] = f"LoopServe, Fig. 4 and 5a: of an answer's {BUDGET} keys, those of {what} ({where})"
        elif name.startswith("blocks"):
            names[name] = f"LoopServe, Fig. 5b: keys shared by stretches of {BLOCK} steps, {name[7:]}"
    for name, text in names.items():
        if recorder.found[name]:
            print(said(text, recorder.found[name]))
    overlap = torch.cat(recorder.found["overlap"])
    print(said(f"PrHS, Table VII: of {SHARED} keys, those of another step up to {BLOCK - 1} away", [overlap]))
    for name in ("query", "key"):
        cosine = torch.cat(recorder.found[name])
        together = torch.corrcoef(torch.stack([cosine, overlap]))[0, 1]
        alike = overlap[cosine >= torch.quantile(cosine[:200_000], 0.75)].mean()
        print(f"  by {name}: correlation with that share {together:.2f}; share of the most alike quarter {alike:.2f}")


if __name__ == "__main__":
    main()
