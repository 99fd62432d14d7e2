"""How fast blocks move between a GPU and pinned host memory: the kernel of the host tier beside the driver's copies.

    python benchmarks/gpu/gather.py [--gib 4]

Scattered blocks of 8B-shaped KV (64 and 128 KiB a block: keys and values of 16 and 32 tokens, 8 KV heads of 128
channels in bfloat16). ``link`` is one large copy by the driver; ``product`` a matrix product by itself, and beside the
kernel on another stream.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import DTYPE, HEAD_DIM, KV_HEADS, Results, time_ms
from torch import Tensor

from saccade.kv.format import KVFormat
from saccade.kv.pinned import PinnedMemory
from saccade.ops.triton import pages

COUNTS = (16, 64, 256, 1024, 4096)
COPIERS = (16, 32, 64, 128)
COPIED = pages.COPIERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0)
    options = parser.parse_args()
    results, device = Results("gather"), torch.device("cuda", torch.cuda.current_device())
    began = time.perf_counter()
    memory = PinnedMemory(int(options.gib * 2**30), device)
    results.facts = {
        "device": torch.cuda.get_device_name(),
        "pinning GiB/s": options.gib / (time.perf_counter() - began),
    }
    whole = memory.data[: 1 << 30]
    there = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    for name, call in (
        ("link, host to device", lambda: there.copy_(whole, non_blocking=True)),
        ("link, device to host", lambda: whole.copy_(there, non_blocking=True)),
    ):
        results.add(copy=name, gbps=(1 << 30) / time_ms(call) / 1e6)
    for size in (16, 32):
        results.attempt(f"blocks of {size}", lambda size=size: _blocks(results, memory, device, size))
    memory.close()


def _blocks(results: Results, memory: PinnedMemory, device: torch.device, size: int) -> None:
    form = KVFormat(DTYPE, KV_HEADS, HEAD_DIM, size)
    cells = memory.data.numel() // form.block_bytes
    used = memory.data[: cells * form.block_bytes]
    kept = tuple(half.view(DTYPE).view(form.shape(cells)) for half in used.chunk(2))
    slots = tuple(torch.zeros(form.shape(8192), dtype=DTYPE, device=device) for _ in range(2))
    for part in kept:
        part.copy_(torch.arange(cells)[:, None, None, None].expand(part.shape) % 251)
    left = torch.randn(4096, 4096, dtype=DTYPE, device=device)
    for count in COUNTS:
        which, where = torch.randperm(cells)[:count], torch.randperm(8192)[:count]
        for copiers in COPIERS:
            pages.COPIERS = copiers
            times = {}
            for name, pair in (("in", (kept, which, slots, where)), ("out", (slots, where, kept, which))):
                source, ours, target, theirs = pair
                on = [part.to(device) for part in (ours, theirs, torch.tensor([count]))]
                times[name] = time_ms(
                    lambda: pages.launch_copies(source, on[0], target, on[1], on[2], count),  # noqa: B023
                    150,
                )
            for part, home in zip(slots, kept):
                assert torch.equal(part[where.to(device)].cpu(), home[which]), "the kernel copied something else"
            bytes_moved = count * form.block_bytes
            alone, beside = _products(left, None), _products(left, partial(_load, kept, which, slots, where))
            results.add(
                kib=form.block_bytes >> 10,
                blocks=count,
                programs=copiers,
                gbps_in=bytes_moved / times["in"] / 1e6,
                gbps_out=bytes_moved / times["out"] / 1e6,
                us_in=times["in"] * 1e3,
                product_alone_ms=alone,
                product_beside_ms=beside,
            )
    pages.COPIERS = COPIED


def _load(source: Any, which: Tensor, target: Any, where: Tensor) -> None:
    pages.copy_blocks(source, which, target, where)


def _products(left: Tensor, beside: Callable[[], None] | None) -> float:
    """Milliseconds of a few products, ``beside`` running on another stream."""
    side = torch.cuda.Stream()

    def both() -> None:
        if beside is not None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                beside()
        for _ in range(4):
            left @ left
        torch.cuda.current_stream().wait_stream(side)

    return time_ms(both, 50)


if __name__ == "__main__":
    main()
