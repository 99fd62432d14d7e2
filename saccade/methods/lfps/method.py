"""LFPS: candidates predicted from what a head attended to before; exact top-k inside them (docs/algorithms.md 1).

Two decayed tables per head remember which positions (vertical lines) and which distances (slash lines) received weight.
A step scores only the keys that a table holds above a threshold, and their neighbours. A head that rests on its sinks
anyway is bypassed. Choices where the paper errs or is silent, the other value of each option being the paper:

* ``blocks``: history cannot foresee what a query asks for that no query asked before. So the keys of the ``blocks``
  blocks of ``block_size`` whose mean keys agree best with the query are candidates too, one mean read per block; the
  paper has none (0);
* ``least``: k never falls below so many keys, where 2 % of a short context is a handful; the paper has no floor (1);
* ``rest="sample"``: the mean value stands for all keys that are no candidates, at the weight that ``probes`` of them
  suggest: heads that average over much of the context lose little (the paper's third finding, which it uses for
  bypassed heads alone: ``none``);
* ``history="restart"``: a new turn fills the tables from its own last rows alone; ``"keep"`` lets what the turn before
  left decay by a step for each of them and joins it, unless tokens were cut off since. The paper knows one turn;
* the threshold of eq. 8 is printed with kurtosis over n, and meant so: with the n nearly everything is a candidate.

The options that follow are for comparisons: with another value than the default, rows are served by the reference in
torch, one by one, and neither by the C++ kernels nor by those of recorded steps.

* ``slash_shift_on_read``: eq. 7 reads the slash table as the last row left it, one position too old, so that a pure
  slash head never finds its key. The table is stored by distance here and read for the row at hand;
* ``bypass="sink_mean"``: a bypassed head returns its sinks' output merged with the mean value at the estimated weight
  of everything else; ``"sink"`` leaves the mean out, ``"mean"`` is Alg. 1, which returns the mean value alone;
* ``bypass_shift``: a bypass leaves the tables aligned with the row; in the paper they fall behind by one;
* ``read_local``: the ``local`` last keys, whose logits the bypass needs, are always read, counted in ``k``, and what
  they weigh is learnt; the paper reads only the row's own key, beside its top-k, and learns from the top-k alone;
* ``running_means``: means take in decoded tokens, too; else they and the spread are the prompt's;
* ``gate="paper"`` drops candidates that exceed neither table's mean, those above a threshold among them
  (``"off_for_c0"`` spares those). ``a=none``: no threshold; with ``gate=off`` every key is a candidate: exact top-k.

The paper to the letter: ``lfps(blocks=0, least=1, rest=none, slash_shift_on_read=false, bypass=mean,
bypass_shift=false, read_local=false)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from saccade.errors import whole_number
from saccade.methods.base import Chunk, Method, Query
from saccade.methods.device_state import DeviceState, Opening
from saccade.methods.host_state import HostState
from saccade.methods.lfps import cpu
from saccade.methods.lfps.choosing import choose
from saccade.methods.lfps.host import HostTables
from saccade.methods.lfps.prompt import last_rows, last_spread
from saccade.methods.lfps.recorded import ForeseenKeys, RecordedTables
from saccade.methods.lfps.state import LFPSState, TurnBefore
from saccade.methods.lfps.tables import ScoreTables, learn
from saccade.methods.options import require, require_choice, require_number, require_whole
from saccade.ops.weights import as_tokens
from saccade.selection import Candidates, Dense, Selection
from saccade.selection.forms import PlanSpec
from saccade.selection.plan import DevicePlan

# Options whose other values the reference alone knows.
COMPARED = "gate", "bypass", "slash_shift_on_read", "bypass_shift", "read_local", "running_means"


@dataclass(frozen=True)
class LFPS(Method):
    """Exact top-``k`` among keys that decayed attention histories predict, and those of the most promising blocks.

    ``k`` is a number of keys or, below 1, a fraction of the keys that are no sinks, at least ``least``; the first
    ``sinks`` are read beside it. ``s`` prompt rows fill the tables, ``r`` is their decay, ``a`` scales their
    thresholds, ``before`` and ``after`` say how far candidates spread. A head is bypassed when its sinks' estimated
    share exceeds ``epsilon`` (1: never).
    ``unit="kv_head"`` keeps one pair of tables and one set of keys per KV head, by the group's mean weights; bypasses
    stay each query head's own.
    """

    name: ClassVar[str] = "lfps"
    paper: ClassVar[str] = "LFPS, sparse decode on CPUs by attention histories"
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    wants_weights: ClassVar[bool] = True
    follows_kv: ClassVar[bool] = True

    k: float = 0.02
    s: int = 32
    r: float = 0.95
    a: float | None = 0.2
    epsilon: float = 0.85
    sinks: int = 4
    local: int = 6
    before: int = 1
    after: int = 2
    unit: str = "q_head"
    blocks: int = 128
    block_size: int = 8
    least: int = 256
    rest: str | None = "sample"
    probes: int = 64
    history: str = "restart"
    gate: str = "paper"
    bypass: str = "sink_mean"
    slash_shift_on_read: bool = True
    bypass_shift: bool = True
    read_local: bool = True
    running_means: bool = False

    @property
    def stands_in(self) -> bool:
        bypassed = self.epsilon < 1 and self.sinks > 0 and self.bypass != "sink"
        return self.rest is not None or bypassed

    def __post_init__(self) -> None:
        whole = whole_number(self.k, 1)
        require(
            whole or (isinstance(self.k, float) and 0 < self.k < 1),
            "k",
            self.k,
            "an integer >= 1 (keys), or a fraction between 0 and 1 of the keys that are no sinks",
        )
        require_whole("s", self.s, 1)
        require_number("r", self.r, 0.0, 1.0)
        require(self.r < 1, "r", self.r, "a number from 0 to below 1")
        if self.a is not None:
            require_number("a", self.a, 0.0, 1e6)
        require_number("epsilon", self.epsilon, 0.0, 1.0)
        for name in ("sinks", "before", "after", "blocks"):
            require_whole(name, getattr(self, name), 0)
        require(max(self.before, self.after) < 64, "before, after", (self.before, self.after), "at most 63")
        require_whole("local", self.local, 1)
        require_whole("least", self.least, 1)
        require_whole("probes", self.probes, 1)
        require_choice("rest", self.rest, ("sample", None))
        require_choice("block_size", self.block_size, (4, 8, 16, 32, 64, 128))
        require_choice("history", self.history, ("restart", "keep"))
        require_choice("unit", self.unit, ("q_head", "kv_head"))
        require_choice("gate", self.gate, ("paper", "off_for_c0", "off"))
        require_choice("bypass", self.bypass, ("sink_mean", "sink", "mean"))
        for name in ("slash_shift_on_read", "bypass_shift", "read_local", "running_means"):
            require_choice(name, getattr(self, name), (False, True))
        object.__setattr__(self, "tail_rows", self.s)
        object.__setattr__(self, "watches", self.history == "keep")

    @cached_property
    def reference_alone(self) -> str | None:
        """The option, with its value, for which rows are served by the reference in torch alone, in a sentence; None
        where kernels know all of them."""
        given = [name for name in COMPARED if getattr(self, name) != getattr(LFPS, name)] + ["a"] * (self.a is None)
        shown = ", ".join(f"{name}={str(getattr(self, name)).lower()}" for name in given)
        return f"{shown} is for comparisons: the reference in torch serves it" if given else None

    @property
    def every_key(self) -> bool:
        """Whether every key is a candidate."""
        return self.a is None and self.gate == "off"

    def probes_at(self, query: Query) -> int:
        """How many keys a row asks for the weight of those that are no candidates."""
        hidden = query.window is not None or query.gone is not None  # then they are not those that nothing stands for
        return 0 if self.rest is None or self.every_key or hidden else self.probes

    def budget(self, keys: int) -> int:
        """How many of ``keys`` keys that are no sinks a row reads, the local ones among them."""
        return int(self.k) if self.k >= 1 else max(self.least, self._asked(keys))

    def _asked(self, keys: int) -> int:
        return math.ceil(round(self.k * keys, 9))

    def hidden_by(self, keys: int) -> str | None:
        hidden = self.k < 1 and self._asked(max(0, keys - self.sinks)) < self.least
        return f"least={self.least}" if hidden else None

    def best(self, keys: int) -> int:
        """How many candidates a row reads at most that sees ``keys`` keys that are no sinks."""
        budget = self.budget(keys)
        return max(0, budget - min(self.local, keys)) if self.read_local else budget

    def watch(self, chunk: Chunk) -> TurnBefore:
        if isinstance(chunk.past, TurnBefore):
            return chunk.past
        state = chunk.states[chunk.layer] if chunk.layer < len(chunk.states) else None
        return TurnBefore(state if isinstance(state, LFPSState) and state.seen == chunk.shape.q_start - 1 else None)

    def begin(self, segment: Chunk) -> LFPSState:
        kv, shape = segment.kv, segment.shape
        end, rows = shape.q_start + shape.q_len, min(self.s, shape.q_len)
        first = min(self.sinks, end)
        units = shape.heads if self.unit == "q_head" else shape.kv_heads
        vertical, slash = last_rows(segment, units, rows, first)
        for lines in (vertical, slash):
            lines *= 1.0 / (2 * (1.0 - self.r))
        keys, values = kv.keys(first, end).float(), kv.values(first, end).float()
        mean_key, mean_value = (part.sum(1) / max(1, end - first) for part in (keys, values))
        past = segment.past.state if isinstance(segment.past, TurnBefore) else None
        if past is not None and past.tables.units == units and past.tables.first == first:
            past.tables.decayed_into(vertical, slash, self.r**rows)
        tables = ScoreTables.of(vertical, slash, first, end - 1)
        return LFPSState(tables, mean_key, mean_value, end - first, last_spread(segment, first), end - 1)

    def select_decode(self, query: Query, state: LFPSState) -> Selection:
        shape, tables = query.shape, state.tables
        position = shape.q_start
        length = position + 1 - tables.first
        tables.grow(length)
        if self.running_means:
            self._extend_means(query, state)
        tables.row.fill_(position if self.slash_shift_on_read else position - 1)
        state.idle = None
        if length - (not self.read_local) <= self.budget(length):
            return Dense(shape)
        local = min(self.local if self.read_local else 1, length)
        by_kernels = cpu.why_not(self, query.q, query.kv, tables) is None
        found = (cpu.choose if by_kernels else choose)(self, query, state, length, local)
        self._count(query, tables, found.offsets, local)
        state.idle = found.idle
        rest = None if found.rest is None else (found.rest, state.mean_value.repeat_interleave(shape.group, 0))
        return Candidates(
            shape,
            found.offsets,
            found.indices,
            torch.full((tables.units,), self.best(length), device=found.offsets.device),
            tables.first,
            local,
            torch.ones(tables.units, dtype=torch.bool, device=shape.device) if self.every_key else None,
            state.idle,
            0 if self.bypass == "mean" else tables.first,
            rest,
        )

    def _count(self, query: Query, tables: ScoreTables, offsets: Tensor, local: int) -> None:
        """What it cost to decide."""
        cost, first = query.cost, tables.first
        if self.epsilon < 1 and first > 0:
            cost.scored += first + self.local
            cost.estimated += 1
        if self.every_key:
            cost.scored += query.shape.causal_pairs
            return
        cost.scored += round(int(offsets[-1]) / tables.units) + local + first
        cost.scored += min(self.probes_at(query), query.shape.k_len - local - first)
        if self.blocks:
            cost.estimated += query.shape.k_len // self.block_size

    def device_plan(self, spec: PlanSpec) -> DevicePlan | None:
        return DevicePlan.alike(self, spec, ForeseenKeys.of(self, spec))

    def device_state(self, opening: Opening) -> DeviceState:
        return RecordedTables(opening, self)

    def host_state(self, opening: Opening) -> HostState | None:
        return HostTables(opening, self) if HostTables.serves(self, opening) else None

    def observe(self, query: Query, selection: Selection, weights: Tensor | None, state: LFPSState) -> None:
        tables, position = state.tables, query.shape.q_start
        tables.row.fill_(position)
        if state.idle is not None and not self.bypass_shift:
            tables.stay(state.idle.view(tables.units, -1).all(1), position + 1 - tables.first)
        read = as_tokens(selection, weights)
        if cpu.why_not(self, query.q, query.kv, tables) is None:
            cpu.learn(tables, *read, state.idle, self.r)
        else:  # the paper does not learn from the row's own key
            learn(tables, *read, state.idle, self.r, position + int(self.read_local))
        state.seen = position

    def _extend_means(self, query: Query, state: LFPSState) -> None:
        """Take the keys and values of decoded tokens into the means."""
        stop = query.shape.q_start + 1
        start = state.tables.first + state.counted
        if start < stop:
            fresh = stop - start
            for mean, part in ((state.mean_key, query.kv.keys), (state.mean_value, query.kv.values)):
                mean += (part(start, stop).float().sum(1) - fresh * mean) / (state.counted + fresh)
            state.counted += fresh
