"""FlexPrefill's token lines (Alg. 3), and its published code; the repaired form is in flexprefill.py.

Both read any appended chunk, which neither defines: the representative rows are the chunk's last ones and the block
grid is anchored at position 0. On a whole prompt they are the originals.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from saccade.methods.base import Chunk
from saccade.ops.scores import among_least, block_sums, mean_keys, mean_queries, row_weights, slash_sums
from saccade.selection import Blocks, Shape


def token_lines(
    vertical: Tensor, slash: Tensor, gamma: float, block_size: int, least: int, most: int | None
) -> tuple[Tensor, Tensor]:
    """Alg. 3, token by token: (columns, distances), bool [heads, n] each.

    ``vertical``, ``slash`` [heads, n]: the gamma from which on a column or a distance is wanted. The first
    ``block_size`` columns and distances stand for the first and the diagonal block, which are always read. A row reads
    a key a line at most, so at least ``least`` and at most ``most`` lines hold the budget of its tokens, both
    directions together; they come and go in the order in which a growing gamma would add them.
    """
    n = vertical.shape[1]
    needed = torch.cat([vertical, slash], 1)
    forced = torch.arange(n, device=needed.device).repeat(2) < block_size
    wanted = needed < max(gamma, 1e-9)  # the heaviest of all is wanted even by gamma=0
    keep = forced | wanted
    if most is not None or least > 0:
        order = needed.masked_fill(forced, -1.0)
        keep = forced | (wanted & among_least(order, 2 * n if most is None else most)) | among_least(order, least)
    return keep[:, :n], keep[:, n:]


def up_to_middle(chunk: Chunk, rows: int) -> Chunk:
    """``chunk`` up to where its middle ``rows`` rows end, so that they are its last ones."""
    stop = min(chunk.shape.q_len, (chunk.shape.q_len + rows) // 2)
    length = chunk.shape.q_start + stop
    shape = Shape.suffix(chunk.shape.heads, chunk.shape.kv_heads, stop, length, chunk.q.device)
    return replace(chunk, q=chunk.q[:, :stop], kv=chunk.kv.upto(length), shape=shape)


def reference_blocks(
    chunk: Chunk, gamma: float, tau: float, block_size: int, min_budget: int, max_budget: int | None
) -> Blocks:
    """The selection of the published code, quirks included:

    * a head that needs T columns (diagonals) for gamma gets ``T // 128 + 1`` blocks, whatever the block size, so the
      blocks may hold less than gamma; at equality T counts one more;
    * diagonals are grouped from the far end and a group becomes one block diagonal, though it straddles two;
    * budgets hold for columns and diagonals apart, in blocks rounded up, with at least one each;
    * a 0 among the block weights makes the divergence NaN and the head vertical-slash;
    * a query-aware head leaves out the block that crosses gamma, and adds vertical and slash blocks at least budget;
    * logits are scaled by 1 / sqrt(head_dim) and never capped, whatever the model says;
    * gamma=1 is not dense.

    Acausal blocks, on which its kernel would fail, are dropped.
    """
    shape, scale = chunk.shape, chunk.q.shape[-1] ** -0.5
    pooled, mean_q = mean_keys(chunk.kv, block_size), mean_queries(chunk.q, shape, block_size)
    first, q_blocks, k_blocks = shape.q_start // block_size, mean_q.shape[1], pooled.shape[1]
    least = min(max(1, -(-min_budget // block_size)), k_blocks)
    most = k_blocks if max_budget is None else min(max(1, -(-max_budget // block_size)), k_blocks)
    device = chunk.q.device
    distance = (first + torch.arange(q_blocks, device=device))[:, None] - torch.arange(k_blocks, device=device)[None, :]
    rows = torch.arange(max(0, shape.q_len - block_size), shape.q_len, device=device)
    chunk.cost.scored += rows.numel() * shape.k_len
    masks = []
    for kv_head in range(shape.kv_heads):
        weights = row_weights(chunk.q, chunk.kv, shape, kv_head, rows, scale)
        vertical = weights.mean(1)
        slash = slash_sums(weights, shape.q_start + int(rows[0])) / rows.numel()
        for index in range(shape.group):
            head = kv_head * shape.group + index
            last_q = chunk.q[head, rows].float().mean(0)
            guess = torch.softmax(last_q @ pooled[kv_head].T * scale, -1)
            columns = block_sums(vertical[index], block_size)
            aware = bool(_plain_root_jsd(guess, columns) < tau)
            counts = [
                least if aware else min(max(_blocks_for(line, gamma), least), most)
                for line in (vertical[index], slash[index])
            ]
            columns[0] = torch.inf
            groups = block_sums(slash[index].flip(-1), block_size)  # from the far end
            groups[-1] = torch.inf
            diagonals = _top(groups, counts[1]).flip(-1)  # group g is block diagonal k_blocks - 1 - g
            mask = _top(columns, counts[0])[None, :] | diagonals[distance.clamp(min=0)]
            if aware:
                chunk.cost.estimated += mask.numel() // shape.heads
                scores = (mean_q[head] @ pooled[kv_head].T * scale).masked_fill(distance < 0, -torch.inf)
                values, order = torch.sort(torch.softmax(scores, -1).flatten(), descending=True, stable=True)
                order = order.masked_fill(values.cumsum(0) > gamma * q_blocks, 0)
                mask = mask.flatten().index_fill(0, order, True).view_as(mask)
            masks.append(mask)
    return Blocks.from_block_mask(shape, block_size, torch.stack(masks))


def _blocks_for(weights: Tensor, gamma: float) -> int:
    """Blocks that the code grants to lines of ``weights`` [n]."""
    tokens = int((torch.sort(weights, descending=True).values.cumsum(0) <= gamma).sum()) + 1
    return tokens // 128 + 1


def _top(sums: Tensor, count: int) -> Tensor:
    """bool like ``sums`` [m]: the ``count`` greatest, ties to the lower index."""
    order = torch.sort(sums, descending=True, stable=True).indices[:count]
    return torch.zeros_like(sums, dtype=torch.bool).index_fill(0, order, True)


def _plain_root_jsd(p: Tensor, q: Tensor) -> Tensor:
    """Square root of the Jensen-Shannon divergence with 0 log 0 left as NaN."""
    middle = (p + q) / 2
    return torch.sqrt(0.5 * (p * torch.log(p / middle)).sum() + 0.5 * (q * torch.log(q / middle)).sum())
