"""A row of LFPS over random keys and tables."""

from __future__ import annotations

import torch
from helpers import generator

from saccade.kv.view import KVView
from saccade.methods.base import Query
from saccade.methods.lfps import LFPS
from saccade.methods.lfps.state import LFPSState
from saccade.methods.lfps.tables import ScoreTables


def row_of(
    method: LFPS,
    length: int,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    softcap: float | None = None,
) -> tuple[Query, LFPSState]:
    """The row of the last of ``length`` keys. Half of the heads look at the sinks; of the tables some entries are heavy
    and many light, but for the first unit's, which are all alike and half empty."""
    rng, units = generator(seed), heads if method.unit == "q_head" else kv_heads
    k, v = torch.randn(2, kv_heads, length, head_dim, generator=rng)
    k[:, : method.sinks] = 1.0
    q = 0.5 * torch.randn(heads, 1, head_dim, generator=rng)
    q[heads // 2 :] += 3.0
    n = length - method.sinks
    both = torch.rand(2, units, n, generator=rng) ** 9 * (torch.rand(2, units, n, generator=rng) < 0.4)
    both[0, 0], both[1, 0, n // 2 :] = 0.125, 0.0
    tables = ScoreTables.of(both[0], both[1], method.sinks, length - 1)
    spread = 0.02 * torch.rand(heads, generator=rng)
    state = LFPSState(tables, k[:, method.sinks :].mean(1), v[:, method.sinks :].mean(1), n, spread, length - 2)
    view = KVView.from_tensors(k.to(dtype), v.to(dtype), shuffle_seed=seed)
    return Query.of(q.to(dtype), view, scale=0.2, softcap=softcap), state
