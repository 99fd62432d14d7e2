"""How much the rows of each query block would give to the mean key of each key block: FlashPrefill's estimate."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops import triton
from saccade.ops.reference import logits
from saccade.selection import Shape

MOST = 2**24  # scores held at once: 64 MiB


def block_energies(
    q: Tensor, kv: KVView, shape: Shape, block_size: int, scale: float, softcap: float | None = None
) -> Tensor:
    """log sum over a query block's rows of exp(scale q . mean key): fp32 [heads, q_blocks, k_blocks], of the rows of
    this call that see the key block whole; -inf where there are none. The grid of blocks is anchored at position 0.

    ``q`` [heads, q_len, head_dim]. The sum of FlashPrefill's block scores, whose reference point (the largest score of
    a query block) falls out of every comparison between its key blocks.
    """
    if q.is_cuda and triton.serves_energies(q, kv, block_size) is None:
        from saccade.ops.triton.block_energies import energies

        return energies(q, kv, shape, block_size, scale, softcap)
    means = kv.summary("mean", block_size)[: kv.length // block_size, 0]  # [k_blocks, kv_heads, d]
    first, ahead = shape.q_start // block_size, shape.q_start % block_size
    q_blocks = (shape.q_start + shape.q_len - 1) // block_size - first + 1
    out = torch.full((shape.heads, q_blocks, -(-shape.k_len // block_size)), -torch.inf, device=q.device)
    last_keys = torch.arange(1, means.shape[0] + 1, device=q.device) * block_size - 1
    each = max(1, MOST // (block_size * max(1, means.shape[0]) * shape.group))  # query blocks a turn
    for block in range(0, q_blocks, each):
        start = max(block * block_size - ahead, 0)
        stop = min((block + each) * block_size - ahead, shape.q_len)
        rows = shape.q_start + torch.arange(start, stop, device=q.device)
        seen = min(means.shape[0], (shape.q_start + stop) // block_size)
        for kv_head in range(shape.kv_heads):
            heads = slice(kv_head * shape.group, (kv_head + 1) * shape.group)
            scores = logits(q[heads, start:stop].float(), means[:seen, kv_head], scale, softcap)
            scores = scores.masked_fill(rows[:, None] < last_keys[:seen], -torch.inf)
            missing = (int(rows[0]) % block_size, -int(rows[-1] + 1) % block_size)  # of the first and last query block
            scores = torch.nn.functional.pad(scores, (0, 0, *missing), value=-torch.inf).unflatten(1, (-1, block_size))
            out[heads, block : block + scores.shape[1], :seen] = scores.logsumexp(2)
    return out
