"""vLLM without and with the plugin, and our engine: seconds to the first token, and answers about long prompts.

    python benchmarks/gpu/vllm_plugin.py                                   # everything, on a GPU, in some six minutes
    python benchmarks/gpu/vllm_plugin.py --parts first --lengths 131072    # first tokens of 128K alone
    python benchmarks/gpu/vllm_plugin.py --shape tiny --device cpu --lengths 2400 --samples 1 --context 512

The last one runs on any machine. Needs vLLM 0.25.1 (docs/from-vllm.md). First tokens: a random Llama (vLLM's
``load_format="dummy"``; its attention is nearly uniform, so a budget sets what is read, and nothing is said about
answers), one prompt at a time, prefix caching off, the best of two runs after one that compiles. Answers: single-turn
tasks of the offline suite, or RULER's with ``--model FOLDER`` of another model, by vLLM's own attention and by the
plugin, greedily, on the same prompts.

Each engine is a process, started while the one before it measures and idle until that is done; what fails or runs
longer than it may becomes a row, and the next one goes on. A row is a line of JSON, printed and written to
$OUT/vllm_plugin.jsonl as it comes; what the engines log is in vllm_plugin.log. Ratios to
vLLM's own attention come last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vllm_plugin_engines import DRAWN, FIRST, RULER, SPARSE, drawn_policy, main_of_a_child

ROOT = Path(__file__).resolve().parent.parent.parent
OUT = Path(os.environ.get("OUT") or ROOT / "build" / "vllm_plugin")
RULER_POLICY = "flexprefill(gamma=0.75, min_budget=512)"  # of the reference model some 11 % at 16K


@dataclass(frozen=True)
class Job:
    """A process: ``engine`` "vllm" or "saccade", ``part`` what it measures. ``policy`` "": vLLM's own attention."""

    part: str
    engine: str
    policy: str
    shape: str
    device: str
    model: str
    lengths: list[int]
    batched: int  # tokens of a step, at most
    eager: bool
    runs: int
    context: int
    samples: int
    least: int  # tokens of a budget that the prompt's length sets

    def facts(self) -> dict[str, Any]:
        how = {"eager": True} if self.eager else {}
        return {"part": self.part, "engine": self.engine, "policy": self.policy, "batched": self.batched, **how}


def jobs(given: argparse.Namespace) -> list[Job]:
    """What matters most comes first, since time may run out."""
    common = {
        "shape": given.shape, "device": given.device, "model": given.model, "eager": given.eager, "runs": given.runs,
        "context": given.context, "samples": given.samples, "least": given.least,
    }  # fmt: skip

    def job(part: str, engine: str, policy: str, batched: int, lengths: list[int]) -> Job:
        return Job(part=part, engine=engine, policy=policy, batched=batched, lengths=lengths, **common)

    def drawn(length: int) -> str:
        return given.policy or drawn_policy(length, given.least)

    long, *shorter = sorted(given.lengths, reverse=True)
    first, *others = given.batched
    plan = [job(FIRST, "vllm", "", first, given.lengths), job(FIRST, "vllm", drawn(long), first, [long])]
    answers = [job(RULER, "vllm", policy, first, []) for policy in ("", given.ruler_policy)]
    plan += answers
    plan += [job(FIRST, "vllm", drawn(one), first, [one]) for one in shorter]
    plan += [job(FIRST, "saccade", f"dense;{SPARSE}", 0, given.lengths)]
    for batched in others:
        plan += [job(FIRST, "vllm", "", batched, given.lengths)]
        plan += [job(FIRST, "vllm", drawn(one), batched, [one]) for one in (long, *shorter)]
    plan += [job(RULER, "saccade", f"dense;{given.ruler_policy}", 0, [])]
    return [one for one in plan if one.part in given.parts and one.engine in given.engines]


class Child:
    """A job's process, which has imported its engine and waits."""

    def __init__(self, job: Job, number: int, place: Path, least: int) -> None:
        self.job, self.log = job, place / f"{number}.log"
        policy = job.policy if job.engine == "vllm" else ""
        self._errors = self.log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", json.dumps({**asdict(job), "place": str(place)})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, start_new_session=True,
            env={
                **os.environ, "SACCADE_POLICY": policy, "SACCADE_MIN_TOKENS": str(least), "PYTHONUNBUFFERED": "1",
                "VLLM_HOST_IP": "127.0.0.1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
                "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_CACHE_ROOT": str(place / "cache"),
                "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "PYTHONPATH": os.pathsep.join(
                    [str(place), str(ROOT / "plugins" / "vllm"), str(ROOT), os.environ.get("PYTHONPATH", "")]
                ),
            },
        )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put(None)

    def rows(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Have it measure, for ``seconds`` at most. The last row says why it ended, where that was not by itself."""
        try:
            assert self._process.stdin is not None
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has failed already: its log says why
        until = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.1, until - time.monotonic()))
            except queue.Empty:
                yield {"failed": f"not done after {seconds:.0f} s: {self._last()}"}
                break
            if line is None:
                self._process.wait()
                break
            if line.startswith("ROW "):
                yield json.loads(line.removeprefix("ROW "))
            else:
                self._errors.write(line)
        self.stop()
        self._errors.flush()
        with (OUT / "vllm_plugin.log").open("a") as all_logs:
            all_logs.write(f"== {self.job.facts()}\n" + self.log.read_text(errors="replace")[-200_000:])
        if self._process.returncode not in (0, -signal.SIGKILL):
            yield {"failed": self._last()}

    def _last(self) -> str:
        self._errors.flush()
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        told = [line for line in lines if "Error" in line]
        return " | ".join((told or lines)[-2:])[-600:]

    def stop(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # a session of its own, workers and compilers with it
            self._process.wait()


def plugin_found(place: Path) -> None:
    """What ``pip install`` writes for vLLM to find the plugin by."""
    found = place / "saccade_vllm-0.3.0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: saccade-vllm\nVersion: 0.3.0\n")
    (found / "entry_points.txt").write_text("[vllm.general_plugins]\nsaccade = saccade_vllm:register\n")


def ratios(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """By length: what others take beside vLLM's own attention at its best; points that the plugin's answers lose."""
    timed = [row for row in rows if "seconds" in row and row["part"] == FIRST]
    for length in sorted({row["length"] for row in timed}):
        here = [row for row in timed if row["length"] == length]
        own = [row["seconds"] for row in here if row["engine"] == "vllm" and not row["policy"]]
        for row in here if own else ():
            if row["engine"] != "vllm" or row["policy"]:
                kept = {name: row[name] for name in ("engine", "policy", "batched", "density")}
                yield {"part": "ratio", "length": length, **kept, "times_faster": min(own) / row["seconds"]}
    scored = [row for row in rows if "scores" in row and row["engine"] == "vllm"]
    stock = next((row for row in scored if not row["policy"]), None)
    for row in scored if stock is not None else ():
        if row["policy"]:
            lost = [100 * (a - b) for a, b in zip(stock["scores"], row["scores"])]
            answers = sum(a != b for a, b in zip(stock["said"], row["said"]))
            yield {
                "part": "points", "policy": row["policy"], "density": row["density"], "samples": len(lost),
                "points_lost": sum(lost) / len(lost), "better": sum(one < 0 for one in lost),
                "worse": sum(one > 0 for one in lost), "answers_that_differ": answers,
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=(FIRST, RULER), default=[FIRST, RULER])
    parser.add_argument("--engines", nargs="+", choices=("vllm", "saccade"), default=["vllm", "saccade"])
    parser.add_argument("--shape", default="8b", help="of the random Llama (benchmarks/random_model.py)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--lengths", nargs="+", type=int, default=[32768, 131072], help="tokens of a prompt")
    parser.add_argument("--batched", nargs="+", type=int, default=[16384, 8192], help="max_num_batched_tokens")
    parser.add_argument(
        "--policy",
        default="",
        help=f"of first tokens; else {SPARSE} with a {DRAWN}th of the prompt, some 12 %% of its pairs",
    )
    parser.add_argument("--least", type=int, default=1024, help="tokens of that budget, at least")
    parser.add_argument("--runs", type=int, default=3, help="of a prompt; the first compiles, the best counts")
    parser.add_argument("--eager", action="store_true", help="vLLM without torch.compile")
    parser.add_argument("--model", default="reference", help="of the answers: reference, or a folder")
    parser.add_argument("--context", type=int, default=16384, help="tokens of a sample and its answer")
    parser.add_argument("--samples", type=int, default=12, help="of a task")
    parser.add_argument("--ruler-policy", default=RULER_POLICY)
    parser.add_argument("--min-tokens", type=int, default=4096, help="chunks that end before are read whole")
    parser.add_argument("--each", type=float, default=150, help="seconds of a process, at most")
    parser.add_argument("--seconds", type=float, default=360, help="of all; jobs that are left become rows")
    given = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    file, rows, began = OUT / "vllm_plugin.jsonl", [], time.monotonic()

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        line = json.dumps({name: round(one, 4) if isinstance(one, float) else one for name, one in row.items()})
        print(line if len(line) < 900 else json.dumps(_short(row)), flush=True)
        with file.open("a") as written:
            written.write(line + "\n")

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        plugin_found(place)
        waiting, ready, eager = deque(jobs(given)), deque[Child](), given.eager
        numbers = itertools.count()
        while ready or waiting:
            while waiting and len(ready) < 2:  # one measures, the next imports
                ready.append(Child(replace(waiting.popleft(), eager=eager), next(numbers), place, given.min_tokens))
            child = ready.popleft()
            left = given.seconds - (time.monotonic() - began)
            if left < 10:
                add({**child.job.facts(), "failed": "no time was left"})
                child.stop()
                continue
            failed = False
            for row in child.rows(min(left, given.each)):
                add({**child.job.facts(), **row})
                failed = "failed" in row
            if failed and child.job.engine == "vllm" and given.device == "cuda" and not child.job.eager:
                waiting.appendleft(child.job)  # once more, and from now on, without torch.compile
                eager = True
    for row in ratios(rows):
        add(row)


def _short(row: dict[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in row.items() if name not in ("said", "scores")}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        main_of_a_child(json.loads(sys.argv[2]))
    else:
        main()
