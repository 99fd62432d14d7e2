"""What the GPU benchmarks share: where results go, how time is taken, what the device can do at most."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from saccade.ops.triton.choose import compact
from saccade.selection import Blocks, Shape

OUT = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16
BEGAN = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f} s] {text}", flush=True)


class Results:
    """Rows of one part, written to ``OUT/<part>.json`` after every row, so that a failure loses nothing before it."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.facts: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        OUT.mkdir(parents=True, exist_ok=True)

    def add(self, **row: Any) -> None:
        self.rows.append({key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()})
        say(f"{self.part}: " + ", ".join(f"{key}={_short(value)}" for key, value in self.rows[-1].items()))
        self.write()

    def write(self) -> None:
        text = json.dumps({"part": self.part, "facts": self.facts, "rows": self.rows}, indent=1)
        (OUT / f"{self.part}.json").write_text(text + "\n", encoding="utf-8")

    def attempt(self, name: str, what: Callable[[], Any]) -> Any:
        """Run ``what``; on an error write it down as a row, free memory and go on with None."""
        try:
            return what()
        except Exception as error:
            self.add(failed=name, error=f"{type(error).__name__}: {str(error)[:300]}")
            torch.cuda.empty_cache()
            return None


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def seconds(call: Callable[[], Any]) -> float:
    """Seconds of one call, by the host's clock, until the device has done all that it was asked to."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def time_ms(call: Callable[[], Any], budget_ms: float = 400.0, most: int = 30) -> float:
    """Median milliseconds by device events: one warm-up, then at least three runs and at most what the budget
    allows."""
    call()
    torch.cuda.synchronize()
    taken: list[float] = []
    while len(taken) < 3 or (len(taken) < most and sum(taken) < budget_ms):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken)


def graph_ms(calls: Sequence[Callable[[], Any]], budget_ms: float = 150.0) -> float:
    """Median milliseconds of one of ``calls``, all captured in one graph and replayed: no launch gaps, and different
    data in turn keep the cache cold."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return time_ms(graph.replay, budget_ms) / len(calls)


def profile(step: Callable[[], Any], steps: int = 4) -> None:
    """Print where the device's time goes in a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)[:16]
    for row in rows:
        say(f"  {row.self_device_time_total / steps:9.1f} us {row.count / steps:6.1f} calls  {row.key[:90]}")


def random_blocks(shape: Shape, size: int, density: float, seed: int = 0) -> Blocks:
    """Random lists of every query head with about ``density`` of the blocks, always the first and the diagonal."""
    blocks = -(-shape.k_len // size)
    generator = torch.Generator("cuda").manual_seed(seed)
    noise = torch.rand(shape.heads, blocks, blocks, device="cuda", generator=generator)
    row, column = torch.arange(blocks, device="cuda")[:, None], torch.arange(blocks, device="cuda")
    taken = ((noise < density) | (column == row) | (column == 0)) & (column <= row)
    return compact(shape, size, taken)


def limits() -> dict[str, float]:
    """``copy_gbps``: bytes read plus written by a copy of 4 GiB; ``matmul_tflops``: 8192^3 of random bf16."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    copy = time_ms(lambda: target.copy_(source))
    a, b = torch.randn(2, 8192, 8192, device="cuda").to(DTYPE)
    product = time_ms(lambda: a @ b)
    return {"copy_gbps": 8 * source.numel() / copy / 1e6, "matmul_tflops": 2 * 8192**3 / product / 1e9}


def measured_limits() -> dict[str, float]:
    """The limits that an earlier part wrote, or measured now."""
    try:
        return json.loads((OUT / "limits.json").read_text())["facts"]["limits"]
    except (OSError, KeyError, ValueError):
        return limits()


def versions() -> dict[str, Any]:
    import triton

    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }
