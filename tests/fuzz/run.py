"""Thousands of mistakes: ``make fuzz``.

    PYTHONPATH=tests python -m fuzz.run 20000

Policies, sampling parameters, prompts, settings, checkpoints and command lines, most of them wrong. Each gives a result
or a SaccadeError of one line, at the command line an exit code and one line, within seconds. What does not is printed,
once for each place that raised, with the seed that makes it again: ``--only KIND --seed SEED 1``.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from fuzz.commands import Commands
from fuzz.kinds import Kinds
from huggingface_hub import constants

from saccade.errors import SaccadeError

SECONDS = 20  # of processor time for one try, which other work on the machine does not lengthen
WAITED = 120  # in all: a try that waits for ever uses no processor
LONGEST = 3000  # letters of an error
MEMORY = 6 << 30  # bytes beyond what the process has at the beginning


class TooLong(BaseException):
    """A try that does not come to an end."""


def fuzz(
    count: int, seed: int = 0, only: str | None = None, say: Callable[[str], None] = lambda text: None
) -> tuple[Counter[str], dict[str, str]]:
    """``count`` tries; how many of each kind gave a result or an error, and what went wrong: by place, one example,
    which ``say`` is told at once."""
    outcomes: Counter[str] = Counter()
    wrong: dict[str, str] = {}
    torch.set_num_threads(1)
    offline = patch.object(constants, "HF_HUB_OFFLINE", True), patch.dict(os.environ, HF_HUB_OFFLINE="1")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), offline[0], offline[1], chdir(folder):
        warnings.simplefilter("ignore")
        kinds = Kinds(Path(folder))
        commands = Commands(Path(folder) / "here", kinds.checkpoint)
        shares: dict[str, tuple[float, Callable[[random.Random], Any]]] = {
            **kinds.all,
            "commands": (0.06, commands.line),
        }
        if only is not None:
            shares = {only: shares[only]}
        names = list(shares)
        for number in range(seed, seed + count):
            (name,) = random.Random(number).choices(names, [shares[one][0] for one in names])
            found = attempt(shares[name][1], random.Random(f"{name} {number}"))
            outcomes[
                f"{name}: {'error' if isinstance(found, SaccadeError) else 'result' if found is None else 'WRONG'}"
            ] += 1
            if isinstance(found, str):
                place, _, text = found.partition("\n")
                if f"{name}: {place}" not in wrong:
                    wrong[f"{name}: {place}"] = f"--only {name} --seed {number} 1\n{text}"
                    say(f"== {name}: {place}\n{wrong[f'{name}: {place}']}\n")
        kinds.close()
    return outcomes, wrong


def attempt(call: Callable[[random.Random], Any], rng: random.Random) -> SaccadeError | str | None:
    """None for a result, the error of one line, or what is wrong: its place, and in the next lines the traceback."""
    try:
        with _limited():
            call(rng)
    except SaccadeError as error:
        text = str(error)
        if len(text) > LONGEST or len(text.splitlines()) != 1 or not text.isprintable():
            return f"not one line of at most {LONGEST} letters: {type(error).__name__}\n{text[:LONGEST]!r}"
        return error
    except (Exception, TooLong) as error:
        last = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in last if "saccade" in frame.filename and "fuzz" not in frame.filename] or last
        where = f"{Path(own[-1].filename).name}:{own[-1].name}"
        said = ascii(str(error)[:60]) if isinstance(error, AssertionError) else ""
        return f"{type(error).__name__} in {where} {said}\n{traceback.format_exc()[-3000:]}"
    return None


@contextmanager
def _limited() -> Iterator[None]:
    def end(number: int, _: object) -> None:
        raise TooLong(f"more than {SECONDS} s of work" if number == signal.SIGPROF else f"more than {WAITED} s")

    limits = (
        (signal.SIGPROF, signal.ITIMER_PROF, SECONDS),
        (signal.SIGALRM, signal.ITIMER_REAL, WAITED),
    )
    before = [
        (timer, number, signal.signal(number, end), signal.setitimer(timer, seconds))
        for number, timer, seconds in limits
    ]
    try:
        yield
    finally:
        for timer, number, handler, others in before:  # the test runner has a limit of its own, say
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
            signal.setitimer(timer, *others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one kind")
    chosen = parser.parse_args()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))  # a MemoryError, and not the machine's end
    began = time.perf_counter()
    outcomes, wrong = fuzz(chosen.count, chosen.seed, chosen.only, lambda text: print(text, flush=True))
    print(f"{dict(sorted(outcomes.items()))} in {time.perf_counter() - began:.0f} s; {len(wrong)} kinds of failure")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
