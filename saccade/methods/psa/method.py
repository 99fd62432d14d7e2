"""PSA: progressive sparse attention in decode (docs/algorithms.md 4).

Blocks are read in order of criticality until the weight still unread cannot matter; the op runs the stopping rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from saccade.errors import PolicyError
from saccade.methods.base import Chunk, Query
from saccade.methods.device_state import DeviceState, Opening
from saccade.methods.dial import Dial
from saccade.methods.host_state import HostState
from saccade.methods.labels import Labels, labels_note
from saccade.methods.options import require_choice, require_number, require_whole
from saccade.methods.psa.estimates import block_estimates, keys_in_few_bits, ranked_by_estimate
from saccade.methods.psa.host import HostKeys
from saccade.methods.psa.recorded import RecordedKeys
from saccade.methods.tails import BlockMethod
from saccade.ops.block_scores import first_ranked, ranked_blocks
from saccade.selection import Dense, Ranking, Selection
from saccade.selection.forms import LABELS, PlanSpec, Rule, Summarized
from saccade.selection.plan import DevicePlan
from saccade.selection.readings import Choice

# Blocks always read: so many first ones, so many last full ones, and the partial one (docs/algorithms.md 4.5 P2).
SINK_BLOCKS, LAST_BLOCKS = 2, 1
FIRST_RANKED = 256  # blocks that a ranking of very many begins with
RANKS = {"cuboid": "cuboid", "minmax": "minmax", "mean": "stored_mean", "moments": "moments"}  # and their summaries
RESTS = ("min", "last_max", "estimate")
MARGINS = {"moments": 3.0, "keys": 0.5}  # standard deviations, where a policy names none


@dataclass(frozen=True)
class PSA(BlockMethod):
    """Read ranked blocks of ``block_size`` keys in microbatches until estimated coverage exceeds ``epsilon``.

    ``rank="keys"``, the default, guesses what each block weighs from every key in ``bits`` bits, and ranks by the
    largest share of any of the unit's heads; it reads a ``bits``/16th of the keys' bytes, and misses no single heavy
    key in a block of light ones (methods/psa/estimates.py). ``"moments"`` guesses from the mean and the variance of a
    block's keys. ``"cuboid"`` is the paper's: ArkVale's criticality, the cuboid-mean score averaged over the unit's
    query heads; ``"minmax"`` averages Quest's bound of the block's dot products, ``"mean"`` that of its mean key.
    ``unit`` is ``kv_head``, or ``layer`` as in the paper.

    ``rest`` is what unread blocks count for. ``"estimate"``, the default with ``keys`` and ``moments``, takes their
    guess of each, raised by as much as the blocks read so far lay above their guesses on average, and ``margin``
    standard deviations of that on top (default: 3 of moments, 0.5 of keys). ``"last_max"``, the default with the
    others, takes the heaviest block of the last microbatch, and ``"min"`` is Alg. 1's: either stops for good at a
    light block ranked too high. What any of them says is covered is an estimate: that of ``keys`` held on every model
    that it was measured on (docs/real-models.md), the others' does not where one key outweighs its block. The paper's
    own form is ``psa(rank=cuboid, rest=min, unit=layer)``.

    ``stop`` says whether all heads of a unit must be covered or their mean. ``epsilon=1`` reads everything,
    ``epsilon=0`` one microbatch beside the blocks that are always read; a context of no more blocks is read whole.
    """

    name: ClassVar[str] = "psa"
    paper: ClassVar[str] = "PSA, progressive sparse attention"
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    dial: ClassVar[Dial | None] = Dial("epsilon", "share")

    epsilon: float = 0.95
    block_size: int = 32
    microbatch: int = 4
    unit: str = "kv_head"
    rest: str | None = None
    stop: str = "all"
    rank: str = "keys"
    margin: float | None = None
    bits: int = 4

    def __post_init__(self) -> None:
        require_number("epsilon", self.epsilon, 0.0, 1.0)
        require_choice("block_size", self.block_size, (8, 16, 32, 64, 128))
        require_whole("microbatch", self.microbatch, 1)
        require_choice("unit", self.unit, ("kv_head", "layer"))
        if self.rest is not None:
            require_choice("rest", self.rest, RESTS)
        require_choice("stop", self.stop, ("all", "mean"))
        require_choice("rank", self.rank, (*RANKS, "keys"))
        require_choice("bits", self.bits, (2, 4, 8))
        if self.margin is not None:
            require_number("margin", self.margin, 0.0, 100.0)
        self.check_tail()
        if self.rest == "estimate" and self.rank not in MARGINS:
            raise PolicyError(
                f"rest=estimate goes by what rank=moments or rank=keys guesses, got rank={self.rank}; give one of "
                "these, or rest=last_max"
            )

    @property
    def rule(self) -> str:
        """``rest``, or what stands for it where a policy names none."""
        return self.rest or ("estimate" if self.rank in MARGINS else "last_max")

    @property
    def spare(self) -> float:
        """``margin``, or what stands for it where a policy names none."""
        return MARGINS.get(self.rank, 0.0) if self.margin is None else self.margin

    @property
    def dense_upto(self) -> int:
        """Rows of up to so many keys read everything: what is always read and one microbatch are all that there is."""
        return (SINK_BLOCKS + LAST_BLOCKS + 1 + self.microbatch) * self.block_size - 1

    @property
    def one_process(self) -> str | None:
        if self.unit != "layer":
            return None
        return "its rule asks all heads of a layer after each microbatch (unit=kv_head lets each KV head stop)"

    @property
    def extra_memory(self) -> str | None:
        return labels_note(self.bits) if self.rank == "keys" else None

    def begin(self, segment: Chunk) -> Labels | None:
        return keys_in_few_bits(segment.kv, self.bits) if self.rank == "keys" else None

    def select_decode(self, query: Query, state: Labels | None) -> Selection:
        shape, size = query.shape, self.block_size
        if shape.k_len <= self.dense_upto:
            return Dense(shape)
        full, rest = divmod(shape.k_len, size)
        stop = full - LAST_BLOCKS
        units = shape.kv_heads if self.unit == "kv_head" else 1
        estimates, begun, complete = None, None, None
        if self.rank in MARGINS:
            if self.rank == "keys":
                state = keys_in_few_bits(query.kv, self.bits) if state is None else state
                state.extend(query.kv)
                guess = state.block_weights(query.q[:, 0], size, query.scale, query.softcap, SINK_BLOCKS, stop)
                query.cost.estimated += shape.k_len
            else:
                summary = query.kv.summary("moments", size)[SINK_BLOCKS:stop]
                guess = block_estimates(query.q[:, 0], summary, size, query.scale, query.softcap)
                query.cost.estimated += stop - SINK_BLOCKS
            order, estimates = ranked_by_estimate(guess, units)
            order += SINK_BLOCKS
        else:
            q, kind = query.q[:, 0], RANKS[self.rank]
            summary, codes = query.kv.summary(kind, size), query.kv.codes(kind, size)
            some = FIRST_RANKED // self.microbatch * self.microbatch
            begun = first_ranked(q, summary, units, some, SINK_BLOCKS, stop, codes) if some else None
            complete = partial(ranked_blocks, q, summary, units, SINK_BLOCKS, stop)
            order = complete() if begun is None else begun
            query.cost.estimated += stop - SINK_BLOCKS
        count = SINK_BLOCKS + LAST_BLOCKS + (rest > 0)
        always = torch.arange(count, dtype=torch.int32, device=order.device)  # a list from the host would wait for it
        always[SINK_BLOCKS:] += stop - SINK_BLOCKS
        ranking = Ranking(
            shape,
            size,
            always.expand(units, -1),
            order,
            epsilon=self.epsilon,
            microbatch=self.microbatch,
            rest=self.rule,
            stop=self.stop,
            estimates=estimates if self.rule == "estimate" else None,
            margin=self.spare,
            ranked=stop - SINK_BLOCKS if begun is not None else None,
            complete=complete if begun is not None else None,
        )
        return self.with_tail(query, ranking, size)

    def device_plan(self, spec: PlanSpec) -> DevicePlan | None:
        if self.stands_in:
            return None
        units, by_keys = spec.kv_heads if self.unit == "kv_head" else 1, self.rank == "keys"
        rank, bits = (LABELS, self.bits) if by_keys else (RANKS[self.rank], 0)
        source = Summarized(self.block_size, rank, bits)
        rule = Rule(self.epsilon, self.microbatch, self.rule, self.stop, self.spare)
        choice = Choice(source, units, SINK_BLOCKS, LAST_BLOCKS, self.dense_upto, rule=rule)
        return DevicePlan.alike(self, spec, choice)

    def whole_upto(self, opening: Opening) -> int:
        return self.dense_upto

    def host_state(self, opening: Opening) -> HostState | None:
        if opening.length <= self.dense_upto:
            return super().host_state(opening)
        plan = None if opening.windowed or self.rank != "keys" else self.device_plan(opening.spec)
        return None if plan is None or plan.choice is None else HostKeys(opening, plan.choice)

    def device_state(self, opening: Opening) -> DeviceState:
        return RecordedKeys(opening, self.bits) if self.rank == "keys" else super().device_state(opening)
