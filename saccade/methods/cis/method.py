"""CIS: similar queries near each other share the keys that one of them retrieved (PrHS; docs/algorithms.md 5.2, 5.3).

Decode steps come in blocks. A query whose cosine with an earlier retrieving query of its block exceeds ``tau`` reads
that one's keys and their neighbours; any other retrieves, by exact top-k. With a window (``psaw``) and a freeze
(``etf``) this is CPE. Choices where the paper is silent or errs:

* ``anchors``: the paper shares with "an earlier query". ``any`` shares with whatever query came before, which passes on
  what it had itself: likeness may drift away along a chain of steps until the block ends, but keys stay those of the
  query that retrieved, so neither gaps nor dilation add up. ``retrieved`` shares with queries that retrieved alone;
* the retrieving query itself reads its exact top-k; those who share read the dilated set;
* ``cover_gap``: keys that were local when the set was retrieved and have left the window since are read as well;
  without it, as printed, they are in neither set;
* blocks count decode steps of the turn (``align="step"``) or positions in the context (``"position"``);
* ``follow``: a model that copies a text looks one key further at every step, with queries that resemble each other. The
  paper's sets stay where they are, so such a head loses its place until it retrieves again, and an answer breaks off
  after a token or two. Here those who share also read where the steps since would have moved the best keys, and what is
  near; ``follow=none`` is the paper;
* a ``kv_head`` unit ranks by the mean of its heads' softmax weights, each renormalised over the keys that may be read;
  a retrieval stays inside a PSAW window, and shared keys that the window hides are dropped;
* ``by``: likeness is that of rotated queries. ``by=key`` and ``by=hidden`` are the paper's Table VII: of the steps' own
  rotated keys, and of the hidden states that the layer is given, where all units of a layer decide alike.

At least every ``s``-th step of a head retrieves: retrieval ratios below 1 / s, as in the paper's Table VI, cannot be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from saccade.errors import whole_number
from saccade.methods.base import Chunk, Method, Query
from saccade.methods.borrowed import Borrowed
from saccade.methods.cis.anchors import Anchors
from saccade.methods.cis.host import HostAnchors
from saccade.methods.cis.recorded import RecordedAnchors, SharedKeys
from saccade.methods.cis.sharing import keep, leave_out, pass_on, share
from saccade.methods.device_state import DeviceState, Opening
from saccade.methods.fitting import Fitting, Sizes
from saccade.methods.host_state import HostState
from saccade.methods.options import require, require_choice, require_number, require_whole
from saccade.methods.state import MethodState
from saccade.selection import Candidates, Dense, Selection, Tokens
from saccade.selection.forms import PlanSpec
from saccade.selection.plan import DevicePlan

ROUNDING = 1e-5  # of cosines
AHEAD = 256  # steps that the room made for lists lasts, where they grow with the context


@dataclass
class CISState(MethodState):
    """``fresh``: which units retrieve at the step at hand, bool [units]; None if none does."""

    replaced: ClassVar[frozenset[str]] = frozenset({"fresh"})

    block: int = -1
    anchors: Anchors | None = None
    fresh: Tensor | None = None

    def fit(self, sizes: Sizes, fitting: Fitting) -> None:
        """See MethodState."""
        fitting.within("block", self.block, -1, sizes.length)
        if self.fresh is not None:
            fitting.tensor("fresh", self.fresh, torch.bool, sizes.units)


@dataclass(frozen=True)
class CIS(Method):
    """Share the top-``k`` of a query with later ones of its block of ``s`` steps whose cosine with it exceeds ``tau``.

    ``k`` is a number of keys, or a fraction of the context below 1; the first ``sinks`` and the last ``local`` keys are
    read beside it. The ``m`` best keys (default: a third of k) bring their neighbours up to ``r`` away into the shared
    set. Who shares also reads where the steps since would have moved those best keys, and up to ``follow`` away: a copy
    looks one key further at every step (none: the paper, whose sets stay where they are). Cosines are those of rotated
    queries (``by``: see the module). ``anchors`` says whose keys are shared: of those that ``retrieved`` alone, or of
    ``any`` query, which passes on what it shared itself. ``unit="kv_head"`` decides for whole groups, by the cosine of
    their concatenated queries, and ranks keys by the mean of the heads' softmax weights. ``s=1`` or ``tau=1`` retrieves
    at every step.
    """

    name: ClassVar[str] = "cis"
    paper: ClassVar[str] = "PrHS, pre-hoc sparsity (CIS)"
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    wants_weights: ClassVar[bool] = True

    tau: float = 0.8
    s: int = 16
    k: float = 432
    sinks: int = 16
    local: int = 64
    r: int = 1
    m: int | None = None
    unit: str = "q_head"
    cover_gap: bool = True
    align: str = "step"
    follow: int | None = 2
    by: str = "query"
    anchors: str = "retrieved"

    def __post_init__(self) -> None:
        require_number("tau", self.tau, -1.0, 1.0)
        require_whole("s", self.s, 1)
        whole = whole_number(self.k, 1)
        fraction = isinstance(self.k, float) and 0 < self.k < 1
        require(whole or fraction, "k", self.k, "an integer >= 1 (keys), or a fraction between 0 and 1 of the context")
        require_whole("sinks", self.sinks, 0)
        require_whole("local", self.local, 1)
        require_whole("r", self.r, 0)
        for name in ("m", "follow"):
            if getattr(self, name) is not None:
                require_whole(name, getattr(self, name), 0)
        require_choice("unit", self.unit, ("q_head", "kv_head"))
        require_choice("cover_gap", self.cover_gap, (False, True))
        require_choice("align", self.align, ("step", "position"))
        require_choice("by", self.by, ("query", "key", "hidden"))
        require_choice("anchors", self.anchors, ("any", "retrieved"))

    @property
    def looks_at_inputs(self) -> bool:
        return self.by == "hidden"

    def budget(self, keys: int) -> int:
        """How many of ``keys`` keys a query retrieves."""
        return int(self.k) if self.k >= 1 else max(1, math.ceil(round(self.k * keys, 9)))

    def too_short(self, keys: int) -> bool:
        """Whether a context of so many keys is too short to leave any out."""
        return keys <= self.sinks + self.budget(keys) + self.local

    @property
    def chains(self) -> bool:
        """Whether queries that shared are shared with."""
        return self.anchors == "any"

    def begin(self, segment: Chunk) -> CISState:
        return CISState()

    def select_decode(self, query: Query, state: CISState) -> Selection:
        shape, n = query.shape, query.shape.k_len
        k = self.budget(n)
        state.fresh = None
        if self.too_short(n):
            return Dense(shape)
        units = shape.heads if self.unit == "q_head" else shape.kv_heads
        asked = self._asked(query, units)
        anchors = self._anchors(query, state, units, asked.numel() // units)
        moves = self.follow or 0, self.sinks  # nothing moves where the anchors remember no best keys
        how = self.tau, self.local, n, self.cover_gap, moves, self.chains
        offsets, shared, searching = share(anchors, asked, *how)
        query.cost.estimated += anchors.count
        searches = int(searching.sum())
        query.cost.scored += round(n * searches / units)
        query.cost.searches = searches * shape.heads // units
        state.fresh = searching if searches else None
        k_of = torch.where(searching, k, n)
        return Candidates(shape, offsets, shared, k_of, self.sinks, self.local, state.fresh)

    def _asked(self, query: Query, units: int) -> Tensor:
        """What is compared: a unit's rows, one after the other, [heads or units, channels]."""
        if self.by == "query":
            return query.q[:, 0]
        if self.by == "hidden":
            assert query.taken_in is not None, "the engine hands over the hidden state that a method asks for"
            return query.taken_in.expand(units, -1)
        n = query.shape.k_len
        return query.kv.keys(n - 1, n)[:, 0].repeat_interleave(units // query.shape.kv_heads, 0)

    def borrowed(self, query: Query, state: CISState) -> Borrowed | None:
        # A mean over heads ranks keys, which no multiple of a query does; other likenesses keep no queries.
        if self.unit != "q_head" or self.by != "query":
            return None
        n, asked, anchors = query.shape.k_len, query.q[:, 0].float(), state.anchors
        best = self.budget(n)
        if not self.too_short(n) and anchors is not None and anchors.count and anchors.of(*asked.shape):
            direction = asked / asked.norm(dim=-1, keepdim=True).clamp(min=1e-38)
            cosines = (anchors.directions[: anchors.count] * direction).sum(-1)
            alike = anchors.has[: anchors.count] & (cosines > self.tau - ROUNDING)
            numbers = torch.arange(anchors.count, device=asked.device)[:, None]
            whose = anchors.retrieving(torch.where(alike, numbers, -1).amax(0).clamp(min=0))
            theirs = anchors.directions[whose, torch.arange(len(asked), device=asked.device)]
            nearest = (asked * theirs).sum(-1, keepdim=True).clamp(min=0) * theirs
            asked = nearest if state.fresh is None else torch.where(state.fresh[:, None], asked, nearest)
        return Borrowed(asked, best, self.sinks, self.local)

    def _anchors(self, query: Query, state: CISState, units: int, channels: int) -> Anchors:
        """Those of the query's block of steps."""
        shape = query.shape
        block = (query.step if self.align == "step" else shape.q_start) // self.s
        if state.anchors is not None and not state.anchors.of(units, channels):
            state.anchors = None
        if state.anchors is None or block != state.block:
            state.anchors = state.anchors or Anchors.empty(units, channels, device=query.q.device)
            state.block, state.anchors.count = block, 0
        capacity, most = self.room(shape.k_len)
        if capacity > state.anchors.capacity or most > state.anchors.most:
            state.anchors.widen(*self.room(shape.k_len + AHEAD))
        return state.anchors

    def room(self, keys: int) -> tuple[int, int]:
        """How many keys a list holds at most after a step that sees ``keys``, and how many best ones are remembered:
        all that was retrieved may be shared, with the neighbours of its best."""
        spread = self.spread(keys)
        most = 0 if self.follow is None else spread
        return min(keys, self.budget(keys) + self.sinks + self.local + 2 * self.r * spread), most

    def spread(self, keys: int) -> int:
        """How many of the keys retrieved out of ``keys`` bring their neighbours along."""
        return min(keys, self.budget(keys) // 3 if self.m is None else self.m)

    def device_plan(self, spec: PlanSpec) -> DevicePlan | None:
        return DevicePlan.alike(self, spec, SharedKeys.of(self)) if self.by == "query" else None

    def device_state(self, opening: Opening) -> DeviceState:
        return RecordedAnchors(opening, self)

    def host_state(self, opening: Opening) -> HostState | None:
        if HostAnchors.why_not(opening, self) is None:
            return HostAnchors(opening, self)
        return super().host_state(opening)

    def whole_upto(self, opening: Opening) -> int:
        return self.sinks + self.local + (int(self.k) if self.k >= 1 else 0)

    def observe(self, query: Query, selection: Selection, weights: Tensor | None, state: CISState) -> None:
        searching, anchors = state.fresh, state.anchors
        state.fresh = None
        n = query.shape.k_len
        if anchors is None or not isinstance(selection, Tokens) or self.too_short(n):
            return
        if searching is None:
            if self.chains:
                pass_on(anchors, n - 1)
            return
        if weights is None:
            return
        middle, best = (self.sinks, n - self.local), self.spread(n)
        keep(anchors, selection, weights, searching, n - 1, middle, best, self.r, passes_on=self.chains)
        if query.window is not None:
            leave_out(anchors, (query.window.sink_keys, query.window.start(n - 1)))
