"""Decode operators: everything, selected blocks and selected tokens, beside torch's dense kernels.

Calls are captured in a graph and replayed, each on lists of its own, so that neither launch gaps nor the cache count.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from harness import DTYPE, HEAD_DIM, HEADS, KV_HEADS, Results, graph_ms, measured_limits
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from saccade.kv import KVFormat, KVStorage
from saccade.methods import parse_method
from saccade.ops.triton.batch import KeyLists, Pages
from saccade.ops.triton.batched_choice import choose_blocks
from saccade.ops.triton.batched_decode import Summaries, score_blocks
from saccade.ops.triton.decode import attend_decode
from saccade.ops.triton.progressive import attend_progressive
from saccade.selection.forms import Rule

SCALE = HEAD_DIM**-0.5
PAGE = 32
MOST_BYTES = 72 << 30
SHARE = 0.02  # of the keys, that methods choose
CHOICES = ("quest(budget={}, dense_layers=0)", "arkvale(budget={})", "arkvale(budget={}, unit=kv_head)")
SPEC = SimpleNamespace(layers=1, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, windows=(None,))
COLD = 256 << 20  # bytes of summaries that calls read in turn: more than a cache holds
TRIED = ((32, 4, 3), (32, 4, 2), (32, 4, 4), (64, 4, 3), (64, 8, 3))  # keys, warps, stages; the first are the defaults


def pages_of(batch: int, context: int) -> Pages:
    """Random keys and values in pages scattered over a pool."""
    layout = KVFormat(DTYPE, KV_HEADS, HEAD_DIM, PAGE)
    blocks = layout.blocks(context)
    storage = KVStorage(layout, batch * blocks, "cuda")
    for part in (storage.k, storage.v):
        part.normal_()
    tables = torch.randperm(batch * blocks, device="cuda").to(torch.int32).view(batch, 1, blocks)
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    return Pages(storage.k, storage.v, tables, lengths, context)


def random_lists(batch: int, context: int, density: float, size: int) -> KeyLists:
    """Random distinct entries of every KV head of every sequence, sorted."""
    entries = -(-context // size)
    count = max(1, round(density * entries))
    rows = batch * KV_HEADS
    chosen = torch.rand(rows, entries, device="cuda").topk(count, dim=1).indices.sort(1).values
    counts = torch.full((rows,), count, dtype=torch.int32, device="cuda")
    return KeyLists(None, counts, chosen.flatten().to(torch.int32), KV_HEADS, size, count)


def peer_calls(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Any]]:
    """q [batch, heads, 1, d]; a group's queries as rows of one KV head is what serves torch's kernels best."""
    packed = q.view(q.shape[0], KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)

    def sdpa(backend: SDPBackend, rows: Tensor, gqa: bool) -> Callable[[], Any]:
        def call() -> Any:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(rows, k, v, enable_gqa=gqa)

        return call

    return {
        "sdpa flash": sdpa(SDPBackend.FLASH_ATTENTION, q, True),
        "sdpa flash packed": sdpa(SDPBackend.FLASH_ATTENTION, packed, False),
        "sdpa cudnn": sdpa(SDPBackend.CUDNN_ATTENTION, q, True),
    }


def flashinfer_call(q: Tensor, pages: Pages) -> Callable[[], Any] | None:
    """FlashInfer's batched decode over the same pages, where it is installed: q [batch, heads, d]."""
    if importlib.util.find_spec("flashinfer") is None:
        return None
    import flashinfer

    batch, _, blocks = pages.tables.shape
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    starts = torch.arange(0, batch * blocks + 1, blocks, dtype=torch.int32, device="cuda")
    last = (pages.lengths - 1) % PAGE + 1
    wrapper.plan(
        starts, pages.tables.flatten(), last, HEADS, KV_HEADS, HEAD_DIM, PAGE, q_data_type=DTYPE, kv_data_type=DTYPE
    )
    return lambda: wrapper.run(q, (pages.k, pages.v))


class Part:
    def __init__(self) -> None:
        self.results = Results("decode")
        self.limits = measured_limits()
        self.results.facts = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "limits": self.limits}

    def row(self, batch: int, context: int, name: str, ms: float, keys: float, best: float | None, **more: Any) -> None:
        """``keys``: read by each KV head of each sequence."""
        moved = 2 * batch * KV_HEADS * keys * HEAD_DIM * DTYPE.itemsize
        rate = moved / ms / 1e6
        self.results.add(
            batch=batch,
            context=context,
            what=name,
            us=1000 * ms,
            density=keys / context,
            gbps=rate,
            percent_of_copy=100 * rate / self.limits["copy_gbps"],
            speedup=None if best is None else best / ms,
            **more,
        )

    def case(self, batch: int, context: int) -> None:
        total = 2 * batch * context * KV_HEADS * HEAD_DIM * DTYPE.itemsize
        if total > MOST_BYTES:
            return
        repeats = 8 if total < 8 << 30 else 2
        best: float | None = None
        q = torch.randn(repeats, batch, HEADS, HEAD_DIM, device="cuda").to(DTYPE)
        k, v = (torch.empty(batch, KV_HEADS, context, HEAD_DIM, dtype=DTYPE, device="cuda").normal_() for _ in range(2))
        for name, call in peer_calls(q[0][:, :, None], k, v).items():
            ms = self.results.attempt(f"{name} b{batch} n{context}", lambda call=call: graph_ms([call] * 2))
            if ms is not None:
                best = ms if best is None else min(best, ms)
                self.row(batch, context, name, ms, context, None)
        del k, v
        torch.cuda.empty_cache()
        pages = pages_of(batch, context)
        call = self.results.attempt("flashinfer", lambda: flashinfer_call(q[0], pages))
        if call is not None:
            ms = self.results.attempt(f"flashinfer b{batch} n{context}", lambda: graph_ms([call] * 2))
            if ms is not None:
                best = ms if best is None else min(best, ms)
                self.row(batch, context, "flashinfer", ms, context, None)
        self.lists(q, pages, best)
        torch.cuda.empty_cache()

    def lists(self, q: Tensor, pages: Pages, best: float | None) -> None:
        repeats, batch, context = q.shape[0], q.shape[1], pages.longest
        if batch == 8 and context == 131072:
            self.tune(q, pages, best)
        cases: list[tuple[str, list[KeyLists | None]]] = [("saccade dense", [None] * min(repeats, 2))]
        for density, size in ((1 / 8, 32), (1 / 8, 64), (0.02, 32), (0.02, 1), (1 / 8, 1)):
            lists = [random_lists(batch, context, density, size) for _ in range(repeats)]
            cases.append((f"{'tokens' if size == 1 else f'blocks {size}'} ({density:g})", list(lists)))
        if context == 131072 and batch <= 8:
            self.results.attempt("psa", lambda: self.progressive(q, pages))
            for text in CHOICES:
                self.results.attempt(text, lambda text=text: self.choice(text.format(round(SHARE * context)), q, pages))
        for name, lists in cases:
            ms = self.results.attempt(f"{name} b{batch} n{context}", lambda lists=lists: self.measure(q, pages, lists))
            if ms is not None:
                keys = context if lists[0] is None else lists[0].longest * lists[0].size
                self.row(batch, context, name, ms, keys, best)

    def progressive(self, q: Tensor, pages: Pages) -> None:
        """PSA's loop, and one call over the blocks that it used. On random keys all blocks weigh about the same, so a
        share epsilon of the blocks reaches coverage epsilon. Calls know how far the one before went, for another
        query, as decode steps do."""
        batch, context = q.shape[1], pages.longest
        units, blocks, size = batch * KV_HEADS, -(-context // 32), 32
        always = torch.tensor([0, 1, blocks - 2, blocks - 1], dtype=torch.int32, device="cuda").repeat(units, 1)
        order = torch.rand(units, blocks - 4, device="cuda").argsort(1).to(torch.int32) + 2
        for epsilon in (0.03, 0.125, 0.54, 0.9):
            rule = Rule(epsilon, 4, "last_max", "all")
            used = attend_progressive(q[0], pages, always, order, size, rule, scale=SCALE)[2].tolist()
            lists = [torch.cat([always[u], order[u, : 4 * used[u]]]).sort().values for u in range(units)]
            counts = torch.tensor([len(one) for one in lists], dtype=torch.int32)
            starts = counts.long().cumsum(0) - counts
            once = KeyLists(starts.cuda(), counts.cuda(), torch.cat(lists), KV_HEADS, size, int(counts.max()))
            keys = float(counts.double().mean()) * size
            whole = self.measure(q, pages, [once] * 2)
            self.row(batch, context, f"one call over psa's blocks ({epsilon:g})", whole, keys, None)

            reach = torch.zeros(units, dtype=torch.int32, device="cuda")

            def loop(i: int, rule: Rule = rule, reach: Tensor = reach) -> tuple[Tensor, ...]:
                return attend_progressive(q[i], pages, always, order, size, rule, scale=SCALE, before=reach)

            calls = [lambda i=i, loop=loop: loop(i) for i in range(2)]
            ms = self.results.attempt("psa", lambda calls=calls: graph_ms(calls))
            if ms is not None:
                stop, read = loop(0)[2:4]
                read = read - 1  # but those always read
                beyond = float((read - stop).double().mean() / stop.double().mean())
                self.row(
                    batch, context, f"psa ({epsilon:g})", ms, keys, None, over_one_call=ms / whole, read_beyond=beyond
                )

    def choice(self, text: str, q: Tensor, pages: Pages) -> None:
        """A method's choice of blocks by their summaries and attention over them, beside attention alone over the same
        blocks; ``floor_us``: summaries and chosen keys read once at the copy's bandwidth. Each call has summaries of
        its own, and a query, so that neither comes from a cache."""
        batch, context = q.shape[1], pages.longest
        plan = parse_method(text).device_plan(SPEC)
        choice, pointers = plan.choice, []
        blocks, row = context // choice.size, 2 * KV_HEADS * HEAD_DIM
        copies = max(2, min(q.shape[0], -(-COLD // (batch * blocks * row * DTYPE.itemsize))))
        made = torch.randn(copies, batch, blocks, row, device="cuda").to(DTYPE)
        for one in made:
            first = one.data_ptr() + torch.arange(batch, device="cuda") * blocks * row * DTYPE.itemsize
            pointers.append(Summaries(first, choice.size, choice.source.summary))
        take, dense = (torch.full((batch,), n, dtype=torch.int32, device="cuda") for n in choice.numbers[:2])

        def chosen(i: int) -> KeyLists:
            return choose_blocks(score_blocks(q[i], pages, pointers[i], choice), pages, choice, take, dense)

        def both(i: int) -> tuple[Tensor, Tensor]:
            return attend_decode(q[i], pages, chosen(i), scale=SCALE)

        lists = [chosen(i) for i in range(copies)]
        alone = self.measure(q, pages, list(lists))
        choosing = graph_ms([lambda i=i: chosen(i) for i in range(copies)])
        whole = graph_ms([lambda i=i: both(i) for i in range(copies)])
        keys = float(lists[0].counts.double().mean()) * choice.size
        moved = 2 * batch * KV_HEADS * (keys + blocks) * HEAD_DIM * DTYPE.itemsize  # two parts of a summary
        floor = moved / self.limits["copy_gbps"] / 1e3
        self.row(batch, context, f"attention over the blocks of {text}", alone, keys, None)
        more = {"choice_us": 1000 * choosing, "over_attention": whole / alone, "floor_us": floor}
        self.row(batch, context, f"choice + attention, {text}", whole, keys, None, **more)

    def measure(self, q: Tensor, pages: Pages, lists: list[KeyLists | None], tiles: Any = None) -> float:
        options = {} if tiles is None else dict(zip(("keys", "warps", "stages"), tiles))
        calls = [
            lambda i=i, one=one: attend_decode(q[i], pages, one, scale=SCALE, **options) for i, one in enumerate(lists)
        ]
        return graph_ms(calls)

    def tune(self, q: Tensor, pages: Pages, best: float | None) -> None:
        batch, context = q.shape[1], pages.longest
        lists = [random_lists(batch, context, 1 / 8, 32) for _ in range(4)]
        for tiles in TRIED:
            ms = self.results.attempt(f"tiles {tiles}", lambda tiles=tiles: self.measure(q, pages, lists, tiles))
            if ms is not None:
                self.row(batch, context, "tile blocks 32 (0.125)", ms, lists[0].longest * 32, best, tiles=str(tiles))
            ms = self.results.attempt(f"tiles {tiles}", lambda tiles=tiles: self.measure(q, pages, [None], tiles))
            if ms is not None:
                self.row(batch, context, "tile dense", ms, context, best, tiles=str(tiles))


def main() -> None:
    torch.manual_seed(0)
    part = Part()
    cases = [(8, 131072), (1, 131072), (32, 131072), (8, 32768), (1, 32768), (32, 32768)]
    cases += [(1, 524288), (8, 524288), (1, 4096), (8, 4096), (32, 4096)]
    if len(sys.argv) > 2:
        cases = [(int(sys.argv[1]), int(sys.argv[2]))]
    with torch.inference_mode():
        for batch, context in cases:
            part.results.attempt(f"batch {batch} context {context}", lambda b=batch, c=context: part.case(b, c))


if __name__ == "__main__":
    main()
