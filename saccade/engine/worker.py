"""Runs steps: packed rows of many requests through the layers, attention from the backends, results as plain data."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from saccade.engine.attention import AttentionBackend, StepFailedError, StepShortError
from saccade.engine.memory import kept_states as kept
from saccade.engine.memory.memories import Memories
from saccade.engine.rows.backend import RowBackend
from saccade.engine.rows.calls import Setting
from saccade.engine.rows.suspended import Advanced, SuspendedPass
from saccade.engine.steps.step import RequestResult, StepInput, StepResult, results_of
from saccade.errors import failure
from saccade.models.runner import HFRunner
from saccade.ops import triton

if TYPE_CHECKING:
    from saccade.engine.device.backend import DeviceBackend
    from saccade.engine.device.prepare import Prepared
    from saccade.kv.blocks import BlockManager
    from saccade.methods.policy import Policy

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
        """Those of a step's ``requests`` that have a pass of their own; a request that is not among them has none
        left."""
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
        runner: HFRunner,
        setting: Setting,
        exact: bool = False,
        cuda_graphs: bool = True,
        memories: Memories | None = None,
    ) -> None:
        self.runner = runner
        self.setting = setting
        self.exact = runner.exact = exact
        self.memories = Memories() if memories is None else memories
        self._alone = Alone()
        self._suspended: dict[int, SuspendedPass] = {}  # by request
        self.host = RowBackend(setting, runner)
        self.device = device_backend(runner, setting, cuda_graphs, covers=not exact)

    @property
    def backends(self) -> tuple[AttentionBackend, ...]:
        """In the order in which they are asked; the last serves every request."""
        return (self.host,) if self.device is None else (self.device, self.host)

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be launched before it is asked for."""
        return self.device is not None and self.device.runs_ahead and not self.exact and not self._alone

    def prepare(
        self, pool: BlockManager, policy: Policy, requests: int, longest: int, seconds: float, share: int
    ) -> Prepared | None:
        """Record the device's steps before they are asked for (device.prepare); None where it has none."""
        if self.device is None:
            return None
        return self.device.prepare(pool, policy, requests, longest, seconds, share)

    def repeats(self, step: StepInput, times: int) -> bool:
        """Whether the device can run the step ``times`` times by itself (see ``run``)."""
        if self.device is None or self.exact or self._alone:
            return False
        return self.device.repeats(step, self.memories, times)

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
        kept.begin(step.scheduled, self.memories, moves=self.device is not None)
        result = StepResult({one.request_id: RequestResult.of(one) for one in step.scheduled})
        step, whole = step.apart(), step
        try:
            for part in self._parts(step):
                if step is not whole:  # rows of drafts have passes of their own, and one before them may have failed
                    part = [at for at in part if results_of(result.requests, step.scheduled[at])[0].error is None]
                ahead = goes_on and len(part) == len(step)
                for backend in self.backends:
                    served, part = self._served(backend, step, part, result)
                    packs = backend.parts(step, served, self.memories)
                    ahead = ahead and not part and len(packs) == 1
                    for pack in packs:
                        packed = step.part(pack)
                        try:
                            for _ in backend.plan(packed, self.memories, result, times, ahead).steps():
                                pass
                        except StepFailedError as error:
                            self._note_failed(packed, result, error)
                            part = sorted([*part, *self._not_spoilt(step, pack, result)])
                        except Exception as error:
                            self._broke(packed, result, error)
        finally:
            self.host.done()
        for one in whole.scheduled:
            if result.requests[one.request_id].is_good:
                self.memories[one.sequence_id].end_step()
                kept.end(one, self.memories[one.sequence_id])
        result.seconds = time.perf_counter() - began
        return result

    def replay(self, step: StepInput) -> StepResult:
        """Run decode rows as if no method knew anything, and take back what that leaves."""
        with self.replaying(step):
            return self.run(step)

    @contextmanager
    def replaying(self, step: StepInput) -> Iterator[None]:
        """Within it no method of the rows of ``step`` knows anything; what they leave is taken back."""
        with ExitStack() as held:
            for one in step.scheduled:
                held.enter_context(self.memories[one.sequence_id].without_method())
            try:
                yield
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
        kept.begin(step.scheduled, self.memories, at_once=False)
        result = StepResult({one.request_id: RequestResult.of(one)})
        (request,) = step.request_ids
        planned = self.host.plan(step, self.memories, result)
        self._suspended[request] = SuspendedPass(planned, torch.device(self.runner.device))

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
                kept.end(one, self.memories[one.sequence_id])
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

    def _served(
        self, backend: AttentionBackend, step: StepInput, which: Sequence[int], result: StepResult
    ) -> tuple[list[int], list[int]]:
        """The requests among ``which`` that a backend serves, and the others, whose results say why not."""
        served: list[int] = []
        left: list[int] = []
        for number in which:
            why_not = backend.serves(step, number, self.memories[step.scheduled[number].sequence_id])
            (served if why_not is None else left).append(number)
            if why_not is not None:
                results_of(result.requests, step.scheduled[number])[0].passed_on = why_not
        return served, left

    def _note_failed(self, step: StepInput, result: StepResult, error: StepFailedError) -> None:
        """Another backend serves the requests of a step that failed, or brings in as much as there is room for at a
        time."""
        short = isinstance(error, StepShortError)
        if not short:
            logger.warning("a batched step failed, its rows run one by one: %s", error)
        why = "torch served steps" if short else "the batched step failed and torch served rows one by one"
        for one in step.scheduled:
            result.requests[one.request_id].note(f"{one.phase}: {why}: {error}")

    def _not_spoilt(self, step: StepInput, which: Sequence[int], result: StepResult) -> list[int]:
        """Of the requests ``which`` of a step that failed, those that another backend can go on with; the others are
        undone, as the next step may have changed their layers' states already."""
        left: list[int] = []
        for number in which:
            one = step.scheduled[number]
            if kept.is_spoilt(self.memories[one.sequence_id]):
                result.requests[one.request_id].undone = True
            else:
                left.append(number)
        return left

    def _broke(self, step: StepInput, result: StepResult, error: Exception) -> None:
        """After a pass that broke its requests are to be tried again, each in a pass of its own, so that only those
        fail that cannot run alone."""
        logger.debug("a pass over %d requests failed", len(step), exc_info=error)
        for one in step.scheduled:
            if len(step) == 1:
                for failed in results_of(result.requests, one):
                    failed.error, failed.error_type = failure(error, one.phase)
            else:
                result.requests[one.request_id].undone = True
                self._alone.broke(one.request_id)


def device_backend(runner: HFRunner, setting: Setting, cuda_graphs: bool, covers: bool = True) -> DeviceBackend | None:
    """The backend of recorded steps; None where the model is on no GPU or the Triton kernels are not to run."""
    device = getattr(runner, "device", None)
    if device is None or device.type != "cuda" or setting.backend not in ("auto", "triton") or not triton.available():
        return None
    keeping = getattr(runner, "keeping", None)
    if keeping is not None and not keeping.in_slots(device):
        return None  # its modules know states as tensors of their own, not by what a step reads on the device
    if runner.spec.shapes:
        return None  # its steps have one block table for all layers
    if triton.serves_heads(runner.spec.head_dim, runner.spec.value_dim) is not None:
        return None
    from saccade.engine.device.backend import DeviceBackend  # needs Triton

    return DeviceBackend(cast(Any, runner), cuda_graphs, setting.watch, covers)
