"""Runs steps: packed rows of many requests through the layers, attention from the backends, results as plain data."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from saccade.engine.host import HostAttention, HostBackend
from saccade.engine.host_calls import Setting
from saccade.engine.memories import Memories
from saccade.engine.pass_tokens import take_logits
from saccade.engine.sampler import NOT_FINITE, row_logprobs
from saccade.engine.step import RequestResult, ScheduledRequest, StepInput, StepResult, results_of
from saccade.engine.suspended import Advanced, SuspendedPass
from saccade.models.interface import Runner, ScoredRows, Segment
from saccade.ops import triton

if TYPE_CHECKING:
    from saccade.engine.device import DeviceBackend

logger = logging.getLogger(__name__)


class Alone:
    """Requests whose pass broke in company: after the n-th time each has 2^(n - 1) passes of its own. One that begins
    anew, since its method's state may have seen the step, so gets beyond where it broke, whatever number of chunks that
    takes."""

    KEPT = 1024  # requests whose breaks are remembered; those that ended go first

    def __init__(self) -> None:
        self._left: dict[int, int] = {}  # passes, by request
        self._breaks: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._left)

    def broke(self, request: int) -> None:
        """A pass of several broke."""
        breaks = self._breaks.pop(request, 0) + 1
        self._breaks[request] = breaks
        self._left[request] = 1 << min(breaks - 1, 30)
        if len(self._breaks) > self.KEPT:
            del self._breaks[next(iter(self._breaks))]

    def take(self, requests: Sequence[int]) -> set[int]:
        """Those of a step's ``requests`` that have a pass of their own; whoever is not among them has none left."""
        alone = {request: left for request in requests if (left := self._left.get(request))}
        self._left = {request: left - 1 for request, left in alone.items() if left > 1}
        return set(alone)


class Worker:
    """Runs steps of a model for the sequences whose keys, values and method states it has (``memories``).

    ``exact`` runs the rows of each request by themselves, and each row of drafts. Matrix products round differently for
    different numbers of rows, so only then is a result the same to the last bit whatever else is in the batch, and
    whatever was drafted; packed, all rows share one pass over the weights.
    """

    def __init__(
        self,
        runner: Runner,
        setting: Setting,
        exact: bool = False,
        cuda_graphs: bool = True,
        memories: Memories | None = None,
    ) -> None:
        self.runner = runner
        self.setting = setting
        self.exact = exact
        self.memories = Memories() if memories is None else memories
        self._alone = Alone()
        self._suspended: dict[int, SuspendedPass] = {}  # by request
        llama = getattr(runner, "llama", None)
        self.host = HostBackend(setting, llama is not None and llama.has_row_kernels)
        self.device = device_backend(runner, setting, cuda_graphs, covers=not exact)

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be launched before it is asked for."""
        return self.device is not None and self.device.runs_ahead and not self.exact and not self._alone

    def repeats(self, step: StepInput) -> bool:
        """Whether the device can run the step again and again by itself (``run``'s ``times``)."""
        if self.device is None or self.exact or self._alone:
            return False
        return self.device.repeats(step, self.memories)

    def replays(self, step: StepInput) -> bool:
        """Whether the device can run the rows of a step densely, too, beside it (``Watch.replays``)."""
        if self.device is None or self.exact or self._alone:
            return False
        return self.device.replays(step, self.memories)

    def run(self, step: StepInput, times: int = 1, goes_on: bool = False) -> StepResult:
        """Compute the rows of ``step`` and store their keys and values. ``times``: a step that ``repeats`` runs so
        often, each row with the token before it, or once where the device failed; results have each time's tokens.
        ``goes_on``: the next step will most likely have the same requests, each with the token that this one chooses.

        A request whose own rows fail gets an ``error``; the others are unaffected. What an interrupt leaves half-done
        is the caller's to undo.
        """
        began = time.perf_counter()
        for one in step.scheduled:
            self.memories[one.sequence_id].begin_step(one.start, one.phase == "decode")
        result = StepResult({one.request_id: RequestResult.of(one) for one in step.scheduled})
        step, whole = step.apart(), step
        for part in self._parts(step):
            if step is not whole:  # rows of drafts have passes of their own, and one before them may have failed
                part = [at for at in part if results_of(result.requests, step.scheduled[at])[0].error is None]
            left = self._run_on_device(step, part, result, times, goes_on and len(part) == len(step))
            if left:
                packed = step.part(left)
                try:
                    self._pass(packed, result)
                except Exception as error:
                    self._broke(packed, result, error)
                finally:
                    self.host.done()
        for one in whole.scheduled:
            if result.requests[one.request_id].is_good:
                self.memories[one.sequence_id].end_step()
        result.seconds = time.perf_counter() - began
        return result

    def replay(self, step: StepInput) -> StepResult:
        """Run decode rows as if no method knew anything, and take back what that leaves."""
        with ExitStack() as held:
            for one in step.scheduled:
                held.enter_context(self.memories[one.sequence_id].without_method())
            try:
                return self.run(step)
            finally:
                for one in step.scheduled:
                    kv = self.memories[one.sequence_id].kv
                    kv.truncate(one.start)  # which gives a block back that the row had to itself
                    kv.reserve(one.stop)

    @torch.inference_mode()
    def begin(self, step: StepInput) -> None:
        """Plan the pass of ``step``, a chunk of one request's prefill, which runs as :meth:`advance` says. The request
        is in no other step until then."""
        (one,) = step.scheduled
        self.memories[one.sequence_id].begin_step(one.start, one.phase == "decode")
        result = StepResult({one.request_id: RequestResult.of(one)})
        (request,) = step.request_ids
        given, asked, _ = self._asked(step, result)  # a prefill's rows: nobody looks at them
        self._suspended[request] = SuspendedPass(
            step, result, self.runner.steps(*given, **asked), torch.device(self.runner.device)
        )

    @torch.inference_mode()
    def advance(self, request: int, seconds: float) -> Advanced:
        """Run layers of the chunk that was begun for a request, for about so many ``seconds``, but at least one. Where
        its rows fail, the result says so."""
        held = self._suspended[request]
        if self.device is not None:
            self.device.forget_ahead()
        try:
            told = held.advance(seconds)
        except Exception as error:
            self.drop(request)
            self._broke(held.step, held.result, error)
            return Advanced(0, 0.0, held.result)
        except BaseException:  # an interrupt
            self.drop(request)
            raise
        if told.result is not None:
            del self._suspended[request]
            if told.result.requests[request].is_good:
                (one,) = held.step.scheduled
                self.memories[one.sequence_id].end_step()
        return told

    def drop(self, request: int) -> None:
        """Forget the chunk that was begun for a request. What it has stored is the caller's to undo."""
        held = self._suspended.pop(request, None)
        if held is not None:
            held.close()

    def _parts(self, step: StepInput) -> list[list[int]]:
        """Which requests share a pass."""
        apart = self._alone.take(step.request_ids) if self._alone else ()
        if not apart and not self.exact:
            return [list(range(len(step)))]
        alone = [[number] for number, one in enumerate(step.scheduled) if self.exact or one.request_id in apart]
        single = {number for (number,) in alone}
        together = [number for number in range(len(step)) if number not in single]
        return [together, *alone] if together else alone

    def _run_on_device(
        self, step: StepInput, which: Sequence[int], result: StepResult, times: int, goes_on: bool
    ) -> list[int]:
        """Run the requests among ``which`` that recorded steps serve; returns the others."""
        device = self.device
        if device is None:
            return list(which)
        left: list[int] = []
        served: list[int] = []
        for number in which:
            why_not = device.serves(step, number, self.memories[step.scheduled[number].sequence_id])
            (served if why_not is None else left).append(number)
        verifying = [number for number in served if step.scheduled[number].together]
        prefilling = {number: one for number in served if (one := step.scheduled[number]).phase == "prefill"}
        parts = device.parts(served, device.before(step, served, self.memories), verifying, prefilling)
        if not parts:
            device.forget_ahead()
        goes_on = goes_on and not left and len(parts) == 1
        for part in parts:
            try:
                result.requests |= device.run(step.part(part), self.memories, times, goes_on)
                result.fresh |= device.fresh
            except device.Short as error:  # the host brings in as much as there is room for at a time
                for number in part:
                    one = step.scheduled[number]
                    result.requests[one.request_id].note(f"{one.phase}: torch served steps: {error}")
                left += part
            except device.Failed as error:
                logger.warning("a batched step failed, its rows run one by one: %s", error)
                for number in part:
                    one = step.scheduled[number]
                    result.requests[one.request_id].note(
                        f"{one.phase}: the batched step failed and torch served rows one by one: {error}"
                    )
                left += part
        return sorted(left)

    def _broke(self, step: StepInput, result: StepResult, error: Exception) -> None:
        """After a pass that broke its requests are to be tried again, each in a pass of its own, so that only those
        fail that cannot run alone."""
        logger.debug("a pass over %d requests failed", len(step), exc_info=error)
        for one in step.scheduled:
            if len(step) == 1:
                for failed in results_of(result.requests, one):
                    failed.error = f"{one.phase}: {type(error).__name__}: {error}"
            else:
                result.requests[one.request_id].undone = True
                self._alone.broke(one.request_id)

    @torch.inference_mode()  # planning makes summaries, too
    def _pass(self, step: StepInput, result: StepResult) -> None:
        """The layers over all rows of ``step`` in one pass."""
        given, asked, shown = self._asked(step, result)
        logits, looks = self.runner.run(*given, **asked), self.setting.watch.logits
        wanted = len(logits) - len(shown)
        for (_, request, position), row in zip(shown, logits[wanted:]):
            assert looks is not None, "rows are shown to those who look"
            looks(request, position, row)
        take_logits(step, result, logits[:wanted], there=logits.is_cuda)

    def _asked(
        self, step: StepInput, result: StepResult
    ) -> tuple[tuple[Tensor, Tensor, HostAttention], dict[str, Any], list[tuple[int, int, int]]]:
        """What a pass over ``step`` asks of the runner, its attention planned; and the decode rows that are looked at:
        packed row, request, position. Their logits come last."""
        context = self.host.plan(step, self.memories, result.requests)
        looks = self.setting.watch.logits
        segments: list[Segment] = []
        wanted: list[int] = []  # packed rows whose logits choose tokens
        scored: list[tuple[int, int, int, ScheduledRequest]] = []
        shown: list[tuple[int, int, int]] = []  # decode rows that are looked at: packed row, request, position
        for one, first in zip(step.scheduled, step.query_start_loc):
            segments.append(Segment(first, one.length, one.rope_length))
            scored += [(first + row - one.start, row + 1, token, one) for row, token in one.scored]
            if one.all_logits:
                wanted += range(first, first + one.length)
            elif one.wants_logits:
                wanted.append(first + one.length - 1)
            if looks is not None and one.phase == "decode":
                shown += [(first + at, one.request_id, one.start + at) for at in range(one.length)]
        rows = np.array([*wanted, *(row for row, _, _ in shown)], dtype=np.int64)
        asked = {
            "segments": segments,
            "logit_rows": torch.from_numpy(rows),  # torch looks at every number of a list by itself
            "scored": _prompt_scores(scored, result) if scored else None,
            "frozen": context.frozen,
            "ahead": context.ahead_rows(),
            "inputs": context.input_rows(),
            "parts": context.parts(),
            "whole": context.whole(),
        }
        return (step.input_ids, step.positions, context), asked, shown


def _prompt_scores(scored: list[tuple[int, int, int, ScheduledRequest]], result: StepResult) -> ScoredRows:
    """``scored``: (packed row, place of the token that it predicts, that token, its request)."""

    def visit(first: int, logits: Tensor) -> None:
        part = scored[first : first + len(logits)]
        finite = logits.amax(-1).isfinite().tolist()
        for top in sorted({one.top for _, _, _, one in part}):  # by themselves: the rank of equals depends on it
            which = [at for at, (_, _, _, one) in enumerate(part) if one.top == top]
            own = logits if len(which) == len(part) else logits[which]
            for at, entries in zip(which, row_logprobs(own, [part[at][2] for at in which], top)):
                _, place, _, one = part[at]
                if not finite[at]:
                    result.requests[one.request_id].error = f"scoring the prompt: {NOT_FINITE}"
                result.requests[one.request_id].prompt_scores[place] = entries

    return ScoredRows(torch.tensor([row for row, _, _, _ in scored]), visit)


def device_backend(runner: Runner, setting: Setting, cuda_graphs: bool, covers: bool = True) -> DeviceBackend | None:
    """Whoever serves recorded decode steps; None where the model is on no GPU or the Triton kernels are not to run."""
    device = getattr(runner, "device", None)
    if device is None or device.type != "cuda" or setting.backend not in ("auto", "triton") or not triton.available():
        return None
    if runner.spec.head_dim % 16 or runner.spec.head_dim > 256:
        return None  # as for every kernel: see ops.triton.dispatch.supports
    from saccade.engine.device import DeviceBackend  # needs Triton

    return DeviceBackend(cast(Any, runner), cuda_graphs, setting.watch, covers)
