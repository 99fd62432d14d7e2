"""The engine: takes requests, runs steps, hands out tokens. One thread at a time drives it."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from saccade.engine.attention import Watch
from saccade.engine.memory.sequence import Sequence, common
from saccade.engine.messages import AddRequest, MapOrder, StepOutput
from saccade.engine.ranks.link import RankLink
from saccade.engine.ranks.worker import FirstRank
from saccade.engine.request import Request
from saccade.engine.rows.calls import Setting
from saccade.engine.sampling.masks import Masks
from saccade.engine.sampling.params import SamplingParams
from saccade.engine.sampling.steering import Constraint, Steering
from saccade.engine.scheduling.answers import Answers
from saccade.engine.scheduling.auditing import Auditing
from saccade.engine.scheduling.batch_control import BatchControl
from saccade.engine.scheduling.compile_waits import CompileWaits
from saccade.engine.scheduling.prefixes import PrefixCache
from saccade.engine.scheduling.scheduler import Scheduler
from saccade.engine.scheduling.settling import Settling
from saccade.engine.scheduling.slices import Slices
from saccade.engine.scheduling.sparse_drafts import SparseDrafts
from saccade.engine.scheduling.step_rows import step_input
from saccade.engine.scheduling.token_gap import TokenGap
from saccade.engine.sessions import Sessions
from saccade.engine.settings.automatic import Automatic
from saccade.engine.settings.checks import Checks, certified
from saccade.engine.steps.step import ScheduledRequest
from saccade.engine.watch.audit import AuditOptions
from saccade.engine.watch.maps import Maps
from saccade.engine.worker import Worker
from saccade.errors import RequestError
from saccade.kv.blocks import BlockManager
from saccade.kv.sequence_states import EVERY
from saccade.methods.policy import Policy
from saccade.models.calibration import Calibrations
from saccade.ops import fa4

if TYPE_CHECKING:
    from saccade.engine.device.prepare import Prepared
    from saccade.engine.settings.config import EngineConfig
    from saccade.models.loader import LoadedModel

logger = logging.getLogger(__name__)
_request_ids = count(1)


def new_request_id() -> int:
    """An id that no other request of this process has."""
    return next(_request_ids)


class Engine:
    """Continuous batching over one model and one KV pool. ``exact`` as in EngineConfig, decided."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        pool: BlockManager,
        max_model_len: int,
        exact: bool,
        link: RankLink | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.pool = pool
        self.max_model_len = max_model_len
        self.link = link
        self.layers = model.spec.layers
        self.watch = Watch()
        part = model.part if link is None else replace(model.part, gather=link.gather)
        calibrations = Calibrations(model.spec, model.path, part)
        device = getattr(model.runner, "device", None)
        by_fa4 = fa4.wanted(config.fa4, config.backend, device)
        setting = Setting(model.spec, calibrations, self.watch, config.backend, config.threads, by_fa4, part)
        self.worker = (
            Worker(model.runner, setting, exact, config.cuda_graphs)
            if link is None
            else FirstRank(link, model.runner, setting, exact, config.cuda_graphs)
        )
        memories = self.worker.memories
        states = pool.states
        self.prefixes: PrefixCache | None = None
        if config.enable_prefix_caching:
            self.prefixes = PrefixCache(pool, memories, config.chunk, model.runner.rope_regime)
        on_gpu, seconds = device is not None and device.type == "cuda", config.token_gap
        gap = None if seconds is None else TokenGap(seconds, exact, getattr(model.runner, "depth", self.layers), on_gpu)
        self.scheduler = Scheduler(
            pool,
            chunk=config.chunk,
            dense_chunk=config.dense_chunk if states is None else min(config.dense_chunk, EVERY),
            max_batch_rows=config.dense_chunk + config.max_requests,
            # Each that runs has a state, and one more room is there to copy it.
            max_requests=min(config.max_requests, config.max_requests if states is None else states.slots - 1),
            prefixes=self.prefixes,
            control=BatchControl(pool, gap),
            drop=self.worker.drop,
        )
        self.masks = Masks(config.grammar_seconds)
        self.checks = Checks(model, pool, max_model_len, calibrations, config.tensor_parallel_size)
        self.automatic = Automatic(self)
        self.answers = Answers(model)
        self.settling = Settling(self.answers, self.scheduler, self.prefixes)
        self.compile_waits = CompileWaits(self.scheduler, on_gpu)
        self.slices = Slices(self.scheduler, self.worker, self.settling, self.watch, self.compile_waits)
        self.sparse_drafts = SparseDrafts(self.scheduler, self.worker, model)
        default = AuditOptions(config.audit, config.audit_steps, config.target)
        self.auditing = Auditing(self.worker, default, max_model_len)
        self.sessions = Sessions(model, pool, memories, config.chunk, self.settling)
        self._suspects: set[int] = set()  # ids of requests, one of which broke a step
        self._driver = threading.Lock()

    def prepare(self, policy: Policy, seconds: float, share: int = 1) -> Prepared | None:
        """Record a GPU's steps of requests under ``policy`` before there are any, for at most so many ``seconds``, and
        one ``share``-th of the recordings that are kept; None where none are recorded. Before the first step."""
        spec, device = self.model.spec, self.worker.device
        if device is not None and self.worker.host.setting.fa4:
            fa4.prepare(spec.heads, spec.kv_heads, spec.head_dim, spec.dtype, self.model.device)
        if device is None or not self.config.cuda_graphs:
            return None
        requests = 1 if self.worker.exact else self.config.max_requests
        return self.worker.prepare(self.pool, policy, requests, self.max_model_len, seconds, share)

    def receive(self, message: AddRequest, shares: Request | None = None) -> Request:
        """Queue a request as a message asks for it; with ``shares``, to go on from the prompt of that request. Raises
        what :meth:`add` raises."""
        if message.session is None:
            return self.add(
                message.prompt,
                message.params,
                message.policy,
                decoded=message.decoded,
                request_id=message.request_id,
                shares=shares,
                constraint=message.constraint,
                cache_salt=message.cache_salt,
                map_order=message.map_order,
            )
        if message.map_order is not None:
            raise RequestError(
                "a selection map shows a whole prompt, which a session computes in parts; ask without one"
            )
        sequence = self.sessions.require(message.session)
        prompt, keep, decoded = message.prompt, message.keep, message.decoded
        if message.whole:
            most = len(prompt) - 1 if keep is None else min(keep, len(prompt) - 1)
            keep = sequence.border(common(sequence.tokens, prompt[: max(0, most)]))
            prompt, decoded = prompt[keep:], min(decoded, len(prompt) - keep)
        return self.add(
            prompt,
            message.params,
            message.policy,
            sequence,
            keep,
            decoded,
            message.request_id,
            constraint=message.constraint,
            cache_salt=message.cache_salt,
        )

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        policy: Policy,
        sequence: Sequence | None = None,
        keep: int | None = None,
        decoded: int = 0,
        request_id: int | None = None,
        shares: Request | None = None,
        constraint: Constraint | None = None,
        cache_salt: str = "",
        map_order: MapOrder | None = None,
    ) -> Request:
        """Queue one sample. ``sequence`` continues a session, whose KV is kept afterwards, from its first ``keep``
        tokens (all by default). The last ``decoded`` tokens of the prompt run as decode steps, under the policy's
        decode method. ``shares``: a request of the same prompt and policy, whose blocks this one shares once that
        prompt is computed. ``constraint``: what the answer must follow. RequestError while an earlier turn of the
        session is still running. Where it raises, nothing has changed."""
        if sequence is not None and sequence.turn is not None:
            raise RequestError("this session is still answering; finish or cancel that turn first")
        before = sequence.tokens if sequence is not None else []
        kept = len(before) if keep is None else keep
        self.checks.prompt(prompt, kept)
        self.checks.request(params, policy)
        asked = policy
        if policy.deferred and shares is not None:
            policy, became = shares.policy, shares.report.became
        else:
            steps = None if params.max_tokens is None else params.max_tokens + decoded
            sizes = kept + len(prompt), len(prompt)
            policy, became = self.automatic.settled(policy, *sizes, steps, session=sequence is not None)
        self.checks.policy(policy)
        policy, located = self.checks.located(certified(policy, params))
        control = self.auditing.control(params, policy)
        steering = Steering.of(params, self.model, constraint, self.masks)
        if not 0 <= decoded <= len(prompt) or decoded == kept + len(prompt):
            raise RequestError(
                f"decoded={decoded} must be from 0 to {len(prompt)}, the tokens that this turn appends, and leave at "
                "least one token of the context to a prefill"
            )
        request = Request(
            new_request_id() if request_id is None else request_id,
            prompt,
            params,
            policy,
            layers=self.layers,
            detokenizer=self.model.tokenizer.stream(params.skip_special_tokens),
            steering=steering,
        )
        request.report.asked, request.report.became = asked.text, became
        request.report.places = self.model.spec.places
        if became is not None:
            request.report.note(became)
        if located is not None:
            request.report.note(located)
        if map_order is not None:
            request.maps = Maps.ordered(map_order, len(prompt), params.max_tokens, self.layers)
        if sequence is not None:
            request.before = sequence.standing(kept)
            sequence.truncate(kept)
        if sequence is not None and sequence.tokens:
            regime = self.model.runner.rope_regime
            if regime(len(sequence.tokens) + len(prompt)) != regime(max(1, sequence.reached)):
                sequence.restart()  # stored keys carry other rotary factors than the longer sequence needs
        request.begin(sequence if sequence is not None else self.sessions.new_sequence(), self.max_model_len, decoded)
        request.report.token_bytes *= self.model.part.parts  # of the model, where this process has some of its heads
        self.auditing.begin(request, control)
        request.keep_kv = sequence is not None
        request.sequence.turn = request
        request.sequence.salted(cache_salt)
        if request.sequence.note is not None:
            request.report.note(request.sequence.note)
        if shares is not None and not shares.finished and not shares.output_ids:
            request.parent = shares
            shares.forks.append(request)
        else:
            self.scheduler.add(request)
        if steering.matcher is not None:
            steering.matcher.owner = request
            steering.matcher.ahead([])
        return request

    def running_reports(self, most: int) -> list[dict[str, Any]]:
        """Reports of at most ``most`` requests at work, as far as they are; each with its ``request_id``."""
        return [
            {**one.report.as_dict(), "request_id": one.id, "output_tokens": len(one.output_ids)}
            for one in self.scheduler.running[:most]
        ]

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def cancel(self, request: Request) -> None:
        """End a request now. A session goes back to where it stood before the turn; other requests are unaffected."""
        self.settling.cancel(request)

    def abandon(self, error: str, error_type: str | None = None) -> list[StepOutput]:
        """End all requests that run with ``error``, for which errors.class_name gives ``error_type``; where none runs,
        those that wait, or it would fail for ever."""
        return self.settling.abandon(error, error_type)

    def step(self) -> list[StepOutput]:
        """Run one step and return what it did for every request in it."""
        if not self._driver.acquire(blocking=False):
            raise RuntimeError("two threads drive one engine; go through AsyncEngine")
        try:
            self.masks.settle()
            outputs = self._too_slow()
            if self.slices.due:
                return [*outputs, *self.slices.run()]
            batch = self._apart(self.scheduler.schedule())
            outputs += [self.settling.starved(request) for request in list(self.scheduler.running) if request.finished]
            if not batch:
                outputs = outputs or self.slices.run()
                if not outputs and not self.scheduler.suspended:
                    self.masks.wait()
                return outputs
            self.slices.due = bool(self.scheduler.suspended)
            for request, _ in batch:
                request.report.schedule(time.perf_counter())
            self.watch.begin({})
            try:
                batch = self.sparse_drafts.added(batch)
                batch = self.auditing.replayed(batch)
                self.watch.audits, self.watch.audited = self.auditing.rows(batch)
                self.watch.replays, self.watch.replays_next = self.auditing.beside, self.auditing.soon
                self.watch.bounds = self.auditing.bounds(batch)
                self.watch.maps = {request.id: request.maps for request, _ in batch if request.maps is not None}
                began = time.perf_counter()
                ahead = self.worker.runs_ahead and self.scheduler.goes_on(batch)
                step = step_input(batch)
                result = self.worker.run(step, goes_on=True) if ahead else self.worker.run(step)
                self.compile_waits.settle()
            except BaseException as error:  # some layers hold the new rows and others do not
                for request, rows in batch:
                    request.sequence.undo(rows)
                if not isinstance(error, Exception):
                    raise
                logger.debug("a step of %d requests failed", len(batch), exc_info=True)
                if len(batch) == 1:
                    return [*outputs, self.settling.failed(batch[0][0], error)]
                said = f"{type(error).__name__}: {error}"
                logger.warning("a step of %d requests failed, they run one by one: %s", len(batch), said)
                self._suspects |= {request.id for request, _ in batch}
                return outputs
            ended = time.perf_counter()
            self.sparse_drafts.timed(batch, ended - began, result)
            self.auditing.settle(batch, result)
            if not result.fresh:
                self.scheduler.control.ran(batch, ended - began, result.requests)
            for request, rows in batch:
                try:
                    outputs += self.settling.settle(request, rows, result.requests[request.id], ended)
                except Exception as error:
                    logger.debug("settling a step failed", exc_info=True)
                    outputs.append(self.settling.failed(request, error))
            return outputs
        finally:
            self.sparse_drafts.settled()
            self._driver.release()

    def _too_slow(self) -> list[StepOutput]:
        """The ends of requests whose constraints have taken too long. What computes goes on, and no request waits."""
        slow = [(cast(Request, one.owner), one.too_slow()) for one in self.masks.overdue() if one.owner is not None]
        return [self.settling.failed(request, error) for request, error in slow]

    def _apart(self, batch: list[tuple[Request, ScheduledRequest]]) -> list[tuple[Request, ScheduledRequest]]:
        """After a step that failed as a whole, its requests run in steps of their own, so that only those are lost
        that fail alone."""
        for one in batch if self._suspects else ():
            if one[0].id in self._suspects:
                self._suspects.discard(one[0].id)
                return [one]
        self._suspects.clear()
        return batch
