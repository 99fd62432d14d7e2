"""A storm of requests over an engine of several processes, which are killed or stopped now and then: ``make
storm-ranks``.

    PYTHONPATH=tests python -m storm.ranks 5000

What must hold: every answer is the one that one process gives, or the request ends with an error that names the process
that was lost; no request waits; an engine that lost none has no block in use at the end; no process is left.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from engine_helpers import EVERY
from storm.callers import Ledger, questions
from storm.run import MIXED, blow, calm, fallen
from tiny_models import make_checkpoint

from saccade import LLM
from saccade.engine.settings.rank_limits import why_not
from saccade.methods.policy import Policy

EACH = 400  # requests an engine gets, if it lives so long
HANGS = 1.5  # seconds after which a stopped process counts as hanging, here
FEW = ["dense", "quest(budget=64)", "arkvale(budget=64, unit=kv_head)"]  # on GPUs, whose kernels are compiled
PATIENCE = 60.0  # seconds that an engine that lost one may take to end all requests


@dataclass
class Lost:
    """Errors of requests of an engine: they are right once a process of it was ``ended``, if they name it."""

    ended: str | None = None

    def blame(self, name: str, error: object) -> str | None:
        """What is wrong with an error."""
        named = "rank " in str(error) or "RanksLost" in str(error)
        return None if self.ended is not None and named else f"{name} failed: {error}"

    def unjust(self) -> list[str]:
        """None: nothing else was planted."""
        return []


class Round(Ledger):
    """What one engine is asked, until it is lost."""

    link: Any = None

    def take(self) -> tuple[str, random.Random] | None:
        return None if self.link.lost is not None else super().take()


def storm(requests: int, seed: int = 0, ranks: int = 2, each: int = EACH, device: str = "cpu") -> dict[str, Any]:
    """Run it; what happened. AssertionError for what does not hold."""
    policies = [one.text for one in EVERY if why_not(one) is None]
    policies += [text for text in MIXED if why_not(Policy.parse(text)) is None]
    policies = policies if device == "cpu" else FEW
    torch.set_num_threads(1)
    done: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    began, rng = time.perf_counter(), random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # one for each request that fails
        heads = {"num_attention_heads": 2 * ranks, "num_key_value_heads": ranks}
        heads |= {} if device == "cpu" else {"head_dim": 32}  # which a GPU's kernels read
        checkpoint = make_checkpoint("llama", Path(folder) / "model", max_position_embeddings=1024, **heads)
        settings: dict[str, Any] = {"dtype": "float32", "prefill_chunk": 64, "threads": 1, "device": device}
        quiet = LLM(checkpoint, kv_memory="8MiB", enable_prefix_caching=False, **settings)
        asks, talks = questions(quiet, policies, seed)
        quiet.close()
        del quiet
        others = {id(one) for one in fallen()}
        while requests > 0:
            llm = LLM(checkpoint, tensor_parallel_size=ranks, kv_memory="1MiB", enable_prefix_caching=False, **settings)
            link = llm.engine.link
            assert link is not None
            link.hangs_after(HANGS)
            lost = Lost()
            ledger = Round(asks, talks, lost, min(each, requests))  # type: ignore[arg-type]
            ledger.link, given = link, ledger.left
            end = rng.choice(("kill", "stop", None))
            over = threading.Event()
            killer = threading.Thread(target=_end, args=(link, lost, end, rng.uniform(0.2, 6.0), over, rng))
            killer.start()
            blow(llm, ledger, 4)
            over.set()
            killer.join()
            if lost.ended is None:
                calm(llm, ledger, others)
            else:
                assert not ledger.wrong, "\n".join(ledger.wrong[:20])
            ends[str(lost.ended)] += 1
            done += ledger.counts
            requests -= given - max(0, ledger.left)
            llm.close()
            assert all(process.poll() is not None for process in link.processes), "a process is left"
            del llm, link
    return {"outcomes": dict(done), "ends": dict(ends), "seconds": round(time.perf_counter() - began, 1)}


def _end(link: Any, lost: Lost, how: str | None, after: float, over: threading.Event, rng: random.Random) -> None:
    """End one of the processes ``after`` seconds, and see that the engine notices."""
    if how is None or over.wait(after):
        return
    lost.ended = how
    process = rng.choice(link.processes)
    os.kill(process.pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    until = time.monotonic() + PATIENCE
    while link.lost is None and not over.is_set():
        assert time.monotonic() < until, f"a process was ended ({how}) and the engine does not notice"
        time.sleep(0.05)
    if link.lost is None:  # nothing was asked any more
        os.kill(process.pid, signal.SIGCONT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=int, nargs="?", default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--each", type=int, default=EACH)
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    print(storm(chosen.requests, chosen.seed, chosen.ranks, chosen.each, chosen.device), file=sys.stdout)


if __name__ == "__main__":
    main()
