"""Messages of the first rank to the others beside steps: what becomes of sequences, as calls of ``Memories``."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from torch import Tensor

from saccade.engine.memory.sequence_memory import Cut
from saccade.engine.steps.step import StepInput
from saccade.engine.watch.bounds import Bounds
from saccade.engine.watch.maps import Maps
from saccade.kv.saved import SavedKV
from saccade.methods.policy import Policy


class Run(NamedTuple):
    """See ``Worker.run``. ``forget``: counts, by request and name, that no report asks for any more."""

    step: StepInput
    times: int
    goes_on: bool
    forget: tuple[tuple[int, Hashable], ...]


class Replay(NamedTuple):
    """See ``Worker.replay``."""

    step: StepInput


class Audits(NamedTuple):
    """What is audited of the next step's rows, by request: the KV heads of the model by layer, and ``RowAudit.whole``.
    The others are as of ``Watch``."""

    drawn: dict[int, tuple[Mapping[int, list[int]], bool]]
    audited: frozenset[int]
    replays: frozenset[int]
    replays_next: bool


class TakeFindings(NamedTuple):
    """Tell what a request's audits found; the ranks gather it."""

    request: int


class Look(NamedTuple):
    """Whose rows of the next step are looked at, as (request, what looks); and what looks, where it is new."""

    at: tuple[tuple[int, Hashable], ...]
    fresh: dict[tuple[int, Hashable], Maps | Bounds]


class TakeSeen(NamedTuple):
    """Tell what was seen of a request's own heads; the ranks gather it."""

    at: tuple[int, Hashable]


class Decision(NamedTuple):
    """Within a step on a device: what the first rank does, of which ``said`` is what must be alike."""

    taken: bool
    said: Hashable


class TakeCounts(NamedTuple):
    """Tell what was counted of a request under a name; the ranks gather it."""

    request: int
    name: Hashable


class RecordStep(NamedTuple):
    """See ``Preparing.record``: the step ``number`` of those that ``policy`` takes. 0 is there even without one."""

    policy: Policy
    requests: int
    longest: int
    number: int


class Fork(NamedTuple):
    """See ``Memories.fork``."""

    source: int
    target: int
    length: int | None


class Truncate(NamedTuple):
    """See ``Memories.truncate``."""

    sequence: int
    length: int
    cut: Cut
    stored: int | None
    learns: bool
    holds: bool


class BeginTurn(NamedTuple):
    """See ``Memories.begin_turn``."""

    sequence: int
    reached: int
    keeps: bool


class BeginDrafts(NamedTuple):
    """See ``Memories.begin_drafts``; nothing is carried."""

    sequence: int


class Settled(NamedTuple):
    """See ``Memories.settled``."""

    sequence: int


class ForgetStates(NamedTuple):
    """See ``Memories.forget_states``."""

    sequence: int


class Pin(NamedTuple):
    """See ``Memories.pin``."""

    sequence: int
    stored: int


class Rest(NamedTuple):
    """See ``Memories.rest``."""

    sequence: int


class Free(NamedTuple):
    """See ``Memories.free``."""

    sequence: int
    closes: bool


class Save(NamedTuple):
    """See ``Memories.save``; the ranks gather keys, values and states."""

    sequence: int
    segment: int | None
    older: tuple[int, ...] = ()


class SaveSnapshot(NamedTuple):
    """See ``Memories.save_snapshot``; likewise."""

    sequence: int
    length: int


class LoadState(NamedTuple):
    """See ``Memories.load_kept``, or with ``snapshot`` ``load_snapshot``: what the rank has of the state."""

    sequence: int
    length: int
    parts: dict[str, Tensor]
    snapshot: bool


class SaveRows(NamedTuple):
    """See ``Memories.save_rows``; likewise."""

    sequence: int
    start: int
    stop: int


class Load(NamedTuple):
    """See ``Memories.load``: keys and values of the rank's own heads."""

    sequence: int
    saved: SavedKV


class LoadRows(NamedTuple):
    """See ``Memories.load_rows``; likewise."""

    sequence: int
    tensors: dict[str, Tensor]
    rows: int | None


Message = (
    Run
    | Replay
    | Audits
    | TakeFindings
    | Look
    | TakeSeen
    | Decision
    | TakeCounts
    | RecordStep
    | BeginTurn
    | BeginDrafts
    | Settled
    | ForgetStates
    | Fork
    | Truncate
    | Pin
    | Rest
    | Free
    | Save
    | SaveSnapshot
    | SaveRows
    | LoadState
    | Load
    | LoadRows
)
