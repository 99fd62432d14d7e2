"""Whether a verification's own weights help the next draft: acceptance of ``quest`` as it is, beside ``quest`` that
also reads the blocks that weighed most in the last verified row, at the same number of keys.

The reference model answers COUNT prompts of each task by 32 tokens under ``lossless(tokens=4, lookup=0)``. An observer
takes the true weights of verified rows, by layer and KV head, and the draft's selection is joined with the heaviest
blocks: an experiment, no method. ``64 + 4`` reads at most what a budget of 128 does, ``128 + 8`` what one of 256 does.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from saccade import LLM, SamplingParams
from saccade.engine.observe import AttentionCall, observing
from saccade.engine.truth import true_rows
from saccade.eval.render import render
from saccade.eval.suite.tasks import make
from saccade.methods.quest import Quest
from saccade.selection import Blocks, Dense

SIZE = 16
ARMS = ((64, 0), (64, 4), (128, 0), (128, 8), (256, 0))  # budget, and blocks carried over


class Carried:
    """The blocks that weighed most in the last verified row, ``count`` by layer and KV head."""

    def __init__(self) -> None:
        self.count = 0
        self.blocks: dict[int, list[torch.Tensor]] = {}
        self.select = Quest.select_decode

    def begin(self, count: int) -> None:
        self.count, self.blocks = count, {}

    def look(self, call: AttentionCall) -> None:
        if not self.count or call.phase != "decode" or type(call.selection) is not Dense:
            return
        found = []
        for true in true_rows(call):
            weights = true.weights().mean(0)[-1]
            sums = weights[: len(weights) // SIZE * SIZE].view(-1, SIZE).sum(1)
            found.append(sums.topk(self.count).indices.int())
        self.blocks[call.layer] = found

    def chosen(self, method: Quest, query: Any, state: Any) -> Any:
        own = self.select(method, query, state)
        if query.layer not in self.blocks or not isinstance(own, Blocks):
            return own
        lists = zip(own.indices.split(own.offsets.diff().tolist()), self.blocks[query.layer])
        return Blocks.from_lists(own.shape, SIZE, [torch.cat(pair) for pair in lists])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=6)
    parser.add_argument("--length", type=int, default=4000)
    parser.add_argument("--tasks", default="span_copy,vt")
    given = parser.parse_args()
    carried = Carried()
    Quest.select_decode = lambda method, query, state: carried.chosen(method, query, state)  # type: ignore[assignment]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    llm = LLM("reference", dtype="bfloat16", max_model_len=given.length + 300, max_requests=1, device="cpu")
    with llm, observing(llm.engine, carried.look):
        for task in given.tasks.split(","):
            prompts = [render(llm.tokenizer, [], make(task, given.length, n).turns[0]).ids for n in range(given.count)]
            for budget, count in ARMS:
                accepted = drafted = 0
                for ids in prompts:
                    carried.begin(count)
                    policy = f"lossless(draft=quest(budget={budget}, dense_layers=0), tokens=4, lookup=0)"
                    said = llm.generate(ids, params, policy=policy)[0].report["speculation"]
                    accepted, drafted = accepted + said["accepted"], drafted + said["drafted"]
                print(f"{task}, {budget} keys + {count} blocks: {accepted} of {drafted} = {accepted / drafted:.2f}")


if __name__ == "__main__":
    main()
