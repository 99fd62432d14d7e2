"""What this machine can do at most, measured in the same run as the rows it is compared with."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from saccade import __version__
from saccade.bench.timing import median_ms
from saccade.machine import ask_for_huge_pages, gpu_name, processor
from saccade.ops import cpu

GEMM_SIZE = 2048
READ_BYTES = 1 << 29  # many times any last-level cache
ROW_BYTES = 256  # one key of one KV head: 128 channels of bfloat16
GPU_GEMM_SIZE = 8192
GPU_BYTES = 1 << 31  # many times a GPU's cache


def measure(
    dtype: torch.dtype, threads: int, clock: str = "wall", device: torch.device | None = None
) -> dict[str, float]:
    """``gemm_gflops`` (torch.mm of 2048 x 2048 matrices in ``dtype``), ``read_gbps`` (one pass in order over 512 MiB)
    and ``gather_gbps`` (rows of 256 bytes in random order), with ``threads`` threads. 1 GB is 1e9 bytes. Of a GPU the
    first, of 8192 x 8192 matrices, and as ``read_gbps`` the bytes that a copy of 2 GiB reads and writes."""
    if device is not None and device.type == "cuda":
        return _measure_gpu(dtype, device)
    a, b = torch.randn(2, GEMM_SIZE, GEMM_SIZE).to(dtype)
    gemm = median_ms([lambda: torch.mm(a, b)], 7, clock)
    data = torch.empty(READ_BYTES // 8, dtype=torch.int64)
    ask_for_huge_pages(data)  # as the KV has them
    data.fill_(1)
    rows = torch.randperm(READ_BYTES // ROW_BYTES).to(torch.int32)
    if cpu.available():
        read = median_ms([lambda: cpu.read_pass(data, threads)], 5, clock)
        gather = median_ms([lambda: cpu.gather_pass(data, rows, ROW_BYTES, threads)], 3, clock)
    else:
        table = data.view(-1, ROW_BYTES // 8)
        read = median_ms([lambda: data.sum()], 5, clock)
        gather = median_ms([lambda: torch.index_select(table, 0, rows).sum()], 3, clock)
    return {
        "gemm_gflops": 2 * GEMM_SIZE**3 / gemm / 1e6,
        "read_gbps": READ_BYTES / read / 1e6,
        "gather_gbps": READ_BYTES / gather / 1e6,
    }


def _measure_gpu(dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    a, b = torch.randn(2, GPU_GEMM_SIZE, GPU_GEMM_SIZE, device=device).to(dtype)
    source = torch.ones(GPU_BYTES // 8, dtype=torch.int64, device=device)
    target = torch.empty_like(source)

    def done(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            call()
            torch.cuda.synchronize(device)

        return run

    gemm = median_ms([done(lambda: a @ b)], 7)
    copy = median_ms([done(lambda: target.copy_(source))], 7)
    return {"gemm_gflops": 2 * GPU_GEMM_SIZE**3 / gemm / 1e6, "read_gbps": 2 * GPU_BYTES / copy / 1e6}


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """What was measured on: processor, cores, versions, instruction set, and the GPU if ``device`` is one."""
    return {
        "gpu": None if device is None else gpu_name(str(device)),
        "processor": processor(),
        "cores": os.cpu_count(),
        "isa": cpu.isa() or None,
        "python": platform.python_version(),
        "torch": version("torch"),
        "saccade": __version__,
    }
