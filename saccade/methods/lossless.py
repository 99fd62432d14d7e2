"""lossless: a sparse method drafts tokens, dense attention verifies them. The answer is dense attention's.

Speculative decoding (Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", ICML
2023; Chen et al., arXiv:2302.01318) with the model as its own draft, under sparse attention, as in TriForce
(arXiv:2404.11912) and MagicDec (arXiv:2408.11049). The engine drives it
(``engine/scheduling/sparse_drafts.py``); here is what a decode row reads that is no draft, everything, and
what the draft learns from it.

A draft that keeps a state learns from verified rows alone: with each it chooses, reads and learns as if the row were
its own, beside what dense attention reads. What its own rows taught it is dropped with them. So its state hangs on the
tokens alone, and a replay of the accepted ones gives it to the last bit. What the draft evicts is gone for the draft,
and for it alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from saccade.methods.base import Chunk, Evicting, Method, Query
from saccade.methods.options import require, require_number, require_whole
from saccade.methods.psa import PSA
from saccade.methods.verified import MOST, UNLEARNT, Drafted, Verified, bare
from saccade.ops import Call, run
from saccade.selection import Dense, Selection, cut, without
from saccade.selection.forms import PlanSpec
from saccade.selection.plan import DevicePlan
from saccade.selection.readings import Everything

AnyChunk = TypeVar("AnyChunk", bound=Chunk)


@dataclass(frozen=True)
class Lossless(Verified):
    """Dense decoding, in fewer passes over the keys: ``draft``, a decode method, drafts ``tokens`` tokens one after the
    other, and one dense pass over them all decides which of them stay.

    ``tokens=0`` drafts as many as the measured acceptance and step times make worth their while, up to 15, and none
    where they are not (``engine/drafts/pacing.py``); a number drafts so many, always. ``lookup``: where the last
    ``lookup`` tokens of the draft stood earlier in the sequence and went on with what was drafted, what followed
    there is drafted too, for no step at all (prompt lookup; Saxena 2023); 0 never does. ``carried``: of the blocks
    that a draft chooses for its budget (``quest``, ``arkvale``), this share are those that weighed most in the last
    verified row, where the verification says so; a draft with a rule (``psa``) reads this share of 512 keys of them
    before its own (``engine/steps/carried.py``).

    Raises PolicyError for a draft that is no decode method, reads everything, or is ``lossless`` itself.
    """

    name: ClassVar[str] = "lossless"
    paper: ClassVar[str] = "speculative decoding, arXiv:2211.17192"
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    means_dense: ClassVar[bool] = True

    draft: Method = field(default=PSA(epsilon=0.3, rank="cuboid"))  # what a draft misses costs time alone
    tokens: int = 0
    lookup: int = 3
    carried: float = 0.5

    def __post_init__(self) -> None:
        draft: Any = self.draft
        wanted = "a sparse method of decode, as in lossless(draft=psa(epsilon=0.3))"
        require(isinstance(draft, Method), "draft", draft, wanted)
        require("decode" in draft.phases and not draft.deferred, "draft", draft.text, wanted)
        require(not draft.means_dense, "draft", draft.text, wanted)
        require_whole("tokens", self.tokens, 0, MOST)
        require_whole("lookup", self.lookup, 0, 64)
        require_number("carried", self.carried, 0.0, 1.0)
        for name in ("tail_rows", "watches"):  # what the draft asks for
            object.__setattr__(self, name, getattr(draft, name))

    @property
    def calibration(self) -> str | None:
        return self.draft.calibration

    @property
    def extra_memory(self) -> str | None:
        return self.draft.extra_memory

    @property
    def looks_ahead(self) -> bool:
        return self.draft.looks_ahead

    @property
    def looks_at_inputs(self) -> bool:
        return self.draft.looks_at_inputs

    def watch(self, chunk: Chunk) -> Any:
        return self.draft.watch(_own(chunk))

    def begin(self, segment: Chunk) -> Drafted | None:
        with self._quiet(segment):
            state = self.draft.begin(_own(segment))
        return None if state is None else Drafted(state)

    def select_decode(self, query: Query, state: Any) -> Selection:
        return Dense(query.shape)

    def observe(self, query: Query, selection: Selection, weights: Tensor | None, state: Any) -> None:
        if not isinstance(state, Drafted) or query.step < UNLEARNT:
            return
        own, draft = _own(query), self.draft
        with self._quiet(query):
            chosen = draft.select_decode(own, state.draft)
            if query.window is not None:
                chosen = cut(chosen, query.window)
            if query.gone is not None and not isinstance(state.draft, Evicting):
                chosen = without(chosen, query.gone)
            if not draft.wants_weights:
                draft.observe(own, chosen, None, state.draft)
                return
            ran = run(Call(query.q, query.kv, chosen, query.scale, query.softcap, want_weights=True))
            draft.observe(own, ran.used, ran.weights, state.draft)

    @contextmanager
    def _quiet(self, chunk: Chunk) -> Iterator[None]:
        """Without notes of a draft that evicts: they tell of keys that are gone for the draft, and here all can be
        read."""
        notes = chunk.cost.notes
        before = len(notes)
        yield
        if self.draft.evicts:
            del notes[before:]

    def device_plan(self, spec: PlanSpec) -> DevicePlan:
        return DevicePlan.alike(self, spec, Everything())


def _own(chunk: AnyChunk) -> AnyChunk:
    """``chunk`` as the draft is to see it."""
    if not any(isinstance(state, Drafted) for state in chunk.states):
        return chunk
    return replace(chunk, states=[bare(state) for state in chunk.states])
