"""The promise of certified attention, held to account: (head, step) pairs of made and of recorded queries, each with
whether its error left the bound. ``make certify`` runs 10,000 of them; the suite a few hundred.

    python tests/certified_pairs.py [PAIRS] [--epsilon 0.1] [--delta 0.1] [--length 4096] [--law certificate|normal]

``--law normal`` puts the same test to samples whose size follows the normal law, which promises nothing where few keys
have most of the weight: it only says in which families the rate is kept.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from saccade import LLM, SamplingParams
from saccade.engine.observing import observing
from saccade.engine.watch.estimates import at_most
from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Query
from saccade.methods.vattention import VAttention
from saccade.ops import Call, run

HEADS, KV_HEADS, WIDTH = 8, 2, 32
Pair = tuple[Tensor, Tensor, Tensor]  # q [heads, 1, d], k, v [kv_heads, n, d]


def flat(rng: torch.Generator, n: int) -> Pair:
    """Logits near each other, values that nearly cancel."""
    k, v = torch.randn(2, KV_HEADS, n, WIDTH, generator=rng)
    return 0.6 * torch.randn(HEADS, 1, WIDTH, generator=rng), k, v


def topics(rng: torch.Generator, n: int) -> Pair:
    """Neighbours resemble each other, and a few topics get most of the weight."""
    steps = torch.randn(KV_HEADS, n // 64 + 1, WIDTH, generator=rng).repeat_interleave(64, 1)[:, :n]
    k = steps + 0.4 * torch.randn(KV_HEADS, n, WIDTH, generator=rng)
    v = torch.randn(KV_HEADS, n, WIDTH, generator=rng) + 0.5
    return 1.5 * torch.randn(HEADS, 1, WIDTH, generator=rng), k, v


def heavy_key(rng: torch.Generator, n: int) -> Pair:
    """One key in a middle block has most of the weight, and a large value; its block's other keys point away from it,
    so that a mean says nothing of it, and the extremes of other blocks promise more."""
    q, k, v = flat(rng, n)
    for g in range(KV_HEADS):  # nobody's queries see what these keys are along
        seen = torch.linalg.qr(q[g * (HEADS // KV_HEADS) : (g + 1) * (HEADS // KV_HEADS), 0].T)[0]
        for first in range(64, n // 4, 64):
            along = torch.randn(WIDTH, generator=rng)
            along -= seen @ (seen.T @ along)
            k[g, first : first + 16] += 20 * along * (2 * (torch.arange(16)[:, None] % 2) - 1)
    at = int(torch.randint(n // 4, 3 * n // 4, (), generator=rng))
    block = slice(at // 16 * 16, at // 16 * 16 + 16)
    for g in range(KV_HEADS):
        away = q[g * (HEADS // KV_HEADS), 0]
        away = away / away.norm()
        k[g, block] -= 2.0 * away
        k[g, at] = away * (math.log(n) * WIDTH**0.5 / float(q[g * (HEADS // KV_HEADS), 0].norm()) + 2.0)
        v[g, at] = 6.0
    return q, k, v


def cancelling(rng: torch.Generator, n: int) -> Pair:
    """Every value has its opposite somewhere: the output is next to nothing beside what it is a sum of."""
    q, k, v = flat(rng, n)
    k[:, 1::2], v[:, 1::2] = k[:, 0::2][:, : n // 2], -v[:, 0::2][:, : n // 2]
    return q, k[:, torch.randperm(n, generator=rng)], v[:, torch.randperm(n, generator=rng)]


def heavy_tails(rng: torch.Generator, n: int) -> Pair:
    """Norms of keys and values without a variance: rare ones are many times the rest."""
    q, k, v = flat(rng, n)
    tail = torch.rand(KV_HEADS, n, 1, generator=rng).clamp(min=1e-4)
    return q, k * tail.rsqrt().clamp(max=6.0), v / torch.rand(KV_HEADS, n, 1, generator=rng).clamp(min=1e-3)


MADE = {"flat": flat, "topics": topics, "heavy_key": heavy_key, "cancelling": cancelling, "heavy_tails": heavy_tails}


@dataclass
class Count:
    """Of one family: pairs, those whose error left the bound, by what gave the bound, and keys read."""

    pairs: int = 0
    broken: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    read: float = 0.0
    worst: float = 0.0

    def add(self, errors: Tensor, epsilon: float, certified: dict[str, int], density: float) -> None:
        self.pairs += errors.numel()
        self.broken += int((errors > epsilon).sum())
        self.read += density * errors.numel()
        self.worst = max(self.worst, float(errors.max()))
        for name, heads in certified.items():
            self.kinds[name] = self.kinds.get(name, 0) + heads

    def holds(self, delta: float) -> bool:
        """Whether as many broken ones are what chance allows once in 1,000 if each breaks with ``delta``."""
        return 1 - at_most(self.broken - 1, self.pairs, delta) > 1e-3


def true_output(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention [heads, d] and the sum of weight times norm of value [heads], in float64."""
    weights = torch.softmax(q[:, 0].double().unflatten(0, (k.shape[0], -1)) @ k.double().mT * scale, -1)
    return (weights @ v.double()).flatten(0, 1), (weights @ v.double().norm(dim=-1)[..., None]).flatten()


def check(method: VAttention, pair: Pair, count: Count, scale: float | None = None) -> None:
    """One step of all heads."""
    q, k, v = pair
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kv = KVView.from_tensors(k, v, 32, shuffle_seed=1)
    query = Query.of(q, kv, scale)
    selection = method.select_decode(query, method.begin(Chunk.of(q, kv, scale)))
    out = run(Call.of(q, kv, selection, scale=scale), "auto").out[:, 0]
    true, norm = true_output(q, k, v, scale)
    errors = (out.double() - true).norm(dim=-1) / norm
    density = float(selection.pairs().double().mean()) / k.shape[1]
    assert not method.certify or sum(query.cost.certified.values()) == q.shape[0]
    count.add(errors, method.epsilon, query.cost.certified, density)


def recorded(llm: LLM, prompt: list[int], steps: int) -> Iterator[tuple[Pair, float]]:
    """Decode steps of a model, all layers: queries, keys and values, and what logits are scaled by."""
    calls = []

    def look(call):
        if call.phase == "decode":
            n = call.selection.shape.k_len
            calls.append(
                ((call.q.float().clone(), call.kv.keys(0, n).float(), call.kv.values(0, n).float()), call.spec.scale)
            )

    with observing(llm.engine, look):
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True))
    yield from calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="?", type=int, default=10_000)
    parser.add_argument("--epsilon", type=float, default=0.1)
    parser.add_argument("--delta", type=float, default=0.1)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--law", choices=("certificate", "normal"), default="certificate")
    given = parser.parse_args()
    each = -(-given.pairs // (len(MADE) + 1))
    rng, counts = torch.Generator().manual_seed(0), {}
    settings = {"epsilon": given.epsilon, "delta": given.delta, "certify": given.law == "certificate"}
    for name, made in MADE.items():
        counts[name] = Count()
        while counts[name].pairs < each:
            check(VAttention(**settings, seed=counts[name].pairs), made(rng, given.length), counts[name])
    counts["recorded"] = Count()
    llm, seed = LLM("reference", dtype="float32", max_model_len=given.length + 64, enable_prefix_caching=False), 0
    while counts["recorded"].pairs < each:
        prompt = torch.randint(10, 2000, (given.length,), generator=rng) % llm.model.spec.vocab_size
        for pair, scale in recorded(llm, prompt.tolist(), 16):
            seed += 1
            if counts["recorded"].pairs < each:
                check(VAttention(**settings, seed=seed), pair, counts["recorded"], scale)
    print(f"epsilon {given.epsilon}, delta {given.delta}, {given.length} keys, {given.law}")
    for name, one in counts.items():
        kinds = ", ".join(f"{kind} {heads}" for kind, heads in sorted(one.kinds.items()) if heads)
        print(
            f"{name:12} {one.pairs} pairs, {one.broken} broken, worst error {one.worst:.3f}, values read "
            f"{100 * one.read / one.pairs:.1f} % ({kinds}): {'holds' if one.holds(given.delta) else 'FAILS'}"
        )
    if given.law == "certificate" and not all(one.holds(given.delta) for one in counts.values()):
        raise SystemExit("the promise does not hold")


if __name__ == "__main__":
    main()
