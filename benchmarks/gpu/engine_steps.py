"""Steps of a random model as the engine runs them, without its scheduler: prompts, and decode steps after a context
whose keys and values are random. Other benchmarks derive from ``Bench``, of other models and pools.

STEPS, LONGEST and LAYERS of the environment say how many decode steps are timed, the most tokens of a sequence, and the
model's layers; PROFILE prints where a step's time goes; FA4 lets FlashAttention-4's kernels run where they serve.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from harness import Results, measured_limits, profile, say, seconds
from random_llama import Packed, random_8b
from unions import Unions

from saccade.engine.attention import Watch
from saccade.engine.core import new_request_id
from saccade.engine.memory.sequence import Sequence
from saccade.engine.request import Request
from saccade.engine.rows.calls import Setting
from saccade.engine.sampling.params import SamplingParams
from saccade.engine.scheduling.step_rows import next_rows, step_input
from saccade.engine.steps.step import RequestResult, ScheduledRequest
from saccade.engine.worker import Worker
from saccade.kv import BlockManager, KVFormat, KVStorage
from saccade.methods.policy import Policy
from saccade.models.calibration import Calibrations
from saccade.models.families import FAMILIES
from saccade.models.interface import ModelSpec
from saccade.models.llama import LlamaDecoder
from saccade.models.llama_weights import NamedTensors, read_weights
from saccade.models.runner import HFRunner
from saccade.ops import triton
from saccade.ops.fp8_weights import Fp8Matrix
from saccade.selection.forms import LABELS

CHUNK = 16384
STEPS = int(os.environ.get("STEPS", "128"))  # decode steps timed: the median counts
PREFILLED = 64  # tokens of a decode row's context that are computed; the others are random
GREEDY = SamplingParams(temperature=0, max_tokens=None)
LONGEST = int(os.environ.get("LONGEST", str(1 << 18)))  # tokens of a sequence, at most
LAYERS = int(os.environ.get("LAYERS", "32"))
# Where a step's time goes, by kernels that start when those before them have ended (common.begin), which takes longer:
# else a kernel's time has in it what it waits for.
PROFILED = bool(os.environ.get("PROFILE"))
VECTORS = {"cuboid": 2, "minmax": 2, "stored_mean": 1, "moments": 2}  # of a block's summary, a KV head
FA4 = bool(os.environ.get("FA4"))  # FlashAttention-4's kernels where they serve


class Bench:
    """A model over a pool of its own, and the rows of the results ``part``; without ``built`` it is of the 8B shape."""

    def __init__(self, part: str, built: tuple[Any, ModelSpec] | None = None) -> None:
        self.results = Results(part)
        self.model, self.spec = built or random_8b(LAYERS, LONGEST)
        self.device = next(self.model.parameters()).device
        self.pool: BlockManager | None = None
        self.serve(None)
        self.limits = measured_limits()
        self.results.facts = {
            "limits": self.limits,
            "layers": self.spec.layers,
            "prefill_chunk": CHUNK,
            "parameters": sum(one.numel() for one in self.model.parameters()),
            "weights": "random",
        }
        self.results.write()
        say(str(self.results.facts))

    def serve(self, quantize: str | None) -> None:
        """Run the model by products of its own type, or ``quantize`` it for good."""
        self.quantize, family = quantize, FAMILIES["llama"]
        tensors = self.model.state_dict()
        if quantize in (None, "fp8"):
            convert = None if quantize is None else lambda matrix: Fp8Matrix.of(matrix.weight, matrix.bias)
            weights = read_weights(self.model, NamedTensors(tensors), join=True, convert=convert)
            self.model.load_state_dict(weights.named(), assign=True)  # parts of what was joined, held once
        else:
            weights = read_weights(self.model, Packed(tensors, quantize), join=True)
            for parameter in self.model.parameters():  # its modules do not run any more
                parameter.data = parameter.new_empty(0)
        del tensors
        self.step_bytes = weights.step_bytes
        torch.cuda.empty_cache()
        runner = HFRunner(self.model, family, self.spec, LlamaDecoder(weights))
        self.watch = Watch()
        self.worker = Worker(runner, Setting(self.spec, Calibrations(self.spec, None), self.watch, fa4=FA4))

    def empty(self) -> None:
        """Give up the pool and what was kept of requests."""
        self.pool = None
        self.worker.memories.clear()
        gc.collect()  # requests and their reports hold each other
        torch.cuda.empty_cache()

    def room(self, tokens: int) -> None:
        """A pool for ``tokens`` tokens in place of the one before."""
        self.empty()
        layout = KVFormat(torch.bfloat16, self.spec.kv_heads, self.spec.head_dim)
        mover = triton.row_mover(torch.device("cuda"))
        storage = KVStorage(layout, self.spec.layers * layout.blocks(tokens), "cuda", mover)
        self.pool = BlockManager(storage, self.spec.layers)

    def request(self, tokens: int, policy: str) -> Request:
        assert self.pool is not None
        sequence = Sequence(self.pool, self.worker.memories)
        vocab = self.spec.vocab_size
        ids = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()
        request = Request(
            new_request_id(), ids, GREEDY, Policy.parse(policy), layers=self.spec.layers, detokenizer=None
        )
        request.begin(sequence, max_length=LONGEST)
        return request

    def step(self, requests: list[Request], chunk: int = CHUNK, goes_on: bool = False) -> dict[int, RequestResult]:
        """The next rows of all, as the engine runs them."""
        return self.run_rows([(request, next_rows(request, chunk)) for request in requests], goes_on)

    def run_rows(
        self, batch: list[tuple[Request, ScheduledRequest]], goes_on: bool = False
    ) -> dict[int, RequestResult]:
        """One step; ``goes_on``: the next one will most likely have the same requests, and may be launched already."""
        result = self.worker.run(step_input(batch), goes_on=goes_on)
        for request, rows in batch:
            own = result.requests[request.id]
            if own.error is not None:
                raise RuntimeError(own.error)
            request.report.take(rows, own, time.perf_counter())
            request.sequence.advance(rows.stop)
        return result.requests

    def prefill(self, request: Request, chunk: int = CHUNK) -> None:
        sequence = request.sequence
        length = len(sequence.tokens)
        sequence.kv.reserve(length)
        while sequence.computed < length:
            self.step([request], chunk)

    def warm_up(self, policy: str, tokens: int = 20000) -> None:
        """Compile what is compiled at first use, by a prompt of ``tokens``. Selection kernels are compiled anew for
        every power of two of the number of blocks."""
        request = self.request(tokens, policy)
        self.prefill(request)
        request.sequence.kv.free()

    def first_token(self, tokens: int, policy: str, dense: float | None) -> float:
        request = self.request(tokens, policy)
        taken = seconds(lambda: self.prefill(request))
        report = request.report.prefill.as_dict()
        request.sequence.kv.free()
        self.results.add(
            what="time to first token",
            context=tokens,
            batch=1,
            policy=policy,
            products=self.quantize or "bfloat16",
            seconds=taken,
            density=report["density"],
            backends=str(report["backends"]),
            speedup=None if dense is None else dense / taken,
        )
        return taken

    @contextmanager
    def begun(self, tokens: int, batch: int, policy: str, steps: int) -> Iterator[list[Request]]:
        """``batch`` requests of ``tokens`` tokens with random keys and values, and room for ``steps`` decode steps."""
        requests = [self.request(tokens, policy) for _ in range(batch)]
        shape = 2, self.spec.kv_heads, tokens - PREFILLED, self.spec.head_dim
        try:
            for request in requests:
                sequence = request.sequence
                sequence.kv.reserve(tokens + steps)
                for layer in range(self.spec.layers):
                    sequence.kv.append(layer, *torch.randn(*shape, device="cuda", dtype=torch.bfloat16))
                sequence.filled(tokens - PREFILLED)
                self.prefill(request)  # methods begin with what they see of a prompt's end
                sequence.extend([7], "decode", request.policy)
            yield requests
        finally:
            if self.worker.device is not None:
                self.worker.device.forget_ahead()
            for request in requests:
                request.sequence.close()

    def decode_step(self, requests: list[Request], goes_on: bool = False) -> None:
        found = self.step(requests, goes_on=goes_on)
        for request in requests:
            own = found[request.id]
            token = own.tokens[-1] if own.tokens is not None else int(own.logits[-1].argmax())
            request.sequence.extend([token], "decode", request.policy)

    def decode(self, tokens: int, batch: int, policy: str, dense: float | None) -> float:
        """Decode steps, tokens chosen and handed on, after a context whose keys and values are random."""
        with self.begun(tokens, batch, policy, STEPS + 12) as requests:
            step = partial(self.decode_step, requests, goes_on=not PROFILED)  # as an engine with these requests alone
            for _ in range(4):  # compiles, records, and replays twice
                step()
            before = requests[0].report.as_dict()["decode"]
            steps, began = [], time.perf_counter()
            for _ in range(STEPS):  # from one step's tokens to the next one's
                step()
                steps.append(time.perf_counter() - began)
                began += steps[-1]
            torch.cuda.synchronize()
            taken = statistics.median(steps)
            report = requests[0].report.as_dict()
            if PROFILED:
                profile(step)
            shares = None if policy == "dense" else self.results.attempt("union", lambda: self.union(requests))
        density = report["decode"]["density"]
        self.results.add(
            what="decode",
            context=tokens,
            batch=batch,
            policy=policy,
            products=self.quantize or "bfloat16",
            ms_per_step=1000 * taken,
            mean_ms_per_step=1000 * statistics.mean(steps),  # steps that search beside steps that do not
            floor_ms=self.floor(tokens * batch, policy, density),
            floor_union_ms=self.floor(tokens * batch, policy, density * (shares or 1.0)),
            tokens_per_second=batch / taken,
            density=density,
            scored=report["decode"]["keys_scored"] / max(1, report["decode"]["keys_causal"]),
            searching=share_of_searches(before, report["decode"]),
            backends=str(report["decode"]["backends"]),
            notes=str(report["notes"]),
            speedup=None if dense is None else dense / taken,
        )
        return taken

    def union(self, requests: list[Request]) -> float:
        """How many times as many keys as the density says one more step reads, if each key that any query head of a KV
        head reads is read once: 1 where they read the same, up to their number. Its kernels are launched one by one,
        by all layers."""
        self.watch.observer = seen = Unions()
        try:
            self.decode_step(requests)
        finally:
            self.watch.observer = None
        return seen.share

    def floor(self, tokens: int, policy: str, density: float) -> float:
        """Milliseconds in which the device copies as many bytes as a step has to read: weights, keys and values by the
        step's density, and summaries of all blocks. Reading alone may be as fast again as a copy's reads.

        ``floor_ms`` takes the density of a query head, as if all query heads of a KV head read the same keys.
        ``floor_union_ms`` takes what they read together, in one step behind the timed ones (:meth:`union`); it is
        ``floor_ms`` where lists are a KV head's, or are not to be had."""
        vector = 2 * self.spec.kv_heads * self.spec.head_dim * self.spec.layers
        plan = Policy.parse(policy).decode.device_plan(self.spec)
        blocks = None if plan is None else plan.blocks
        summaries = 0.0
        if blocks is not None and blocks.summary == LABELS:  # codes of all channels, and a key's range
            each = self.spec.head_dim * blocks.bits / 8 + 8
            summaries = tokens * each * self.spec.kv_heads * self.spec.layers
        elif blocks is not None:
            summaries = tokens // blocks.size * VECTORS[blocks.summary] * vector
        return 1e-6 * (self.step_bytes + 2 * tokens * density * vector + summaries) / self.limits["copy_gbps"]


def share_of_searches(before: dict[str, Any], after: dict[str, Any]) -> float | None:
    """Of the query heads that may search, those that did, since ``before``."""
    may = after["searchable"] - before["searchable"]
    return (after["searches"] - before["searches"]) / may if may else None
