"""Progressive attention over ranked blocks (PSA, Alg. 1): read until the weight still unread cannot matter."""

from __future__ import annotations

import math

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
    and the rule's estimate of each unit's coverage when it stopped, fp32 [units], on the CPU.

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
    return out.to(q.dtype), lse, ranking.prefix(used), torch.tensor(covered, device="cpu")


def _run(reader: _Reader, ranking: Ranking, unit: int) -> tuple[Tensor, Tensor, int, float]:
    order = ranking.order[unit]
    per_unit = ranking.shape.heads // ranking.units
    heads = slice(unit * per_unit, (unit + 1) * per_unit)
    guess = None if ranking.estimates is None else ranking.estimates[heads].float()
    excess = torch.empty(per_unit, 0, device=order.device)  # how far blocks lay above their guesses
    acc_out, acc_lse, _ = reader.read(ranking.always[unit])
    least = torch.full_like(acc_lse, torch.inf)
    done, total, enough = 0, order.numel(), 1.0
    while done < total:
        batch = order[done : done + ranking.microbatch]
        out, lse, block_lse = reader.read(batch)
        acc_out, acc_lse = merge_state(acc_out, acc_lse, out, lse)
        done += batch.numel()
        if guess is not None:
            excess = torch.cat([excess, block_lse - guess[:, done - batch.numel() : done]], 1)
            rest = _unread(guess[:, done:], excess, ranking.margin)
        else:
            least = torch.minimum(least, block_lse.amin(-1)) if ranking.rest == "min" else block_lse.amax(-1)
            rest = math.log(total - done) + least if done < total else torch.full_like(least, -torch.inf)
        coverage = 1.0 / (1.0 + torch.exp(rest - acc_lse))
        enough = float(coverage.mean() if ranking.stop == "mean" else coverage.min())
        if enough > ranking.epsilon:
            break
    return acc_out, acc_lse, done, enough


def _unread(guess: Tensor, excess: Tensor, margin: float) -> Tensor:
    """The log of the weight left, fp32 [heads]: the sum of what is guessed of the unread blocks [heads, m], raised by
    the mean and ``margin`` standard deviations of ``excess`` [heads, read]."""
    if guess.shape[1] == 0:
        return guess.new_full(guess.shape[:1], -torch.inf)
    if excess.shape[1] < 2:
        return guess.new_full(guess.shape[:1], torch.inf)
    raised = excess.mean(1) + margin * excess.std(1, correction=0)
    return torch.logsumexp(guess, 1) + raised


class _Reader:
    """Attention of one unit's query heads over a few whole blocks at a time."""

    def __init__(
        self, q: Tensor, kv: KVView, kv_heads: list[int], block_size: int, scale: float, softcap: float | None
    ) -> None:
        self.q = q.unflatten(0, (len(kv_heads), -1))  # [kv_heads of the unit, query heads of each, d]
        self.kv, self.kv_heads, self.size = kv, kv_heads, block_size
        self.scale, self.softcap = scale, softcap

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``blocks`` int [m] -> out [heads, d], lse [heads], per-block lse [heads, m]."""
        heads = self.q.shape[0] * self.q.shape[1]
        if blocks.numel() == 0:
            none = self.q.new_full((heads,), -torch.inf)
            return self.q.new_zeros(heads, self.q.shape[-1]), none, none[:, None][:, :0]
        positions = (blocks.long()[:, None] * self.size + torch.arange(self.size, device=blocks.device)).flatten()
        inside = positions < self.kv.length
        positions = positions.clamp(max=self.kv.length - 1)
        taken = [self.kv.take(positions, g) for g in self.kv_heads]
        k, v = (torch.stack(part).float() for part in zip(*taken))
        scores = logits(self.q, k, self.scale, self.softcap).masked_fill(~inside, -torch.inf)
        block_lse = torch.logsumexp(scores.unflatten(-1, (blocks.numel(), self.size)), -1)
        lse = torch.logsumexp(block_lse, -1)
        out = torch.exp(scores - lse.unsqueeze(-1)) @ v
        return out.flatten(0, 1), lse.flatten(), block_lse.flatten(0, 1)
