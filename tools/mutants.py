"""Small mistakes that the tests must notice: python tools/mutants.py [NUMBER ...] [--jobs N] [--list]

Each entry of tools/mutants.toml is one mistake: ``file``, ``old`` and ``new`` text, the ``tests`` that must fail (a
file of tests/, perhaps with ``-k`` words in ``only``) and, in one line, ``why`` it is there. Each is made in a copy of
the tree, never in the checkout, and its tests run there. Before that all those tests must pass in a copy as it is.

Exit status 1 if a mistake survives, or if an ``old`` text does not occur exactly once; 2 if the tests fail without any.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_name("mutants.toml")
PARTS = ("saccade", "contrib", "tests", "train", "docs", "tools", "pyproject.toml", "README.md")
LONGEST = 300  # seconds that one entry's tests may take; a mistake that makes them hang is noticed, too
# An editable install may look up its modules by a finder of its own, before PYTHONPATH.
SITE = 'import sys\nsys.meta_path[:] = [one for one in sys.meta_path if not hasattr(one, "known_source_files")]\n'


@dataclass(frozen=True)
class Mutant:
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str
    only: str = ""

    @property
    def command(self) -> list[str]:
        return [*self.tests, *(["-k", self.only] if self.only else [])]

    def fault(self) -> str | None:
        """Why the entry cannot be tried, or None."""
        path = ROOT / self.file
        if not path.exists():
            return f"{self.file} does not exist"
        found = path.read_text(encoding="utf-8").count(self.old)
        if found != 1:
            return f"the old text occurs {found} times in {self.file}, not once: {self.old!r}"
        missing = [one for one in self.tests if not (ROOT / one).exists()]
        return f"{missing[0]} does not exist" if missing else None


def listed() -> list[Mutant]:
    """The entries, in order; TypeError for a field that is none."""
    tables = tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**table, "tests": tuple(table["tests"])}) for table in tables]


@contextmanager
def copied():
    """A copy of the tree, with the compiled kernels that are installed."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        copy = Path(name)
        for part in PARTS:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, copy / part)
            else:
                shutil.copy2(source, copy / part)
        kernels = importlib.util.find_spec("saccade._kernels")
        if kernels is not None and kernels.origin is not None:
            shutil.copy2(kernels.origin, copy / "saccade")
        (copy / "sitecustomize.py").write_text(SITE, encoding="utf-8")
        yield copy


def run(copy: Path, arguments: list[str], seconds: float) -> tuple[int | None, str]:
    """pytest's exit status in ``copy`` (None: it took too long), and the end of what it said."""
    environment = {**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{copy / 'contrib'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not thorough", *arguments]
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, (done.stdout + done.stderr)[-3000:]


def survives(mutant: Mutant) -> str | None:
    """How the tests took a mistake, where they did not fail by it; None where they did."""
    with copied() as copy:
        path = copy / mutant.file
        path.write_text(path.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")
        status, said = run(copy, mutant.command, LONGEST)
    if status in (1, None):
        return None
    return "survived" if status == 0 else f"pytest ended with {status}:\n{said}"


def unharmed(mutants: list[Mutant], jobs: int) -> list[str]:
    """What the entries' tests say, where they fail without a mistake."""
    commands = [command.split("\0") for command in dict.fromkeys("\0".join(one.command) for one in mutants)]
    with copied() as copy, ThreadPoolExecutor(jobs) as pool:
        where = run(copy, ["--version"], LONGEST)
        assert where[0] == 0, where[1]
        done = list(pool.map(lambda command: run(copy, command, 4 * LONGEST), commands))
    return [
        f"{' '.join(command)} ends with {status}:\n{said}" for command, (status, said) in zip(commands, done) if status
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, help="entries, from 1 on; all without any")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true", help="say which there are, and whether each can be tried")
    options = parser.parse_args()
    mutants = dict(enumerate(listed(), 1))
    chosen = {number: mutants[number] for number in options.numbers or mutants}
    faults = {number: fault for number, one in chosen.items() if (fault := one.fault()) is not None}
    for number, fault in faults.items():
        print(f"{number:3}  {fault}")
    if options.list:
        for number, one in chosen.items():
            print(f"{number:3}  {one.file}: {one.why}")
        print(dict(Counter(one.file.split("/")[1] for one in chosen.values())))
        return 1 if faults else 0
    tried = {number: one for number, one in chosen.items() if number not in faults}
    if told := unharmed(list(tried.values()), options.jobs):
        print("without any mistake:", *told, sep="\n")
        return 2
    alive = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for (number, one), said in zip(tried.items(), pool.map(survives, tried.values())):
            alive += said is not None
            print(f"{number:3}  {'killed' if said is None else said}  {one.file}: {one.why}", flush=True)
    print(f"{len(tried) - alive} of {len(chosen)} killed, {alive} survived, {len(faults)} could not be tried")
    return 1 if alive or faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
