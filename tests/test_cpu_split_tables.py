"""Every C++ kernel over KV heads that do not share slots: the same as over heads that do, and as the reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cpu_helpers import problem, random_blocks
from helpers import generator
from lfps_helpers import row_of

from saccade.kv import KVView, Paged
from saccade.methods.labels.store import Labels
from saccade.methods.lfps import LFPS
from saccade.methods.lfps import cpu as lfps_cpu
from saccade.methods.loopserve import cpu as loopserve_cpu
from saccade.ops import Call, attend, cpu, cpu_rows, cpu_sums, run
from saccade.ops.cpu_structs import native
from saccade.selection import (
    Band,
    Candidates,
    Dense,
    Lines,
    Mixed,
    Ranking,
    Sampled,
    Shape,
    Tokens,
)
from saccade_contrib.magicpig.tables import HashTables, draw

pytestmark = pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable() or "-")
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
HEADS, KV_HEADS, DIM = 8, 4, 48


@pytest.fixture(params=cpu.supported_isas(), autouse=True)
def isa(request):
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa(None)


@pytest.fixture(params=DTYPES)
def dtype(request):
    return DTYPES[request.param]


def split(view: KVView) -> KVView:
    """``view`` with every KV head's blocks shuffled by themselves; what no head's table points at is NaN."""
    blocks, paged = view.blocks, view.paged()
    slots = 2 * blocks + 3
    own = torch.stack([torch.randperm(slots, generator=generator(g))[:blocks] for g in range(view.kv_heads)]).int()
    tables = torch.zeros(view.kv_heads, blocks + 5, dtype=torch.int32)  # rows longer than what is in use
    tables[:, :blocks] = own
    pools = []
    for pool in (paged.k, paged.v):
        moved = torch.full((slots, *pool.shape[1:]), math.nan, dtype=pool.dtype)
        for head in range(view.kv_heads):
            moved[own[head].long(), head] = pool[paged.block_table[0, :blocks].long(), head]
        pools.append(moved)
    return KVView(Paged(*pools, tables, view.length, view.format))


def same(ours, want, dtype):
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 2e-2}
    torch.testing.assert_close(ours[0], want[0], **close)
    torch.testing.assert_close(ours[1], want[1], atol=1e-4, rtol=1e-5)


def lines(shape: Shape) -> Lines:
    columns = [torch.tensor([0, 3, 40 + u, 200]) for u in range(HEADS)]
    distances = [torch.cat([torch.arange(0, 20), torch.tensor([77, 150 + u])]) for u in range(HEADS)]
    return Lines.from_lists(shape, columns, distances)


PREFILLS = {
    "dense": Dense,
    "band": lambda shape: Band(shape, 50, 5),
    "blocks of each KV head": lambda shape: random_blocks(shape, 64, KV_HEADS),
    "blocks of each head": lambda shape: random_blocks(shape, 16, HEADS),
    "blocks of the layer": lambda shape: random_blocks(shape, 32, 1),
    "lines": lines,
    "mixed": lambda shape: Mixed(
        shape, (Dense(shape), lines(shape), Band(shape, 9)), torch.arange(HEADS, dtype=torch.uint8) % 3
    ),
}


@pytest.mark.parametrize("kind", PREFILLS)
def test_prefill(kind, dtype):
    shape = Shape.suffix(HEADS, KV_HEADS, 150, 400)
    q, view = problem(shape, DIM, dtype, seed=1)
    selection = PREFILLS[kind](shape)
    want = attend(q, view, selection, backend="reference")
    same(attend(q, split(view), selection, backend="cpu"), want, dtype)


@pytest.mark.parametrize("kind", [kind for kind in PREFILLS if kind not in ("lines", "mixed")])
@pytest.mark.parametrize("keys", [1, 400, 9000])
def test_decode(kind, keys, dtype):
    shape = Shape.suffix(HEADS, KV_HEADS, 1, keys)
    q, view = problem(shape, DIM, dtype, seed=2)
    selection = PREFILLS[kind](shape)
    want = attend(q, view, selection, backend="reference")
    same(attend(q, split(view), selection, backend="cpu"), want, dtype)


def test_joined_rows(dtype):
    shapes = [Shape.suffix(HEADS, KV_HEADS, 1, keys) for keys in (300, 8500)]
    problems = [problem(shape, DIM, dtype, seed=3) for shape in shapes]
    views = [split(view).paged() for _, view in problems]
    k, v = (torch.cat([getattr(view, name) for view in views]) for name in ("k", "v"))
    moved = [
        KVView(view._replace(k=k, v=v, block_table=view.block_table + start))
        for view, start in zip(views, (0, len(views[0].k)))
    ]
    q = torch.cat([q for q, _ in problems], 1)
    selections = [random_blocks(shapes[0], 32, KV_HEADS), Dense(shapes[1])]
    out = torch.empty(2, HEADS, DIM, dtype=dtype)
    cpu_rows.attend(q, [0, 1], moved, selections, out, scale=0.1)
    for row, ((own, view), selection) in enumerate(zip(problems, selections)):
        want, _ = attend(own, view, selection, scale=0.1, backend="reference")
        same((out[row], torch.zeros(1)), (want[:, 0], torch.zeros(1)), dtype)


@pytest.mark.parametrize("units", [1, 2, KV_HEADS, HEADS])
@pytest.mark.parametrize("rest", ["last_max", "min"])
def test_rankings(units, rest, dtype):
    shape = Shape.suffix(HEADS, KV_HEADS, 1, 1000)
    q, view = problem(shape, DIM, dtype, seed=4)
    order = torch.stack([torch.randperm(32, generator=generator(u)) for u in range(units)]).int()
    ranking = Ranking(shape, 32, order[:, :2], order[:, 2:], epsilon=0.7, microbatch=3, rest=rest)
    ours = run(Call.of(q, split(view), ranking), "cpu")
    reference = run(Call.of(q, view, ranking), "reference")
    same(ours[:2], reference[:2], dtype)
    assert torch.equal(ours.used.block_mask(), reference.used.block_mask())


def test_candidates_and_tokens(dtype):
    shape = Shape.suffix(HEADS, KV_HEADS, 1, 700)
    q, view = problem(shape, DIM, dtype, seed=5)
    for selection in (
        Candidates.all_keys(shape, KV_HEADS, 40, sinks=3, local=9),
        Tokens.from_mask(shape, torch.rand(HEADS, 1, 700, generator=generator(5)) < 0.3),
    ):
        ours = run(Call.of(q, split(view), selection, want_weights=True), "cpu")
        reference = run(Call.of(q, view, selection, want_weights=True), "reference")
        same(ours[:2], reference[:2], dtype)
        assert torch.equal(ours.used.indices, reference.used.indices)
        torch.testing.assert_close(ours.weights, reference.weights, atol=1e-3, rtol=1e-3)


def test_sampled_keys(dtype):
    shape = Shape.suffix(HEADS, KV_HEADS, 1, 700)
    q, view = problem(shape, DIM, dtype, seed=6)
    tokens = Tokens.from_mask(shape, torch.rand(HEADS, 1, 700, generator=generator(6)) < 0.3)
    sampled = Sampled(tokens, torch.rand(tokens.indices.numel(), generator=generator(7)))
    want = attend(q, view, sampled, backend="reference")
    same(attend(q, split(view), sampled, backend="cpu"), want, dtype)


def test_hash_draws(dtype):
    shape = Shape.suffix(HEADS, KV_HEADS, 1, 700)
    q, view = problem(shape, DIM, dtype, seed=7)
    bits, tables = 5, 8
    codes = torch.randint(0, 2**bits, (KV_HEADS, tables, 600), generator=generator(7)).short()
    asked = torch.randint(0, 2**bits, (HEADS, tables), generator=generator(8)).short()
    mean = torch.randn(KV_HEADS, DIM, generator=generator(9))
    drawn = []
    for seen in (split(view), view):
        made = HashTables.of(q, seen, 20, 620, bits, mean, codes)
        drawn.append(draw(q, seen, shape, made, asked)[0])
    by_hand = draw(q, view, shape, HashTables(20, 620, 700, bits, mean, codes), asked)[0]
    assert torch.equal(drawn[0].tokens.indices, drawn[1].tokens.indices)
    assert torch.equal(drawn[0].bias, drawn[1].bias)
    torch.testing.assert_close(drawn[0].bias, by_hand.bias, atol=1e-3, rtol=1e-3)


def test_labels(dtype):
    shape = Shape.suffix(HEADS, KV_HEADS, 1, 500)
    q, view = problem(shape, DIM, dtype, seed=8)
    channels = torch.stack([torch.randperm(DIM, generator=generator(g))[:10] for g in range(KV_HEADS)])
    scores = []
    for seen in (split(view), view):
        labels = Labels(channels, 4)
        labels.extend(seen)
        scores.append(labels.scores(q[:, 0], "kv_head"))
    assert torch.equal(*scores)


def test_sums_over_sampled_rows(dtype):
    shape = Shape.suffix(HEADS, KV_HEADS, 100, 500)
    q, view = problem(shape, DIM, dtype, seed=9)
    apart = split(view)
    for ours, want in zip(cpu_sums.line_sums(q, apart, shape, 70, 0.1), cpu_sums.line_sums(q, view, shape, 70, 0.1)):
        assert torch.equal(ours, want)
    shares = [cpu_sums.antidiagonals(q, seen, shape, 16, 64, 0.1) for seen in (apart, view)]
    assert torch.equal(*shares)
    rows = torch.arange(0, 100, 3)
    covers = [loopserve_cpu.cover_rows(q, seen, shape, rows, 0.1, None, 0.8) for seen in (apart, view)]
    for ours, want in zip(*covers):
        assert all(map(torch.equal, ours, want))


def test_what_lfps_chooses(dtype):
    method = LFPS(k=20, blocks=4, epsilon=0.1)
    query, state = row_of(method, 500, HEADS, KV_HEADS, DIM, seed=10, dtype=dtype)
    chosen = [lfps_cpu.choose(method, replace(query, kv=kv), state, 496, 6) for kv in (split(query.kv), query.kv)]
    assert 0 < int(chosen[0].idle.sum()) < HEADS
    for ours, want in zip(*chosen):
        assert torch.equal(ours, want)


def test_rows_are_stored_in_slots_of_their_own(dtype):
    pools = [torch.zeros(6, KV_HEADS, 16, DIM, dtype=dtype) for _ in range(2)]
    k, v = (torch.randn(KV_HEADS, 3, DIM, generator=generator(seed)).to(dtype) for seen, seed in ((0, 1), (0, 2)))
    cpu_rows.store(k, v, *pools, [(2, (5, 0, 1, 3), 7), (0, 4, 15)])
    for pool, rows in zip(pools, (k, v)):
        for head, slot in enumerate((5, 0, 1, 3)):
            assert torch.equal(pool[slot, head, 7], rows[head, 2])
        assert torch.equal(pool[4, :, 15], rows[:, 0])
        assert int(pool.count_nonzero()) == int(rows[:, [0, 2]].count_nonzero())


def test_structs_refuse_what_would_read_wild_memory():
    address = torch.zeros(4096).data_ptr()
    pool = {"k": address, "v": address, "slots": 4, "kv_heads": 2, "block_size": 16, "head_dim": 16}
    pool |= {"storage": 0, "format": 0}
    table = native.BlockTable(slots=address, head_stride=0, blocks=2)
    queries = {"q": address, "head_stride": 16, "row_stride": 16, "heads": 4, "q_len": 1, "q_start": 20, "scale": 0.25}
    output = native.Output(out=address, lse=address, rows=1)
    dense = native.Keys(kind=0)
    for change, message in (
        ({"k": 0}, "Pool: k must be an address"),
        ({"storage": 2}, "Pool: storage=2 must be 0 to 1"),
        ({"format": 4}, "Pool: format=4 must be 0 to 3"),
        ({"block_size": 48}, "Pool: block_size must be a power of two"),
        ({"slots": -1}, "Pool: slots=-1 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            native.Pool(**pool | change)
    with pytest.raises(ValueError, match="Queries: softcap is missing"):
        native.Queries(**queries)
    with pytest.raises(ValueError, match="Queries: scale must be a number"):
        native.Queries(**queries | {"scale": math.nan, "softcap": 0.0})
    with pytest.raises(TypeError, match="BlockTable: has no field stride"):
        native.BlockTable(slots=address, stride=0, blocks=2)
    with pytest.raises(TypeError, match="keyword arguments only"):
        native.BlockTable(address, 0, 2)
    with pytest.raises(ValueError, match="head_stride must be 0"):
        native.BlockTable(slots=address, head_stride=1, blocks=2)
    run = cpu.kernels().attend
    for change, message in (
        ({"q_start": 32}, "reads 33 keys but its block table holds 32"),
        ({"heads": 3}, "3 query heads cannot share 2 KV heads"),
        ({"q_len": 2}, "room for 1 rows, not for 2"),
    ):
        with pytest.raises(ValueError, match=message):
            run(1, native.Pool(**pool), table, native.Queries(**queries | {"softcap": 0.0} | change), dense, output)
    with pytest.raises(ValueError, match="head_dim=24 must be a multiple of 16"):
        run(1, native.Pool(**pool | {"head_dim": 24}), table, native.Queries(**queries, softcap=0.0), dense, output)
    lists = torch.tensor([0, 1, 2, 3])
    blocks = native.Keys(kind=2, block_size=16, units=3, q_blocks=1, offsets=lists.data_ptr(), indices=address)
    with pytest.raises(ValueError, match="units=3 do not fit"):
        run(1, native.Pool(**pool), table, native.Queries(**queries, softcap=0.0), blocks, output)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        run(1, table, native.Pool(**pool), native.Queries(**queries, softcap=0.0), dense, output)
    rows = native.NewRows(k=address, v=address, head_stride=16, row_stride=16, count=1)
    for place, message in (
        ((0, 4, 0), "slot 4"),
        ((1, 0, 0), "row 1"),
        ((0, 0, 16), "offset 16"),
        ((0, (1,), 0), "one"),
    ):
        with pytest.raises(ValueError, match=message):
            native.store_rows(native.Pool(**pool), rows, [place])
