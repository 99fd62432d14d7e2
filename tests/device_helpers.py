"""What the tests of the device backend share: decode rows built by hand over a tiny Llama, and what they must give."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from helpers import generator

from saccade import LLM
from saccade.engine.device.backend import DeviceBackend
from saccade.engine.memory.sequence_memory import SequenceMemory
from saccade.engine.steps.step import CallCount, ScheduledRequest, StepInput
from saccade.engine.watch.layer_stats import LayerStats
from saccade.kv import BlockManager, KVFormat, KVStorage
from saccade.methods.base import Query
from saccade.methods.policy import Policy
from saccade.models.interface import Segment
from saccade.ops import Call, run
from saccade.selection import Selection


@dataclass
class Sequences:
    """One sequence for each of ``policies``, of ``lengths`` random keys; equal seeds give equal ones."""

    runner: object
    policies: list[str]
    lengths: list[int]
    seed: int = 0
    heads_apart: bool = False

    def __post_init__(self) -> None:
        spec, rng = self.runner.spec, generator(self.seed)
        self.policies = [Policy.parse(policy) for policy in self.policies]
        storage = KVStorage(KVFormat(torch.float32, spec.kv_heads, spec.head_dim, 32), 300)
        storage.k.fill_(float("nan"))
        storage.v.fill_(float("nan"))
        self.pool = BlockManager(storage, spec.layers, heads_apart=self.heads_apart)
        self.memories = {}
        for number, length in enumerate(self.lengths):
            memory = self.memories[number] = SequenceMemory(self.pool)
            memory.kv.reserve(length + 64)
            for layer in range(spec.layers):
                memory.kv.append(layer, *torch.randn(2, spec.kv_heads, length, spec.head_dim, generator=rng))
        self.tokens = torch.randint(250, (len(self.lengths), 64), generator=rng)
        self.done = 0

    def step(self, **options) -> StepInput:
        """The next row of each."""
        ids = self.tokens[:, self.done]
        starts = [self.memories[number].kv.length for number in range(len(ids))]
        scheduled = tuple(
            ScheduledRequest(
                number + 100, number, start, start + 1, "decode", policy, start, start + 1, start,
                **{"wants_logits": True, **options},
            )
            for number, (start, policy) in enumerate(zip(starts, self.policies))
        )  # fmt: skip
        self.done += 1
        return StepInput(scheduled, ids, torch.tensor(starts), tuple(range(len(ids) + 1)))


class Reference:
    """An attention context: each row by its method's own choice and the reference loop. ``read``: by row and layer,
    the selections and what they cost."""

    def __init__(self, sequences: Sequences, step: StepInput) -> None:
        self.sequences, self.step = sequences, step
        self.read: dict[tuple[int, int], Selection] = {}
        self.stats: dict[tuple[int, int], LayerStats] = {}

    def run(self, layer, q, k, v, spec):
        out = torch.empty_like(q)
        for row, one in enumerate(self.step.scheduled):
            kv, at = self.sequences.memories[one.sequence_id].kv, slice(row, row + 1)
            kv.append(layer, k[:, at], v[:, at])
            query = Query.of(q[:, at], kv.view(layer), scale=spec.scale, layer=layer)
            selection = one.policy.decode.select_decode(query, None)
            call = Call.of(q[:, at], query.kv, selection, scale=spec.scale, softcap=spec.softcap)
            ran = run(call, "reference")
            out[:, at] = ran.out
            self.read[row, layer] = ran.used
            self.stats[row, layer] = LayerStats()
            self.stats[row, layer].add(CallCount(layer, ran.used, query.cost, ran.backend, ran.coverage))
        return out


def reference(sequences: Sequences):
    """The next row of each: logits [rows, vocab], and the context that attended."""
    step = sequences.step()
    context, rows = Reference(sequences, step), len(step)
    segments = [Segment(row, 1, one.stop) for row, one in enumerate(step.scheduled)]
    logits = sequences.runner.run(
        step.input_ids, step.positions, context, segments=segments, logit_rows=torch.arange(rows)
    )
    return logits, context


class Once:
    """Raises ``error`` at one call of ``function``, and runs all others."""

    def __init__(self, function, error, at: int = 1) -> None:
        self.function, self.error, self.left = function, error, at

    def __call__(self, *args, **options):
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.function(*args, **options)


def put_on_device(llm: LLM) -> None:
    """Have the device backend serve an engine on the CPU, which has none of its own."""
    worker = llm.engine.worker
    worker.device = DeviceBackend(llm.model.runner, watch=llm.engine.watch)


def take_off_device(llm: LLM) -> None:
    """Have the row path serve all requests."""
    llm.engine.worker.device = None


def device_of(llm: LLM) -> DeviceBackend:
    """Who serves an engine's recorded steps."""
    return llm.engine.worker.device


def choose_one_by_one(llm: LLM) -> None:
    """Have the method of each decode row choose for each layer, on the CPU too."""
    llm.engine.worker.host.fixed.of = lambda rows: "a test asks for it"
