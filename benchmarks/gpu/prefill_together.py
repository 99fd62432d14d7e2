"""Several prompts prefilled in one step: their chunks' attention in one launch, beside a launch for each. First the
attention alone, then steps of a model of the 8B shape with random weights and few layers (LAYERS, 8 by default).

    python benchmarks/gpu/prefill_together.py
"""

from __future__ import annotations

import os
import statistics

os.environ.setdefault("LAYERS", "8")

import torch
from engine_steps import Bench
from harness import DTYPE, HEAD_DIM, HEADS, KV_HEADS, Results, seconds, time_ms

from saccade.engine.rows import attention as host
from saccade.engine.rows import together as host_together
from saccade.kv import BlockManager, KVFormat, KVStorage
from saccade.kv.sequence import SequenceKV
from saccade.ops import Call, run
from saccade.ops.triton.prefill_together import Part, attend_together
from saccade.selection import Blocks, Dense, Shape

SIZES = (8, 4096), (4, 4096), (16, 1024), (32, 512), (64, 256), (128, 128)  # prompts, tokens of each
POLICIES = "dense", "xattention"


def parts_of(count: int, length: int, density: float) -> tuple[torch.Tensor, list[Part]]:
    """Prompts of one pool, each to read everything or ``density`` of its blocks at random and the diagonal."""
    layout = KVFormat(DTYPE, KV_HEADS, HEAD_DIM)
    pool = BlockManager(KVStorage(layout, count * layout.blocks(length), "cuda"), 1)
    parts = []
    for number in range(count):
        kv = SequenceKV(pool)
        kv.reserve(length)
        kv.append(0, *torch.randn(2, KV_HEADS, length, HEAD_DIM, device="cuda", dtype=DTYPE))
        shape = Shape.suffix(HEADS, KV_HEADS, length, length, torch.device("cuda"))
        blocks = -(-length // 128)
        block = torch.arange(blocks, device="cuda")
        taken = (torch.rand(HEADS, blocks, blocks, device="cuda") < density) | (block == block[:, None])
        selection = Dense(shape) if density == 1 else Blocks.from_block_mask(shape, 128, taken)
        parts.append(Part(number * length, kv.view(0), selection))
    return torch.randn(count * length, HEADS, HEAD_DIM, device="cuda", dtype=DTYPE).transpose(0, 1), parts


def attention(results: Results, count: int, length: int, density: float) -> None:
    q, parts = parts_of(count, length, density)
    out, apart = torch.empty_like(q), torch.empty_like(q)

    def one_by_one() -> None:
        for part in parts:
            here = slice(part.first, part.first + length)
            apart[:, here] = run(Call.of(q[:, here], part.kv, part.selection), "triton").out

    def together() -> torch.Tensor:
        return attend_together(q, parts, out, scale=HEAD_DIM**-0.5)

    one_by_one()
    together()
    assert torch.equal(out, apart), "a prompt's rows get what they get alone, bit by bit"
    times = {"apart": time_ms(one_by_one, 100), "together": time_ms(together, 100)}
    results.add(what="attention", prompts=count, length=length, density=density, **times,
                gain=times["apart"] / times["together"])  # fmt: skip


def steps(results: Results, bench: Bench, count: int, length: int, policy: str) -> None:
    bench.room(count * (length + 64))
    taken: dict[str, list[float]] = {"apart": [], "together": []}
    waits = host.waits
    for turn in range(4):
        for name, own in (("apart", lambda *given: False), ("together", waits)):
            host.waits = own
            requests = [bench.request(length, policy) for _ in range(count)]
            for request in requests:
                request.sequence.kv.reserve(length)
            time = seconds(lambda requests=requests: bench.step(requests, length))
            if turn:
                taken[name].append(time * 1000)
            for request in requests:
                request.sequence.kv.free()
                bench.worker.memories.pop(request.sequence.id, None)
    host.waits = waits
    times = {name: statistics.median(found) for name, found in taken.items()}
    results.add(what="step", prompts=count, length=length, policy=policy, layers=bench.spec.layers, **times,
                gain=times["apart"] / times["together"])  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    host_together.SHORT = 4096  # to see what it gains beyond, too
    results = Results("prefill_together")
    with torch.inference_mode():
        for count, length in SIZES:
            for density in (1.0, 0.25) if length >= 512 else (1.0,):
                attention(results, count, length, density)
        bench = Bench("prefill_together_steps")
        for policy in POLICIES:
            for count, length in SIZES[1:]:
                steps(results, bench, count, length, policy)


if __name__ == "__main__":
    main()
