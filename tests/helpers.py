"""Seeded structured attention data, brute-force oracles, and calls of methods over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Method, Query
from saccade.methods.outside import load_outside
from saccade.ops import Call, run
from saccade.selection import Band, Blocks, Dense, Lines, Mixed, Ranking, Selection, Shape, Tokens, Tri

load_outside()  # tests name the methods of saccade-contrib, too

# Over a phase of a report: what hangs on the machine, and on who else is in a step.
UNTIMED = {"seconds": 0, "tokens_per_second": 0, "paths": []}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Planted:
    """What the attention of a head should look like. ``strength`` is the logit that a planted pair gains."""

    sink: float = 4.0
    columns: tuple[int, ...] = ()
    slashes: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()  # blocks of 32 keys that every query likes
    strength: float = 8.0


def planted_heads(
    heads: int,
    kv_heads: int,
    n: int,
    head_dim: int = 32,
    seed: int = 0,
    pattern: Planted = Planted(columns=(7, 201), slashes=(13,), blocks=(3,)),
    noise: float = 0.3,
    equal_heads: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """``q`` [heads, n, d], ``k``, ``v`` [kv_heads, n, d], whose logits q.k/sqrt(d) show a sink, vertical and
    slash lines and hot blocks, over noise. Directions 0..2 of the head carry sink, columns and blocks; the rest code
    positions for the slashes. ``equal_heads`` makes the query heads of a group equal."""
    made = _planted_heads(heads, kv_heads, n, head_dim, seed, pattern, noise, equal_heads)
    return made[0].clone(), made[1].clone(), made[2].clone()


@lru_cache(maxsize=128)  # many tests ask for the same ones
def _planted_heads(
    heads: int, kv_heads: int, n: int, head_dim: int, seed: int, pattern: Planted, noise: float, equal_heads: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rng = generator(seed)
    unit = math.sqrt(math.sqrt(head_dim))  # q and k each carry the root of the scale
    code_dim = head_dim - 3
    codes = torch.randn(kv_heads, n + 4096, code_dim, generator=rng)
    codes = codes / codes.norm(dim=-1, keepdim=True)
    k = noise * torch.randn(kv_heads, n, head_dim, generator=rng)
    group = heads // kv_heads
    q = noise * torch.randn(kv_heads, 1 if equal_heads else group, n, head_dim, generator=rng)
    q[..., 0] += unit
    k[:, 0, 0] += pattern.sink * unit
    q[..., 1] += unit
    for column in pattern.columns:
        if column < n:
            k[:, column, 1] += pattern.strength * unit
    q[..., 2] += unit
    for block in pattern.blocks:
        k[:, block * 32 : (block + 1) * 32, 2] += 0.6 * pattern.strength * unit
    k[..., 3:] += codes[:, 4096:] * unit
    for slash in pattern.slashes:
        q[..., 3:] += pattern.strength * unit * codes[:, None, 4096 - slash : 4096 - slash + n]
    if equal_heads:
        q = q.expand(kv_heads, group, n, head_dim)
    v = torch.randn(kv_heads, n, head_dim, generator=rng) + torch.linspace(-1, 1, n)[None, :, None]
    return q.reshape(heads, n, head_dim).contiguous(), k, v


def brute_force(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Masked softmax attention in float64, one head and row at a time in meaning: (out, lse)."""
    heads, kv_heads = q.shape[0], k.shape[0]
    of = torch.arange(heads) // (heads // kv_heads)
    scores = q.double() @ k.double()[of].transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.where(mask, torch.exp(scores - lse[..., None]), 0.0)
    weights = torch.where(torch.isneginf(lse)[..., None], 0.0, weights)
    return weights @ v.double()[of], lse


def mass_of(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """Share of the dense causal softmax that ``mask`` [heads, rows, n] keeps, for the last rows: [heads, rows]."""
    dense = Shape.suffix(q.shape[0], k.shape[0], q.shape[1], k.shape[1]).causal_mask()
    full = brute_force(q, k, k, dense[None].expand_as(mask))[1]
    kept = brute_force(q, k, k, mask)[1]
    return torch.exp(kept - full)


def random_selection(kind: str, shape: Shape, units: int, rng: torch.Generator, block_size: int = 32) -> Selection:
    """A random selection of one kind, at times with empty lists."""
    q_blocks = (shape.q_start + shape.q_len - 1) // block_size - shape.q_start // block_size + 1
    k_blocks = -(-shape.k_len // block_size)
    if kind == "dense":
        return Dense(shape)
    if kind == "band":
        return Band(shape, window=int(torch.randint(1, shape.k_len + 5, (), generator=rng)), sinks=3)
    if kind == "tri":
        dense_rows = int(torch.randint(0, shape.q_len + 3, (), generator=rng))
        return Tri(
            shape, window=int(torch.randint(1, shape.k_len + 5, (), generator=rng)), sinks=3, dense_rows=dense_rows
        )
    if kind == "blocks":
        return Blocks.from_block_mask(shape, block_size, torch.rand(units, q_blocks, k_blocks, generator=rng) < 0.4)
    if kind == "lines":
        last = shape.q_start + shape.q_len
        columns = [torch.randperm(last, generator=rng)[: last // 7] for _ in range(units)]
        distances = [torch.randperm(last, generator=rng)[: last // 9 + 1] for _ in range(units)]
        return Lines.from_lists(shape, columns, distances)
    if kind == "mixed":
        parts = tuple(random_selection(kind, shape, units, rng, block_size) for kind in ("blocks", "lines"))
        return Mixed(shape, parts, torch.randint(0, 2, (shape.heads,), generator=rng))
    if kind == "tokens":
        return Tokens.from_mask(shape, torch.rand(units, shape.q_len, shape.k_len, generator=rng) < 0.2)
    if kind == "ranking":
        last = (shape.q_start + shape.q_len - 1) // block_size
        order = torch.stack([torch.randperm(last, generator=rng)[: max(0, last - 1)] for _ in range(units)])
        always = torch.full((units, 1), last)
        return Ranking(shape, block_size, always.int(), order.int(), epsilon=1.0)
    raise ValueError(kind)


KINDS = ("dense", "band", "tri", "blocks", "lines", "mixed", "tokens", "ranking")


def run_method(
    method: Method, phase: str, q: Tensor, view: KVView, rows: int, **options: Any
) -> tuple[Tensor, Tensor, Selection]:
    """Select for the last ``rows`` rows of ``q`` and attend on the reference backend: (out, lse, what was read)."""
    tail = q[:, -rows:]
    if phase == "prefill":
        selection = method.select_prefill(Chunk.of(tail, view))
    else:
        query = Query.of(tail, view)
        state = method.begin(Chunk.of(tail, view))
        selection = method.select_decode(query, state)
    selection.check()
    ran = run(Call.of(tail, view, selection, **options), "reference")
    out, lse = ran.out, ran.lse
    assert ran.used is not None
    ran.used.check()
    return out, lse, ran.used


def phases_and_rows(method: Method, rows: Sequence[int] = (1, 5, 200)) -> list[tuple[str, int]]:
    """The calls a method serves: any appended chunk in prefill, one row in decode."""
    calls = [("prefill", count) for count in rows] if "prefill" in method.phases else []
    return calls + ([("decode", 1)] if "decode" in method.phases else [])


def call(heads, kv_heads, q_len, n, head_dim, seed, block_size=32):
    q, k, v = planted_heads(heads, kv_heads, n, head_dim, seed)
    return q[:, n - q_len :], k, v, KVView.from_tensors(k, v, block_size, shuffle_seed=seed)


def arkvale_scores(q: torch.Tensor, k: torch.Tensor, size: int) -> torch.Tensor:
    """Criticality by the formula, a channel's interval at a time: [heads, full blocks]."""
    full = k.shape[1] // size
    keys = k[:, : full * size].unflatten(1, (full, size))
    center = (keys.amax(2) + keys.amin(2)) / 2
    spread = (center[:, :, None] - keys).abs().mean(2)
    group = torch.arange(q.shape[0]) // (q.shape[0] // k.shape[0])
    bounds = [q[:, None] * (center + sign * spread)[group] for sign in (1, -1)]  # [heads, full, d]
    return torch.maximum(*bounds).sum(-1)
