"""Progressive attention over ranked blocks (PSA, Alg. 1): read until the weight still unread cannot matter."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops.merge import merge_state
from saccade.ops.reference import logits
from saccade.selection import Blocks, Ranking


def attend_ranking(
    q: Tensor, kv: KVView, ranking: Ranking, *, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor, Blocks, Tensor]:
    """``q`` [heads, 1, head_dim]. Returns ``(out, lse, read, coverage)``: like ``attend``, the blocks that were read,
    and the rule's estimate of each unit's coverage when it stopped, fp32 [units].

    All sums of exponentials are kept as log-sum-exp, where Alg. 1 as printed overflows.
    """
    shape = ranking.shape
    per_unit = shape.heads // ranking.units
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    used, covered = [], []
    for unit in range(ranking.units):
        heads = slice(unit * per_unit, (unit + 1) * per_unit)
        kv_heads = range(unit * per_unit // shape.group, ((unit + 1) * per_unit - 1) // shape.group + 1)
        reader = _Reader(q[heads, 0].float(), kv, list(kv_heads), ranking.block_size, scale, softcap)
        out[heads, 0], lse[heads, 0], count, coverage = _run(reader, ranking, unit)
        used.append(count)
        covered.append(coverage)
    return out.to(q.dtype), lse, ranking.prefix(used), torch.tensor(covered)


def _run(reader: _Reader, ranking: Ranking, unit: int) -> tuple[Tensor, Tensor, int, float]:
    order = ranking.order[unit]
    acc_out, acc_lse, _ = reader.read(ranking.always[unit])
    least = torch.full_like(acc_lse, torch.inf)
    done, total, enough = 0, order.numel(), 1.0
    while done < total:
        batch = order[done : done + ranking.microbatch]
        out, lse, block_lse = reader.read(batch)
        acc_out, acc_lse = merge_state(acc_out, acc_lse, out, lse)
        done += batch.numel()
        if ranking.rest == "min":
            least = torch.minimum(least, block_lse.amin(-1))
        else:
            least = block_lse.amax(-1)
        coverage = 1.0 / (1.0 + (total - done) * torch.exp(least - acc_lse))
        enough = float(coverage.mean() if ranking.stop == "mean" else coverage.min())
        if enough > ranking.epsilon:
            break
    return acc_out, acc_lse, done, enough


class _Reader:
    """Attention of one unit's query heads over a few whole blocks at a time."""

    def __init__(
        self, q: Tensor, kv: KVView, kv_heads: list[int], block_size: int, scale: float, softcap: float | None
    ) -> None:
        self.q = q.unflatten(0, (len(kv_heads), -1))  # [kv_heads of the unit, query heads of each, d]
        self.kv, self.kv_heads, self.size = kv, kv_heads, block_size
        self.scale, self.softcap = scale, softcap
        self.table = kv.table.long()

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``blocks`` int [m] -> out [heads, d], lse [heads], per-block lse [heads, m]."""
        heads = self.q.shape[0] * self.q.shape[1]
        if blocks.numel() == 0:
            none = self.q.new_full((heads,), -torch.inf)
            return self.q.new_zeros(heads, self.q.shape[-1]), none, none[:, None][:, :0]
        positions = (blocks.long()[:, None] * self.size + torch.arange(self.size)).flatten()
        inside = positions < self.kv.length
        positions = positions.clamp(max=self.kv.length - 1)
        slots, offsets = self.table[positions // self.kv.block_size], positions % self.kv.block_size
        k = torch.stack([self.kv.k_pool[slots, g, offsets] for g in self.kv_heads]).float()
        v = torch.stack([self.kv.v_pool[slots, g, offsets] for g in self.kv_heads]).float()
        scores = logits(self.q, k, self.scale, self.softcap).masked_fill(~inside, -torch.inf)
        block_lse = torch.logsumexp(scores.unflatten(-1, (blocks.numel(), self.size)), -1)
        lse = torch.logsumexp(block_lse, -1)
        out = torch.exp(scores - lse.unsqueeze(-1)) @ v
        return out.flatten(0, 1), lse.flatten(), block_lse.flatten(0, 1)
