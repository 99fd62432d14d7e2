"""Which facts ``infllm`` loses, and at which of its choices: of each question of ``saccade demo`` the block with the
key that its last row looks for, and its place among those that may be chosen, in the layer that matches.

    python benchmarks/infllm_facts.py [--characters 33000] [--seed 1] [--facts 10]

Places count from 1. ``chosen``: as the method ranks them, whose representatives are voted for by the first rows of the
chunk. ``paper``: by the paper's r_m, the mean of the 4,096 queries after each key. ``paper, 512``: these for the last
512 queries together, as the authors' code has it. ``itself``: by the rows of the last query block. In float64.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade import LLM, SamplingParams
from saccade.engine.observing import observing
from saccade.engine.watch.observe import AttentionCall
from saccade.facts import is_correct, make_facts, plant
from saccade.methods.infllm import InfLLM
from saccade.models.reference.layout import LAYERS
from saccade.prose import generate

AUTHORS_CHUNK = 512


class Matching:
    """An observer of the last layer, which has one head: all queries so far, and the last chunk of a prompt."""

    def __init__(self) -> None:
        self.queries = torch.zeros(0, 0, dtype=torch.float64)
        self.keys = torch.zeros(0, 0, dtype=torch.float64)
        self.start = 0

    def __call__(self, call: AttentionCall) -> None:
        if call.layer != LAYERS - 1:
            return
        shape, q = call.selection.shape, call.q[0].double()
        before = self.queries[: shape.q_start] if self.queries.numel() else q[:0]
        self.queries = torch.cat([before, q])
        if call.phase == "prefill":
            self.start, self.keys = shape.q_start, call.kv.keys(0, shape.k_len)[0].double()


def votes(keys: Tensor, queries: Tensor, start: int, window: int) -> Tensor:
    """[keys]: the mean product of each key with the ``window`` queries after it, of those from ``start`` on."""
    sums = pad(queries.cumsum(0), (0, 0, 1, 0))
    low = (torch.arange(len(keys)) + 1 - start).clamp(0, len(queries) - 1)
    high = (low + window).clamp(max=len(queries))
    return (keys * ((sums[high] - sums[low]) / (high - low)[:, None])).sum(-1)


def place(method: InfLLM, keys: Tensor, voted: Tensor, asked: Tensor, target: int) -> tuple[int, int]:
    """The block ``target``'s place among those that ``asked`` may choose from, and how many these are; 0 for one that
    is read in any case."""
    size = method.block_size
    blocks = -(-len(keys) // size)
    room = blocks * size - len(keys)
    best = pad(voted, (0, room), value=-torch.inf).unflatten(0, (blocks, size)).topk(method.representatives, -1)
    rows = pad(keys, (0, 0, 0, room)).unflatten(0, (blocks, size))
    memory = rows.gather(1, best.indices[..., None].expand(-1, -1, rows.shape[-1])).sum(1)
    first, last, _ = method._counts()
    free = range(first, blocks - last)
    if target not in free:
        return 0, len(free)
    scores = memory @ asked
    return 1 + int((scores[list(free)] > scores[target]).sum()), len(free)


def line(seen: Matching, method: InfLLM) -> str:
    """The cells of a question whose rows were the last ones."""
    keys, start = seen.keys, seen.start
    queries = seen.queries[: len(keys)]
    weights = (queries[-1] @ keys.T / keys.shape[-1] ** 0.5).softmax(-1)
    weights[0] = 0  # the sink
    key = int(weights.argmax())
    target, block = key // method.block_size, (len(keys) - 1) // method.block_size * method.block_size
    own, authors = queries[max(block, start) :].sum(0), queries[-AUTHORS_CHUNK:].sum(0)
    paper = votes(keys, queries, 0, method.window)
    chosen = votes(keys, queries[start:], start, method.window)
    ways = ((chosen, own), (paper, own), (paper, authors), (keys @ own, own))
    found = [place(method, keys, voted, asked, target) for voted, asked in ways]
    cells = [f"{at} of {free}" if at else "window" for at, free in found]
    return " | ".join([f"{len(keys) - start}", f"{key} | {float(weights[key]):.3f}", *cells])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--characters", type=int, default=33_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--facts", type=int, default=10)
    given = parser.parse_args()
    planted, method, seen = make_facts(given.facts, given.seed), InfLLM(), Matching()
    document = plant(generate(given.characters, given.seed), planted, given.seed)
    llm = LLM("retriever", enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=40, stop=["\n", ". "])
    print("| | right | rows of the chunk | key | weight | chosen | paper | paper, 512 | itself |\n" + "|---" * 9 + "|")
    with llm.session("prefill=infllm") as session, observing(llm.engine, seen):
        for number, fact in enumerate(planted):
            prompt = f"{'' if number else document}\n{fact.question}"
            (*_, step) = session.stream(prompt, params)
            right = "yes" if step.outcome is not None and is_correct(step.outcome.text, fact) else "no"
            print(f"| {fact.subject} | {right} | {line(seen, method)} |", flush=True)


if __name__ == "__main__":
    main()
