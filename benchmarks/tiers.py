"""Decode over more keys and values than memory holds: tokens/s over a disk against the same where all is resident.

    python benchmarks/tiers.py [--tokens 1000000] [--short 32768] [--kv-memory 1GiB] [--kv-disk ~/kv:20GiB]
        [--policies quest(budget=4096,block_size=32,dense_layers=0)] [--steps 32] [--threads 2] [--cold]
        [--keys planted|topics]
    python benchmarks/tiers.py --paired --tokens 32768 --sequences 1 2 --shares 0.15 0.3 0.6 --block 16 32 [--cold]

A random model of 125 M parameters decodes over made-up keys (as ``bench generate --synthetic-kv``, but some at a time).
For each policy: the short context without a tier, the same with one (everything resident: what the tier costs then),
and the long context. ``warm`` are the later half of the steps, CPU their processor time over all threads. With
``--cold`` the file leaves the system's page cache before every step, so that what is read comes from the device.
Keys are noise with a few heavy columns, with ``--keys topics`` on top of a walk of topics.

``--paired``: over memory for a share of all blocks, every other step waits for all blocks before it attends any, and
the others attend while blocks come (host_resolved.PIPELINED); and without a tier. ``{block}`` in a policy is each of
``--block``. ``MB``: read from the disk by a step.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from saccade import LLM, SamplingParams
from saccade.bench.cli import model_folder
from saccade.bench.generate_kv import TAIL, Filling, run_tail
from saccade.bench.ttft import prompt
from saccade.engine.request import Request
from saccade.engine.rows import resolved as host_resolved
from saccade.kv.tier import TierCounts
from saccade.methods.policy import Policy

PIECE = 1 << 16  # tokens of made-up KV at a time


def add_topics(keys: Tensor, q: Tensor, generator: torch.Generator) -> None:
    """Add a walk of topics to ``keys`` [kv_heads, n, head_dim]: for 200 to 2,000 tokens they share a direction, one of
    64, turned as rotary embeddings turn it; and a few channels lie far from zero, as a trained model's do."""
    kv_heads, count, head_dim = keys.shape
    directions = torch.randn(64, kv_heads, head_dim, generator=generator)
    at, which = 0, torch.empty(count, dtype=torch.long)
    while at < count:
        stay = int(torch.randint(200, 2000, (1,), generator=generator))
        which[at : at + stay] = int(torch.randint(64, (1,), generator=generator))
        at += stay
    half = head_dim // 2
    angle = torch.arange(count)[:, None] * 500_000.0 ** (-torch.arange(half) / half)
    cos, sin = angle.cos(), angle.sin()
    for head in range(kv_heads):
        topic = directions[which, head]
        keys[head] *= 0.7
        keys[head, :, :half] += topic[:, :half] * cos - topic[:, half:] * sin
        keys[head, :, half:] += topic[:, half:] * cos + topic[:, :half] * sin
    keys[..., :: head_dim // 4] += 4.0


@torch.inference_mode()
def fill(llm: LLM, request: Request, topics: bool = False) -> None:
    """Store made-up KV for all but the last row of the prompt."""
    ids, kv = request.sequence.tokens, request.sequence.kv
    kv.reserve(len(ids))
    run_tail(llm.model.runner, ids, Filling(kv, len(ids) - TAIL, PIECE, 0, add_topics if topics else None))
    kv.truncate(len(ids) - 1)
    request.sequence.filled(len(ids) - 1)


def resident_gb() -> float:
    with open("/proc/self/statm") as info:
        return int(info.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9


def steps(llm: LLM, tokens: int, policy: str, count: int, cold: bool, topics: bool) -> Iterator[dict[str, float]]:
    ids = prompt(tokens, llm.model.spec.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=count + 2, ignore_eos=True)
    request = llm.engine.add(ids, params, Policy.parse(policy))
    fill(llm, request, topics)
    tiers = llm.pool.tiers
    while len(request.output_ids) < 2:  # the prompt's last row, and the step that makes summaries
        llm.engine.step()
    while not request.finished:
        if cold and tiers is not None:
            os.fdatasync(tiers.tier._fd)  # type: ignore[attr-defined]
            os.posix_fadvise(tiers.tier._fd, 0, 0, os.POSIX_FADV_DONTNEED)  # type: ignore[attr-defined]
        before = None if tiers is None else tiers.counts.copy()
        began, used = time.perf_counter(), time.process_time()
        llm.engine.step()
        seconds, cpu = time.perf_counter() - began, time.process_time() - used
        moved = None if before is None or tiers is None else tiers.counts.since(before)
        yield {
            "seconds": seconds,
            "cpu": cpu,
            "resident": resident_gb(),
            "hits": moved.hits if moved else 0,
            "misses": moved.misses if moved else 0,
            "read": moved.bytes_read if moved else 0,
            "waited": moved.wait_seconds if moved else 0.0,
        }
    assert request.error is None, request.error


def paired(options: argparse.Namespace, path: Path, most: int) -> None:
    """Steps in turn, one that waits for its blocks and one that does not."""
    print("| policy | sequences | memory for | hits | ms: all resident, waiting, pipelined | ratio of pairs: quartiles "
          "| MB: waiting, pipelined |", "|---|---|---|---|---|---|---|", sep="\n")  # fmt: skip
    each = token_bytes(path)
    for block, text, count in itertools.product(options.block, options.policies, options.sequences):
        policy, whole = text.replace("{block}", str(block)), 0.0
        for share in [None, *options.shares]:
            layout = {"block_size": block, "dtype": "bfloat16", "exact": False, "threads": options.threads}
            all_bytes = count * (options.tokens + 2 * options.steps + 32) * each
            memory = int((1.3 if share is None else share) * all_bytes)
            disk = None if share is None else options.kv_disk
            with LLM(
                path,
                kv_memory=memory,
                kv_disk=disk,
                max_model_len=most,
                max_requests=count,
                **layout,
                enable_prefix_caching=False,
            ) as llm:
                seconds, moved = alternate(llm, count, policy, options)
            if share is None:
                whole = statistics.median(seconds[0] + seconds[1])
                continue
            ms = [1e3 * statistics.median(own) for own in seconds]
            ratios = sorted(two / one for one, two in zip(*seconds))
            every = [one for own in moved for one in own]
            hits, misses = sum(one.hits for one in every), sum(one.misses for one in every)
            read = [sum(one.bytes_read for one in own) / max(1, len(own)) / 1e6 for own in moved]
            print(
                f"| `{policy}` | {count} | {share:.0%} | {hits / max(1, hits + misses):.1%} | {1e3 * whole:.1f}, "
                f"{ms[0]:.1f}, {ms[1]:.1f} | {ratios[len(ratios) // 4]:.2f} {ratios[len(ratios) // 2]:.2f} "
                f"{ratios[3 * len(ratios) // 4]:.2f} | {read[0]:.2f}, {read[1]:.2f} |",
                flush=True,
            )


def token_bytes(path: Path | str) -> int:
    """Keys and values of a token, in bfloat16."""
    with LLM(path, dtype="bfloat16", kv_memory="64MiB", enable_prefix_caching=False) as llm:
        spec = llm.model.spec
    return 2 * 2 * spec.layers * spec.kv_heads * spec.head_dim


def alternate(
    llm: LLM, count: int, policy: str, options: argparse.Namespace
) -> tuple[list[list[float]], list[list[TierCounts]]]:
    """Seconds of steps that wait and of those that do not, without the first few, and what they moved."""
    params = SamplingParams(temperature=0, max_tokens=2 * options.steps + 8, ignore_eos=True)
    requests = []
    for number in range(count):
        ids = prompt(options.tokens - number, llm.model.spec.vocab_size)
        requests.append(llm.engine.add(ids, params, Policy.parse(policy)))
        fill(llm, requests[-1], options.keys == "topics")
    while min(len(request.output_ids) for request in requests) < 4:
        llm.engine.step()
    seconds: list[list[float]] = [[], []]
    moved: list[list[TierCounts]] = [[], []]
    tiers = llm.pool.tiers
    for number in range(2 * options.steps):
        host_resolved.PIPELINED = bool(number % 2)
        if options.cold and tiers is not None:
            os.fdatasync(tiers.tier._fd)  # type: ignore[attr-defined]
            os.posix_fadvise(tiers.tier._fd, 0, 0, os.POSIX_FADV_DONTNEED)  # type: ignore[attr-defined]
        before = None if tiers is None else tiers.counts.copy()
        began = time.perf_counter()
        llm.engine.step()
        seconds[number % 2].append(time.perf_counter() - began)
        if tiers is not None and before is not None:
            moved[number % 2].append(tiers.counts.since(before))
    failed = [request.error for request in requests if request.error is not None]
    assert not failed, failed
    return seconds, moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--short", type=int, default=32768)
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--kv-disk", default=f"{tempfile.gettempdir()}:20GiB")
    parser.add_argument("--policies", nargs="+", default=["quest(budget=4096,block_size=32,dense_layers=0)"])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--keys", choices=("planted", "topics"), default="planted")
    parser.add_argument("--paired", action="store_true")
    parser.add_argument("--sequences", nargs="+", type=int, default=[1], help="with --paired")
    parser.add_argument(
        "--shares", nargs="+", type=float, default=[0.15, 0.3, 0.6], help="with --paired: of all blocks"
    )
    parser.add_argument("--block", nargs="+", type=int, default=[32], help="with --paired: tokens of a block")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    columns = (
        *("policy", "context", "KV", "ms a step, first half", "warm", "warm tokens/s"),
        *("CPU ms", "hits", "MB read", "ms waited", "RSS GB"),
    )
    print(f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", sep="\n")
    with tempfile.TemporaryDirectory() as folder:
        most = options.tokens + 2 * options.steps + 40
        path = model_folder(options.model, Path(folder), torch.bfloat16, most)
        if options.paired:
            paired(options, path, most)
            return
        for policy in options.policies:
            for tokens, disk in (
                (options.short, None),
                (options.short, options.kv_disk),
                (options.tokens, options.kv_disk),
            ):
                llm = LLM(
                    path,
                    dtype="bfloat16",
                    max_model_len=most,
                    max_requests=1,
                    kv_memory=options.kv_memory,
                    kv_disk=disk,
                    threads=options.threads,
                    exact=False,
                    enable_prefix_caching=False,
                )
                with llm:
                    rows = list(steps(llm, tokens, policy, options.steps, options.cold, options.keys == "topics"))
                half = len(rows) // 2
                first, warm = (statistics.median(row["seconds"] for row in part) for part in (rows[:half], rows[half:]))
                hits, misses, read, waited = (
                    sum(row[name] for row in rows[half:]) for name in ("hits", "misses", "read", "waited")
                )
                cpu = statistics.median(row["cpu"] for row in rows[half:])
                resident = [row["resident"] for row in rows]
                print(
                    f"| {policy} | {tokens} | {'memory' if disk is None else 'memory, disk'} | {first * 1e3:.1f} | "
                    f"{warm * 1e3:.1f} | {1 / warm:.1f} | {cpu * 1e3:.1f} | {hits / max(1, hits + misses):.1%} | "
                    f"{read / half / 1e6:.1f} | {waited / half * 1e3:.1f} | {min(resident):.2f}..{max(resident):.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
