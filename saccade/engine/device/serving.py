"""Which requests of a step a device backend serves, and how it divides them into device steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from saccade.engine.attention import Watch
from saccade.engine.device import prefill
from saccade.engine.device.plans import DevicePlans
from saccade.engine.device.rooms import EACH
from saccade.engine.device.tiers import DeviceTiers
from saccade.engine.memory.sequence_memory import SequenceMemory
from saccade.engine.rows.hosted import goes_to_host
from saccade.engine.steps.step import ScheduledRequest, StepInput
from saccade.methods.policy import Policy
from saccade.models.decode_step import DecodeStep
from saccade.models.runner import HFRunner

MOST_ROWS = 64  # that decode or verify


class DeviceServing:
    """For ``runner``, while ``watch`` sees every call."""

    def __init__(self, runner: HFRunner, watch: Watch) -> None:
        self.runner, self.watch = runner, watch
        self._forward = DecodeStep(runner)
        self._tiers = DeviceTiers()
        self._plans = DevicePlans(runner.spec)

    def serves(self, step: StepInput, index: int, memory: SequenceMemory) -> str | None:
        """Why request ``index`` of a step cannot be part of a batched one; None where it can."""
        one = step.scheduled[index]
        if one.phase == "prefill":
            return self._serves_prefill(one, memory)
        if one.phase != "decode" or (one.length != 1 and not one.together):
            return "only single decode rows are batched"
        if one.together and (one.length > EACH or not self.watch.idle):
            return f"more than {EACH} rows of a request, or an observer looks on"
        if one.row is not None:
            return "rows of drafts are counted, and taken back, one by one"
        if not self._forward.serves:
            return "the model's rotary factors hang on more than a row's position"
        if one.scored:
            return "log-probabilities of its tokens are wanted"
        if one.request_id in self.watch.bounds:
            return "bounds of its errors are wanted"
        if self.runner.spec.value_dim is not None and one.request_id in self.watch.audited:
            return "audits of latents run by the host"
        if one.phase == "decode" and goes_to_host(memory.kv.pool, one.policy):
            return "its keys and tables live in host memory, where the CPU attends them (kv_compute)"
        if memory.kept is not None and (one.together or memory.kept.spare is None):
            return "rows that may be taken back change states by the host" if one.together else "no second slot is free"
        planned = self._plans.of(one.policy, one.stop)
        if memory.kv.pool.absent:
            if memory.kv.pool.shares_layers:
                return "layers read others' KV blocks, which may not be resident"
            if self.watch.looks_within and not memory.kv.resident:
                return "an observer looks on, and some of its KV blocks are not resident"
            if (reason := self._tiers.why_not(memory.kv, planned.plan)) is not None:
                return reason
        if planned.plan is not None:
            if memory.has_state and not planned.plan.keeps and memory.knows_of(planned.acting):
                return "the decode method keeps a state that its device plan does not know"
            if memory.has_gone and not (one.policy.decode.evicts and memory.gone_within(planned.acting)):
                return "an earlier turn evicted keys"
        if one.together and any(cone is not None for cone in planned.cones):
            return "rows under a policy's window are attended one by one"
        return planned.why_not

    def why_not(self, policy: Policy) -> str | None:
        """Why no decode row under ``policy`` can be part of a batched step, whatever its request is; None where most
        can."""
        found = [one.why_not for one in self._plans.among(policy, 1, self.runner.spec.max_position)]
        return None if None in found else found[-1]

    def _serves_prefill(self, one: ScheduledRequest, memory: SequenceMemory) -> str | None:
        if not self.watch.idle:
            return "an observer looks on"
        if memory.kept is not None:
            return "layers that keep a state take prompts by the host"
        if not self._forward.serves:
            return "the model's rotary factors hang on more than a row's position"
        return prefill.why_not(one, memory)

    def parts(self, step: StepInput, which: Sequence[int], memories: Mapping[int, SequenceMemory]) -> list[list[int]]:
        """The served requests ``which`` in as many steps as they need: those whose blocks must all stay resident while
        those of others may not in steps of their own before all others, those that verify drafts, or prefill, in steps
        of their own."""
        kinds: tuple[list[int], list[int], list[int]] = [], [], []
        prefilling: dict[int, ScheduledRequest] = {}
        for number in which:
            one = step.scheduled[number]
            if one.phase == "prefill":
                prefilling[number] = one
                continue
            plan, pool = self._plans.of(one.policy, one.stop).plan, memories[one.sequence_id].kv.pool
            early = plan is not None and not plan.listed and self._tiers.absent(pool)
            kinds[0 if early else 2 if one.together else 1].append(number)
        found = [kind[at : at + MOST_ROWS] for kind in kinds for at in range(0, len(kind), MOST_ROWS)]
        return found + prefill.parts(prefilling)

    def replays(self, step: StepInput, memories: Mapping[int, SequenceMemory]) -> bool:
        """Whether the device can run a step's rows densely, too, in a step before it: single decode rows whose keys are
        all there, and for which the same layers' windows rule."""
        if not self.watch.idle or not 0 < len(step) <= MOST_ROWS:
            return False
        if len({self._plans.replaying(length).plan for length in step.seq_lens}) > 1:
            return False
        for index, one in enumerate(step.scheduled):
            memory = memories[one.sequence_id]
            if one.phase != "decode" or one.length != 1 or memory.has_gone or memory.kv.pool.tiers is not None:
                return False
            if self.serves(step, index, memory) is not None:
                return False
        return True

    def repeats(self, step: StepInput, memories: Mapping[int, SequenceMemory], times: int) -> bool:
        """Whether the device can run a step ``times`` times by itself, each row with the token that it chose before:
        all rows want their likeliest token alone, nothing on the way asks the host, and no row outgrows a window."""
        watch = self.watch
        if not watch.idle or watch.audits or watch.replays or watch.bounds or not 0 < len(step) <= MOST_ROWS:
            return False
        for index, one in enumerate(step.scheduled):
            memory, plan = memories[one.sequence_id], self._plans.of(one.policy, one.stop).plan
            if not one.greedy or plan is None or plan.keeps or memory.kv.pool.tiers is not None:
                return False
            if not self._plans.stays(one.policy, one.stop, one.stop + times - 1):
                return False
            if self.serves(step, index, memory) is not None:
                return False
        return True
