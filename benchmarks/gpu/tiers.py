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
import itertools

import torch
from harness import say
from tiered_steps import PROFILED, Tiered

from saccade.kv import offers
from saccade.kv.compute import MODES
from saccade.kv.row_formats import FORMATS
from saccade.ops.triton import common

QUEST = "streaming+quest(budget={},block_size=32,dense_layers=0)"
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
        row = bench.results.rows[-1]
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
                row = bench.results.rows[-1]
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
