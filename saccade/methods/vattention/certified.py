"""Certified decode attention: for each head a bound on the output's error that holds with probability 1 - delta
(docs/algorithms.md 6.20).

The error of an output o' = N'/D' is |N - o' D| / D with the true sums N of weight times value and D of weights; all
bounds are of it over S/D, S the sum of weight times norm of value. What bounds unread keys: no logit of a block exceeds
what its keys' extremes allow, and no value's norm leaves the block's least and greatest one.

1. Deterministic: what is not read adds at most Z + |o'| A to |N - o' D|, where A and Z sum, over unread blocks, the
   greatest weight that a key may have, and that times the greatest norm.
2. Keys drawn with replacement, by the same products. Each term of the estimate, the pair (weight * value, weight * c)
   over its chance, has norm at most M = Z + c A, whatever the keys are: a heavy one in an unread block cannot break the
   bound. Sums in a Hilbert space then stay within 2 M L / b + sqrt(2 M^2 L / b) of their mean, L = log(2 / delta), for
   b draws (Smale and Zhou, "Learning theory estimates via integral operators", 2007, Lemma 2, after Pinelis).
3. All logits, no values: weights are known then. The heaviest keys are read, the others' values drawn by weight.
   The same inequality with M = D_R times the greatest norm, and for the second moment the sum of weight times greatest
   squared norm; D errs nothing.
4. Everything.

No step uses the variance of a sample, which a heavy key that was not drawn does not show. Steps 2 and 3 may both be
tried: each has half of delta.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.methods.base import Query
from saccade.methods.fitting import Fitting, Sizes
from saccade.methods.state import MethodState
from saccade.methods.vattention.places import Middle, Read, counted, draws, ordered
from saccade.ops.scores import row_logits

BLOCKS, WEIGHTS = 3, 4  # stages that draw
SLACK = 1e-4  # of epsilon, for rounding in float32
MOST = 0.5  # of the middle that is read on the strength of bounds, before all logits are looked at
Lists = list[tuple[Tensor, Tensor] | None]


@dataclass(eq=False)
class ValueNorms(MethodState):
    """``bounds`` fp32 [2, kv_heads, blocks]: least and greatest norm of the values of each full block of ``size``
    keys. ``begun``: tokens that there were when it began."""

    replaced: ClassVar[frozenset[str]] = frozenset({"bounds"})

    bounds: Tensor
    size: int
    begun: int

    def fit(self, sizes: Sizes, fitting: Fitting) -> None:
        """See MethodState."""
        fitting.within("size", self.size, 1, 2**31)
        fitting.within("begun", self.begun, 0, sizes.length)
        bounds = fitting.tensor("bounds", self.bounds, torch.float32, 2, sizes.kv_heads, None)
        fitting.within("blocks", bounds.shape[2], 0, sizes.length // self.size)

    @classmethod
    def of(cls, kv: KVView, size: int) -> ValueNorms:
        made = cls(torch.zeros(2, kv.kv_heads, 0, device=kv.device), size, kv.length)
        made.follow(kv)
        return made

    def follow(self, kv: KVView) -> None:
        """Know all full blocks of ``kv``."""
        have, full = self.bounds.shape[2], kv.length // self.size
        if full <= have:
            return
        norms = kv.values(have * self.size, full * self.size).float().norm(dim=-1).unflatten(1, (-1, self.size))
        self.bounds = torch.cat([self.bounds, torch.stack([norms.amin(-1), norms.amax(-1)])], 2)

    def holds(self, length: int) -> bool:
        return length >= self.begun

    def truncate(self, length: int) -> None:
        self.bounds = self.bounds[:, :, : length // self.size]


@dataclass(frozen=True)
class Certifier:
    """Chooses what one step's heads read. ``heavy``: blocks of the middle that are read at least."""

    query: Query
    middle: Middle
    heavy: int
    epsilon: float
    delta: float
    seed: int

    @property
    def log(self) -> float:
        """Of 2 over half of delta."""
        return math.log(4 / self.delta)

    def choose(self, kv_head: int, bounds: Tensor, norms: Tensor) -> Lists:
        """For each query head of a KV head the positions that it reads and what their logits gain; None for everything.
        ``bounds`` fp32 [group, blocks]: upper bounds of logits; ``norms`` fp32 [2, blocks] of values' norms."""
        cost, group = self.query.cost, self.query.shape.group
        found = self._by_blocks(kv_head, bounds, norms[1])
        if found is not None:
            return [found] * group
        lists = self._by_weights(kv_head, norms)
        sampled = sum(one is not None and bool((one[1] != 0).any()) for one in lists)
        exact = sum(one is None for one in lists)
        cost.certify(exact=exact, sample=sampled, bounds=group - exact - sampled)
        return lists

    def _by_blocks(self, kv_head: int, bounds: Tensor, most: Tensor) -> tuple[Tensor, Tensor] | None:
        """Steps 1 and 2, with more and more blocks; None where neither is cheap."""
        query, middle, group = self.query, self.middle, bounds.shape[0]
        order = (bounds + most.clamp(min=1e-30).log()).amax(0).argsort(descending=True)
        count = self.heavy
        while count <= MOST * middle.blocks:
            exact = middle.exact(order[:count])
            read = Read.of(query, kv_head, exact)
            top = read.scores.amax(1, keepdim=True)
            weights = torch.exp(read.scores - top)
            out = (weights @ read.values) / weights.sum(1, keepdim=True)
            scale = weights @ read.values.norm(dim=-1)
            others = order[count:]
            greatest = torch.exp((bounds[:, others] - top).double()) * middle.size
            norm, allowed = out.norm(dim=-1).double(), self.epsilon * (1 - SLACK) * scale.double()
            mass, massive = greatest.sum(1), (greatest * most[others]).sum(1)
            if bool((massive + norm * mass <= allowed).all()):
                query.cost.certify(bounds=group)
                return exact, torch.zeros(exact.numel(), device=exact.device)
            drawn = self._drawn_blocks(kv_head, exact, others, greatest, most[others], norm, allowed)
            if drawn is not None:  # a second try would take its chance anew, which half of delta does not allow
                query.cost.certify(sample=group if drawn[1] else 0)
                return drawn[0] if drawn[1] else None
            count *= 4
        return None

    def _drawn_blocks(
        self,
        kv_head: int,
        exact: Tensor,
        others: Tensor,
        greatest: Tensor,
        most: Tensor,
        norm: Tensor,
        allowed: Tensor,
    ) -> tuple[tuple[Tensor, Tensor], bool] | None:
        """Step 2: one sample for all heads of the group, by the greatest of their products, and whether its result is
        within the bound; None where it would be large."""
        query, middle = self.query, self.middle
        product = greatest * (most + norm[:, None])  # [group, others]
        chance = (product / product.sum(1, keepdim=True)).amax(0)
        chance /= chance.sum()
        ceiling = (product / chance).amax(1)  # M of each head
        # |N - o'D| <= sqrt(1 + (|o'| / c)^2) times the sums' error; |o'| is known afterwards, so a little is left.
        budget = allowed / (1.1 * math.sqrt(2))
        count = draws_needed(float((ceiling / budget).amax()), float((ceiling / budget).square().amax()), self.log)
        if count > others.numel() * middle.size // 4:
            return None
        at = torch.searchsorted(chance.cumsum(0), draws(self.seed, BLOCKS, query, kv_head, count)).clamp(
            max=others.numel() - 1
        )
        within = (draws(self.seed, BLOCKS + 100, query, kv_head, count) * middle.size).long()
        places, times = counted(at * middle.size + within)
        positions = (others[places // middle.size] + middle.first) * middle.size + places % middle.size
        bias = torch.log(times / (count * chance[places // middle.size] / middle.size)).float()
        chosen = ordered(torch.cat([exact, positions]), torch.cat([bias.new_zeros(exact.numel()), bias]))
        read = Read.of(query, kv_head, chosen[0])
        weights = torch.softmax(read.scores + chosen[1], 1)
        final = (weights @ read.values).norm(dim=-1).double()
        error = 2 * ceiling * self.log / count + ceiling * math.sqrt(2 * self.log / count)
        held = torch.sqrt(1 + (final / norm.clamp(min=1e-30)).square()) * error <= allowed
        return chosen, bool(held.all())

    def _by_weights(self, kv_head: int, norms: Tensor) -> Lists:
        """Steps 3 and 4, each head by itself."""
        query, middle = self.query, self.middle
        shape, n = query.shape, middle.length
        scores = row_logits(query.q, query.kv, shape, kv_head, 0, 1, query.scale, query.softcap)[:, 0].double()
        query.cost.scored += n  # of one KV head's
        weights = torch.exp(scores - scores.amax(1, keepdim=True))
        least, most = self._norms_of_keys(kv_head, norms)
        return [self._one(kv_head, head, weights[head], least, most) for head in range(shape.group)]

    def _norms_of_keys(self, kv_head: int, norms: Tensor) -> tuple[Tensor, Tensor]:
        """float64 [keys]: what a value's norm lies between; the norms themselves outside of the middle."""
        middle, kv = self.middle, self.query.kv
        first, last = middle.first * middle.size, middle.last * middle.size
        ends = [kv.values(a, b)[kv_head].float().norm(dim=-1) for a, b in ((0, first), (last, middle.length))]
        each = norms.repeat_interleave(middle.size, 1)
        least, most = (torch.cat([ends[0], part, ends[1]]).double() for part in each)
        return least, most

    def _one(
        self, kv_head: int, head: int, weights: Tensor, least: Tensor, most: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Step 3 for one head, of the cheapest kind; None where reading everything is no dearer."""
        n = weights.numel()
        order = (weights * most).argsort(descending=True)
        w, v = weights[order], most[order]
        allowed = self.epsilon * (1 - SLACK) * float(weights @ least)
        after = [_after(part) for part in (w, w * v, w * v * v)]  # of all keys behind the first k, for k = 0 .. n
        largest = torch.nn.functional.pad(v.flip(0).cummax(0).values.flip(0), (0, 1))  # norm behind the first k
        read = (after[1][:1] - after[1]) / (after[0][:1] - after[0]).clamp(min=1e-300)  # at least the output's norm
        read[0] = largest[0]
        enough = after[1] + read * after[0] <= allowed  # step 1 over keys instead of blocks
        whole = int(enough.to(torch.int8).argmax())  # the end always is
        sizes = torch.tensor([k for k in (0, *(2**i for i in range(4, 20))) if k < n], device=w.device)
        mass, second, greatest = after[0][sizes], after[2][sizes], largest[sizes]
        counts = [
            draws_needed(float(m * g) / max(allowed, 1e-150), float(m * s) / max(allowed, 1e-150) ** 2, self.log)
            for m, s, g in zip(mass, second, greatest)
        ]
        cost, best = min((int(size) + count, at) for at, (size, count) in enumerate(zip(sizes, counts)))
        if min(cost, whole) >= 3 * n // 4:
            return None
        if whole <= cost:
            return order[:whole].sort().values, torch.zeros(whole, device=w.device)
        size, count = int(sizes[best]), counts[best]
        behind = w[size:].cumsum(0)
        stage = WEIGHTS + 1000 * (head + 1)
        at = torch.searchsorted(behind, draws(self.seed, stage, self.query, kv_head, count) * behind[-1])
        places, times = counted(at.clamp(max=n - size - 1))
        share = times * float(behind[-1]) / count / w[size + places]
        bias = torch.cat([share.new_zeros(size), share.log()]).float()
        return ordered(torch.cat([order[:size], order[size + places]]), bias)


def draws_needed(ceiling: float, second: float, log: float) -> int:
    """The fewest draws b for which 2 * ceiling * log / b + sqrt(2 * second * log / b) <= 1. ``ceiling``: of a term's
    norm, ``second``: of its mean square, both over what the error may be."""
    if not math.isfinite(ceiling) or not math.isfinite(second):
        return 2**62
    root = (math.sqrt(2 * second) + math.sqrt(2 * second + 8 * ceiling)) / 2  # of 1 / sqrt(b / log)
    return max(1, math.ceil(log * root * root))


def _after(parts: Tensor) -> Tensor:
    """Sums of all entries behind the first k, k = 0 .. n, summed from the end so that small ones do not get lost."""
    return torch.nn.functional.pad(parts.flip(0).cumsum(0).flip(0), (0, 1))
