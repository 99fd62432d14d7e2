"""A storm of requests over an engine of several processes, which are killed or stopped now and then: ``make
storm-ranks``.

    PYTHONPATH=tests python -m storm.ranks 5000 --log storm.jsonl

What must hold: every answer is the one that one process gives (right), or the request ends with an error that names the
process that was lost (named); anything else is wrong. Keys and values in 8 bits take another code where sums over
processes round a number the other way, which moves an answer now and then: over those the answer is that of as many
processes that nothing happens to. No request waits; an engine that lost none has no block in use at the end; no process
is left. Every third engine or so is over host memory. A line for each engine says what became of its requests; with
``--log`` a storm that was stopped goes on where the file ends, if its settings are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import rank_threads
import torch
from engine_helpers import EVERY
from storm.callers import Ledger, questions
from storm.run import MIXED, blow, calm, fallen
from tiny_models import make_checkpoint

from saccade import LLM, ranks
from saccade.engine.settings.rank_limits import why_not
from saccade.methods.policy import Policy

EACH = 400  # requests an engine gets, if it lives so long
DRAFTED = (
    "lossless(draft=quest(budget=64, dense_layers=0), tokens=3)",
    "flexprefill(min_budget=0)+lossless(draft=lfps(k=24, blocks=2, least=1), tokens=2, lookup=0)",
)
RIGHT = ("answered", "left")  # outcomes of a ledger
HANGS = 1.5  # seconds after which a stopped process counts as hanging, here
FEW = ["dense", "quest(budget=64)", "arkvale(budget=64, unit=kv_head)"]  # on GPUs, whose kernels are compiled
PATIENCE = 60.0  # seconds that an engine that lost one may take to end all requests


@dataclass
class Lost:
    """Errors of requests of an engine: they are right once a process of it was ``ended``, if they name it."""

    ended: str | None = None

    def blame(self, name: str, error: object) -> str | None:
        """What is wrong with an error."""
        named = "rank " in str(error)
        return None if self.ended is not None and named else f"{name} failed: {error}"

    def unjust(self) -> list[str]:
        """None: nothing else was planted."""
        return []


class Round(Ledger):
    """What one engine is asked, until it is lost."""

    link: Any = None

    def take(self) -> tuple[str, random.Random] | None:
        return None if self.link.lost is not None else super().take()


@dataclass(frozen=True)
class Plan:
    """What a storm is made of."""

    seed: int = 0
    ranks: int = 2
    kv_heads: int | None = None  # of the model; as many as ranks by default
    kv_dtype: str = "auto"
    each: int = EACH


class Storm:
    """Rounds of engines, each of which is what the seed and its number say."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        kv_heads = plan.kv_heads or plan.ranks
        heads = {"num_attention_heads": 2 * max(kv_heads, plan.ranks), "num_key_value_heads": kv_heads}
        self.checkpoint = make_checkpoint("llama", folder / "model", max_position_embeddings=1024, **heads)
        self.settings: dict[str, Any] = {"dtype": "float32", "prefill_chunk": 64, "threads": 1, "device": "cpu"}
        self.settings |= {"enable_prefix_caching": False, "kv_dtype": plan.kv_dtype}
        texts = [*(one.text for one in EVERY), *MIXED, *DRAFTED]
        policies = [text for text in texts if why_not(Policy.parse(text)) is None]
        count = 1 if plan.kv_dtype == "auto" else plan.ranks
        with patch.object(ranks, "subprocess", rank_threads.SUBPROCESS):  # which wait less for each other
            quiet = LLM(self.checkpoint, tensor_parallel_size=count, kv_memory="8MiB", **self.settings)
        self.asks, self.talks = questions(quiet, policies, plan.seed)
        quiet.close()
        del quiet
        self.others = {id(one) for one in fallen()}

    def round(self, number: int, requests: int) -> dict[str, Any]:
        """The engine of a number, and what became of at most so many requests."""
        plan, began = self.plan, time.perf_counter()
        rng = random.Random(1000 * plan.seed + number)
        tiers: dict[str, Any] = {"kv_host": "8MiB"} if rng.random() < 1 / 3 else {}
        runs = [why_not(Policy.parse(ask.policy), bool(tiers)) is None for ask in self.asks]
        asks = [ask for ask, fits in zip(self.asks, runs) if fits]
        talks = [talk for talk in self.talks if why_not(Policy.parse(talk.policy), bool(tiers)) is None]
        llm = LLM(self.checkpoint, tensor_parallel_size=plan.ranks, kv_memory="1MiB", **self.settings, **tiers)
        link = llm.engine.link
        assert link is not None
        link.hangs_after(HANGS)
        lost = Lost()
        ledger = Round(asks, talks, lost, requests)  # type: ignore[arg-type]
        ledger.link = link
        end = rng.choice(("kill", "stop", None))
        over = threading.Event()
        asked = rng.randint(requests // 10, requests * 3 // 4)
        killer = threading.Thread(
            target=_end, args=(link, lost, end, lambda: requests - ledger.left >= asked, over, rng)
        )
        killer.start()
        blow(llm, ledger, 4)
        over.set()
        killer.join()
        wrong = list(ledger.wrong)
        if lost.ended is None and not wrong:
            try:
                calm(llm, ledger, self.others)
            except AssertionError as error:  # a storm goes on, and its log says so
                wrong.append(f"not calm: {error}")
        llm.close()
        if not all(process.poll() is not None for process in link.processes):
            wrong.append("a process is left")
        return {
            "round": number,
            "requests": requests - max(0, ledger.left),
            "right": sum(ledger.counts[name] for name in RIGHT) - sum("instead of" in one for one in ledger.wrong),
            "named": ledger.counts["failed"] - sum("failed" in one for one in ledger.wrong),
            "wrong": wrong,
            "outcomes": dict(ledger.counts),
            "end": str(lost.ended),
            "tiers": bool(tiers),
            "seconds": round(time.perf_counter() - began, 1),
        }


def storm(
    requests: int, plan: Plan, log: Path | None = None, said: Callable[[str], None] = lambda line: None
) -> Totals:
    """Run it, from where ``log`` ends; what happened, a line for each engine told to ``said``."""
    totals, head = Totals(), json.dumps(asdict(plan))
    lines = log.read_text().splitlines() if log is not None and log.exists() else []
    if lines and lines[0] != head:
        raise SystemExit(f"{log} is the log of another storm ({lines[0]}); give another file")
    for line in lines[1:]:
        totals.add(json.loads(line))
    if log is not None and not lines:
        log.write_text(head + "\n")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # one for each request that fails
        made = Storm(plan, Path(folder)) if totals.requests < requests else None
        while made is not None and totals.requests < requests:
            done = made.round(totals.rounds, min(plan.each, requests - totals.requests))
            totals.add(done)
            said(json.dumps(done))
            if log is not None:
                with log.open("a") as file:
                    file.write(json.dumps(done) + "\n")
    return totals


@dataclass
class Totals:
    """Of all rounds."""

    rounds: int = 0
    requests: int = 0
    right: int = 0
    named: int = 0
    wrong: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, done: Mapping[str, Any]) -> None:
        """Count a round."""
        self.rounds += 1
        self.requests += done["requests"]
        self.right += done["right"]
        self.named += done["named"]
        self.wrong += done["wrong"]
        self.ends[done["end"]] += 1
        self.seconds += done["seconds"]


def _end(
    link: Any, lost: Lost, how: str | None, due: Callable[[], bool], over: threading.Event, rng: random.Random
) -> None:
    """End one of the processes once it is ``due``, and see that the engine notices."""
    if how is None:
        return
    while not due():
        if over.wait(0.01):
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
    parser.add_argument("--kv-heads", type=int, help="of the model, fewer than ranks for instance")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--log", type=Path, help="a file of rounds, which a storm that was stopped goes on from")
    chosen = parser.parse_args()
    plan = Plan(chosen.seed, chosen.ranks, chosen.kv_heads, chosen.kv_dtype)
    totals = storm(chosen.requests, plan, chosen.log, lambda line: print(line, flush=True))
    ends = ", ".join(f"{count} {name}" for name, count in totals.ends.items())
    print(
        f"{totals.requests} requests, {totals.rounds} engines ({ends}), {totals.seconds:.0f} s: {totals.right} right, "
        f"{totals.named} named, {len(totals.wrong)} wrong"
    )
    for one in totals.wrong[:20]:
        print(one)
    sys.exit(1 if totals.wrong else 0)


if __name__ == "__main__":
    main()
