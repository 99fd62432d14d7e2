"""Decode over more keys and values than a GPU holds: the rest lies in pinned host memory (docs/tiers.md).

    python benchmarks/gpu/tiers.py long [--tokens 786432] [--device-gib 32] [--host-gib 98] [--unit head]
    python benchmarks/gpu/tiers.py batch [--sequences 8] [--tokens 131072] [--untiered 98304] [--only tiered]
    python benchmarks/gpu/tiers.py rates [--tokens 98304] [--shares 0.4 0.6 0.8 0.95] [--unit block head]
        [--compute device auto host] [--functions] [--profile]
    python benchmarks/gpu/tiers.py places [--block 16 32] [--batches 1 2 4 8] [--shares 0.25 0.4 0.7] [--tokens 65536]

A random model of the 8B shape over made-up KV. ``long`` is one sequence; ``batch`` are several, after as many shorter
ones of which all is resident. ``rates`` is one sequence without a tier, then with slots for a share of its blocks:
the step beside the greater of the step without a tier and what its bytes take at the copy kernel's speed. All of them
run as in an engine: the scheduler puts steps together, and a step is launched before it is asked for where that may be,
without a tier as with one. So a step's time is that from its tokens to the next one's, and nothing waits in between;
``launched ahead`` counts the steps that were under way when they were asked for. ``--unit``:
what moves over the link: one layer's keys and values of 32 tokens, a ``block`` of 128 KiB, or the 16 KiB of one KV
``head``. ``hit share``: of the parts that steps asked for, those that were on the device. ``steps recorded``: those
that no row path served. ``places`` pairs three forms of a step: all is resident; blocks come before they are read; or
what is absent is read where it lies in host memory, each KV head its part, and comes afterwards (offers.READS_HOST).
``same``: the share of the tokens that are those of the resident run. ``--compute``: ``kv_compute``.
``--functions``: of further steps, where the host's time goes; ``--profile``: and the kernels' (of such a run no kernel
starts early).
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import itertools
import os
import pstats
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("WANTED", "")
os.environ.setdefault("LONGEST", str(1 << 20))

import torch
from endtoend import CHUNK, Bench, profile
from harness import Results, say
from torch import Tensor

from saccade.bench.generate_kv import TAIL, plant
from saccade.engine.device.ahead import Ahead
from saccade.engine.request import Request
from saccade.engine.scheduling.batch_control import BatchControl
from saccade.engine.scheduling.scheduler import Scheduler
from saccade.kv import BlockManager, KVFormat, KVStorage, SequenceKV, offers
from saccade.kv.compute import MODES
from saccade.kv.host import HostTier
from saccade.kv.row_formats import AUTO, FORMATS, RowFormat
from saccade.models.interface import LayerAttention, ModelSpec, Segment
from saccade.ops import attend
from saccade.ops.movers import row_mover
from saccade.ops.triton import common

SHAPE = KVFormat(torch.bfloat16, 8, 128)
PIECE = 1 << 15  # tokens of made-up KV at a time
PROFILED = 8  # steps
QUEST = "streaming+quest(budget={},block_size=32,dense_layers=0)"


class Filling:
    """An attention context that stores a layer's made-up past when it sees the layer's queries, and attends to the last
    piece of it."""

    def __init__(self, kv: SequenceKV, past: int, summaries: Sequence[tuple[str, int]]) -> None:
        self.kv, self.past, self.summaries = kv, past, summaries
        self.layout, self.device = kv.pool.format, kv.pool.storage.device
        self.generator = torch.Generator(self.device).manual_seed(past)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention) -> Tensor:
        for start in range(0, self.past, PIECE):
            with torch.device(self.device):
                made = plant(q, min(PIECE, self.past - start), self.layout.kv_heads, spec.scale, self.generator)
            past_k, past_v = (part.to(self.layout.dtype) for part in made)
            self.kv.append(layer, past_k, past_v)
            for kind, size in self.summaries:
                self.kv.view(layer).summary(kind, size)  # while they are at hand
        self.kv.append(layer, k, v)
        seen = torch.cat([past_k, k], 1), torch.cat([past_v, v], 1)
        return attend(q, seen, scale=spec.scale, softcap=spec.softcap)[0]

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        raise NotImplementedError


class Tiered(Bench):
    """Steps of the 8B shape over a pool with a host tier."""

    part = "tiers"  # what results are called
    stored: RowFormat = AUTO
    computed = 1  # rows of a context that run as any prefill's, so that methods begin with them
    summaries: Sequence[tuple[str, int]] = (("minmax", SHAPE.block_size),)
    tokens: Sequence[Sequence[int]] = ()  # of each sequence, by the last run

    def __init__(self, profiled: bool = False, timed: bool = False, built: tuple[Any, ModelSpec] | None = None) -> None:
        super().__init__(built=built)
        self.profiled, self.timed = profiled, timed or profiled
        self.layout = self.layout_of()
        self.rows = Results(self.part)
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"
        self.rows.facts = {"device": name, **self.results.facts}

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
        ids = torch.tensor(sequence.tokens[past:])
        self.worker.runner.run(
            ids, torch.arange(past, tokens), Filling(kv, past, self.summaries), segments=[Segment(0, TAIL, tokens)],
            logit_rows=torch.empty(0, dtype=torch.long),
        )  # fmt: skip
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
        self.rows.add(
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


LINK = 51e9  # bytes a second that the copy kernel reaches (gather.py)


def rates(bench: Tiered, tokens: int, shares: list[float], steps: int, units: list[str], computes: list[str]) -> None:
    """Steps at several shares of hits."""
    policy = QUEST.format(int(tokens * 0.025) // 32 * 32)
    parts = bench.spec.layers * bench.layout.blocks(tokens + steps + 40 + 2 * PROFILED)
    bench.pool_of(parts + 64, None)
    whole = bench.measure("no tier", 1, tokens, policy, steps)
    for unit, compute, share in itertools.product(units, computes, shares):
        host = int(1.02 * parts) * bench.layout.block_bytes
        bench.pool_of(int(share * parts), host, unit=unit, compute=compute)
        ms = bench.measure(f"slots for {share:.0%}, by {unit}, kv_compute={compute}", 1, tokens, policy, steps)
        row = bench.rows.rows[-1]
        bound = max(whole, row["mb_read_per_step"] * 1e6 / LINK * 1e3)
        say(f"hits {row['hit_share']:.1%}: {ms:.2f} ms, bound {bound:.2f} ms, {bound / ms:.0%} of it")


PLACED = {
    "quest": "streaming+quest(budget={budget},block_size={block},dense_layers=0)",
    "psa": "streaming+psa(rank=cuboid,epsilon={epsilon},block_size={block})",
}
KINDS = {"quest": "minmax", "psa": "cuboid"}  # summaries


def places(bench: Tiered, options: argparse.Namespace) -> None:
    """Where absent blocks are read; ``--tokens`` of each of up to two sequences, half as many of each of more."""
    say("block batch policy slots | hits | MB a step | ms: resident, before, in place | of resident | same | recorded")
    for block, batch, name in itertools.product(options.block, options.batches, options.methods):
        tokens = (options.tokens or 65536) // (1 if batch <= 2 else 2)
        steps = options.steps
        policy = PLACED[name].format(budget=tokens // 40 // block * block, block=block, epsilon=options.epsilon)
        bench.layout = bench.layout_of(block)
        bench.summaries = ((KINDS[name], block),)
        parts = bench.spec.layers * bench.layout.blocks(tokens + steps + 40) * batch
        bench.pool_of(parts + 64, None)
        whole = bench.measure(f"{name} block {block} batch {batch}: resident", batch, tokens, policy, steps)
        want = bench.tokens
        for share in options.shares:
            found = []
            for in_place in (False, True):
                offers.READS_HOST = in_place
                bench.pool_of(int(share * parts), int(1.02 * parts) * bench.layout.block_bytes)
                form = "in place" if in_place else "before"
                title = f"{name} block {block} batch {batch}: slots for {share:.0%}, {form}"
                ms = bench.measure(title, batch, tokens, policy, steps)
                row = bench.rows.rows[-1]
                same = sum(a == b for one, two in zip(want, bench.tokens) for a, b in zip(one, two)) / (steps * batch)
                found.append((ms, row, same))
            hits = " ".join(f"{row['hit_share']:.1%}" for _, row, _ in found)
            moved = " ".join(f"{row['mb_read_per_step']:.1f}" for _, row, _ in found)
            taken = " ".join(f"{ms:.2f}" for ms, _, _ in found)
            of = " ".join(f"{whole / ms:.0%}" for ms, _, _ in found)
            same = " ".join(f"{one:.0%}" for *_, one in found)
            recorded = " ".join(f"{row['recorded']}/{steps}" for _, row, _ in found)
            say(
                f"ROW {block} {batch} {name} {share:.0%} | {hits} | {moved} | {whole:.2f} {taken} | {of} | {same} | "
                f"{recorded} | density {found[-1][1]['density']}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("long", "batch", "rates", "places"))
    parser.add_argument("--block", nargs="+", type=int, default=[32], help="of places: tokens of a block")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8], help="of places")
    parser.add_argument("--methods", nargs="+", choices=tuple(PLACED), default=list(PLACED), help="of places")
    parser.add_argument("--epsilon", type=float, default=0.02, help="of places: psa's")
    parser.add_argument("--late", type=int, default=offers.MOST_LATE, help="of places: parts of a layer that come")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.4, 0.6, 0.8, 0.95])
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--untiered", type=int, default=98304)
    parser.add_argument("--device-gib", type=float)
    parser.add_argument("--host-gib", type=float, default=98)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--replacement", default="clock")
    parser.add_argument("--unit", nargs="+", default=["block"], choices=("block", "head"))
    parser.add_argument("--compute", nargs="+", default=["device"], choices=MODES, help="of rates")
    parser.add_argument("--functions", action="store_true", help="where the host's time goes")
    parser.add_argument("--profile", action="store_true", help="and the kernels'")
    parser.add_argument("--only", choices=("resident", "tiered"), help="of batch: one of its two halves")
    parser.add_argument("--kv-dtype", default="auto", choices=sorted(FORMATS), help="how keys and values are stored")
    options = parser.parse_args()
    Tiered.stored = FORMATS[options.kv_dtype]
    if options.profile:
        common.is_hopper = lambda device: False
    bench = Tiered(options.profile, options.functions)
    if options.what == "places":
        offers.MOST_LATE = options.late
        places(bench, options)
        return
    if options.what == "rates":
        rates(bench, options.tokens or 98304, options.shares, options.steps, options.unit, options.compute)
        return
    free = torch.cuda.mem_get_info()[0] / 2**30
    count = 1 if options.what == "long" else options.sequences
    tokens = options.tokens or (786432 if options.what == "long" else 131072)
    device_gib = options.device_gib or (32.0 if options.what == "long" else min(96.0, free - 12))
    slots = int(device_gib * 2**30) // bench.layout.block_bytes
    density = 0.025
    if options.what == "batch" and options.only != "tiered":
        short = options.untiered
        per = bench.spec.layers * bench.layout.blocks(short + options.steps + 40)
        fits = int((free - 8) * 2**30) // (per * bench.layout.block_bytes)
        few = min(count, fits)
        policy = QUEST.format(int(short * density) // 32 * 32)
        bench.pool_of(few * per, None)
        bench.measure("all resident, no tier", few, short, policy, options.steps)
    if options.only == "resident":
        return
    policy = QUEST.format(int(tokens * density) // 32 * 32)
    unit = options.unit[0]
    bench.pool_of(slots, int(options.host_gib * 2**30), options.replacement, unit)
    name = f"{device_gib:.0f} GiB of device, {options.host_gib:.0f} GiB of host, by {unit}"
    bench.measure(name, count, tokens, policy, options.steps)


if __name__ == "__main__":
    main()
