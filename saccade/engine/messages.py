"""What passes between callers and an engine, which may run on another thread or in another process: plain data that
pickles. Callers choose the ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from saccade.engine.memory.saved import SavedSession
from saccade.engine.sampling.params import SamplingParams
from saccade.engine.sampling.steering import Constraint
from saccade.methods.policy import Policy


@dataclass(frozen=True)
class MapOrder:
    """A selection map of a request: of ``layers``, at most ``pixels`` cells a side (see engine.watch.maps)."""

    layers: tuple[int, ...]
    pixels: int = 96


@dataclass(frozen=True)
class AddRequest:
    """Complete ``prompt``. ``session``: append it to that session's context, of which the first ``keep`` tokens stay
    (all by default). ``whole``: the prompt is to be the whole context of the session, and what it shares with what is
    stored is kept, as far as ``keep`` allows. The last ``decoded`` tokens of the prompt run as decode steps.
    ``shares``: the id of a request in the same letter with the same prompt and policy, from whose prompt this one goes
    on. ``constraint``: what the answer must follow, a grammar say. ``cache_salt``: requests with unequal ones share no
    prefixes. ``map_order``: have the outcome hold a selection map; what others computed, and what sessions hold, is not
    on it."""

    request_id: int
    prompt: list[int]
    params: SamplingParams
    policy: Policy
    session: int | None = None
    keep: int | None = None
    whole: bool = False
    decoded: int = 0
    shares: int | None = None
    constraint: Constraint | None = None
    cache_salt: str = ""
    map_order: MapOrder | None = None


@dataclass(frozen=True)
class CancelRequest:
    """End a request now; one that has ended already stays as it is."""

    request_id: int


@dataclass(frozen=True)
class OpenSession:
    """Begin a session; the answer is its id."""


@dataclass(frozen=True)
class ForgetSession:
    """Drop a session and give its blocks back; a turn that still runs is cancelled."""

    session: int


@dataclass(frozen=True)
class SaveSession:
    """Copy a session between two turns; the answer is a SavedSession."""

    session: int


@dataclass(frozen=True)
class RestoreSession:
    """Open a session with what was saved; the answer is its id, and a sentence on what is computed again, if anything
    is. ``damaged``, ``recompute``: see engine.memory.saved.restore_sequence."""

    saved: SavedSession
    damaged: list[str] = field(default_factory=list)
    recompute: bool = False


@dataclass(frozen=True)
class ReportRunning:
    """What at most ``most`` of the running requests have done so far; the answer is a list of their reports, each with
    its ``request_id``."""

    most: int


@dataclass(frozen=True)
class ClearPrefixes:
    """Give up what is kept of ended requests for others to go on from."""


@dataclass(frozen=True)
class EngineStatistics:
    """How an engine stands. ``waiting``: requests that queue, those among them that are not let in yet.
    ``used_blocks``: slots of the KV pool that are taken, of ``num_blocks``; ``kept_blocks`` of them hold what ended
    requests left for others. ``stored``: what DurableSessions reports, where sessions are stored. ``tiers``: where KV
    goes to a tier, what has moved, and the tier's cells, by name.
    ``bytes_by_tier``: of keys and values, those that are taken and those that there are. ``graphs``: on a GPU, how many
    kinds of step are recorded, and how many may be. ``states``: of layers that keep one, how many there are room for,
    that requests compute with, that are snapshots, and that were given up for others since the engine began.
    ``compiled``: kernels that its process has compiled, and in how many seconds."""

    running: int
    waiting: int
    used_blocks: int
    num_blocks: int
    sessions: int
    kept_blocks: int = 0
    stored: dict[str, int | None] | None = None
    tiers: dict[str, float] | None = None
    bytes_by_tier: dict[str, list[int]] = field(default_factory=dict)
    graphs: tuple[int, int] | None = None
    states: dict[str, int] | None = None
    compiled: tuple[int, float] = (0, 0.0)


@dataclass
class TokenLogprob:
    """Log-probability of one token under the model's unprocessed distribution; rank 1 is the likeliest.
    ``decoded_token``: the text that the token completes, empty for the first parts of a character. ``token_bytes``: its
    own, None where it is no part of the text, as special tokens are. ``offset``: characters of the text before it."""

    logprob: float
    rank: int
    decoded_token: str
    token_bytes: bytes | None = None
    offset: int = 0


@dataclass
class RequestMetrics:
    """When what happened to a request, in seconds since the epoch; None for what did not happen. The names are vLLM's.
    ``time_in_queue``: until its first step, in seconds; ``first_token_latency``: from its arrival, in seconds."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0

    @property
    def time_in_queue(self) -> float | None:
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def first_token_latency(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass
class RequestOutcome:
    """How a request ended. ``finish_reason``: ``stop`` (end token or stop string), ``length``, ``cancelled`` or
    ``error``. ``prompt``: the tokens that this turn appended. ``report``: what it really did (see docs/report.md).
    ``stop_reason``: the stop string or stop token that ended it; None for an end token of the model. ``error_type``:
    the class of saccade.errors that ``error`` is of, by its name, or None; a lost rank's is EngineLost."""

    prompt: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    report: dict[str, Any]
    error: str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, TokenLogprob]] | None = None
    prompt_logprobs: list[dict[int, TokenLogprob] | None] | None = None
    request_id: int = 0
    stop_reason: int | str | None = None
    metrics: RequestMetrics | None = None
    selection_map: dict[str, Any] | None = None  # what ``map_order`` asked for, see engine.watch.maps.Maps.as_dict
    error_type: str | None = None


@dataclass
class StepOutput:
    """What one or more engine steps did for one request. ``prefilled`` of ``prefill_total`` prompt tokens are computed;
    ``cached`` of them did not have to be, and ``kept`` will be there for later requests that begin alike.
    ``new_logprobs``: one entry for each of ``new_tokens``, if they were asked for. ``finished``: it is the request's
    last, and has its ``outcome``."""

    request_id: int
    new_text: str = ""
    new_tokens: list[int] = field(default_factory=list)
    prefilled: int = 0
    prefill_total: int = 0
    outcome: RequestOutcome | None = None
    new_logprobs: list[dict[int, TokenLogprob]] = field(default_factory=list)
    cached: int = 0
    kept: int = 0

    @property
    def finished(self) -> bool:
        return self.outcome is not None

    def joined(self, later: StepOutput) -> StepOutput:
        """This output and a later one of the same request as one."""
        return StepOutput(
            self.request_id,
            self.new_text + later.new_text,
            self.new_tokens + later.new_tokens,
            max(self.prefilled, later.prefilled),
            later.prefill_total or self.prefill_total,
            later.outcome,
            self.new_logprobs + later.new_logprobs,
            max(self.cached, later.cached),
            max(self.kept, later.kept),
        )
