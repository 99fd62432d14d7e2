"""MagicPIG: keys sampled by locality-sensitive hashing, reweighted to an unbiased estimate (Chen et al., 2024;
docs/algorithms.md 6.12)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from saccade.methods.base import Chunk, Query
from saccade.methods.device_state import Opening
from saccade.methods.measured import Measured
from saccade.methods.options import require_choice, require_whole
from saccade.methods.whole import WholeMethod
from saccade.selection import Dense, Selection
from saccade.selection.forms import MOST
from saccade_contrib.magicpig.tables import HashTables, draw

LAYERS_PER_DRAW = 16  # layers that share their random projections
TILE_KEYS = 4096  # keys hashed at once
MOST_TABLES = 4096  # a key takes 4 bytes in each: 32 times the bytes of a bfloat16 key and value of 128 channels

TURNED = tuple(dict.fromkeys(str(min(round(2 * 1.12**at), 400)) for at in range(48)))  # tables, on a board


@dataclass(frozen=True)
class MagicPIG(WholeMethod):
    """Keys whose hash of ``bits`` signs equals the query's in at least 2 of ``tables`` tables are sampled; each one's
    logit loses ln(u + 1e-4), where u = 1 - (1 - p)^L - L p (1 - p)^(L - 1) is its chance to be and p =
    (1 - angle / pi)^bits, so that sums over hash draws are those of all keys. The first ``sinks``
    keys, the last ``local`` of the prompt and all later ones are read exactly. Keys are hashed without their mean.

    Every ``dense_every``-th layer from the first on is dense (0: none). Projections are drawn from ``seed``, the KV
    head and the layer's run of 16. Query heads sample for themselves.
    Rows of up to ``dense_upto`` keys read everything.
    """

    name: ClassVar[str] = "magicpig"
    paper: ClassVar[str] = "MagicPIG, arXiv:2410.16179"
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    numbers_heads: ClassVar[bool] = True
    rows_only: ClassVar[str | None] = (
        "no batched kernel looks up its hash tables, or weighs what it drew by the chance of that"
    )
    measured: ClassVar[Measured | None] = Measured("magicpig(tables={value})", TURNED, summary=None)

    bits: int = 10
    tables: int = 150
    sinks: int = 4
    local: int = 64
    dense_every: int = 16
    seed: int = 0

    @property
    def extra_memory(self) -> str | None:
        return f"hash tables take {4 * self.tables} bytes a key, KV head and sparse layer beside kv_memory"

    @property
    def stands_in(self) -> bool:
        return self.dense_every != 1  # else all layers are dense

    def __post_init__(self) -> None:
        require_choice("bits", self.bits, tuple(range(1, 16)))
        require_whole("tables", self.tables, 2, MOST_TABLES)
        for name in ("sinks", "dense_every", "seed"):
            require_whole(name, getattr(self, name), 0)
        require_whole("local", self.local, 1)
        self.check_dense_upto()

    def begin(self, segment: Chunk) -> HashTables | None:
        shape, last = segment.shape, segment.shape.k_len - self.local
        if self._dense(segment) or last <= self.sinks:
            return None
        keys = segment.kv.keys(self.sinks, last).float()
        mean = keys.mean(1)
        heads = [segment.part.global_head(g, shape.kv_heads) for g in range(shape.kv_heads)]
        codes = [
            torch.cat([self.hash(tile, segment.layer, head) for tile in (keys[g] - mean[g]).split(TILE_KEYS)], 1)
            for g, head in enumerate(heads)
        ]
        return HashTables.of(segment.q, segment.kv, self.sinks, last, self.bits, mean, torch.stack(codes))

    def select_decode(self, query: Query, state: Any) -> Selection:
        shape = query.shape
        if state is None or self._dense(query) or shape.k_len <= self.dense_upto:
            return Dense(shape)
        asked = [
            self.hash(q.float(), query.layer, query.part.global_head(g, shape.kv_heads)).T
            for g, q in enumerate(query.q[:, 0].split(shape.group))
        ]
        sampled, drawn = draw(query.q, query.kv, shape, state, torch.cat(asked))
        query.cost.estimated += state.last - state.first
        query.cost.scored += -(-drawn // shape.heads)
        return sampled

    def whole_upto(self, opening: Opening) -> int:
        return MOST if all(state is None for state in opening.states) else self.dense_upto

    def hash(self, vectors: Tensor, layer: int, kv_head: int) -> Tensor:
        """``vectors`` fp32 [m, head_dim] of a KV head, by its number in the model -> codes int16 [tables, m]."""
        drawn = _projections(self.seed, layer // LAYERS_PER_DRAW, kv_head, vectors.shape[1], self.tables, self.bits)
        signs = (vectors @ drawn.to(vectors.device) > 0).unflatten(1, (self.tables, self.bits))
        weights = 2.0 ** torch.arange(
            self.bits, device=vectors.device
        )  # a product of floats is many times faster than one of integers
        return (signs.float() @ weights).to(torch.int16).T.contiguous()

    def _dense(self, chunk: Chunk) -> bool:
        return self.dense_every > 0 and chunk.layer % self.dense_every == 0


@lru_cache(maxsize=64)
def _projections(seed: int, run: int, kv_head: int, head_dim: int, tables: int, bits: int) -> Tensor:
    """Normal draws, fp32 [head_dim, tables * bits]; the same whatever else runs."""
    rng = np.random.default_rng([seed, run, kv_head])
    return torch.from_numpy(rng.standard_normal((head_dim, tables * bits), dtype=np.float32))
