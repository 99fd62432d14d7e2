"""A storm of requests over one engine whose insides fail now and then: ``make storm``.

    PYTHONPATH=tests python -m storm.run 10000

Threads (2, then 16) and asyncio tasks send prompts, samples, streams and turns of sessions under every method; a part
of them is left or cancelled; exceptions come up in the methods' hooks, in kernels, in the allocation of blocks, in the
layer loop and in the choice of tokens. What must hold: every answer is the one that a quiet engine gives, or the
request ends with an error that names its exception; an exception is suffered by one request at most; at the end no
block is used, no request or state is alive, and the engine answers as before.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SACCADE_DEBUG", "1")

import torch
from engine_helpers import EVERY
from kv_helpers import check_blocks
from storm.callers import Ledger, in_a_task, in_a_thread, questions, runs
from storm.faults import Faults
from tier_helpers import nothing_left
from tiny_models import make_checkpoint

from saccade import LLM
from saccade.engine.memory.sequence_memory import SequenceMemory
from saccade.engine.request import Request
from saccade.engine.stream import Stream

MIXED = (
    "flexprefill(gamma=0.5, block_size=64, min_budget=0)+psa(epsilon=0.4, block_size=16, microbatch=1)",
    "xattention+lfps(k=24, blocks=2, least=1)",
    "loopserve+topk(k=16, sinks=2, local=8)",
)
GAP = 0.001  # seconds: chunks are suspended after nearly every layer
PHASES = (  # calling threads, exact, the gap between tokens, share of the requests
    (2, True, None, 0.3),
    (2, True, GAP, 0.2),
    (16, True, GAP, 0.3),
    (16, False, GAP, 0.1),
    (16, False, None, 0.1),
)
TASKS = 8
FALLEN = (Request, SequenceMemory, Stream)


def storm(
    requests: int,
    seed: int = 0,
    rate: float = 1.0,
    each: int = 3,
    family: str = "llama",
    kv_dtype: str = "auto",
) -> dict[str, Any]:
    """Run it with ``each`` prompts and a talk of every policy that a model of ``family`` runs; what happened.
    AssertionError for what does not hold."""
    policies = [*dict.fromkeys([policy.text for policy in EVERY]), *MIXED]
    others = {id(one) for one in fallen()}  # of whatever else this process does
    torch.set_num_threads(1)
    done: Counter[str] = Counter()
    planted: Counter[str] = Counter()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # one for each request that fails
        checkpoint = make_checkpoint(family, Path(folder) / "model", max_position_embeddings=1024)
        quiet = LLM(
            checkpoint,
            dtype="float32",
            kv_memory="8MiB",
            prefill_chunk=64,
            threads=1,
            kv_dtype=kv_dtype,
            enable_prefix_caching=False,
        )
        policies = [one for one in policies if runs(quiet, one)]
        asks, talks = questions(quiet, policies * each, seed)
        quiet.close()
        del quiet
        for number, (callers, exact, gap, share) in enumerate(PHASES):
            settings: dict[str, Any] = {"exact": exact, "max_token_gap": gap, "threads": 2, "kv_dtype": kv_dtype}
            llm = LLM(
                checkpoint,
                dtype="float32",
                kv_memory="1MiB",
                prefill_chunk=64,
                **{"enable_prefix_caching": False, **settings},
            )
            faults = Faults(seed + number, llm.model.runner, rate)
            ledger = Ledger(asks, talks, faults, int(requests * share), exact)
            with faults.planted():
                blow(llm, ledger, callers)
            calm(llm, ledger, others)
            done += ledger.counts
            planted.update(place.split(":")[0] for place in faults.fired.values())
            llm.close()
            del llm, faults
    return {"outcomes": dict(done), "planted": dict(planted), "seconds": round(time.perf_counter() - began, 1)}


def blow(llm: LLM, ledger: Ledger, callers: int) -> None:
    """Ask from so many threads, and from asyncio tasks, until nothing is left to ask."""
    threads = [threading.Thread(target=in_a_thread, args=(llm, ledger), daemon=True) for _ in range(callers)]

    async def tasks() -> None:
        await asyncio.gather(*(in_a_task(llm, ledger) for _ in range(TASKS)))

    for thread in threads:
        thread.start()
    asyncio.run(tasks())
    for thread in threads:
        thread.join()


def fallen() -> list[Any]:
    """What a request leaves while it lives."""
    gc.collect()
    return [one for one in gc.get_objects() if type(one) in FALLEN]


def calm(llm: LLM, ledger: Ledger, others: set[int]) -> None:
    """What must hold once it is quiet again."""
    wrong = [*ledger.wrong, *ledger.faults.unjust()]
    assert not wrong, "\n".join(wrong[:20])
    engine = llm.engine
    deadline = time.monotonic() + 30
    while (engine.busy or engine.pool.used_blocks) and time.monotonic() < deadline:
        time.sleep(0.01)  # what was cancelled last is still being given back
    assert not engine.busy
    if engine.pool.tiers is None:
        check_blocks(engine.pool, [])
    else:
        nothing_left(engine.pool)
    assert engine.pool.used_blocks == 0
    assert engine.pool.states is None or engine.pool.states.used == 0
    assert not engine.sessions
    assert not engine.worker.memories
    assert not engine.scheduler.suspended
    assert not engine.worker._suspended
    assert not llm.loop._loop.live
    for ask in ledger.asks[:: max(1, len(ledger.asks) // 12)]:
        (output,) = llm.generate(ask.ids, ask.params, policy=ask.policy)
        if ledger.exact:
            got = [one.token_ids for one in output.outputs]
            assert got == ask.answers, f"{ask.policy}: {got} instead of {ask.answers}"
    deadline = time.monotonic() + 10
    while True:  # the engine's thread may be in the end of the last answer's step
        alive = Counter(type(one).__name__ for one in fallen() if id(one) not in others)
        if not alive or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert not alive, f"still alive: {dict(alive)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=int, nargs="?", default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", default="llama", help="of tests/tiny_models.py")
    parser.add_argument("--kv-dtype", default="auto")
    chosen = parser.parse_args()
    print(storm(chosen.requests, chosen.seed, family=chosen.family, kv_dtype=chosen.kv_dtype), file=sys.stdout)


if __name__ == "__main__":
    main()
