"""Attention over keys and values in int8 and fp8 rows beside bfloat16's: decode of everything, of blocks, of tokens and
by PSA's rule, chunks of a prompt, and copies from host memory. Heads are an 8B Llama's; graphs are replayed on
scattered blocks.

TILES=1 tries other cuts of dense decode, too:

    python benchmarks/gpu/kv_formats.py [CONTEXTxBATCH ...]
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from saccade.kv import KVFormat, KVStorage, KVView
from saccade.kv.host import HostTier
from saccade.kv.row_formats import AUTO, FORMATS, FP8, INT8, RowFormat
from saccade.ops import Call, run
from saccade.ops.triton import decode
from saccade.ops.triton.batch import KeyLists, Pages
from saccade.ops.triton.decode import Tiles, attend_decode
from saccade.ops.triton.pages import copy_blocks
from saccade.ops.triton.progressive import attend_progressive
from saccade.selection import Dense, Shape
from saccade.selection.forms import Rule

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 32
WARM = bool(os.environ.get("WARM"))  # only compile, beside others
CODED = [FORMATS[name] for name in os.environ.get("CODED", "int8,fp8").split(",")]
SCALE = HEAD_DIM**-0.5
TRIED = (
    decode.CODES,
    decode.FEW_CODES,
    decode.FEW_SCALED,
    Tiles(64, 1, 2, None, 8),
    Tiles(32, 1, 4, None, 8),
    Tiles(16, 1, 3, None, 20),
    Tiles(64, 2, 3, None, 4),
    Tiles(64, 1, 3, None, 8),
    Tiles(64, 4, 3, 128, 4),
    Tiles(32, 2, 3, None, 4),
    Tiles(64, 2, 4, None, 4),
)


def pages_of(rows: RowFormat, context: int, batch: int) -> Pages:
    """Random keys and values in pages scattered over a pool."""
    layout = KVFormat(torch.bfloat16, KV_HEADS, HEAD_DIM, PAGE, rows, rows)
    blocks = layout.blocks(context)
    storage = KVStorage(layout, batch * blocks, "cuda")
    for part in (storage.k, storage.v):
        for some in part.split(4096):
            values = torch.randn(*some.shape[:3], HEAD_DIM, device="cuda", dtype=torch.bfloat16)
            some.copy_(rows.encode(values, some.dtype))
    tables = torch.randperm(batch * blocks, device="cuda").to(torch.int32).view(batch, 1, blocks)
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    return Pages(storage.k, storage.v, tables, lengths, context)


def lists_of(context: int, batch: int, share: float, size: int) -> KeyLists:
    """Random distinct blocks, or keys, of every KV head of every sequence, sorted."""
    entries = context // size
    count, lists = max(1, round(share * entries)), batch * KV_HEADS
    chosen = torch.stack([torch.randperm(entries, device="cuda")[:count].sort().values for _ in range(lists)])
    counts = torch.full((lists,), count, dtype=torch.int32, device="cuda")
    return KeyLists(None, counts, chosen.flatten().to(torch.int32), KV_HEADS, size, count)


def us(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()  # what follows runs on a stream of its own
    if WARM:
        call()
        return 1.0
    return 1e3 * float(triton.testing.do_bench_cudagraph(call, rep=20, return_mode="median"))


def compare(name: str, plain: Callable[[], Any], coded: dict[str, Callable[[], Any]]) -> None:
    """Three rounds of each in turn: their medians."""
    found = [(us(plain), *map(us, coded.values())) for _ in range(1 if WARM else 3)]
    one, *others = (statistics.median(part) for part in zip(*found))
    text = ", ".join(f"{kind} {two:.1f} us, {one / two:.2f}x" for kind, two in zip(coded, others))
    print(f"{name}: bf16 {one:.1f} us, {text}", flush=True)


def decoding(context: int, batch: int) -> None:
    plain, pages = pages_of(AUTO, context, batch), {rows.name: pages_of(rows, context, batch) for rows in CODED}
    q = torch.randn(batch, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    at = f"{context} x {batch}"

    def attend(name: str, lists: KeyLists | None) -> None:
        def of(own: Pages) -> Callable[[], Any]:
            return lambda: attend_decode(q, own, lists, scale=SCALE)

        compare(f"{name}, {at}", of(plain), {kind: of(own) for kind, own in pages.items()})

    attend("dense", None)
    for size in (32, 1):
        for share in (0.02, 0.12):
            attend(f"lists of {size}, {share:.0%}", lists_of(context, batch, share, size))
    blocks, units = context // PAGE, batch * KV_HEADS
    order = torch.stack([torch.randperm(blocks - 4, device="cuda") + 2 for _ in range(units)]).to(torch.int32)
    always = torch.tensor([0, 1, blocks - 2, blocks - 1], device="cuda").int().expand(units, -1).contiguous()
    rule = Rule(0.125, 4, "min", "all")

    def by_rule(own: Pages) -> Callable[[], Any]:
        return lambda: attend_progressive(q, own, always, order[:, : blocks // 8], PAGE, rule, scale=SCALE)

    compare(f"PSA's rule over 1/8, {at}", by_rule(plain), {kind: by_rule(own) for kind, own in pages.items()})
    for tiles in TRIED if os.environ.get("TILES") else ():
        for kind, own in pages.items():
            try:
                time = us(lambda own=own, tiles=tiles: attend_decode(q, own, None, scale=SCALE, tiles=tiles))
                print(f"   {kind}, dense {at}: {time:.1f} us, {tuple(tiles)}", flush=True)
            except Exception as error:
                print(f"   {kind}, {tuple(tiles)}: {type(error).__name__}: {str(error)[:80]}", flush=True)


def prefilling(context: int, rows: int) -> None:
    q = torch.randn(HEADS, rows, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, KV_HEADS, context, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    shape, times = Shape.suffix(HEADS, KV_HEADS, rows, context), {}
    for kind in (AUTO, *CODED):
        call = Call.of(q, KVView.from_tensors(k, v, PAGE, shuffle_seed=1, rows=kind), Dense(shape))
        if WARM:
            run(call)
        else:
            times[kind.name] = triton.testing.do_bench(
                lambda call=call: run(call), warmup=5, rep=60, return_mode="median"
            )
    if times:
        one = times.pop("auto")
        text = ", ".join(f"{kind} {two:.3f} ms, {one / two:.2f}x" for kind, two in times.items())
        print(f"prefill {rows} rows of {context}: bf16 {one:.3f} ms, {text}", flush=True)


def tiers() -> None:
    """Scattered blocks out of pinned host memory."""
    times = []
    for rows in (AUTO, INT8, FP8):
        layout = KVFormat(torch.bfloat16, KV_HEADS, HEAD_DIM, PAGE, rows, rows)
        storage, count = KVStorage(layout, 512, "cuda"), 512
        tier = HostTier(512 * layout.block_bytes, storage)
        which = torch.randperm(count)

        def back(tier: HostTier = tier, storage: KVStorage = storage, which: Tensor = which) -> None:
            copy_blocks((tier.k, tier.v), which, (storage.k, storage.v), which)

        back()
        torch.cuda.synchronize()
        times.append((layout.block_bytes, statistics.median(_ms(back) for _ in range(9))))
        tier.close()
    (size, one), *others = times
    text = "; ".join(
        f"{name} {less / size:.3f}x, {one / two:.2f}x as fast" for name, (less, two) in zip(("int8", "fp8"), others)
    )
    print(f"512 blocks from host memory: {size} bytes, {one:.2f} ms; {text}")


def _ms(call: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)
    for one in sys.argv[1:] or ["131072x8", "131072x1"]:
        decoding(*map(int, one.split("x")))
    for context, rows in ((32768, 32768), (131072, 8192), (131072, 2048), (131072, 256), (131072, 64)):
        prefilling(context, rows)
    tiers()
