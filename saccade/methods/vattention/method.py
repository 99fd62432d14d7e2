"""vAttention (Desai et al., arXiv:2510.05688): keys that matter exactly, the others by a uniform sample, whose size
follows from the variance that a first look at some of them shows (docs/algorithms.md 6.19)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade.kv.row_formats import AUTO
from saccade.methods.base import Chunk, Method, Query
from saccade.methods.device_state import Opening
from saccade.methods.dial import Dial
from saccade.methods.fitting import Fitting, Sizes
from saccade.methods.options import budget_keys, require, require_budget, require_choice, require_number, require_whole
from saccade.methods.state import MethodState
from saccade.methods.vattention.certified import Certifier, ValueNorms
from saccade.methods.vattention.places import Middle, Read, counted, draws, ordered, upper_bounds
from saccade.ops.rounding import attention_error
from saccade.selection import Dense, Sampled, Selection, Tokens
from saccade.selection.forms import MOST

LEAST = 32  # keys of any sample
FIRST, SECOND = 1, 2  # stages that draw


@dataclass(eq=False)
class Heaviest(MethodState):
    """``keys`` int64 [kv_heads, follow]: those of greatest weight that a step of ``length`` keys read in its middle, -1
    for none."""

    replaced: ClassVar[frozenset[str]] = frozenset({"keys"})

    keys: Tensor
    length: int = 0

    def fit(self, sizes: Sizes, fitting: Fitting) -> None:
        """See MethodState."""
        fitting.within("length", self.length, 0, sizes.length)
        fitting.within(
            "keys", fitting.tensor("keys", self.keys, torch.int64, sizes.kv_heads, None), -1, self.length - 1
        )


@dataclass(frozen=True)
class VAttention(Method):
    """Reads exactly the first ``sinks`` and last ``local`` keys (as whole blocks of ``block_size``), and as many more
    as ``heavy`` says, in the blocks that may hold the highest logits. Of the rest a base sample of the share ``base``
    is looked at; from its variance follows how many keys a second, independent uniform sample must have so that the
    output's error, over the sum of weight times norm of value, stays below ``epsilon`` with probability 1 - ``delta``
    if that sum is normal. It is spread evenly over the rest in the order of the blocks' bounds. Sums over the sample
    stand for the rest without bias. ``epsilon=0`` reads everything.

    ``follow``: the blocks of so many keys, those of greatest weight in the step before, and of the keys after them are
    the first of the ``heavy`` ones; an answer that copies goes on there, where bounds may be low. 0 is the paper.

    ``certify``: bounds that hold take the place of the normal law (``certified``), and each step says what they are.
    Draws hang on ``seed``, the row's place, the layer and the KV head.
    """

    name: ClassVar[str] = "vattention"
    paper: ClassVar[str] = "vAttention, arXiv:2510.05688"
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    numbers_heads: ClassVar[bool] = True
    dial: ClassVar[Dial | None] = Dial("epsilon", "error")
    rows_only: ClassVar[str | None] = "no batched kernel draws its samples, whose sizes its steps decide one by one"

    epsilon: float = 0.05
    delta: float = 0.05
    sinks: int = 128
    local: int = 128
    heavy: float = 0.02
    base: float = 0.02
    block_size: int = 16
    follow: int = 0
    certify: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        require_number("epsilon", self.epsilon, 0.0, 1.0)
        require_number("delta", self.delta, 0.0, 1.0)
        require(0 < self.delta < 1, "delta", self.delta, "a number between 0 and 1")
        require_whole("sinks", self.sinks, 0)
        require_whole("local", self.local, 1)
        require_budget("heavy", self.heavy)
        require_number("base", self.base, 0.0, 1.0)
        require_choice("block_size", self.block_size, (8, 16, 32, 64, 128))
        require_whole("follow", self.follow, 0)
        require_choice("certify", self.certify, (False, True))
        require(not (self.certify and self.follow), "follow", self.follow, "0 where certify=true chooses what is read")
        require_whole("seed", self.seed, 0)

    @property
    def stands_in(self) -> bool:
        return self.epsilon > 0  # 0 reads everything

    def certified(self, epsilon: float, delta: float) -> VAttention:
        return replace(self, certify=True, epsilon=epsilon, delta=delta, follow=0)

    def begin(self, segment: Chunk) -> MethodState | None:
        if self.certify:
            return ValueNorms.of(segment.kv, self.block_size)
        nothing = torch.full((segment.kv.kv_heads, self.follow), -1, dtype=torch.int64, device=segment.kv.device)
        return Heaviest(nothing) if self.follow else None

    def whole_upto(self, opening: Opening) -> int:
        if self.certify:  # which is said of every row
            return 0
        return MOST if self.epsilon == 0 else self.sinks + self.local

    def select_decode(self, query: Query, state: Any) -> Selection:
        shape, size = query.shape, self.block_size
        middle = Middle.of(shape.k_len, size, self.sinks, self.local)
        heavy = -(-budget_keys(self.heavy, middle.blocks * size) // size) if middle.blocks else 0
        if self.epsilon == 0 or middle.blocks <= heavy:
            if self.certify:
                query.cost.certify(exact=shape.heads)
                self._count_rounding(query)
            return Dense(shape)
        summary = query.kv.summary("minmax", size)[middle.first : middle.last]
        query.cost.estimated += middle.blocks
        before = query.cost.scored
        lists: list[tuple[Tensor, Tensor] | None] = []
        if self.certify:
            assert isinstance(state, ValueNorms)
            state.follow(query.kv)
            certifier = Certifier(query, middle, heavy, self.epsilon, self.delta, self.seed)
            norms = state.bounds[:, :, middle.first : middle.last]
            self._count_rounding(query)
            for kv_head in range(shape.kv_heads):
                lists += certifier.choose(kv_head, upper_bounds(query, summary, kv_head), norms[:, kv_head])
        else:
            known, heaviest = isinstance(state, Heaviest) and state.length == shape.k_len - 1, []
            for kv_head in range(shape.kv_heads):
                rank = upper_bounds(query, summary, kv_head).amax(0)
                if known:
                    rank[self._followed(state.keys[kv_head], middle)] = torch.inf
                chosen, most = self._choose(query, middle, heavy, kv_head, rank)
                lists += [chosen] * shape.group
                heaviest.append(most)
            if isinstance(state, Heaviest):
                state.keys, state.length = torch.stack(heaviest), shape.k_len
        query.cost.scored = before + round((query.cost.scored - before) / shape.kv_heads)
        if all(one is None for one in lists):
            return Dense(shape)
        everything = torch.arange(shape.k_len, device=shape.device)
        read = [(everything, torch.zeros(shape.k_len, device=shape.device)) if one is None else one for one in lists]
        tokens = Tokens.from_lists(shape, [positions for positions, _ in read])
        return Sampled(tokens, torch.cat([bias for _, bias in read]))

    def _count_rounding(self, query: Query) -> None:
        if query.kv.format.k is not AUTO:
            groups = query.q[:, 0].unflatten(0, (query.shape.kv_heads, -1))
            found = [attention_error(q, query.kv, head, query.scale) for head, q in enumerate(groups)]
            query.cost.rounding = max(found)

    def _choose(
        self, query: Query, middle: Middle, heavy: int, kv_head: int, rank: Tensor
    ) -> tuple[tuple[Tensor, Tensor] | None, Tensor]:
        """Positions that one KV head's query heads read and what their logits gain, None for everything; and the
        heaviest keys of the middle (as of :class:`Heaviest`). ``rank`` fp32 [blocks]: the highest are read."""
        blocks = torch.topk(rank, heavy).indices
        exact, others = middle.exact(blocks), middle.others(blocks)
        near = Read.of(query, kv_head, exact)
        most = self._heaviest(exact, near, middle)
        rest = others.numel() * middle.size
        looked = max(LEAST, math.ceil(self.base * rest))
        if 2 * looked >= rest:
            return None, most
        positions = self._drawn(FIRST, query, middle, others, kv_head, looked)
        query.cost.scored += looked  # of one KV head's
        count = sample_size(near, Read.of(query, kv_head, positions), rest, self.epsilon, self.delta)
        count = max(LEAST, count)
        if 2 * count >= rest:  # reading it all costs little more, and errs nothing
            return None, most
        # Blocks of like bounds hold like weights: a sample spread evenly over their order errs less than one drawn
        # anywhere, and never more (Cochran, "Sampling Techniques", 5.6, for stretches of equal length).
        ranked = others[rank[others].argsort(descending=True, stable=True)]
        found, times = counted(self._drawn(SECOND, query, middle, ranked, kv_head, count, spread=True))
        bias = torch.log(times * (rest / count)).float()
        return ordered(torch.cat([exact, found]), torch.cat([bias.new_zeros(exact.numel()), bias])), most

    def _heaviest(self, exact: Tensor, near: Read, middle: Middle) -> Tensor:
        """The ``follow`` keys of the middle among ``exact`` with the greatest weight in any head; int64, -1 where there
        are fewer."""
        inside = (exact >= middle.first * middle.size) & (exact < middle.last * middle.size)
        weight = torch.where(inside, torch.softmax(near.scores, 1).amax(0), -1.0)
        count = min(self.follow, exact.numel())
        best = torch.topk(weight, count)
        found = torch.where(best.values < 0, -1, exact[best.indices])
        return torch.nn.functional.pad(found, (0, self.follow - count), value=-1)

    def _followed(self, keys: Tensor, middle: Middle) -> Tensor:
        """The blocks of the middle that hold ``keys`` (int64, -1 for none) or a key after one of them."""
        keys = keys[keys >= 0]
        blocks = torch.cat([keys, keys + 1]) // middle.size - middle.first
        return blocks[(blocks >= 0) & (blocks < middle.blocks)]

    def _drawn(
        self, stage: int, query: Query, middle: Middle, others: Tensor, kv_head: int, count: int, spread: bool = False
    ) -> Tensor:
        """Positions of ``count`` keys of the blocks ``others``, drawn uniformly with replacement; with ``spread`` one
        of each of ``count`` stretches of equal length."""
        rest, chance = others.numel() * middle.size, draws(self.seed, stage, query, kv_head, count)
        if spread:
            chance = (chance + torch.arange(count, device=chance.device)) / count
        at = (chance * rest).long().clamp(max=rest - 1)  # the quotient may round up to 1
        return (others[at // middle.size] + middle.first) * middle.size + at % middle.size


def sample_size(exact: Read, looked: Read, rest: int, epsilon: float, delta: float) -> int:
    """Keys of a uniform sample of ``rest`` keys by which every head's error, over the sum of weight times norm of
    value, stays below ``epsilon`` with probability 1 - ``delta``, by the normal law: the error is that of a sum of
    weight times (value - output), whose variance the base sample ``looked`` shows."""
    top = torch.maximum(exact.scores.amax(1), looked.scores.amax(1))[:, None]
    near, far = torch.exp(exact.scores - top), torch.exp(looked.scores - top)
    share = rest / far.shape[1]
    total = near.sum(1) + share * far.sum(1)
    out = (near @ exact.values + share * (far @ looked.values)) / total[:, None]
    scale = near @ exact.values.norm(dim=-1) + share * (far @ looked.values.norm(dim=-1))
    away = far[:, :, None] * (looked.values - out[:, None])  # [group, looked, head_dim]
    variance = away.var(1).sum(-1)
    z = NormalDist().inv_cdf(1 - delta / 2)
    needed = (z * rest / (epsilon * scale.clamp(min=1e-30))) ** 2 * variance
    return math.ceil(min(float(needed.amax()), float(rest)))
