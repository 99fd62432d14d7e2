"""What a first level over block summaries rules out: runs of blocks against codes of 4 bits (docs/tiers.md).

    python benchmarks/block_levels.py [--tokens 30000] [--take 32]

Keys of the trained reference model (one long prompt a task, the queries of the steps that follow), of walks of topics,
and noise. For the best 1 / ``take`` of all blocks: the share of blocks that have to be scored by their summaries to be
sure of them, when runs of 8 or 16 blocks are judged by their least and greatest values, and when every block is judged
by its summary in 4 or 8 bits. The threshold is the best one there is: that of the last block taken.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from tiers import add_topics
from torch import Tensor

from saccade import LLM, SamplingParams
from saccade.engine.observing import observing
from saccade.engine.watch.observe import AttentionCall
from saccade.eval.suite import make
from saccade.kv.summaries import summarize


def recorded(tokens: int, task: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Queries [heads, head_dim] and keys [kv_heads, n, head_dim] of decode steps."""
    found: list[tuple[Tensor, Tensor]] = []

    def see(call: AttentionCall) -> None:
        if call.q.shape[1] == 1 and len(found) < 12:
            found.append((call.q[:, 0].clone(), call.kv.keys()))

    with LLM("reference", dtype="float32", enable_prefix_caching=False) as llm:
        turn = make(task, tokens, 1).turns[0]
        ids = llm.encode(" ".join(turn.context) + turn.question)
        with observing(llm.engine, see):
            llm.generate([ids], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    yield from found


def made_up(tokens: int, topics: bool) -> Iterator[tuple[Tensor, Tensor]]:
    for seed in range(4):
        rng = torch.Generator().manual_seed(seed)
        keys, q = torch.randn(2, tokens, 64, generator=rng), torch.randn(8, 64, generator=rng)
        if topics:
            add_topics(keys, q[:, None], rng)
            q += 0.5 * keys[:, tokens // 2].repeat_interleave(4, 0)
        yield q, keys


def shares(q: Tensor, keys: Tensor, kind: str, size: int, take: int) -> list[float]:
    """Of runs of 8 and 16 blocks, and of codes of 4 and 8 bits."""
    kv_heads, count = keys.shape[0], keys.shape[1] // size // 16 * 16
    high, low = summarize(keys[:, : count * size].unflatten(1, (count, size)), kind)
    by_head = q.float().unflatten(0, (kv_heads, -1))
    up, down = by_head.clamp(min=0).mean(1), by_head.clamp(max=0).mean(1)

    def scores(high: Tensor, low: Tensor) -> Tensor:
        return torch.einsum("gd,gnd->gn", up, high) + torch.einsum("gd,gnd->gn", down, low)

    true = scores(high, low)
    least = true.topk(max(1, count // take), 1).values[:, -1:]
    found = []
    for run in (8, 16):
        bound = scores(high.unflatten(1, (-1, run)).amax(2), low.unflatten(1, (-1, run)).amin(2))
        found.append((bound >= least).float().mean().item())
    values, weights = torch.cat([high, low], -1), torch.cat([up, down], -1)
    mean, deviation = values.mean(1, keepdim=True), values.std(1, keepdim=True).clamp(min=1e-6)
    scaled, weights = (values - mean) / deviation, weights * deviation[:, 0]
    base = true - torch.einsum("gc,gnc->gn", weights, scaled)
    for bits in (4, 8):
        floor = scaled.amin(-1, keepdim=True)
        step = (scaled.amax(-1, keepdim=True) - floor) / (2**bits - 1)
        rounded = floor + step * ((scaled - floor) / step).round()
        bound = base + torch.einsum("gc,gnc->gn", weights, rounded) + weights.abs().sum(-1)[:, None] * step[..., 0] / 2
        found.append((bound >= least).float().mean().item())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--take", type=int, default=32)
    options = parser.parse_args()
    sets = {
        "reference model, `multikey`": list(recorded(options.tokens, "multikey")),
        "reference model, `words`": list(recorded(options.tokens, "words")),
        "walk of topics": list(made_up(options.tokens, True)),
        "noise": list(made_up(options.tokens, False)),
    }
    print("| keys | summaries | runs of 8 | runs of 16 | 4 bits | 8 bits |", "|---" * 6 + "|", sep="\n")
    for name, pairs in sets.items():
        for kind in ("minmax", "cuboid"):
            rows = torch.tensor([shares(q, keys, kind, 32, options.take) for q, keys in pairs]).mean(0)
            print(f"| {name} | `{kind}` | {' | '.join(f'{one:.0%}' for one in rows.tolist())} |", flush=True)


if __name__ == "__main__":
    main()
