"""What summaries of blocks find of exact top-k's keys: the table of docs/results/claims-decode.md, LFPS.

``python benchmarks/block_summaries.py [task] [length]`` answers one sample of the suite densely, its question in decode
steps, and looks at every sixth of them: of the k heaviest keys (128, or 2 % of the context; sinks and the last six left
out), how many lie in the blocks that each summary ranks first, and how much of those keys' weight.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from functools import partial

import torch
from torch import Tensor

from saccade import LLM, SamplingParams
from saccade.engine.observing import observing
from saccade.engine.watch.observe import AttentionCall
from saccade.eval.render import render
from saccade.eval.suite import make
from saccade.kv.summaries import summarize

SINKS, LOCAL, EVERY = 4, 6, 6


def intervals(q: Tensor, blocks: Tensor, spread: float) -> Tensor:
    """ArkVale's cuboids, their spread scaled: ``q`` [heads, d], ``blocks`` [n, size, d] -> [heads, n]."""
    high, low = summarize(blocks, "cuboid")
    return q @ ((high + low) / 2).T + spread * q.abs() @ ((high - low) / 2).T


def moments(q: Tensor, blocks: Tensor, deviations: float) -> Tensor:
    return q @ blocks.mean(1).T + deviations * (q.square() @ blocks.var(1, correction=0).T).sqrt()


def best(q: Tensor, blocks: Tensor) -> Tensor:
    return torch.einsum("hd,nbd->hnb", q, blocks).amax(-1)


def channels(q: Tensor, blocks: Tensor, count: int) -> Tensor:
    keys = blocks[:, 0] - blocks[:, 0].mean(0)
    basis = torch.linalg.svd(keys[:4096], full_matrices=False).Vh[:count]
    return (q @ basis.T) @ (keys @ basis.T).T


RANKINGS = {  # name: (block size, blocks, how they are scored)
    "cuboid of 16": (16, 32, partial(intervals, spread=1.0)),
    "cuboid of 16, 0.35 of its spread": (16, 32, partial(intervals, spread=0.35)),
    "mean and 1.5 deviations of 16": (16, 32, partial(moments, deviations=1.5)),
    "best key of 16": (16, 32, best),
    "16 principal channels of each key": (1, 512, partial(channels, count=16)),
    "cuboid of 8": (8, 64, partial(intervals, spread=1.0)),
    "mean of 4": (4, 128, partial(moments, deviations=0.0)),
    **{f"mean of 8, {n} blocks": (8, n, partial(moments, deviations=0.0)) for n in (64, 96, 128)},
}


def main(task: str, length: int) -> None:
    llm = LLM("reference", dtype="bfloat16", enable_prefix_caching=False)
    found: dict[str, list[Tensor]] = defaultdict(list)

    def look(call: AttentionCall) -> None:
        n = call.kv.length
        if call.phase != "decode" or n % EVERY:
            return
        q, keys = call.q[:, 0].float(), call.kv.keys(0, n)[0].float()  # the reference model has one KV head
        weights = torch.softmax(q @ keys.T * call.spec.scale, -1)
        weights[:, :SINKS] = weights[:, n - LOCAL :] = 0.0
        top = weights.topk(max(128, n // 50) - LOCAL, -1)
        for name, (size, count, score) in RANKINGS.items():
            scores = score(q, keys[: n // size * size].unflatten(0, (-1, size)))
            chosen = torch.zeros_like(scores).scatter_(1, scores.topk(count, -1).indices, 1.0)
            inside = torch.nn.functional.pad(chosen.repeat_interleave(size, 1), (0, n % size)).gather(1, top.indices)
            share = (inside * top.values).sum(1) / top.values.sum(1)
            found[name].append(torch.stack([inside.mean(1), share], 1).mean(0))

    turn = make(task, length, 0, 0).turns[0]
    prompt = render(llm.tokenizer, [], turn)
    params = SamplingParams(temperature=0.0, max_tokens=turn.max_new_tokens)
    with observing(llm.engine, look), llm.session("dense") as session:
        session.complete(prompt.ids, params, decoded=len(prompt.ids) - prompt.cut)
    for name, rows in found.items():
        keys, weight = torch.stack(rows).mean(0).tolist()
        print(f"{name:36s} keys found {keys:.3f}, their weight {weight:.3f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "span_copy", int(sys.argv[2]) if len(sys.argv) > 2 else 8192)
