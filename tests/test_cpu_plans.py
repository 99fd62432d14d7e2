"""Decode rows under device plans on the C++ kernels: to the last bit what each method's own selection reads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_helpers import tokens
from helpers import UNTIMED, generator
from kv_helpers import poisoned_pool
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.observing import timing
from saccade.engine.rows.plans import FixedPlans
from saccade.engine.watch.clock import Clock
from saccade.errors import SaccadeError
from saccade.kv import kept_summaries
from saccade.kv.sequence import SequenceKV
from saccade.methods.arkvale import ArkVale
from saccade.methods.base import Query
from saccade.methods.cis import CIS
from saccade.methods.cis.anchors import Anchors
from saccade.methods.cis.host import HostAnchors
from saccade.methods.cis.method import CISState
from saccade.methods.cis.recorded import RecordedAnchors, SharedKeys
from saccade.methods.device_state import Opening
from saccade.methods.psa import PSA
from saccade.methods.psa.estimates import keys_in_few_bits
from saccade.methods.quest import Quest
from saccade.methods.streaming import Streaming
from saccade.methods.topk import TopK
from saccade.ops import Call, cpu, cpu_readings, run
from saccade.ops.cpu_plans import PlannedRow, PlannedRows, Residence
from saccade.ops.cpu_readings import Guessed, Kept, Listed, Readings
from saccade.ops.cpu_structs import native
from saccade.ops.progressive import attend_ranking
from saccade.selection.pieces import read_blocks

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the C++ kernels")
LAYERS, HEADS, KV_HEADS, DIM = 2, 6, 2, 32
METHODS = [
    Quest(budget=64, dense_layers=1),
    Quest(budget=8, block_size=8, dense_layers=0, unit="q_head"),
    Quest(budget=16, dense_layers=0, unit="layer"),
    ArkVale(budget=160),
    ArkVale(budget=96, block_size=8, sinks=0, window=3, unit="q_head"),
    ArkVale(budget=128, sinks=2, window=2),  # nothing beside the ends
    PSA(epsilon=0.5, block_size=16, microbatch=1, rank="cuboid"),
    PSA(epsilon=0.9, block_size=8, microbatch=3, rest="min", stop="mean", rank="cuboid"),
    PSA(epsilon=0.7, block_size=32, microbatch=2, unit="layer", rank="cuboid"),
    PSA(epsilon=0.0, block_size=64, microbatch=1, rank="cuboid"),
    PSA(epsilon=1.0, block_size=16, rank="cuboid"),
    Streaming(sinks=3, window=40),
]


# Methods that pick single keys, and learn from them: other sums than in Python, so equal but for the last bits.
LISTED = [
    "topk(k=40)",
    "topk(k=0.2, unit=kv_head, sinks=3, local=9)",
    "topk(k=4, sinks=3, local=9)",
    "topk(k=150)",  # comes to choose within the answer
    "lfps(k=0.1, least=8, blocks=6)",
    "lfps(k=30, unit=kv_head, blocks=4, block_size=16, sinks=2)",
    "lfps(k=20, blocks=0, epsilon=0.05, rest=none)",
    "lfps(k=20, blocks=100, epsilon=0.3, probes=500)",
    "lfps(k=20, unit=kv_head, blocks=3, epsilon=0.2, a=0.6, after=9, sinks=3)",
    "lfps(k=20, a=0.05, local=9, sinks=0)",
    "lfps(k=110, least=1, blocks=2)",  # reads everything at first
    "lfps(k=20, slash_shift_on_read=false)",  # not what the kernels do
    "cis(k=30, sinks=4, local=8, tau=0.1)",
    "cis(k=0.15, sinks=2, local=6, tau=0.3, unit=kv_head, s=4, align=position)",
    "cis(k=12, sinks=0, local=4, tau=0.2, s=3, follow=none, r=2, m=5)",
    "cis(k=110, sinks=4, local=8, tau=0.1)",  # comes to choose within the answer
    "cis(k=20, sinks=4, local=8, tau=0)+psaw(start_layer=1, sinks=5, local=9, block_size=32)",
    "cis(k=20, sinks=4, local=9, tau=0.2, unit=kv_head)+psaw(start_layer=1, sinks=5, local=6, block_size=1)",
    "cis(k=20, sinks=4, local=8, tau=0.3, follow=1, s=2)+psaw(start_layer=1)+etf(start_layer=1)",
]


# Blocks by labels of their keys: sums of other order than in Python.
GUESSED = [
    PSA(epsilon=0.5, block_size=16, microbatch=1),
    PSA(epsilon=0.9, block_size=8, microbatch=3, stop="mean", bits=8, margin=2.0),
    PSA(epsilon=0.7, block_size=32, microbatch=2, unit="layer", bits=2),
    PSA(epsilon=0.6, block_size=16, microbatch=2, rest="last_max"),
    PSA(epsilon=1.0, block_size=64, microbatch=1),
]


class Spec:
    layers, heads, kv_heads, head_dim, windows = LAYERS, HEADS, KV_HEADS, 32, (None,) * LAYERS


@pytest.fixture(autouse=True)
def _default_isa():
    yield
    cpu.set_isa(None)


def lengths_of(method) -> list[int]:
    """Around what a method reads in full, and around the borders of its blocks; drawn anew at each run."""
    size, upto = getattr(method, "block_size", 16), 400
    plan = method.device_plan(Spec)
    if plan.blocks is not None:
        upto = plan.choice.dense_upto
    drawn = torch.randint(upto + 1, upto + 700, (2,)).tolist()
    return [1, upto, upto + 1, (upto // size + 2) * size, (upto // size + 3) * size + 1, *drawn]


def sequences(lengths, dtype, rows: int):
    """Sequences of one pool, blocks interleaved, that hold all keys but the last, and queries of a packed step."""
    rng = generator(sum(lengths))
    blocks = sum(-(-length // 32) for length in lengths)
    pool = poisoned_pool(LAYERS * blocks + 8, KV_HEADS, DIM, layers=LAYERS, dtype=dtype, heads_apart=rows > 1)
    every = [SequenceKV(pool) for _ in lengths]
    keys = [torch.randn(LAYERS, 2, KV_HEADS, length, DIM, generator=rng).to(dtype) for length in lengths]
    for start in range(0, max(lengths), 100):
        for kv, length, own in zip(every, lengths, keys):
            stop = min(length - 1, start + 100)
            kv.reserve(max(stop, 0) + 1 if start == 0 else max(stop, kv.length) + 1)
            for layer in range(LAYERS):
                if stop > start:
                    kv.append(layer, *own[layer, :, :, start:stop])
    wide = torch.randn(len(lengths) + 2, LAYERS, HEADS, 2 * DIM, generator=rng).to(dtype)
    return every, keys, wide[1:-1, :, :, :DIM].permute(1, 2, 0, 3)  # [layers, heads, rows, head_dim], offset, strided


@pytest.mark.parametrize("method", METHODS, ids=lambda one: one.text)
@pytest.mark.parametrize(("dtype", "table_rows"), [(torch.float32, 1), (torch.bfloat16, 1), (torch.float32, KV_HEADS)])
def test_rows_get_to_the_last_bit_what_their_methods_select(method, dtype, table_rows, monkeypatch):
    lengths = lengths_of(method)
    plan = method.device_plan(Spec)
    assert all(cpu_readings.serves(one, KV_HEADS) is None for one in plan.layers)
    order = torch.randperm(len(lengths)).tolist()
    for threads, isa in ((1, None), (3, None), (50, cpu.supported_isas()[-1])):
        cpu.set_isa(isa)
        every, keys, q = sequences(lengths, dtype, table_rows)
        readings = Readings(plan.layers)
        rows = []
        for i in order:
            kv, blocks = every[i], plan.blocks
            sparse = blocks is not None and lengths[i] > plan.choice.dense_upto
            summaries = kv.summaries(blocks.summary, blocks.size) if sparse else ()
            with monkeypatch.context() as patch:  # what methods select is found without codes
                patch.setattr(kept_summaries, "LEAST_BLOCKS", 16)
                codes = kv.summary_codes(blocks.summary, blocks.size) if sparse else ()
            rows.append(PlannedRow(i, lengths[i] - 1, kv.tables, readings, summaries, codes))
        planned = PlannedRows(rows, every[0].pool.storage.k, every[0].pool.storage.v)
        got, touched = [], []
        for layer in range(LAYERS):
            for kv, own in zip(every, keys):
                kv.append(layer, *own[layer, :, :, -1:])
            out = torch.full((len(lengths), HEADS, DIM), float("nan"), dtype=dtype)
            planned.attend(layer, q[layer], out, 0.2, 9.0, threads)
            got.append(out)
            touched.append([planned.touched(at) for at in range(len(rows))])
        for at, i in enumerate(order):
            for layer in range(LAYERS):
                query = Query.of(
                    q[layer][:, i : i + 1], every[i].view(layer), layer=layer, layers=LAYERS, scale=0.2, softcap=9.0
                )
                selection = method.select_decode(query, None)
                ran = run(Call(query.q, query.kv, selection, 0.2, 9.0, threads), "cpu")
                assert torch.equal(got[layer][i], ran.out[:, 0])
                assert touched[layer][at] == int(read_blocks(ran.used, 32).sum())
                if ran.coverage is not None:
                    ruled = planned.ruled(at)
                    assert torch.equal(ruled.coverage[layer], ran.coverage)
                    sure = plan.layers[layer].cost(lengths[i]).keys
                    pairs = ran.used.pairs().view(ruled.used.shape[1], -1)[:, 0]
                    assert (ruled.used[layer] * plan.blocks.size + sure).tolist() == pairs.tolist()


@pytest.mark.parametrize("method", GUESSED, ids=lambda one: one.text)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_ranked_by_labels_get_what_the_reference_reads(method, dtype, monkeypatch):
    """Rows whose labels were begun earlier, some in a tile begun, of several ends of tiles and blocks; two steps, the
    second by what the first has labelled."""
    upto, size = method.dense_upto, method.block_size
    drawn = int(torch.randint(upto + 1, upto + 1300, ()))
    lengths = [upto + 1, (upto // size + 2) * size, (upto // size + 3) * size + 1, drawn]
    for threads, isa in ((1, None), (3, cpu.supported_isas()[-1])):
        cpu.set_isa(isa)
        every, keys, q = sequences([length + 1 for length in lengths], dtype, 1)
        began = [
            [keys_in_few_bits(kv.view(layer).upto(length - 3), method.bits) for layer in range(LAYERS)]
            for kv, length in zip(every, lengths)
        ]
        states, reference = began, [[state.fork() for state in own] for own in began]
        held = [
            method.host_state(Opening(own, kv, Spec, 0, length + 1)) for own, kv, length in zip(states, every, lengths)
        ]
        rows = [
            PlannedRow(i, length, kv.tables, state.reads(length + 1))
            for i, (kv, length, state) in enumerate(zip(every, lengths, held))
        ]
        planned = PlannedRows(rows, every[0].pool.storage.k, every[0].pool.storage.v)
        for layer in range(LAYERS):
            for kv, own in zip(every, keys):
                kv.append(layer, *own[layer, :, :, -1:])
            out = torch.full((len(lengths), HEADS, DIM), float("nan"), dtype=dtype)
            planned.attend(layer, q[layer], out, 0.2, 9.0, threads)
            with monkeypatch.context() as patch:
                patch.setattr(cpu, "available", lambda: False)
                for i, kv in enumerate(every):
                    query = Query.of(q[layer][:, i : i + 1], kv.view(layer), layer=layer, scale=0.2, softcap=9.0)
                    ranking = method.select_decode(query, reference[i][layer])
                    want, lse, read, coverage = attend_ranking(query.q, query.kv, ranking, scale=0.2, softcap=9.0)
                    off = 2e-2 if dtype == torch.bfloat16 else 1e-5
                    torch.testing.assert_close(out[i], want[:, 0], atol=off, rtol=off)
                    torch.testing.assert_close(planned.lse[i], lse[:, 0], atol=1e-4, rtol=1e-4)
                    ruled, sure = planned.ruled(i), ranking.always.shape[1]
                    torch.testing.assert_close(ruled.coverage[layer], coverage, atol=1e-4, rtol=1e-4)
                    counts = (read.offsets.diff() - sure).tolist()
                    assert ruled.used[layer].tolist() == counts
        for state, length, own in zip(held, lengths, reference):
            state.done(length + 1)
            for got, want in zip(state.settle(length + 1), own):
                assert got.length == want.length == length + 1
                ours, theirs = got.saved_fields(), want.saved_fields()
                assert all(torch.equal(ours[name], theirs[name]) for name in ("_codes", "_range"))


@pytest.mark.parametrize(("threads", "best"), [(1, 20), (3, 20), (3, 4000)])
def test_blocks_that_lists_touch_are_counted_once(threads, best):
    """Of few keys in many blocks, and of so many that several threads mark the same ones."""
    length, forced = int(torch.randint(5000, 9000, (1,))), {"sinks": 1, "local": 40}
    (kv,), (keys,), q = sequences([length], torch.float32, 1)
    tally = torch.zeros(HEADS + 3, dtype=torch.float64)
    listed = native.ListedKeys(units=HEADS, best=best, **forced), [native.ListedLayer(tally=tally.data_ptr())] * LAYERS
    planned = PlannedRows(
        [PlannedRow(0, length - 1, kv.tables, Listed(*listed, 0))], kv.pool.storage.k, kv.pool.storage.v
    )
    with pytest.raises(ValueError, match="the row has read nothing"):
        planned.touched(0)
    method = TopK(k=best + 41, unit="q_head", **forced)
    for layer in range(LAYERS):
        planned.run(layer, q[layer], *keys[layer, :, :, -1:], torch.empty(1, HEADS, DIM), 0.2, None, threads)
        kv.append(layer, *keys[layer, :, :, -1:])
        query = Query.of(q[layer], kv.view(layer), layer=layer, layers=LAYERS, scale=0.2)
        used = run(Call(query.q, query.kv, method.select_decode(query, None), 0.2, None, 1)).used
        assert planned.touched(0) == int(read_blocks(used, 32).sum())


@pytest.mark.parametrize("epsilon", [0.0, 0.9999])
def test_a_rule_over_very_many_blocks_begins_with_the_first(epsilon):
    method, length = PSA(epsilon=epsilon, block_size=8, rank="cuboid"), 140003
    (kv,), (keys,), q = sequences([length], torch.float32, 1)
    plan = method.device_plan(Spec)
    codes = kv.summary_codes("cuboid", 8) if kv.summaries("cuboid", 8) else ()
    assert len(codes) == LAYERS
    got = []
    for known in (codes, ()):
        row = PlannedRow(0, length - 1, kv.tables, Readings(plan.layers), kv.summaries("cuboid", 8), known)
        planned = PlannedRows([row], kv.pool.storage.k, kv.pool.storage.v)
        out = torch.empty(1, HEADS, DIM)
        planned.run(0, 3 * q[0], *keys[0, :, :, -1:], out, 0.2, None, 2)
        got.append((out, *planned.ruled(0)))
    (out, used, coverage), (whole, all_used, all_coverage) = got
    assert torch.equal(out, whole)
    assert torch.equal(used[0], all_used[0])
    assert torch.equal(coverage[0], all_coverage[0])
    assert (used[0] < 256).all() if epsilon < 0.5 else (used[0] > 256).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "method",
    [
        Quest(budget=96, dense_layers=0),
        Quest(budget=40, block_size=8, dense_layers=0, unit="q_head"),
        ArkVale(budget=320, block_size=64, sinks=1),
        ArkVale(budget=160, unit="layer"),
    ],
    ids=lambda one: one.text,
)
def test_blocks_in_no_slot_are_named_before_anything_is_read_or_stored(method, dtype):
    length = int(torch.randint(1100, 1500, (1,)))
    (kv,), (keys,), q = sequences([length], dtype, 1)
    reading = method.device_plan(Spec).choice
    readings, storage = Readings([reading] * LAYERS), kv.pool.storage
    given = readings, kv.summaries(reading.source.summary, reading.size)
    ids, nowhere = kv.block_table.numpy(), storage.num_blocks - 1
    wide = np.full((LAYERS, kv.pool.logical_blocks + 5), -7, dtype=np.int32)
    slots = wide[:, 2:-3]
    slots[:] = kv.pool.map_of(0)
    plain = PlannedRows([PlannedRow(0, length - 1, kv.tables, *given)], storage.k, storage.v)
    rng = np.random.default_rng(length)
    for layer in range(LAYERS):
        new, whole = keys[layer, :, :, -1:], torch.empty(1, HEADS, DIM, dtype=dtype)
        plain.run(layer, q[layer], *new, whole, 0.2, None, 2)
        kv.append(layer, *new)
        query = Query.of(q[layer], kv.view(layer), layer=layer, layers=LAYERS, scale=0.2)
        read = read_blocks(method.select_decode(query, None), 32).nonzero()[:, 0].tolist()
        for share in (0.0, 0.6, 1.0):  # the own block is among those that left, too
            gone = rng.permutation(len(ids))[: round(share * len(ids))]
            left = torch.from_numpy(slots[layer, ids[gone]]).long()
            kept = storage.k[left].clone(), storage.v[left].clone()
            storage.k[left] = storage.v[left] = torch.nan
            slots[layer, ids[gone]] = -1
            home = Residence(ids, slots, nowhere, len(ids))
            row = PlannedRow(0, length - 1, home.table, *given, home=home)
            planned = PlannedRows([row], storage.k, storage.v)
            out = torch.full((1, HEADS, DIM), 5.0, dtype=dtype)
            planned.run(layer, q[layer], *new, out, 0.2, None, 2)
            wanted, missing = planned.wanted(0)
            assert sorted(home.blocks[:wanted].tolist()) == read
            assert missing == len(set(read) & set(gone.tolist()))
            assert (home.slots[:wanted] == slots[layer, ids[home.blocks[:wanted]]]).all()
            if missing:
                assert (out == 5).all()
                slots[layer, ids[gone]] = left.numpy()
                storage.k[left], storage.v[left] = kept
                storage.k[left[gone == length // 32], :, (length - 1) % 32] = torch.nan  # stored by the call
                planned.run(layer, q[layer], *new, out, 0.2, None, 2)
                assert planned.wanted(0) == (wanted, 0)
            slots[layer, ids[gone]] = left.numpy()
            storage.k[left], storage.v[left] = kept
            assert torch.equal(out, whole)
            assert (home.table == nowhere).all()
    home = Residence(ids, slots, nowhere, 1)
    planned = PlannedRows([PlannedRow(0, length - 1, home.table, *given, home=home)], storage.k, storage.v)
    with pytest.raises(ValueError, match="no room"):
        planned.run(0, q[0], *new, out, 0.2, None, 2)
    with pytest.raises(SaccadeError, match="int32 with contiguous rows"):
        Residence(ids, slots[:, ::2], nowhere, 8)


@pytest.mark.parametrize(
    "method",
    [PSA(epsilon=0.9, microbatch=2, rank="cuboid"), PSA(epsilon=0.999, block_size=64, microbatch=1, rank="cuboid")],
)
@pytest.mark.parametrize("first", [0, 3, 1000])
def test_of_a_ranking_only_what_its_rule_reads_is_wanted(method, first):
    """What is not brought in stays NaN: the rule may not see it."""
    length, dtype = 1433, torch.bfloat16
    (kv,), (keys,), q = sequences([length], dtype, 1)
    reading = method.device_plan(Spec).choice
    storage = kv.pool.storage
    given = Readings([reading] * LAYERS), kv.summaries(reading.source.summary, reading.size)
    ids, nowhere = kv.block_table.numpy(), storage.num_blocks - 1
    slots, reach = kv.pool.map_of(0).copy(), np.full(LAYERS, first, dtype=np.int64)
    plain = PlannedRows([PlannedRow(0, length - 1, kv.tables, *given)], storage.k, storage.v)
    home = Residence(ids, slots, nowhere, len(ids), reach)
    row = PlannedRow(0, length - 1, home.table, *given, home=home)
    planned, turns = PlannedRows([row], storage.k, storage.v), 0
    for layer in range(LAYERS):
        new, whole = keys[layer, :, :, -1:], torch.empty(1, HEADS, DIM, dtype=dtype)
        plain.run(layer, q[layer], *new, whole, 0.2, None, 2)
        kv.append(layer, *new)
        places = slots[layer, ids].copy()
        kept = storage.k[places].clone(), storage.v[places].clone()
        storage.k[places] = storage.v[places] = torch.nan
        slots[layer, ids] = -1
        out, missing, before = torch.full((1, HEADS, DIM), 5.0, dtype=dtype), 1, 0
        while missing:
            planned.run(layer, q[layer], *new, out, 0.2, None, 2)
            wanted, missing = planned.wanted(0)
            assert wanted > before or not missing
            before, turns, came = wanted, turns + 1, home.blocks[:wanted]
            slots[layer, ids[came]] = places[came]
            storage.k[places[came]], storage.v[places[came]] = kept[0][came], kept[1][came]
        assert torch.equal(out, whole)
        assert (home.table == nowhere).all()
        used = plain.ruled(0).used[layer]
        assert torch.equal(planned.ruled(0).used[layer], used)
        assert torch.equal(planned.ruled(0).coverage[layer], plain.ruled(0).coverage[layer])
        most = int(used.max())
        assert reach[layer] == max(16, most + most // 4)
        storage.k[places], storage.v[places] = kept
    assert turns == 2 * LAYERS if first == 1000 else turns > 2 * LAYERS
    with pytest.raises(SaccadeError, match="reach must be int64"):
        Residence(ids, slots, nowhere, 8, reach[:1])
    home = Residence(ids, slots, nowhere, len(ids))
    bare = PlannedRows([PlannedRow(0, length - 1, home.table, *given, home=home)], storage.k, storage.v)
    with pytest.raises(ValueError, match="a rule needs reach"):
        bare.run(0, q[0], *new, out, 0.2, None, 2)


def test_what_is_not_served_says_so():
    best = Quest(dense_layers=0).device_plan(Spec).choice
    for reading, why in (
        (PSA(rank="moments", rest="last_max").device_plan(Spec).choice, "not by moments"),
        (replace(best, last=0, dense_upto=2048), "no summary yet"),
        (replace(best, units=3), "3"),
    ):
        assert why in cpu_readings.serves(reading, KV_HEADS)


def test_a_row_without_enough_blocks_or_summaries_is_refused():
    (kv,), _, q = sequences([200], torch.float32, 1)
    storage, out = kv.pool.storage, torch.zeros(1, HEADS, DIM)
    readings = Readings(Quest(budget=64, dense_layers=0).device_plan(Spec).layers)
    short = [one[:3] for one in kv.summaries("minmax", 16)]
    planned = PlannedRows([PlannedRow(0, 199, kv.tables, readings, short)], storage.k, storage.v)
    with pytest.raises(ValueError, match="summaries of 3 blocks do not reach 12"):
        planned.attend(0, q[0], out, 0.2, None, 1)
    with pytest.raises(ValueError, match="last=0 must be at least 1"):
        native.BlockChoice(size=16, units=1, parts=2, first=0, last=0)
    with pytest.raises(SaccadeError, match="contiguous"):
        planned.attend(0, q[0], torch.zeros(HEADS, 1, DIM).transpose(0, 1)[:, ::2], 0.2, None, 1)


def test_a_row_whose_anchors_do_not_fit_is_refused():
    (kv,), _, q = sequences([200], torch.float32, 1)
    storage, out = kv.pool.storage, torch.zeros(1, HEADS, DIM)
    method = CIS(k=20, sinks=2, local=4)
    state = method.host_state(Opening([method.begin(None) for _ in range(LAYERS)], kv, Spec, 199, 200))
    planned = PlannedRows([PlannedRow(0, 199, kv.tables, state.reads(200))], storage.k, storage.v)
    state._window[0, 1] = 200
    with pytest.raises(ValueError, match="hides the row's own key"):
        planned.attend(0, q[0], out, 0.2, None, 1)
    state._counts.fill_(1)  # a place that is not there
    with pytest.raises(ValueError, match="anchors do not fit a row of 200 keys"):
        planned.attend(1, q[1], out, 0.2, None, 1)
    assert state.reads(200) is not None  # which makes room
    again = PlannedRows([PlannedRow(0, 199, kv.tables, state.reads(200))], storage.k, storage.v)
    again.attend(1, q[1], out, 0.2, None, 1)
    assert state._counts.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"anchors": "any"}, "anchors=any"), ({"cover_gap": False}, "cover_gap=false"), ({"by": "key"}, "by=key")],
)
def test_the_papers_other_values_are_left_to_the_hooks(options, reason):
    (kv,), _, _ = sequences([200], torch.float32, 1)
    method = CIS(k=20, sinks=2, local=4, **options)
    opening = Opening([method.begin(None) for _ in range(LAYERS)], kv, Spec, 199, 200)
    assert method.host_state(opening) is None
    assert reason in HostAnchors.why_not(opening, method)
    assert reason in SharedKeys.of(method).why_not(Spec)


def test_anchors_that_pass_on_are_left_to_the_hooks_and_shared_by_no_kernel():
    """A state that ``anchors=any`` left, under other options: units without lists of their own."""
    (kv,), _, _ = sequences([200], torch.float32, 1)
    method, states = CIS(k=20, sinks=2, local=4), []
    for _ in range(LAYERS):
        anchors = Anchors.empty(HEADS, DIM, 30, 6)
        anchors.reserve(2)
        anchors.count, anchors.has[:2], anchors.counts[1, 2] = 2, True, -1
        states.append(CISState(0, anchors))
    opening = Opening(states, kv, Spec, 197, 200)
    assert "passed on" in HostAnchors.why_not(opening, method)
    (own, _) = RecordedAnchors(opening, method)._layers
    assert own.has[:2].tolist() == [[True] * HEADS, [unit != 2 for unit in range(HEADS)]]
    assert not own.has[2:].any()


def test_a_row_whose_lists_are_full_or_that_keeps_more_than_its_budget_is_refused():
    (kv,), _, q = sequences([200], torch.float32, 1)
    storage, out = kv.pool.storage, torch.zeros(1, HEADS, DIM)
    tally, keys = torch.zeros(HEADS + 3, dtype=torch.float64), torch.arange(8, dtype=torch.int32).repeat(KV_HEADS, 1)
    counts = torch.full((KV_HEADS,), 8)
    room = {"tally": tally.data_ptr(), "keys": keys.data_ptr(), "counts": counts.data_ptr(), "room": 8}
    for how, why in (
        (native.KeptKeys(units=KV_HEADS), "no room for one more of 200"),
        (native.KeptKeys(units=KV_HEADS, budget=4, recent=5), "no more recent ones than its budget"),
    ):
        reads = Kept(how, [native.KeptLayer(**room)] * LAYERS)
        planned = PlannedRows([PlannedRow(0, 199, kv.tables, reads)], storage.k, storage.v)
        with pytest.raises(ValueError, match=why):
            planned.attend(0, q[0], out, 0.2, None, 1)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"size": 12, "microbatch": 1}, "of 8, 16, .. 1024 keys"),
        ({"size": 8}, "for a rule"),
        ({"size": 8, "microbatch": 1}, "no room for 200 keys"),
    ],
)
def test_labels_that_cannot_rank_are_refused(wrong, why):
    (kv,), _, q = sequences([200], torch.float32, 1)
    storage, out = kv.pool.storage, torch.empty(1, HEADS, DIM)
    labels = keys_in_few_bits(kv.view(0).upto(180), 4)
    choice = native.BlockChoice(units=KV_HEADS, parts=0, first=2, last=1, **wrong)
    planned = PlannedRows(
        [PlannedRow(0, 199, kv.tables, Guessed(choice, [labels.known()] * LAYERS, KV_HEADS))], storage.k, storage.v
    )
    with pytest.raises(ValueError, match=why):
        planned.attend(0, q[0], out, 0.2, None, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=512, head_dim=32)


def test_batches_have_the_tokens_and_reports_of_rows_that_select(folder, monkeypatch):
    """A packed batch of all these methods, planned and not; a session whose second turn finds kept summaries."""
    policies = [method.text for method in METHODS + GUESSED]
    ids = [random_ids(100 + 17 * i, seed=i) for i in range(len(policies))]
    few = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

    def answers():
        llm = LLM(folder, kv_memory="16MiB", prefill_chunk=128, exact=False, enable_prefix_caching=False)
        outputs = llm.generate(ids, few, policy=policies)
        with llm.session("psa(epsilon=0.6, block_size=8, microbatch=1, rank=cuboid)") as session:
            outputs += [session.generate(random_ids(n, seed=n), few) for n in (150, 40)]
        with llm.session(GUESSED[0].text) as session:
            outputs += [session.generate(random_ids(n, seed=n), few) for n in (150, 40)]
        assert llm.engine.pool.used_blocks == 0
        return outputs

    calls, real = [], PlannedRows.run_layers
    monkeypatch.setattr(PlannedRows, "run_layers", lambda *rest, **more: calls.append(1) or real(*rest, **more))
    planned = answers()
    assert len(calls) > 5 * (few.max_tokens - 2)  # of the batch, and of four turns
    monkeypatch.setattr(FixedPlans, "of", lambda self, rows: None)
    for left, right in zip(planned, answers()):
        assert tokens(left) == tokens(right)
        reports = [{**one.report["decode"], **UNTIMED} for one in (left, right)]
        for name in ("coverage_estimated", "coverage_estimated_least"):
            assert reports[0].pop(name) == pytest.approx(reports[1].pop(name), abs=1e-6)
        assert reports[0] == reports[1]
        assert left.report["notes"] == right.report["notes"]


@pytest.mark.parametrize(("dtype", "threads"), [("float32", 1), ("float32", 5), ("bfloat16", 2)])
def test_batches_that_pick_single_keys_do_as_their_hooks(folder, monkeypatch, dtype, threads):
    """Two turns each: a state goes back to the hooks in between, and is opened anew."""
    ids = [random_ids(110 + 9 * i, seed=i) for i in range(len(LISTED))]
    few = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def answers():
        llm = LLM(
            folder,
            kv_memory="16MiB",
            prefill_chunk=128,
            exact=False,
            dtype=dtype,
            threads=threads,
            enable_prefix_caching=False,
        )
        outputs = llm.generate(ids, few, policy=LISTED)
        with llm.session("lfps(k=20, history=keep)") as session:
            outputs += [session.generate(random_ids(n, seed=n), few) for n in (150, 40)]
        assert llm.engine.pool.used_blocks == 0
        return outputs

    served = []
    real = FixedPlans.count
    monkeypatch.setattr(FixedPlans, "count", lambda self, row, *rest: served.append(row) or real(self, row, *rest))
    listed = answers()
    assert len({row.rows.method for row in served}) == len(LISTED)  # the session's among them, the last one's not
    monkeypatch.setattr(FixedPlans, "of", lambda self, rows: None)
    for left, right in zip(listed, answers()):
        assert tokens(left) == tokens(right)
        reports = [{**one.report["decode"], **UNTIMED} for one in (left, right)]
        assert reports[0] == reports[1]
        assert left.report["notes"] == right.report["notes"]


@pytest.mark.parametrize("policy", [one for one in LISTED if one.startswith("cis")])
def test_shared_keys_are_to_the_last_bit_those_of_the_hooks(folder, monkeypatch, policy):
    """What later rows share, after steps in which some units retrieved and some did not, all in one call."""
    few = SamplingParams(temperature=0, max_tokens=37, ignore_eos=True)

    def left():
        llm = LLM(folder, kv_memory="16MiB", prefill_chunk=128, exact=False, enable_prefix_caching=False)
        with llm.session(policy) as session:
            session.generate(random_ids(170, seed=3), few)
            (sequence,) = llm.engine.scheduler.idle.values()
            return sequence.memories[sequence.id].states

    calls = []
    real = PlannedRows.run_layers
    monkeypatch.setattr(PlannedRows, "run_layers", lambda *rest, **more: calls.append(1) or real(*rest, **more))
    joined = left()
    assert calls
    monkeypatch.setattr(FixedPlans, "of", lambda self, rows: None)
    for one, other in zip(joined, left()):
        ours, theirs = one.anchors, other.anchors
        assert (one.block, ours.count, ours.first) == (other.block, theirs.count, theirs.first)
        for name in ("directions", "has", "counts", "positions"):
            assert torch.equal(getattr(ours, name)[: ours.count], getattr(theirs, name)[: ours.count])
        for at in range(ours.count):
            for unit, count in enumerate(ours.counts[at].tolist()):
                assert torch.equal(ours.keys[at, unit, : max(count, 0)], theirs.keys[at, unit, : max(count, 0)])
                if ours.has[at, unit] and count >= 0:
                    best = [own.moving[at, unit][own.moving[at, unit] < 2**31 - 1] for own in (ours, theirs)]
                    assert torch.equal(*best)


def test_a_clock_times_what_runs_without_it(folder, monkeypatch):
    policies = [
        "dense",
        "quest(budget=64, dense_layers=0)",
        "psa(epsilon=0.7, block_size=8, rank=cuboid)",
        LISTED[0],
        LISTED[4],
    ]
    policies += [LISTED[-3], GUESSED[0].text, "topp(dense_upto=0, p=0.5)"]  # the last one chooses layer by layer
    ids = [random_ids(180 + 9 * i, seed=i) for i in range(len(policies))]
    few = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    served, shares = [], []
    count, run_layer = FixedPlans.count, PlannedRows.run
    monkeypatch.setattr(FixedPlans, "count", lambda self, row, *rest: served.append(row) or count(self, row, *rest))

    def layer(self, *rest, **more):
        share = run_layer(self, *rest, **more)
        shares.append((share, more))
        return share

    monkeypatch.setattr(PlannedRows, "run", layer)

    def answers(clock):
        llm = LLM(folder, kv_memory="16MiB", prefill_chunk=128, exact=False, enable_prefix_caching=False)
        if clock is None:
            return llm.generate(ids, few, policy=policies)
        with timing(llm.engine, clock):
            return llm.generate(ids, few, policy=policies)

    plain, clock = answers(None), Clock()
    assert all(share == 0 and not more for share, more in shares)
    alone = len(served)
    shares.clear()
    timed = answers(clock)
    assert len(served) == 2 * alone > 0
    assert all(0 <= share < 1 and more == {"watched": True} for share, more in shares)
    assert sum(share > 0 for share, _ in shares) > len(shares) / 2  # dense rows alone choose nothing
    assert {"attention", "selection", "linear"} <= clock.seconds.keys()
    assert min(clock.seconds.values()) > 0
    for left, right in zip(plain, timed):
        assert tokens(left) == tokens(right)
        reports = [{**one.report["decode"], **UNTIMED} for one in (left, right)]
        assert reports[0] == reports[1]


def test_a_stretch_belongs_in_part_to_another():
    now = iter([0.0, 1.0, 3.0, 3.0, 7.0, 8.0])
    clock = Clock(lambda: next(now))
    clock.begin("step")
    clock.begin("attention")
    clock.end({"selection": 0.25})
    clock.begin("attention")
    clock.end()
    clock.end()
    assert clock.seconds == {"step": 1.0 + 0.0 + 1.0, "attention": 1.5 + 4.0, "selection": 0.5}
