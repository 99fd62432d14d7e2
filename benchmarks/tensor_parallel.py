"""One model on one GPU and on several of a host (docs/scale-out.md): seconds to the first token and milliseconds a
decode step, what the sums between ranks take of them, and what the hardware allows.

    python benchmarks/tensor_parallel.py                            # everything, on 1 and 2 GPUs, in one run
    python benchmarks/tensor_parallel.py --parts sums 8b:ranks      # sums by size; the 8B shape on 2 GPUs alone
    python benchmarks/tensor_parallel.py --parts tiny --device cpu  # whether it runs, on any machine

Weights are random and made on each rank's device, the same for any number of them; nothing here says anything about
answers. Prompts of decode rows are computed with a window, since what lies in their keys does not matter. A row is a
line of JSON, printed and written to $OUT/tensor_parallel.jsonl as it comes; ratios of several GPUs to one come last.
--seconds bounds each engine, --most-seconds all of them.
"without sums" is the same with each rank's part in place of the sum (logits are gathered), whose answers mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from random_model import ALONE, NO_SUMS, SHAPES, STEPS, Shape, patch

import saccade.ranks
from saccade import LLM, SamplingParams
from saccade.bench.ttft import prompt
from saccade.engine.ranks.meeting import RankGroup
from saccade.engine.ranks.watch import SumCounts
from saccade.models.reference.tokenizer import build_tokenizer

OUT = Path(os.environ.get("OUT") or "build/tensor_parallel") / "tensor_parallel.jsonl"
WINDOW = "streaming(sinks=64, window=512)"  # of the prompts of decode rows
SPARSE = "flexprefill(lines=block, max_budget={})"  # with a 16th of the prompt some 12 % of its pairs
FEW = 40  # decode steps of short answers; long ones take STEPS more, which are timed
GOALS = {"dense first token": 1.85, "sparse first token": 1.7, "dense decode": 1.75, "arkvale decode": 1.4}
# Of a shape: all of these; on several GPUs; on one; on several without sums; one rank of several.
WAYS = "", ":ranks", ":one", ":bare", ":alone"
PARTS = ["limits", "sums", *(f"{name}{way}" for name in SHAPES for way in WAYS)]
KERNELS_NAMED = "SACCADE_BENCH_KERNELS"  # of processes that say what their kernels take
KERNELS = 14  # that are named, the longest


class Rows:
    """Where lines go."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)

    def add(self, **row: Any) -> None:
        line = json.dumps({name: round(one, 5) if isinstance(one, float) else one for name, one in row.items()})
        print(line, flush=True)
        with self._file.open("a") as file:
            file.write(line + "\n")


def measure(name: str, ranks: int, device: str, rows: Rows) -> None:
    """One engine: its rows."""
    patch()
    shape, without, one = SHAPES[name], bool(os.environ.get(NO_SUMS)), bool(os.environ.get(ALONE))
    facts = {"shape": name, "ranks": ranks, "sums": not (without or one)}
    with tempfile.TemporaryDirectory() as place, saccade.ranks.alone() if one else nullcontext():
        folder = Path(place)
        (folder / "shape").write_text(name)
        build_tokenizer().save_pretrained(folder)
        began = time.perf_counter()
        llm = LLM(
            folder,
            device=device,
            tensor_parallel_size=ranks,
            kv_memory=shape.kv_bytes // ranks,
            max_model_len=max(shape.first or 0, shape.context) + 4 * STEPS,
            enable_prefix_caching=True,
            **({"dtype": "float32", "exact": False} if device == "cpu" else {}),
        )
        gc.collect()
        if ranks > 1 and llm.pool.format.kv_heads == shape.kv_heads:
            raise RuntimeError("each rank has the whole model")
        joins = "nothing" if llm.engine.link is None else type(getattr(llm.engine.link.group, "_there", None)).__name__
        rows.add(
            what="start", **facts, seconds=time.perf_counter() - began, joins=joins, weights=llm.model.weight_bytes
        )
        vocab = min(shape.vocab, 256)
        if shape.first is not None and not one:  # before decode rows, whose prompts are to stay
            for what, policy in (
                ("sparse first token", SPARSE.format(max(1024, shape.first // 16))),
                ("dense first token", "dense"),
            ):
                attempt(rows, facts | {"what": what}, lambda policy=policy: first(llm, shape.first or 0, vocab, policy))
            llm.reset_prefix_cache()
        plans = [
            ("dense decode", f"{WINDOW}+dense"),
            ("arkvale decode", f"{WINDOW}+arkvale(budget=2048, unit=kv_head)"),
        ]
        for what, policy in plans:
            attempt(rows, facts | {"what": what}, lambda policy=policy: decode(llm, shape, vocab, policy, ranks))
            if os.environ.get(KERNELS_NAMED):
                attempt(
                    rows, facts | {"what": f"{what}: kernels"}, lambda policy=policy: kernels(llm, shape, vocab, policy)
                )
        llm.close()


def attempt(rows: Rows, facts: dict[str, Any], what: Any) -> None:
    """What fails is a row, too."""
    try:
        rows.add(**facts, **what())
    except Exception as error:
        rows.add(**facts, failed=f"{type(error).__name__}: {str(error)[:300]}")


def decode(llm: LLM, shape: Shape, vocab: int, policy: str, ranks: int) -> dict[str, Any]:
    """Milliseconds a step, of rows that all run; prompts are computed once."""
    prompts = [prompt(shape.context, vocab, seed=seed) for seed in range(shape.batch)]
    taken: dict[int, list[float]] = {12: [], FEW: [], FEW + STEPS: []}
    outputs: list[Any] = []
    for steps in (12, *2 * (FEW, FEW + STEPS)):  # the first compiles and records
        params = SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True)
        outputs = llm.generate(prompts, params, policy=policy)
        for one in outputs:
            if one.error is not None:
                raise RuntimeError(one.error)
        firsts = [one.metrics.first_token_time for one in outputs if one.metrics is not None]
        lasts = [one.metrics.last_token_time for one in outputs if one.metrics is not None]
        if steps > 12 and max(firsts) >= min(lasts):  # the first computes prompts, and outlasts its steps
            raise RuntimeError("rows did not run together: not all of them have room")
        taken[steps].append(max(lasts) - max(firsts))
    report = outputs[0].report["decode"]
    keys = report["density"] * shape.batch * shape.context
    read = llm.model.weight_bytes + keys * shape.layers * 2 * (shape.kv_heads // ranks) * shape.head_dim * 2
    paths = {path["path"]: path["rows"] for path in report["paths"]}
    step = (min(taken[FEW + STEPS]) - min(taken[FEW])) / STEPS  # without what the first step after a prompt prepares
    if step <= 0:
        raise RuntimeError(
            f"no time of a step: {FEW} steps took {taken[FEW]} s, {FEW + STEPS} took {taken[FEW + STEPS]}"
        )
    known = min(one.num_cached_tokens for one in outputs)
    return {"ms": 1e3 * step, "density": report["density"], "bytes": round(read), "paths": paths, "cached": known}


def kernels(llm: LLM, shape: Shape, vocab: int, policy: str) -> dict[str, Any]:
    """Microseconds a decode step on this process' GPU by kernel, and of all of them, of steps long recorded."""
    prompts = [prompt(shape.context, vocab, seed=seed) for seed in range(shape.batch)]
    totals = []
    for steps in (FEW, 2 * FEW):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            llm.generate(prompts, SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True), policy=policy)
        totals.append({one.key: (one.self_device_time_total, one.count) for one in profile.key_averages()})
    taken = {}
    for name, (us, count) in totals[1].items():
        before, calls = totals[0].get(name, (0.0, 0))
        taken[name] = round((us - before) / FEW, 1), round((count - calls) / FEW, 1)
    longest = sorted(taken.items(), key=lambda one: -one[1][0])[:KERNELS]
    return {"us": sum(us for us, _ in taken.values()), "longest": {name[:80]: one for name, one in longest}}


def first(llm: LLM, length: int, vocab: int, policy: str) -> dict[str, Any]:
    """Seconds to the first token of a prompt that nothing is known of."""
    params, taken, report = SamplingParams(temperature=0, max_tokens=1), [], {}
    for turn in range(2):  # the first compiles
        llm.reset_prefix_cache()
        began = time.perf_counter()
        (output,) = llm.generate([prompt(length, vocab, seed=100 + turn)], params, policy=policy)
        taken.append(time.perf_counter() - began)
        if output.error is not None:
            raise RuntimeError(output.error)
        report = output.report["prefill"]
    return {"seconds": min(taken), "density": report["density"]}


def sums(ranks: int) -> None:
    """One rank of some that add up parts of all sizes, recorded: microseconds a sum, by what joins them."""
    rank, store, name = (os.environ[one] for one in ("BENCH_RANK", "BENCH_STORE", "SACCADE_REDUCE"))
    device = torch.device("cuda", int(rank))
    torch.cuda.set_device(device)
    counts = SumCounts(Path(store + ".counts"), ranks)
    group = RankGroup(
        torch.distributed.FileStore(store, ranks), int(rank), ranks, 60.0, counts, device, Path(store).name
    )
    rows = Rows(OUT)
    for size in (1 << 14, 1 << 16, 1 << 18, 1 << 19, 1 << 20, 1 << 22, 1 << 24):
        part = torch.ones(size // 2, dtype=torch.bfloat16, device=device)
        group.sum(part.clone())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            made = [group.sum(part.clone()) for _ in range(32)]
        times = []
        for _ in range(8):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / len(made))
        right = all(bool((one == ranks).all()) for one in made)
        if rank == "0":
            rows.add(what="sum", joins=name, bytes=size, us=statistics.median(times), right=right)
    torch.cuda.synchronize()
    group.sum(torch.zeros(1, device="cpu"))
    os._exit(0)


def all_sums(ranks: int) -> None:
    """Those of each choice, in processes of their own."""
    for name in ("one_shot,nccl", "nccl"):
        with tempfile.TemporaryDirectory() as place:
            settings = {**os.environ, "BENCH_STORE": f"{place}/store", "SACCADE_REDUCE": name}
            command = [sys.executable, __file__, "--sums", str(ranks)]
            started = [subprocess.Popen(command, env={**settings, "BENCH_RANK": str(rank)}) for rank in range(ranks)]
            ends = time.monotonic() + 60
            for process in started:
                try:
                    process.wait(max(1.0, ends - time.monotonic()))
                except subprocess.TimeoutExpired:
                    Rows(OUT).add(what="sum", joins=name, failed="not done within 60 s")
            for process in started:
                process.kill()


def limits(device: str) -> None:
    """What one GPU reads and multiplies."""
    sys.path.insert(0, str(Path(__file__).parent / "gpu"))
    from harness import limits as measured

    Rows(OUT).add(what="limits", device=torch.cuda.get_device_name(device), **measured())


def compare(ranks: int) -> None:
    """Ratios of what one GPU takes to what several do, and the share of sums."""
    rows = [json.loads(line) for line in OUT.read_text().splitlines()]
    found: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if "shape" in row and ("ms" in row or row["what"].endswith("first token")) and "failed" not in row:
            found[row["what"], row["shape"], row["ranks"], row["sums"]] = row.get("ms", row.get("seconds"))
    for (what, shape, count, with_sums), taken in list(found.items()):
        one, bare = found.get((what, shape, 1, True)), found.get((what, shape, ranks, False))
        if count == ranks and with_sums:
            Rows(OUT).add(
                what=f"{what}: ratio",
                shape=shape,
                ranks=ranks,
                ratio=None if one is None else one / taken,
                goal=GOALS.get(what) if (shape, ranks) == ("8b", 2) else None,
                share_of_sums=None if bare is None else 1 - bare / taken,
            )


def apart(name: str, ranks: int, device: str, seconds: float, **variables: str) -> None:
    """An engine in a process of its own, for at most so long."""
    if seconds < 5:
        return Rows(OUT).add(what="start", shape=name, ranks=ranks, failed="no time was left")
    command = [sys.executable, __file__, "--measure", name, str(ranks), "--device", device]
    process = subprocess.Popen(command, env={**os.environ, **variables})
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        Rows(OUT).add(what="start", shape=name, ranks=ranks, failed=f"not done within {seconds:g} s")
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["limits", "sums", "8b", "70b"], choices=PARTS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=170.0, help="of one engine, at most")
    parser.add_argument("--most-seconds", type=float, help="of all engines together; ratios of what has run come then")
    parser.add_argument("--kernels", action="store_true", help="also say what kernels take of a step, on the first GPU")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--sums", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.sums:
        sums(given.sums)
    if given.measure:
        return measure(given.measure[0], int(given.measure[1]), given.device, Rows(OUT))
    if given.kernels:
        os.environ[KERNELS_NAMED] = "1"
    ends = float("inf") if given.most_seconds is None else time.monotonic() + given.most_seconds

    def left() -> float:
        return min(given.seconds, ends - time.monotonic())

    for part in given.parts:
        name, _, which = part.partition(":")
        if part == "limits":
            limits(given.device)
        elif part == "sums":
            all_sums(given.ranks)
        else:
            if which in ("", "ranks"):
                apart(name, given.ranks, given.device, left())
            if which in ("", "one"):
                apart(name, 1, given.device, left())
            if which in ("", "bare"):
                apart(name, given.ranks, given.device, left(), **{NO_SUMS: "1"})
            if which == "alone":
                apart(name, given.ranks, given.device, left(), **{ALONE: "1"})
    compare(given.ranks)


if __name__ == "__main__":
    main()
