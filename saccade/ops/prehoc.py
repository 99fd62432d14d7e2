"""The inequalities of PrHS: how much a head can lose by keys that it does not read (Pre-hoc Sparsity, Sections VII and
VIII, Appendix D).

``delta``, the dropped mass, is the share of a head's softmax weight that lies on keys it does not read. ``d`` in the
paper's 1 / sqrt(d) is here the layer's own ``scale``, and the norms are those that there are, not 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.ops.reference import soft_capped

BLOCK = 32  # keys whose extremes bound their logits


def information_loss(dropped: Tensor, keys: int) -> Tensor:
    """At most so many nats of mutual information are lost with a share ``dropped`` of the weight of ``keys`` keys: 2
    (h(delta) + delta ln L) (Proposition 1, U1)."""
    share = dropped.double().clamp(0.0, 1.0)
    entropy = -torch.xlogy(share, share) - torch.xlogy(1 - share, 1 - share)
    return 2 * (entropy + share * math.log(keys))


def divergence(dropped: Tensor) -> Tensor:
    """KL divergence, in nats, of the weights that are left, renormalised, from all: ln(1 / tau) (Proposition 1, U2)."""
    return -torch.log1p(-dropped.double())


def drift(query: Tensor, before: Tensor, longest: Tensor, scale: float) -> Tensor:
    """Delta: at most so much, in L1, do weights change from the query ``before`` to ``query``, [..., head_dim] each,
    where no key is longer than ``longest``: 2 K_max |q - q'| scale (Lemmas 5 and 6; the print puts sqrt(2 - 2 tau) for
    |q - q'|, which queries of norm 1 have)."""
    return 2 * longest * (query - before).norm(dim=-1) * scale


def dropped_at_most(q: Tensor, keys: Tensor, read: Tensor, lse: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Upper bounds float64 [heads] of delta, from what is known of unread keys without reading them: per channel, the
    extremes of each ``BLOCK`` of keys (Quest's summary).

    ``q`` fp32 [heads, head_dim] of one KV head's group, ``keys`` fp32 [n, head_dim], of which ``read`` bool [heads, n]
    are read; ``lse`` [heads]: log-sum-exp of the logits read, attention sinks among them.
    """
    last = (-len(keys)) % BLOCK
    padded = torch.cat([keys, keys[-1:].expand(last, -1)]).unflatten(0, (-1, BLOCK))
    low, high = padded.amin(1), padded.amax(1)
    most = (q.clamp(min=0) @ high.T + q.clamp(max=0) @ low.T).double() * scale
    most = soft_capped(most, softcap)
    unread = torch.nn.functional.pad(~read, (0, last)).unflatten(1, (-1, BLOCK)).sum(-1).double()
    mass = torch.logsumexp(most + unread.log(), -1)
    return torch.sigmoid(mass - lse.double())


@dataclass(frozen=True)
class Fit:
    """|k(l) - k(l - 1)| <= B e^(-mu (l - l_s)) over the layers from ``start``: ``mu`` by least squares, ``most`` (B) as
    large as that needs."""

    start: int
    most: float
    mu: float

    def at(self, layer: int) -> float:
        return self.most * math.exp(-self.mu * (layer - self.start))


def fit_changes(changes: Sequence[float], start: int) -> Fit:
    """``changes``: the greatest change of a key at each layer from ``start`` on."""
    logs = torch.tensor(changes, dtype=torch.float64, device="cpu").clamp(min=1e-12).log()
    at = torch.arange(len(changes), dtype=torch.float64, device="cpu")
    slope = 0.0
    if len(changes) > 1:
        slope = float(((at - at.mean()) * (logs - logs.mean())).sum() / (at - at.mean()).square().sum())
    most = float(torch.exp(logs - slope * at).amax())
    return Fit(start, most, -slope)
