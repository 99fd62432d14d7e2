"""The engine: takes requests, runs steps, hands out tokens. One thread drives it."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from torch import Tensor

from saccade.engine.executor import Executor
from saccade.engine.params import SamplingParams
from saccade.engine.request import Request, Sequence, StepOutput, TokenLogprob, Work
from saccade.engine.sampler import Sampler, top_logprobs
from saccade.engine.scheduler import Scheduler
from saccade.engine.stopping import StopText
from saccade.errors import CapacityError, PolicyError, RequestError
from saccade.kv.pool import BlockPool
from saccade.methods.policy import Policy

if TYPE_CHECKING:
    from saccade.models.loader import LoadedModel


class Engine:
    """Continuous batching over one model and one KV pool."""

    def __init__(
        self,
        model: LoadedModel,
        pool: BlockPool,
        *,
        max_model_len: int,
        chunk: int = 4096,
        max_requests: int = 64,
        backend: str = "auto",
        threads: int | None = None,
        exact: bool = False,
        cuda_graphs: bool = True,
    ) -> None:
        self.model = model
        self.pool = pool
        self.max_model_len = max_model_len
        self.layers = model.spec.layers
        self.scheduler = Scheduler(
            pool, self.layers, chunk=chunk, max_batch_rows=chunk + max_requests, max_requests=max_requests
        )
        self.abandoned: deque[Sequence] = deque()  # of sessions nobody holds any more; appended from any thread
        self.executor = Executor(model.runner, backend, threads, exact, model.path, cuda_graphs)

    def new_sequence(self) -> Sequence:
        return Sequence(self.pool, self.layers, self.model.runner.rope_regime)

    def check(self, prompt: list[int], before: int = 0) -> None:
        """Raise RequestError or CapacityError for a prompt that can never run after ``before`` earlier tokens."""
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token")
        vocab = self.model.spec.vocab_size
        for token in prompt:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
                raise RequestError(f"token id {token!r} is not an integer from 0 to {vocab - 1}")
        total = before + len(prompt)
        if total >= self.max_model_len:
            raise RequestError(
                f"the prompt has {total} tokens but max_model_len is {self.max_model_len}, one of them for the answer; "
                "shorten it or raise max_model_len"
            )
        if not self.scheduler.fits(total + 1):
            size = self.pool.block_size
            room = self.pool.num_blocks // self.layers * size
            raise CapacityError(
                f"the prompt has {total} tokens but the KV pool holds {room} at most; shorten it or raise kv_memory"
            )

    def check_policy(self, policy: Policy) -> None:
        """Raise PolicyError for a policy that this model cannot run."""
        freeze = policy.freeze
        if freeze is not None and freeze.copies and not self.model.runner.layers_rotate_alike:
            raise PolicyError(
                f"'{freeze.text}' copies keys from layer to layer, but {self.model.spec.family} layers do not rotate "
                f"keys all alike; use '{freeze.name}(reuse=hidden)'"
            )
        self.executor.calibrations.layer(policy.decode.calibration, 0)

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        policy: Policy,
        sequence: Sequence | None = None,
        keep: int | None = None,
        decoded: int = 0,
    ) -> Request:
        """Queue one sample. ``sequence`` continues a session, whose KV is kept afterwards, from its first ``keep``
        tokens (all by default). The last ``decoded`` tokens of the prompt run as decode steps, under the policy's
        decode method. RequestError while an earlier turn of the session is still running."""
        if sequence is not None and sequence.turn is not None:
            raise RequestError("this session is still answering; finish or cancel that turn first")
        before = sequence.tokens if sequence is not None else []
        kept = len(before) if keep is None else keep
        self.check(prompt, kept)
        self.check_policy(policy)
        if not 0 <= decoded <= len(prompt) or decoded == kept + len(prompt):
            raise RequestError(
                f"decoded={decoded} must be from 0 to {len(prompt)}, the tokens that this turn appends, and leave at "
                "least one token of the context to a prefill"
            )
        dropped = before[kept:]
        if sequence is not None:
            sequence.truncate(kept)
        if sequence is not None and sequence.tokens:
            regime = self.model.runner.rope_regime
            if regime(len(sequence.tokens) + len(prompt)) != regime(max(1, sequence.reached)):
                sequence.restart()  # stored keys carry other rotary factors than the longer sequence needs
        request = Request(
            sequence if sequence is not None else self.new_sequence(),
            prompt,
            params,
            policy,
            self.max_model_len,
            self.layers,
            decoded,
        )
        request.keep_kv = sequence is not None
        request.dropped = dropped
        request.sequence.turn = request
        request.sampler = Sampler(params)
        request.detokenizer = self.model.tokenizer.stream()
        request.stopper = StopText(params.stop or ())
        self.scheduler.add(request)
        return request

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def cancel(self, request: Request) -> None:
        """End a request now. A session goes back to where it stood before the turn; other requests are unaffected."""
        if request.finished:
            return
        self._finish(request, "cancelled")

    def forget(self, sequence: Sequence) -> None:
        """Drop a session's sequence and give its blocks back; a turn that still runs is cancelled."""
        if sequence.turn is not None:
            self.cancel(sequence.turn)
        self.scheduler.idle.pop(id(sequence), None)
        sequence.truncate(0)

    def step(self) -> list[StepOutput]:
        """Run one step and return what it did for every request in it."""
        while self.abandoned:
            self.forget(self.abandoned.popleft())
        batch = self.scheduler.schedule()
        outputs = [self._starved(request) for request in list(self.scheduler.running) if request.finished]
        if not batch:
            return _delivered(outputs)
        began = time.perf_counter()
        for work in batch:
            if not work.request.report.prefill.tokens and not work.request.report.decode.tokens:
                work.request.report.queue_seconds = began - work.request.arrived
        logits = self.executor.run(batch)
        seconds = time.perf_counter() - began
        return _delivered(outputs + [self._settle(work, logits.get(work.request.id), seconds) for work in batch])

    def _starved(self, request: Request) -> StepOutput:
        """A request that the scheduler ended because the pool is full: what it has is its answer."""
        assert request.finish_reason is not None
        reason, request.finish_reason = request.finish_reason, None
        self._finish(request, reason)
        return StepOutput(request, new_text=request.stopper.release(final=True))

    def _settle(self, work: Work, logits: Tensor | int | None, seconds: float) -> StepOutput:
        request = work.request
        stats = request.report.phase(work.phase)
        method = getattr(work.policy, work.phase).text
        if method not in stats.policies:
            stats.policies.append(method)
        stats.tokens += work.length
        stats.seconds += seconds
        output = StepOutput(request, prefilled=min(work.stop, request.output_start), prefill_total=request.output_start)
        if request.error is not None:
            self._finish(request, "error")
        elif logits is not None:
            try:
                self._take_token(request, logits, output)
            except Exception as error:  # as in attention: one request's failure must not take the others down
                request.error = f"choosing a token: {type(error).__name__}: {error}"
                self._finish(request, "error")
        return output

    def _take_token(self, request: Request, logits: Tensor | int, output: StepOutput) -> None:
        """``logits``, or the token itself."""
        params, sequence = request.params, request.sequence
        token = logits if isinstance(logits, int) else request.sampler.sample(sequence.tokens, logits)
        if params.logprobs is not None and isinstance(logits, Tensor):
            self._record_logprobs(request, logits, token)
        sequence.extend([token], "decode", request.policy)
        if len(sequence.tokens) == self.model.runner.restart_length:
            sequence.restart(request.policy)
            request.report.note(f"rotary factors change at {len(sequence.tokens)} tokens: all keys were computed again")
        output.new_tokens.append(token)
        ended = not params.ignore_eos and token in self.model.eos_token_ids
        reason = "stop" if ended or token in params.stop_token_ids else None
        stopper = request.stopper
        if stopper.add(request.detokenizer.step(token)):
            reason = "stop"
        elif reason is None and len(request.output_ids) >= request.max_tokens:
            reason = "length"
        if reason is not None and not stopper.stopped:
            stopper.add(request.detokenizer.flush())
        output.new_text = stopper.release(final=reason is not None)
        if reason is not None:
            self._finish(request, reason)

    def _record_logprobs(self, request: Request, logits: Tensor, token: int) -> None:
        entries = top_logprobs(logits, token, request.params.logprobs or 0)
        request.cumulative_logprob += entries[token][0]
        request.logprobs.append(self.named(entries))

    def named(self, entries: dict[int, tuple[float, int]]) -> dict[int, TokenLogprob]:
        """``row_logprobs``' entries with the tokens' texts."""
        decode = self.model.tokenizer.decode
        return {
            token: TokenLogprob(logprob, rank, decode([token], skip_special_tokens=False))
            for token, (logprob, rank) in entries.items()
        }

    def _finish(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        request.text = request.stopper.text
        request.final_ids = list(request.output_ids)
        request.report.output_tokens = len(request.final_ids)
        if request.params.prompt_logprobs is not None:
            places = range(request.output_start - len(request.prompt), request.output_start)
            scores = [request.prompt_scores.get(place) for place in places]
            request.prompt_logprobs = [None if entries is None else self.named(entries) for entries in scores]
        self.scheduler.remove(request)
        sequence = request.sequence
        sequence.turn = None
        if not request.keep_kv:
            sequence.kv.free()
            return
        if reason in ("cancelled", "error"):
            sequence.truncate(*request.rollback)
            sequence.tokens.extend(request.dropped)
        self.scheduler.park(sequence)


def _delivered(outputs: list[StepOutput]) -> list[StepOutput]:
    """Put every output before whoever reads that request's stream, no matter who drives the step."""
    for output in outputs:
        output.finished = output.request.finished
        if output.request.outbox is not None:
            output.request.outbox.append(output)
    return outputs
