"""InfLLM: blocks of the past by the products of a few representative keys (Xiao et al., 2024, arXiv:2402.04617).

A key's representative score is its mean product with the queries that follow it (the paper's r_m); the highest of each
block stand for it. A block of queries reads the first and the last blocks, and of the others those whose
representatives have the greatest products with its queries in all (sim(X, B)): one list a layer, queries meaned over
the heads of a group, as in the authors' code.

Choosing is the paper's; three things are not. Keys keep their positions, where InfLLM puts all that are far at one
distance, for models that were trained on less. Queries come in blocks of ``block_size`` (the authors' chunks have 512).
And the queries of earlier chunks of a prompt are gone, so that keys from before a chunk are scored by its first rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from saccade.errors import ModelError
from saccade.methods.base import Chunk, Method
from saccade.methods.options import require_choice, require_whole
from saccade.ops.scores import NOT_FINITE
from saccade.selection import Blocks, Dense, Selection


@dataclass(frozen=True)
class InfLLM(Method):
    """Per query block of ``block_size``: the blocks of the first ``sinks`` keys, those of the last ``window`` (its own
    among them), and the ``budget`` keys in blocks whose ``representatives`` score best. Decode is dense."""

    name: ClassVar[str] = "infllm"
    paper: ClassVar[str] = "InfLLM, arXiv:2402.04617"
    phases: ClassVar[tuple[str, ...]] = ("prefill",)

    sinks: int = 128
    window: int = 4096
    budget: int = 2048
    representatives: int = 4
    block_size: int = 128

    def __post_init__(self) -> None:
        require_whole("sinks", self.sinks, 0)
        require_whole("window", self.window, 1)
        require_whole("budget", self.budget, 0)
        require_choice("block_size", self.block_size, (32, 64, 128))
        require_whole("representatives", self.representatives, 1, self.block_size)

    @property
    def joins_heads(self) -> bool:
        return True  # it meets its blocks with the queries of all

    def _counts(self) -> tuple[int, int, int]:
        """Blocks: the first, the last, and how many others are taken."""
        size = self.block_size
        return -(-self.sinks // size), -(-self.window // size), self.budget // size

    def reads_all(self, start: int, stop: int) -> bool:
        return -(-stop // self.block_size) <= sum(self._counts())

    def select_prefill(self, chunk: Chunk) -> Selection:
        shape, size = chunk.shape, self.block_size
        first, last, take = self._counts()
        if self.reads_all(shape.q_start, shape.q_start + shape.q_len):
            return Dense(shape)
        scores = self._scores(chunk)
        if not bool(scores.isfinite().all()):
            raise ModelError(NOT_FINITE)
        chunk.cost.scored += shape.k_len * min(self.window, shape.q_len)
        chunk.cost.estimated += scores.numel() * self.representatives // max(1, shape.heads * chunk.part.parts)
        block = torch.arange(scores.shape[1], device=scores.device)
        own = shape.q_start // size + torch.arange(scores.shape[0], device=scores.device)[:, None]
        always = (block < first) | (block > own - last)
        rank = scores.masked_fill(always | (block > own), -torch.inf)
        best = torch.sort(rank, dim=-1, descending=True, stable=True).indices[:, :take]
        taken = always.scatter(-1, best, True) & (block <= own)
        return Blocks.from_block_mask(shape, size, taken[None])

    def _scores(self, chunk: Chunk) -> Tensor:
        """fp32 [q_blocks, k_blocks]: the products of a block's queries with a block's representatives, in all."""
        shape, size = chunk.shape, self.block_size
        q = chunk.q.float().unflatten(0, (shape.kv_heads, -1)).mean(1)  # [G, q_len, d]
        keys = chunk.kv.keys(0, shape.k_len).float()
        votes = (keys * self._following(q, shape.q_start, shape.k_len)).sum(-1)  # [G, k_len]
        blocks = -(-shape.k_len // size)
        room = blocks * size - shape.k_len
        votes = torch.nn.functional.pad(votes, (0, room), value=-torch.inf).unflatten(1, (blocks, size))
        best = votes.topk(self.representatives, -1)
        chosen = torch.nn.functional.pad(keys, (0, 0, 0, room)).unflatten(1, (blocks, size))
        chosen = chosen.gather(2, best.indices[..., None].expand(-1, -1, -1, keys.shape[-1]))
        memory = (chosen * best.values.gt(-torch.inf)[..., None]).sum(2)  # [G, blocks, d]
        place = torch.arange(shape.q_start, shape.q_start + shape.q_len, device=q.device) // size
        place -= shape.q_start // size
        asked = q.new_zeros(q.shape[0], int(place[-1]) + 1, q.shape[-1]).index_add_(1, place, q)
        if chunk.part.is_whole:
            return torch.einsum("gqd,gkd->qk", asked, memory)
        return chunk.all_heads(asked @ memory.transpose(1, 2)).sum(0)

    def _following(self, q: Tensor, start: int, keys: int) -> Tensor:
        """fp32 [G, keys, d]: the mean of the ``window`` queries after each key, as far as the chunk has them; of the
        chunk's first ones for keys that lie further back, of its last one for the last key."""
        rows = q.shape[1]
        sums = torch.nn.functional.pad(q.double().cumsum(1), (0, 0, 1, 0))
        low = (torch.arange(keys, device=q.device) + 1 - start).clamp(0, rows - 1)
        high = torch.minimum(low + self.window, torch.full_like(low, rows))
        return ((sums[:, high] - sums[:, low]) / (high - low)[:, None]).float()
