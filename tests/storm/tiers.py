"""A storm over engines whose memory holds a small part of what is asked, and whose disk fails: ``make storm-tiers``.

    PYTHONPATH=tests python -m storm.tiers 20000

The callers of ``storm.run`` (threads and asyncio tasks with prompts, samples, streams that are left and turns of
sessions, under every method) ask engines whose KV goes to a disk that fails in 1 % of its reads and writes: flipped
bits, torn, short and stale writes, errors, no space; to host memory; and to a little of that with such a disk behind
it. What must hold: every answer is the one of a quiet engine whose memory holds everything, or the request ends with an
error of the tier; at the end no block, slot, cell or file is left, and the engine answers as before.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SACCADE_DEBUG", "1")

import torch
from engine_helpers import EVERY
from storm.callers import Ledger, questions
from storm.run import MIXED, TASKS, blow
from tier_helpers import FaultySystem, nothing_left
from tiny_models import make_checkpoint

from saccade import LLM
from saccade.kv.disk import DiskTier
from saccade.kv.format import KVFormat
from saccade.kv.host_disk import HostAndDisk
from saccade.kv.row_formats import format_called

NEED = 600  # slots that two dozen callers' requests take together
# Of the need, calling threads, who leaves first, shared prefixes, over host memory by block or KV head (and where that
# is attended, else on the device), share of the requests.
PHASES: tuple[tuple[float, int, str, bool, str | None, float], ...] = (
    (0.02, 4, "clock", False, None, 0.2),
    (0.1, 16, "fifo", True, None, 0.2),
    (0.3, 16, "lru", True, None, 0.15),
    (0.1, 16, "clock", True, "block", 0.05),
    (0.1, 16, "clock", True, "head", 0.1),
    (0.1, 16, "lru", True, "disk", 0.15),
    (0.1, 16, "lru", True, "block auto", 0.05),
    (0.1, 16, "clock", True, "head host", 0.05),
    (0.05, 16, "lru", True, "block host", 0.05),
)


def slot_bytes(kv_dtype: str) -> int:
    rows = format_called(kv_dtype, torch.float32, "cpu")
    return KVFormat(torch.float32, 2, 32, 32, rows, rows).block_bytes


class DiskFaults:
    """What requests may end with when a disk fails (in place of storm.faults.Faults)."""

    def blame(self, request: str, error: object) -> str | None:
        """What is wrong with that, if anything is."""
        text = str(error)
        if "TierError" in text or "LostKV" in text:
            return None
        return f"{request} ended with {type(error).__name__}: {error}"


def storm(requests: int, seed: int = 0, rate: float = 0.01, each: int = 2, kv_dtype: str = "auto") -> dict[str, Any]:
    """Run it with ``each`` prompts and a talk of every policy; what happened. AssertionError for what does not hold."""
    policies = [*dict.fromkeys([policy.text for policy in EVERY]), *MIXED]
    torch.set_num_threads(1)
    done: Counter[str] = Counter()
    met: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # one for each request that fails
        checkpoint = make_checkpoint("llama", Path(folder) / "model", max_position_embeddings=1024, head_dim=32)
        with LLM(
            checkpoint,
            dtype="float32",
            kv_memory="16MiB",
            prefill_chunk=64,
            threads=1,
            kv_dtype=kv_dtype,
            enable_prefix_caching=False,
        ) as quiet:
            asks, talks = questions(quiet, policies * each, seed)
        for number, (part, callers, replacement, prefixes, unit, share) in enumerate(PHASES):
            system = FaultySystem(rate, seed + number)
            descriptors = len(os.listdir("/proc/self/fd"))
            slots = max(9, int(part * NEED))
            gap = 0.001 if number % 2 else None  # seconds: chunks are suspended after nearly every layer
            with _llm(checkpoint, folder, unit, system, slots, replacement, prefixes, gap, kv_dtype) as llm:
                ledger = Ledger(asks, talks, DiskFaults(), int(requests * share))  # type: ignore[arg-type]
                blow(llm, ledger, callers)
                system.rate = 0
                _calm(llm, ledger)
                moved.update(llm.pool.tiers.counts.as_dict())
            assert len(os.listdir("/proc/self/fd")) <= descriptors
            done += ledger.counts
            met.update({str(kind): count for kind, count in system.met.items()})
            assert set(os.listdir(Path(folder) / "kv")) <= {"sessions"}  # where those with a name would survive
    return {
        "outcomes": dict(done),
        "faults": dict(met),
        "moved": dict(moved),
        "seconds": round(time.perf_counter() - began, 1),
    }


def _llm(
    checkpoint: Path,
    folder: str,
    unit: str | None,
    system: FaultySystem,
    slots: int,
    replacement: str,
    prefixes: bool,
    gap: float | None,
    kv_dtype: str,
) -> LLM:
    """Over a disk with that system's faults, over host memory by that unit, or over a little of it and the "disk"."""
    import saccade.pools

    real = saccade.pools.DiskTier, saccade.pools.HostAndDisk
    over, compute = [*(unit or "disk").split(), "device"][:2]
    slot = slot_bytes(kv_dtype)
    behind = {"kv_host": "32MiB", "kv_unit": over, "kv_compute": compute}
    if over == "disk":
        behind = {"kv_disk": f"{folder}/kv:32MiB"} | ({"kv_host": slots * slot} if unit else {})
    saccade.pools.DiskTier = partial(DiskTier, system=system)  # type: ignore[assignment,misc]
    saccade.pools.HostAndDisk = partial(HostAndDisk, system=system)  # type: ignore[assignment,misc]
    try:
        return LLM(
            checkpoint,
            dtype="float32",
            kv_memory=slots * slot,
            kv_dtype=kv_dtype,
            **behind,
            kv_replacement=replacement,
            enable_prefix_caching=prefixes,
            prefill_chunk=64,
            max_token_gap=gap,
            threads=2,
        )
    finally:
        saccade.pools.DiskTier, saccade.pools.HostAndDisk = real  # type: ignore[misc]


def _calm(llm: LLM, ledger: Ledger) -> None:
    """What must hold once it is quiet again."""
    assert not ledger.wrong, "\n".join(ledger.wrong[:20])
    engine = llm.engine
    deadline = time.monotonic() + 30
    while engine.busy and time.monotonic() < deadline:
        time.sleep(0.01)  # what was cancelled last is still being given back
    assert not engine.busy
    llm.reset_prefix_cache()
    assert not engine.sessions
    assert not engine.worker.memories
    nothing_left(llm.pool)
    for ask in ledger.asks[:: max(1, len(ledger.asks) // 12)]:
        (output,) = llm.generate(ask.ids, ask.params, policy=ask.policy)
        assert [one.token_ids for one in output.outputs] == ask.answers, ask.policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=int, nargs="?", default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-dtype", default="auto")
    chosen = parser.parse_args()
    done = storm(chosen.requests, chosen.seed, kv_dtype=chosen.kv_dtype)
    print(f"{TASKS} tasks and up to 16 threads", done, file=sys.stdout)


if __name__ == "__main__":
    main()
