"""What blocks will weigh for a decode step's query, guessed from the mean and the variance of their keys (summary
``moments``, kv/summaries.py) or from every key in a few bits, and blocks ranked by it.

Were a block's logits independent normal draws with the mean mu and the deviation sigma that the moments give (channels
taken as uncorrelated), the log of their sum of exponentials would be mu + log(n) + sigma^2 / 2 while many of the n keys
count, sigma^2 < 2 log(n), and mu + sigma sqrt(2 log(n)), the largest of them, beyond (Derrida's random energy model,
Phys. Rev. B 24, 1981). The first formula alone promises of wide blocks more than any n keys can hold.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.methods.labels import Labels
from saccade.ops import cpu_blocks

FRAME_KEYS = 8192  # looked at once
FRAMED = 64  # keys from which on their channels have a mean and a deviation worth the name


def block_estimates(q: Tensor, summary: Tensor, size: int, scale: float, softcap: float | None = None) -> Tensor:
    """The guess for every block of ``size`` keys: ``q`` [heads, head_dim], ``summary`` [blocks, 2, kv_heads, head_dim]
    -> fp32 [heads, blocks], natural log. Capped logits have the cap of the mean, and the spread that its slope leaves.
    """
    if softcap is None and cpu_blocks.serves_summary(q, summary, summary.shape[2]) is None:
        return cpu_blocks.estimate_blocks(q, summary, size, scale)
    rows = q.float().unflatten(0, (summary.shape[2], -1)) * scale  # [kv_heads, group, d]
    mean, variance = summary.float().permute(1, 2, 3, 0)  # [kv_heads, d, blocks] each
    mu, square = (rows @ mean).flatten(0, 1), (rows.square() @ variance).flatten(0, 1)
    if softcap is not None:
        bent = torch.tanh(mu / softcap)
        mu, square = softcap * bent, square * (1 - bent * bent).square()
    log = math.log(size)
    return mu + torch.where(square < 2 * log, log + square / 2, (2 * log * square).sqrt())


def ranked_by_estimate(estimates: Tensor, units: int) -> tuple[Tensor, Tensor]:
    """Blocks by the largest share of any of the unit's heads that they are guessed to hold, ties to the lower:
    ``estimates`` [heads, blocks] -> int32 [units, blocks], and the estimates in that order."""
    if cpu_blocks.serves_estimates(estimates) is None:
        return cpu_blocks.order_estimates(estimates, units)
    shares = estimates - torch.logsumexp(estimates, 1, keepdim=True)
    order = torch.sort(shares.unflatten(0, (units, -1)).amax(1), dim=1, descending=True, stable=True).indices
    per_unit = estimates.shape[0] // units
    return order.to(torch.int32), estimates.gather(1, order.repeat_interleave(per_unit, 0))


def keys_in_few_bits(kv: KVView, bits: int) -> Labels:
    """Every channel of the keys in ``bits`` bits, each less its mean and over its deviation, both of the keys that
    there are: a few channels of wide range would take the bits of all others. Of fewer than 64 keys the channels
    themselves."""
    count, frame = kv.length, None
    if count >= FRAMED:
        total = torch.zeros(kv.kv_heads, kv.head_dim, dtype=torch.float64, device=kv.device)
        squares = torch.zeros_like(total)
        for start in range(0, count, FRAME_KEYS):
            keys = kv.keys(start, min(start + FRAME_KEYS, count)).double()
            total, squares = total + keys.sum(1), squares + keys.square().sum(1)
        mean = total / count
        deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
        floor = deviation.mean(-1, keepdim=True) / 1024 + 1e-6
        frame = torch.stack([mean, torch.maximum(deviation, floor)]).float()  # [2, kv_heads, head_dim]
    labels = Labels(torch.arange(kv.head_dim, device=kv.device).repeat(kv.kv_heads, 1), bits, frame=frame)
    labels.extend(kv)
    return labels
