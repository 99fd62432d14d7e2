"""What every method is: a frozen dataclass of its paper's hyper-parameters with hooks for the phases of inference.

A method decides which keys. It holds no storage and runs no attention: hooks get a chunk (queries and a view of the
keys) and return a selection. Everything that changes lives in the state its ``begin`` returns, a ``MethodState`` (see
``state``) or None, one per sequence and layer.

The simplest method is one ``return``::

    @dataclass(frozen=True)
    class LastHalf(Method):
        name = "last_half"
        phases = ("prefill", "decode")

        def select_prefill(self, chunk):
            return Band(chunk.shape, window=max(1, chunk.shape.k_len // 2))

        def select_decode(self, query, state):
            return Band(query.shape, window=max(1, query.shape.k_len // 2))
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, Self

from torch import Tensor

from saccade.kv.view import KVView
from saccade.methods.borrowed import Borrowed
from saccade.methods.device_state import DeviceState, Opening
from saccade.methods.dial import Dial
from saccade.methods.host_state import HostState, WholeRows
from saccade.methods.measured import Measured
from saccade.methods.state import MethodState
from saccade.methods.windowed import windowed
from saccade.selection import Cone, Dense, Selection, Shape
from saccade.selection.forms import PlanSpec
from saccade.selection.head_part import WHOLE, HeadPart
from saccade.selection.plan import DevicePlan


@dataclass
class Cost:
    """What a selection cost, counted from work done. Units: (query, key) dot products per query head."""

    scored: int = 0  # exact logits computed to decide
    estimated: int = 0  # scores against block summaries or other stand-ins for keys
    searches: int | None = (
        None  # query heads that looked for keys anew, for methods that at times reuse what they found
    )
    notes: list[str] = field(default_factory=list)  # sentences for the request's report
    certified: dict[str, int] = field(default_factory=dict)  # query heads whose error has a bound, by what gave it
    rounding: float | None = None  # at most what rounded keys and values add to that error

    def certify(self, **heads: int) -> None:
        """Count query heads whose output's error is certified: by ``bounds``, a ``sample``, or being ``exact``."""
        for name, count in heads.items():
            self.certified[name] = self.certified.get(name, 0) + count


class Evicting(MethodState):
    """Base of the state of a decode method that forgets keys for good. Their storage may stay, but no later row of the
    sequence reads them again, whatever its policy."""

    def gone(self) -> Tensor:
        """bool [units, m], units as in a selection: the evicted ones of the m keys that it knows of, those of earlier
        turns among them."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Chunk:
    """Appended rows of one sequence at one layer; their keys are stored already.

    ``q`` [heads, q_len, head_dim], post-RoPE, storage dtype. ``layer`` counts from 0. ``window`` is what the policy's
    window leaves visible: a selection is cut to it afterwards, so a method may ignore it or spend its budget inside.
    ``gone`` bool [units, m]: keys that earlier turns evicted; a selection loses them afterwards. ``past``: what
    ``watch`` returned last, or in its first call of a turn the state that an evicting method left. ``states``: the
    decode states of all layers, none for ``watch`` where tokens that they saw were cut off. ``offline``: this layer's
    tensors of the method's calibration. ``part``: which of the layer's heads these are; all, in one process.
    """

    q: Tensor
    kv: KVView
    shape: Shape
    scale: float
    softcap: float | None = None
    layer: int = 0
    layers: int = 1
    cost: Cost = field(default_factory=Cost)
    window: Cone | None = None
    gone: Tensor | None = None
    past: Any = None
    states: Sequence[Any] = ()
    offline: Mapping[str, Tensor] | None = None
    part: HeadPart = WHOLE

    def all_heads(self, own: Tensor) -> Tensor:
        """``own`` of this chunk's heads (or units of them) along dimension 0 -> the same of all of the layer's. Every
        process that has some calls it, in the same order; only methods that ``join_heads`` may."""
        shape = self.shape
        return self.part.all_of(own, (self.layer, shape.q_start, shape.q_len, shape.k_len))

    @classmethod
    def of(cls, q: Tensor, kv: KVView, scale: float | None = None, **rest: Any) -> Self:
        """A chunk whose rows are the last of the stored keys; ``scale`` defaults to 1 / sqrt(head_dim)."""
        shape = Shape.suffix(q.shape[0], kv.kv_heads, q.shape[1], kv.length, q.device)
        return cls(q, kv, shape, 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale, **rest)


@dataclass(frozen=True, eq=False)
class Query(Chunk):
    """The row of one decode step. ``step`` counts the decode steps of this turn from 0. ``ahead`` [heads, 1, head_dim]:
    what this layer would ask if its input were that of the layer before; for methods that look ahead. ``taken_in``
    [channels]: the hidden state that the layer is given, before its norm; for methods that look at it."""

    step: int = 0
    ahead: Tensor | None = None
    taken_in: Tensor | None = None


@dataclass(frozen=True)
class PolicyPart:
    """What a policy is put together from: a named choice with its options. ``phases`` are the places in a policy that
    it can take."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    phases: ClassVar[tuple[str, ...]] = ()
    calibrations: ClassVar[Mapping[str, type]] = {}  # classes over offline.Calibration that it brings, by kind

    @cached_property
    def text(self) -> str:
        """The choice as policy text, options that differ from their defaults spelt out."""
        options = [
            f"{f.name}={_literal(getattr(self, f.name))}" for f in fields(self) if getattr(self, f.name) != f.default
        ]
        return f"{self.name}({', '.join(options)})" if options else self.name


@dataclass(frozen=True)
class Method(PolicyPart):
    """Base of all methods. Hooks default to dense."""

    is_dense: ClassVar[bool] = False  # whether it is the method that reads everything
    means_dense: ClassVar[bool] = False  # whether reading everything is what it is for
    tail_rows: ClassVar[int] = 0  # last prefill queries that `begin` wants to see
    wants_weights: ClassVar[bool] = False  # whether `observe` is to be given the attention weights of a step
    evicts: ClassVar[bool] = False  # whether its state is an Evicting one
    watches: ClassVar[bool] = False  # whether `watch` is to be called in prefill
    recalled: ClassVar[int] = 0  # last queries of decode rows that `recall` wants to see
    deferred: ClassVar[bool] = False  # whether it stands for a method that is named when a request comes
    begins_at_once: ClassVar[bool] = False  # whether a request's first step builds nothing from the keys before
    dial: ClassVar[Dial | None] = None  # what makes it read more
    measured: ClassVar[Measured | None] = None  # how boards and recall set it, of methods from outside the package
    follows_kv: ClassVar[bool] = False  # whether its state and its decode rows go where host memory keeps the keys
    numbers_heads: ClassVar[bool] = False  # whether it draws by a KV head's number in its layer
    rows_only: ClassVar[str | None] = None  # why recorded steps on a GPU do not decode by it; None where they do

    @property
    def joins_heads(self) -> bool:
        """Whether a choice for one KV head hangs on others, and so asks ``Chunk.all_heads`` for theirs. Where processes
        share out the heads, such a method chooses in its hooks."""
        return False

    @property
    def one_process(self) -> str | None:
        """Why processes that share out the heads cannot run it; None where they can."""
        return None

    @property
    def calibration(self) -> str | None:
        """The kind of calibration that the method needs of a model (see ``saccade calibrate``), if any."""
        return None

    @property
    def looks_ahead(self) -> bool:
        """Whether decode queries are to come with ``ahead``, which costs a layer's projections once more."""
        return False

    @property
    def dense_upto(self) -> int:
        """Decode rows of up to so many keys read everything and need nothing that the method asks for, whatever its
        state is."""
        return 0

    @property
    def looks_at_inputs(self) -> bool:
        """Whether decode queries are to come with ``taken_in``."""
        return False

    @property
    def extra_memory(self) -> str | None:
        """What its states take beside ``kv_memory``, where that is a large share of what keys and values take and so no
        part of the 300 MiB that all requests of a process share; None where it is less."""
        return None

    @property
    def stands_in(self) -> bool:
        """Whether something may stand for keys that a step did not read, in its output and in its log-sum-exp."""
        return False

    def certified(self, epsilon: float, delta: float) -> Method | None:
        """The method with each head's error certified to stay below ``epsilon`` with probability 1 - ``delta``; None
        where nothing of the kind is known of it."""
        return None

    def hidden_by(self, keys: int) -> str | None:
        """The option that alone decides how many of ``keys`` keys a row reads, with its value: a least number that is
        above what the method's other options ask for. None where these count."""
        return None

    def reads_all(self, start: int, stop: int) -> bool:
        """Whether it is known before they are there that the rows ``start .. stop - 1`` of a prefill read everything up
        to their own: then :meth:`select_prefill` says so too, and counts nothing."""
        return self.is_dense

    @property
    def row_by_row(self) -> bool:
        """Whether a prefill's rows choose each for itself, a list a row: then they may be given a few at a time, so
        that the lists stay small."""
        return False

    @property
    def asks_states(self) -> bool:
        """Whether :meth:`select_prefill` looks at what decode rows left: then it is given keys as these were."""
        return False

    def select_prefill(self, chunk: Chunk) -> Selection:
        """Which keys the rows of an appended chunk read (q_len <= k_len)."""
        return Dense(chunk.shape)

    def watch(self, chunk: Chunk) -> Any:
        """Called with every chunk of a prefill, after it was attended, if the class says ``watches``; what it returns
        is ``past`` in the next call and in ``begin``."""
        return None

    def begin(self, segment: Chunk) -> Any:
        """State for decoding after a prefill; ``segment`` holds the turn's last ``tail_rows`` queries (at least
        one)."""
        return None

    def select_decode(self, query: Query, state: Any) -> Selection:
        """Which keys one decode step reads: a selection, or a Ranking whose stopping rule the op runs."""
        return Dense(query.shape)

    def borrowed(self, query: Query, state: Any) -> Borrowed | None:
        """Asked between :meth:`select_decode` and :meth:`observe`: whose best keys the step reads; None of methods that
        know nothing of the kind."""
        return None

    def device_plan(self, spec: PlanSpec) -> DevicePlan | None:
        """What each layer of a model reads in decode, for steps that a device runs on its own (see selection.plan): the
        same keys as ``select_decode`` chooses. None where there is no such plan; the row path serves it then."""
        return None

    def device_state(self, opening: Opening) -> DeviceState:
        """What recorded steps of one sequence know, for plans with readings of the method's own."""
        return DeviceState(opening)

    def host_state(self, opening: Opening) -> HostState | None:
        """What decode steps of one sequence know on a CPU; None where the method's hooks serve each row by itself, or
        its plan says all."""
        upto = self.whole_upto(opening)
        return WholeRows(opening, self, upto) if opening.length <= upto else None

    def whole_upto(self, opening: Opening) -> int:
        """Decode rows of up to so many keys read everything, whatever they ask: then :meth:`select_decode` says so too
        and counts nothing, and :meth:`observe` does what :meth:`recall` does, or nothing. 0 where that is not known."""
        return 0

    def recall(self, state: Any, rows: Tensor, length: int) -> None:
        """Learn from the queries ``rows`` [heads, m, head_dim] of decode rows that read everything, all there were or
        the last ``recalled`` ones; the last one saw ``length`` keys."""

    def observe(self, query: Query, selection: Selection, weights: Tensor | None, state: Any) -> None:
        """Called after the step with what was really read.

        ``weights`` is None unless the class says ``wants_weights``: then the softmax weights over what was
        read, as :func:`saccade.ops.weights.selected_weights` lays them out.
        """


@dataclass(frozen=True)
class WindowMethod(PolicyPart):
    """Base of windows: what rows may see at all. Whatever the method of a phase selects is cut to it."""

    phases: ClassVar[tuple[str, ...]] = ("window",)

    def acts(self, layers: int) -> bool:
        """Whether it changes anything in a model of ``layers`` layers."""
        return any(self.at(layer, layers) is not None for layer in range(layers))

    def at(self, layer: int, layers: int) -> Cone | None:
        """What rows see at ``layer`` (from 0) of ``layers``; None is everything."""
        return None

    @property
    def calibration(self) -> str | None:
        """The kind of calibration that says where it may act, if it asks for one."""
        return None

    def calibrated(self, layers: Sequence[Mapping[str, Tensor] | None] | None) -> tuple[WindowMethod, str | None]:
        """Itself as its calibration wants it, and a sentence for reports. ``layers``: each layer's tensors, None where
        the model's own window decides; None in all where nothing was measured."""
        return self, None

    def narrowed(self, plan: DevicePlan) -> DevicePlan | None:
        """``plan`` within this window; None where a reading of it knows no windows."""
        layers = len(plan.layers)
        return windowed(plan, tuple(self.at(layer, layers) for layer in range(layers)))


@dataclass(frozen=True)
class FreezeMethod(PolicyPart):
    """Base of freezes: rows of a prefill that pass the deeper layers by, their hidden state unchanged. Other rows find
    there, as a frozen row's key and value, the layer's own projection of that hidden state."""

    phases: ClassVar[tuple[str, ...]] = ("freeze",)

    def acts(self, layers: int) -> bool:
        """Whether it changes anything in a model of ``layers`` layers, given a long context."""
        return False

    @property
    def copies(self) -> bool:
        """Whether they find a copy of the layer before instead."""
        return False

    def first_frozen(self, positions: Tensor, length: int, layers: int) -> Tensor:
        """The layer (from 0, never 0 itself) from which on each row is frozen, ``layers`` where it never is: int64 like
        ``positions``, the rows' places in a context of ``length`` tokens when its prefill ends."""
        return positions.new_full(positions.shape, layers)


def _literal(value: Any) -> str:
    if isinstance(value, PolicyPart):
        return value.text
    if isinstance(value, str) and not value.isidentifier():
        return repr(value)
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
