"""Steps of the 8B shape over a pool with a host tier: made-up KV is filled in, and the scheduler puts steps together as
in an engine, so that a step's time is that from its tokens to the next one's."""

from __future__ import annotations

import cProfile
import gc
import io
import os
import pstats
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("LONGEST", str(1 << 20))

import torch
from engine_steps import CHUNK, Bench
from harness import profile, say

from saccade.bench.generate_kv import TAIL, Filling, run_tail
from saccade.engine.device.ahead import Ahead
from saccade.engine.request import Request
from saccade.engine.scheduling.batch_control import BatchControl
from saccade.engine.scheduling.scheduler import Scheduler
from saccade.kv import BlockManager, KVFormat, KVStorage
from saccade.kv.host import HostTier
from saccade.kv.row_formats import AUTO, RowFormat
from saccade.models.interface import ModelSpec
from saccade.ops.movers import row_mover

SHAPE = KVFormat(torch.bfloat16, 8, 128)
PIECE = 1 << 15  # tokens of made-up KV at a time
PROFILED = 8  # steps


class Tiered(Bench):
    """Steps of the 8B shape over a pool with a host tier."""

    part = "tiers"  # what results are called
    stored: RowFormat = AUTO
    computed = 1  # rows of a context that run as any prefill's, so that methods begin with them
    summaries: Sequence[tuple[str, int]] = (("minmax", SHAPE.block_size),)
    tokens: Sequence[Sequence[int]] = ()  # of each sequence, by the last run

    def __init__(self, profiled: bool = False, timed: bool = False, built: tuple[Any, ModelSpec] | None = None) -> None:
        super().__init__(self.part, built)
        self.profiled, self.timed = profiled, timed or profiled
        self.layout = self.layout_of()
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"
        self.results.facts = {"device": name, **self.results.facts}

    def layout_of(self, block: int = SHAPE.block_size) -> KVFormat:
        return KVFormat(self.spec.dtype, self.spec.kv_heads, self.spec.head_dim, block, self.stored, self.stored)

    def pool_of(
        self,
        slots: int,
        host_bytes: int | None,
        replacement: str = "clock",
        unit: str = "block",
        compute: str = "device",
    ) -> None:
        """A pool of so many slots, in place of the one before."""
        if self.worker.device is not None:
            self.worker.device.forget_ahead()  # of that pool
        if self.pool is not None and self.pool.tiers is not None:
            self.pool.tiers.close()
        self.pool = None
        self.worker.memories.clear()
        gc.collect()
        torch.cuda.empty_cache()
        storage = KVStorage(self.layout, slots, self.device, row_mover(self.device))
        began = time.perf_counter()
        apart = unit == "head"
        tier = None if host_bytes is None else HostTier(host_bytes, storage, apart, compute)
        if host_bytes is not None:
            say(f"pinned {host_bytes / 2**30:.1f} GiB in {time.perf_counter() - began:.1f} s")
        self.pool = BlockManager(storage, self.spec.layers, heads_apart=apart, tier=tier, replacement=replacement)

    @torch.inference_mode()
    def filled(self, tokens: int, policy: str) -> Request:
        """A request whose context is made up but for its last tokens."""
        request = self.request(tokens, policy)
        sequence, past = request.sequence, tokens - TAIL
        kv = sequence.kv
        kv.reserve(tokens)
        run_tail(self.worker.runner, sequence.tokens, Filling(kv, past, PIECE, past, summaries=self.summaries))
        kv.truncate(tokens - self.computed)
        sequence.filled(tokens - self.computed)
        self.prefill(request)
        sequence.extend([7], "decode", request.policy)
        return request

    def measure(self, name: str, sequences: int, tokens: int, policy: str, steps: int) -> float:
        """Milliseconds from a step's tokens to the next one's, the median of the later half."""
        assert self.pool is not None
        began = time.perf_counter()
        requests = []
        for number in range(sequences):
            requests.append(self.filled(tokens, policy))
            torch.cuda.synchronize()
            say(f"sequence {number}: {time.perf_counter() - began:.1f} s")
        say(f"filled {sequences} x {tokens} in {time.perf_counter() - began:.1f} s")
        tiers, taken, moved, rows = self.pool.tiers, [], [], []
        recorded, control = 0, BatchControl(self.pool)
        scheduler = Scheduler(
            self.pool, chunk=CHUNK, max_batch_rows=CHUNK + sequences, max_requests=sequences, control=control
        )
        scheduler.running = list(requests)

        def step() -> None:
            nonlocal recorded, began
            before = None if tiers is None else tiers.counts.copy()
            batch = scheduler.schedule()
            found = self.run_rows(batch, self.worker.runs_ahead and scheduler.goes_on(batch))
            recorded += all(found[request.id].late for request, _ in batch)
            for request, _ in batch:
                own = found[request.id]
                token = own.tokens[-1] if own.tokens is not None else int(own.logits[-1].argmax())
                request.sequence.extend([token], "decode", request.policy)
            now = time.perf_counter()
            control.ran(batch, now - began, found)
            taken.append(1e3 * (now - began))
            began = now
            moved.append(None if tiers is None or before is None else tiers.counts.since(before))
            rows.append(len(batch))

        torch.cuda.synchronize()
        with ahead_asked() as asked:
            began = time.perf_counter()
            for number in range(steps):
                step()
                if number % 8 == 0:
                    say(f"step {number}: {taken[-1]:.1f} ms")
        self.tokens = [list(request.sequence.tokens[-steps:]) for request in requests]
        half = steps // 2
        late: list[Any] = [one for one in moved[half:] if one is not None]
        hits, misses, read = (sum(getattr(one, key) for one in late) for key in ("hits", "misses", "bytes_read"))
        ms = statistics.median(taken[half:])
        report = requests[0].report.as_dict()
        self.results.add(
            what=name,
            sequences=sequences,
            context=tokens,
            policy=policy,
            ms_per_step=ms,
            mean_ms_per_step=statistics.mean(taken[half:]),
            tokens_per_second=statistics.mean(rows[half:]) / ms * 1e3,
            first_steps_ms=str([round(one, 1) for one in taken[:4]]),
            density=report["decode"]["density"],
            steps=steps,
            recorded=recorded,
            launched_ahead=sum(asked),
            hit_share=hits / max(1, hits + misses) if late else 1.0,
            mb_read_per_step=read / max(1, len(late)) / 1e6,
            gbps_if_all_were_copies=read / max(1, len(late)) / ms / 1e6,
            notes=str(report["notes"])[:200],
        )
        began = time.perf_counter()
        if self.profiled:
            say(name)
            profile(step, PROFILED)
        if self.timed:
            functions(step, PROFILED)
        for request in requests:
            request.sequence.close()
        return ms


@contextmanager
def ahead_asked() -> Iterator[list[bool]]:
    """Whether each step that was launched ahead was the one that came."""
    seen: list[bool] = []
    real = Ahead.serves

    def serves(*args: Any) -> bool:
        seen.append(real(*args))
        return seen[-1]

    Ahead.serves = serves  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Ahead.serves = real  # type: ignore[method-assign]


def functions(step: Callable[[], None], steps: int) -> None:
    """Print where the host's time goes in a step."""
    seen, text = cProfile.Profile(), io.StringIO()
    seen.enable()
    for _ in range(steps):
        step()
    seen.disable()
    pstats.Stats(seen, stream=text).sort_stats("cumulative").print_stats(45)
    say(f"{steps} steps:" + text.getvalue()[:6000])
