"""Families of queries and keys that no selection rule was made for; their numbers and seeds are frozen.

Every family is one text read by many heads. The text is a walk over topics: segments of geometric length, each on a new
topic near the last one or on an earlier topic again. Per KV head a key holds its topic, its token and noise, and a part
that all keys share, under RoPE (theta 500,000, half-split pairs); the first four keys (sinks) and a few others (heavy
columns, the head's own) hold a direction besides that RoPE hardly turns.

A query asks for several things at once, in logits that are drawn for its head: the sinks' direction, what is near (the
shared part: under RoPE its product falls with the logarithm of the distance), what is about the topic it stands in, and
an earlier place that it follows: a pointer that moves along with the row for a while and then jumps. White noise makes
the rest, which is why the weight outside grows with the context.

Draws are made on the CPU, so that a seed gives the same text everywhere; sums are made on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

THETA = 500_000.0
SINKS = 4
TOPIC, SHARED = 0.85, 0.5  # of a key's content, and of what all keys share
STILL = 4  # pairs of channels of least frequency, of sinks and columns alone
LOW = 2 / 3  # pairs from here on carry topics to any distance
SEED = 20_261_123

Range = tuple[float, float]


@dataclass(frozen=True)
class Family:
    """How a text goes and what heads ask for. Ranges are of logits, drawn evenly for each query head.

    ``segment``: mean tokens of a topic's segment; ``returns``: share of segments on an earlier topic; ``topics``: those
    of the whole text, 0 for as many as the walk meets; ``run``: mean rows that follow a pointer; ``theme`` and
    ``token``: shares of a key's content that its topic gives, and its token, which comes again where the topic does;
    ``columns``: heavy columns of a KV head; ``rare``: share of rows that ask for one earlier key, with ``needle``
    logits.
    """

    segment: float
    returns: float
    topics: int
    run: float
    theme: float
    token: float
    columns: int
    sink: Range
    near: Range
    topic: Range
    follow: Range
    white: Range
    rare: float = 0.0
    needle: Range = (0.0, 0.0)


FAMILIES = {
    "topics": Family(256, 0.5, 0, 256, 0.8, 0.1, 12, (9.0, 12.5), (4.0, 9.0), (2.0, 6.0), (10.0, 18.0), (0.2, 0.4)),
    "needles": Family(
        256, 0.3, 0, 256, 0.3, 0.5, 8, (10.0, 13.0), (6.0, 10.0), (0.0, 2.0), (0.0, 3.0), (0.2, 0.5), 0.1, (14.0, 18.0)
    ),
    "code": Family(48, 0.8, 64, 48, 0.25, 0.7, 8, (9.5, 12.5), (5.0, 9.0), (1.0, 3.0), (12.0, 20.0), (0.2, 0.5)),
    "flat": Family(256, 0.5, 0, 256, 0.4, 0.3, 2, (3.0, 6.0), (0.5, 3.0), (0.0, 1.0), (0.0, 2.0), (0.3, 0.8)),
}


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values of one layer: ``q`` [heads, n, head_dim], ``k`` and ``v`` [kv_heads, n, head_dim]."""

    q: Tensor
    k: Tensor
    v: Tensor


def generate(
    name: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    length: int,
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
) -> Heads:
    """The family ``name`` at ``length`` tokens. ``head_dim`` is even and at least 16. A head's draws hang on the seed
    and its number alone: with as many query heads to a KV head, fewer heads are the first ones of more."""
    family = FAMILIES[name]
    with torch.device("cpu"):  # whatever the caller's default is
        topics, tokens, parents = _text(family, length, _generator(seed, 0))
        turn = _Turn(head_dim, length, torch.device(device))
        root = math.sqrt(head_dim)
        k = torch.empty(kv_heads, length, head_dim, dtype=dtype, device=device)
        v = torch.empty_like(k)
        q = torch.empty(heads, length, head_dim, dtype=dtype, device=device)
        for head in range(kv_heads):
            rng = _generator(seed, 1000 + head)
            content = _content(family, topics, tokens, parents, turn, rng).to(device)
            shared, still = turn.shared(rng), turn.still(rng)
            keys = turn(root * (TOPIC * content + SHARED * shared))
            columns = torch.randperm(length, generator=rng)[: family.columns]
            keys[:SINKS] = 0.3 * keys[:SINKS] + root * still
            keys[columns.to(device)] += (
                root * (0.85 + 0.2 * torch.rand(columns.numel(), 1, generator=rng)).to(device) * still
            )
            k[head] = keys.to(dtype)
            words = torch.randn(int(topics.max()) + 1, head_dim, generator=rng)[topics]
            v[head] = (0.7 * words + 0.7 * torch.randn(length, head_dim, generator=rng)).to(device, dtype)
            for one in range(head * (heads // kv_heads), (head + 1) * (heads // kv_heads)):
                q[one] = _queries(family, content, shared, still, turn, _generator(seed, 2000 + one)).to(dtype)
    return Heads(q, k, v)


def _queries(
    family: Family, content: Tensor, shared: Tensor, still: Tensor, turn: _Turn, rng: torch.Generator
) -> Tensor:
    """One head's queries [n, head_dim], fp32, for logits that are divided by sqrt(head_dim)."""
    n, head_dim = content.shape
    sink, near, topic, follow, white = (
        low + (high - low) * float(torch.rand((), generator=rng))
        for low, high in (family.sink, family.near, family.topic, family.follow, family.white)
    )
    place = _followed(n, family.run, rng).to(content.device)
    low = content * turn.low
    q = turn((near / SHARED) * shared + (topic / TOPIC) * low / low.norm(dim=1, keepdim=True).clamp(min=1e-6))
    q += (follow / TOPIC) * turn(content)[place] + sink * still
    q += white * torch.randn(n, head_dim, generator=rng).to(content.device)
    if family.rare:
        rows = (torch.rand(n, generator=rng) < family.rare).to(content.device)
        wanted = (torch.rand(n, generator=rng) * torch.arange(n)).long().to(content.device)
        logits = family.needle[0] + (family.needle[1] - family.needle[0]) * torch.rand(n, 1, generator=rng)
        q += rows[:, None] * (logits.to(content.device) / TOPIC) * turn(content)[wanted]
    return q


def _text(family: Family, length: int, rng: torch.Generator) -> tuple[Tensor, Tensor, list[int]]:
    """Topic and token of every position, int64 [n] each, and of every topic the one it is near to (-1: none)."""
    starts = (torch.rand(length, generator=rng) < 1 / family.segment).tolist()
    draws = torch.rand(length, 2, generator=rng).tolist()
    topics, offsets, parents = [], [], [-1]
    current, offset = 0, 0
    for start, (again, which) in zip(starts, draws):
        if start:
            offset = 0
            known = len(parents)
            if again < family.returns or (family.topics and known >= family.topics):
                current = min(known - 1, int(which * known))
            else:
                parents.append(current)
                current = known
        topics.append(current)
        offsets.append(offset)
        offset += 1
    topic, token = torch.tensor(topics), torch.tensor(offsets)
    return topic, topic * 1021 + token, parents  # an offset beyond 1020 meets another topic's token: harmless


def _content(
    family: Family, topics: Tensor, tokens: Tensor, parents: list[int], turn: _Turn, rng: torch.Generator
) -> Tensor:
    """What keys hold of their topic, their token and noise, before RoPE: [n, head_dim] of norm 1."""
    head_dim = turn.head_dim
    fresh = torch.randn(len(parents), head_dim, generator=rng)
    for topic, parent in enumerate(parents):
        if parent >= 0:
            fresh[topic] = 0.6 * fresh[parent] + 0.8 * fresh[topic]
    _, which = tokens.unique(return_inverse=True)
    words = torch.randn(int(which.max()) + 1, head_dim, generator=rng)
    noise = torch.randn(tokens.numel(), head_dim, generator=rng)
    parts = ((family.theme, fresh[topics]), (family.token, words[which]), (1 - family.theme - family.token, noise))
    mixed = sum(math.sqrt(share) * part for share, part in parts)
    assert isinstance(mixed, Tensor)
    mixed *= turn.moving.cpu()
    return mixed / mixed.norm(dim=1, keepdim=True)


def _followed(n: int, run: float, rng: torch.Generator) -> Tensor:
    """The place that each row follows, before its own but for row 0: int64 [n]."""
    starts = torch.rand(n, generator=rng) < 1 / run
    starts[0] = True
    first = torch.where(starts, torch.arange(n), 0).cummax(0).values
    target = (torch.rand(n, generator=rng) * torch.arange(n)).long()[first]
    return target + torch.arange(n) - first


class _Turn:
    """RoPE over ``length`` positions, and what of a head's channels is for what."""

    def __init__(self, head_dim: int, length: int, device: torch.device) -> None:
        self.head_dim, self.device = head_dim, device
        pairs = head_dim // 2
        frequency = THETA ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
        angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
        self.cos, self.sin = angle.cos().float().to(device), angle.sin().float().to(device)
        pair = torch.arange(pairs)
        still = pair >= pairs - STILL
        self.moving = (~still).float().repeat(2).to(device)
        self.low = ((pair >= int(LOW * pairs)) & ~still).float().repeat(2).to(device)

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [n, head_dim] turned to the positions 0 .. n - 1."""
        a, b = x.chunk(2, 1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], 1)

    def shared(self, rng: torch.Generator) -> Tensor:
        """A vector [head_dim] of norm 1, of one size in every pair that moves."""
        phase = 2 * math.pi * torch.rand(self.head_dim // 2, generator=rng)
        vector = torch.cat([phase.cos(), phase.sin()]) * self.moving.cpu()
        return (vector / vector.norm()).to(self.device)

    def still(self, rng: torch.Generator) -> Tensor:
        """A vector [head_dim] of norm 1 in the pairs that hardly turn."""
        vector = torch.randn(self.head_dim, generator=rng) * (1 - self.moving.cpu())
        return (vector / vector.norm()).to(self.device)


def _generator(seed: int, part: int) -> torch.Generator:
    return torch.Generator().manual_seed(SEED + 1_000_003 * seed + part)
