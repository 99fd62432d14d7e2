"""Whether runs that share GPUs fit there: keys and values of all of them, and BESIDE for each. What does not fit is
made smaller, ``--together`` and ``--kv-memory`` in proportion, and it is said what was needed and what is free.

    printf '0\\tqlong\\t--together 48 --kv-memory 8GiB\\n' | python benchmarks/gpu/rooms.py --free 0=70

Lines of a GPU's number, a name and options, tabs between, come back as they can run. ``--free``: GiB of a GPU; without,
nvidia-smi is asked, and where there is none nothing is made smaller. Exits with 1 where runs have no room at all.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from named_numbers import named_numbers

BESIDE = 4.0  # GiB of a process: weights, CUDA itself, recorded steps, labels; 2 to 2.5 were seen beside pools
LEAST = 1.0  # GiB of keys and values, below which nothing is worth starting
FEWEST = 4  # samples together
POOL, TOGETHER = re.compile(r"--kv-memory (\d+(?:\.\d+)?)(GiB|MiB)"), re.compile(r"--together (\d+)")


@dataclass(frozen=True)
class Run:
    """``words``: its options, with --kv-memory and perhaps --together among them."""

    gpu: str
    name: str
    words: str

    @property
    def pool(self) -> float:
        """GiB of keys and values. SystemExit where that is not said."""
        found = POOL.search(self.words)
        if found is None:
            raise SystemExit(f"{self.name} does not say its --kv-memory in GiB or MiB: {self.words}")
        return float(found[1]) / (1 if found[2] == "GiB" else 1024)

    def smaller(self, share: float) -> Run:
        """With that share of its keys and values, in steps of 256 MiB, and of its samples together."""
        pool = int(4 * self.pool * share) / 4
        words = POOL.sub(f"--kv-memory {pool:g}GiB" if pool >= 1 else f"--kv-memory {int(1024 * pool)}MiB", self.words)
        fewer = [max(min(FEWEST, int(one[1])), int(int(one[1]) * share)) for one in TOGETHER.finditer(words)]
        return replace(self, words=TOGETHER.sub(f"--together {fewer[0]}", words) if fewer else words)


def fitted(runs: Sequence[Run], free: Mapping[str, float]) -> tuple[list[Run], list[str]]:
    """The runs as they fit into ``free`` GiB of each GPU, and what is to be said of each. SystemExit where some GPU has
    less than LEAST for each of its runs."""
    by_gpu: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_gpu[run.gpu].append(run)
    shares, said = {}, []
    for gpu, own in by_gpu.items():
        pools, beside = sum(run.pool for run in own), BESIDE * len(own)
        text = f"GPU {gpu}: {pools + beside:.1f} GiB needed by {len(own)} runs ({pools:.1f} of keys and values)"
        if gpu not in free:
            shares[gpu] = 1.0
            said.append(f"{text}; how much is free is not known")
            continue
        shares[gpu] = min(1.0, (free[gpu] - beside) / pools)
        text += f", {free[gpu]:.1f} free"
        if any(run.pool * shares[gpu] < min(LEAST, run.pool) for run in own):
            raise SystemExit(
                f"{text}: no room for keys and values; start fewer of {', '.join(one.name for one in own)}"
            )
        if shares[gpu] < 1:
            text += f": --kv-memory and --together become {100 * shares[gpu]:.0f} % of what was asked"
        said.append(text)
    return [run if shares[run.gpu] == 1 else run.smaller(shares[run.gpu]) for run in runs], said


def free_now() -> dict[str, float]:
    """GiB by GPU number, of nvidia-smi; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return {}
    words = ["nvidia-smi", "--query-gpu=index,memory.free", "--format=csv,noheader,nounits"]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = [line.split(",") for line in ran.stdout.splitlines()] if ran.returncode == 0 else []
    return {gpu.strip(): int(size) / 1024 for gpu, size in lines if size.strip().isdigit()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--free", action="append", metavar="GPU=GIB")
    given = parser.parse_args()
    lines = [line.rstrip("\n").split("\t") for line in sys.stdin if line.strip()]
    if any(len(line) != 3 for line in lines):
        raise SystemExit("each line must be GPU, name and options with tabs between")
    free = named_numbers("--free", given.free, "GPU=GIB", "0=139") if given.free else free_now()
    runs, said = fitted([Run(*line) for line in lines], free)
    print(*said, sep="\n", file=sys.stderr)
    print(*("\t".join((run.gpu, run.name, run.words)) for run in runs), sep="\n")


if __name__ == "__main__":
    main()
