"""What prefill methods leave out of the rows at the beginning of each block of 128, beside other rows, on a model's own
attention over natural text: a head that looks a few tokens back asks for the block before its own in these rows alone.

    python benchmarks/block_starts.py smollm2 -f novel.txt --length 4096

One dense run; every method chooses for its chunks. A row is lost where its head reads less than half of its true
weight. Of each block the first 8 rows and 8 of the others are looked at, in the layers without a window of their own.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from saccade import LLM, SamplingParams
from saccade.engine.observing import observing
from saccade.engine.watch.observe import AttentionCall
from saccade.engine.watch.truth import selected_rows, true_rows
from saccade.methods.base import Chunk
from saccade.methods.policy import Policy
from saccade.prose import generate

METHODS = (
    "xattention",
    "xattention(window_blocks=2)",
    "loopserve(lines=block, window_blocks=1)",
    "loopserve(lines=block)",
    "loopserve",
    "sampled_rows(window_blocks=1)",
    "sampled_rows",
    "flexprefill",
    "flexprefill(lines=block)",
    "minference",
    "flashprefill",
    "infllm",
)
BLOCK, FIRST, LOST = 128, 8, 0.5
OTHERS = torch.arange(FIRST + 7, BLOCK, (BLOCK - FIRST) // 8)  # places in a block


class Rows:
    """An observer: of each method the pairs read, and which rows of either kind are lost."""

    def __init__(self, methods: tuple[str, ...]) -> None:
        self.methods = {text: Policy.parse(f"prefill={text}").prefill for text in methods}
        self.pairs: dict[str, list[float]] = defaultdict(list)
        self.causal: list[float] = []
        self.kept: dict[tuple[str, bool], list[Tensor]] = defaultdict(list)

    def __call__(self, call: AttentionCall) -> None:
        shape, spec = call.selection.shape, call.spec
        if call.phase != "prefill" or spec.window is not None:
            return
        place = shape.rows % BLOCK
        looked = (((place < FIRST) | torch.isin(place, OTHERS)) & (shape.rows >= 2 * BLOCK)).nonzero()[:, 0]
        if not looked.numel():
            return
        chunk = Chunk(call.q, call.kv, shape, spec.scale, spec.softcap, layer=call.layer)
        picked = {text: method.select_prefill(chunk) for text, method in self.methods.items()}
        self.causal.append(float(shape.causal_pairs * shape.heads))
        for text, selection in picked.items():
            self.pairs[text].append(float(selection.pairs().sum()))
        for part in true_rows(call, looked):
            weights, first = part.weights(), place[part.rows] < FIRST
            for text, selection in picked.items():
                kept = (weights * selected_rows(selection, part.heads, part.rows)).sum(-1)
                for kind in (True, False):
                    self.kept[text, kind].append(kept[:, first == kind].flatten())

    def line(self, text: str) -> str:
        first, others = (torch.cat(self.kept[text, kind]) for kind in (True, False))
        lost = [f"{100 * float((kept < LOST).double().mean()):.2f} %" for kept in (first, others)]
        mean = [f"{float(kept.double().mean()):.4f}" for kept in (first, others)]
        density = f"{100 * sum(self.pairs[text]) / sum(self.causal):.1f} %"
        return "| " + " | ".join([f"`{text}`", density, *lost, *mean]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="A checkpoint folder, what saccade fetch brought, or retriever.")
    parser.add_argument("-f", "--file", type=Path, help="UTF-8 text; made up where it is left out.")
    parser.add_argument("--length", type=int, default=4096, help="Tokens of the text.")
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="METHOD", help="Prefill methods with options.")
    given = parser.parse_args()
    text = given.file.read_text(encoding="utf-8") if given.file else generate(8 * given.length, 1)
    llm = LLM(given.model, enable_prefix_caching=False)
    ids = llm.encode(text[: 16 * given.length])[: given.length]
    rows = Rows(tuple(given.methods))
    with observing(llm.engine, rows):
        llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=1), policy="dense")
    print(f"| {given.model}, {len(ids):,} tokens | pairs read | rows 0 to 7 lost | others lost | kept | kept, others |")
    print("|---|---|---|---|---|---|")
    for one in rows.methods:
        print(rows.line(one), flush=True)


if __name__ == "__main__":
    main()
