"""LFPS's recorded steps a stage at a time, under Triton's interpreter: candidates across the borders of parts, what is
chosen of them with its weights and what is learnt, and the values it reads, against the row path and plain sums."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from covering import spread
from lfps_helpers import row_of

from saccade.methods.device_state import REALS, WORDS, Opening
from saccade.methods.lfps import LFPS, triton_row_blocks, triton_row_candidates, triton_row_choice
from saccade.methods.lfps.choosing import candidates, join_blocks, threshold
from saccade.methods.lfps.recorded import Marks, Reals, RecordedTables
from saccade.methods.lfps.stand_ins import sampled_rest, sink_share
from saccade.methods.lfps.state import LFPSState
from saccade.methods.lfps.tables import ScoreTables, learnt
from saccade.methods.lfps.triton_row_learning import take_in
from saccade.methods.lfps.triton_row_rest import bypasses, join_rest
from saccade.ops.triton import batched_best, best_near
from saccade.ops.triton.batch import Pages
from saccade.ops.triton.batched_rows import LayerRows, listed

HEADS, KV_HEADS, LENGTHS, LONGEST = 4, 2, [0, 77, 250], 256
OPTIONS = [
    {"k": 40, "before": 19, "after": 0, "blocks": 3, "block_size": 16},
    {"k": 150, "before": 1, "after": 18, "a": 0.9, "unit": "kv_head", "blocks": 2, "block_size": 4},
    {"k": 12, "sinks": 5},
    {"k": 30, "before": 3, "after": 17, "sinks": 3, "blocks": 9, "block_size": 8, "unit": "kv_head"},
    {"k": 6, "blocks": 1, "block_size": 32, "sinks": 0},  # forced keys alone
]


def opened(method: LFPS, units: int, rng: torch.Generator) -> tuple[LayerRows, list]:
    words, reals = torch.zeros(3, WORDS, dtype=torch.int64), torch.zeros(3, REALS, dtype=torch.float64)
    states: list = [None] * 3
    for row, length in enumerate(LENGTHS):
        if length:
            sinks = method.sinks
            vertical, slash = torch.rand(2, units, length - 1 - sinks, generator=rng) ** 40
            tables = ScoreTables.of(vertical, slash, sinks, length - 2)
            nothing = torch.zeros(KV_HEADS, 16)
            state = LFPSState(tables, nothing, nothing, 0, torch.zeros(HEADS), length - 1)
            kv = SimpleNamespace(pool=SimpleNamespace(storage=SimpleNamespace(device=torch.device("cpu"))))
            states[row] = RecordedTables(Opening([state], kv, SimpleNamespace(), 0, length), method)
            words[row, : len(states[row].words(0))] = torch.tensor(states[row].words(0))
            reals[row, : len(Reals._fields)] = torch.tensor(states[row].reals(0), dtype=torch.float64)
    pool, none = torch.randn(40, KV_HEADS, 16, 16, generator=rng), torch.zeros(3, dtype=torch.int32)
    table = torch.randperm(40, generator=rng)[:32].to(torch.int32).repeat(3, 1, 1)
    pages = Pages(pool, pool, table, torch.tensor(LENGTHS, dtype=torch.int32), LONGEST)
    q = torch.zeros(3, HEADS, 16)
    return LayerRows(0, q, pages, words, reals, torch.zeros(3, 4, dtype=torch.float64), none, none, 1.0), states


def best_by_sorting(ranks: torch.Tensor, take: int) -> list[int]:
    return sorted(torch.sort(ranks, descending=True, stable=True).indices[: max(0, take)].tolist())


@pytest.mark.parametrize(("options", "short"), spread(OPTIONS, [0, 8]), ids=str)  # by parts, by one program
def test_what_is_foreseen_chosen_learnt_and_read(options, short, monkeypatch):
    for module, sizes in (
        (triton_row_candidates, {"SPAN": 128, "TILE": 8}),
        (triton_row_choice, {"KEYS": 16}),
        (batched_best, {"SPAN": 64, "SHORT": short}),
        (best_near, {"SAMPLE": 16}),
    ):
        for name, size in sizes.items():
            monkeypatch.setattr(module, name, size)
    method = LFPS(**{"blocks": 0, "least": 1, "sinks": 4, "local": 6, **options})
    units, rng = HEADS if method.unit == "q_head" else KV_HEADS, torch.Generator().manual_seed(1)
    each = HEADS // units
    rows, states = opened(method, units, rng)
    idle = torch.zeros(3 * HEADS, dtype=torch.int8)
    idle[8:10], idle[11] = 1, 1  # of the last row two heads, or a whole KV head, and another head rest
    size = method.block_size if method.blocks else 0
    marked = (torch.rand(3 * units, LONGEST // size, generator=rng) < 0.05).to(torch.int8) if size else None
    seen = triton_row_candidates.scan(rows, units, take_in(rows, units))
    found = triton_row_candidates.candidates(rows, units, seen, idle, marked, size)
    logits = (torch.rand(3, HEADS, LONGEST, generator=rng) * 12).round()
    ranks = logits if units == HEADS else (torch.rand(3, units, LONGEST, generator=rng) * 12).round()
    chosen = triton_row_choice.choose(rows, units, logits, ranks, found, idle, LONGEST)
    parts, lse = triton_row_choice.read_values(rows, units, chosen, idle)
    out = parts.sum(2).view(3, HEADS, 16)
    assert chosen.lists.counts[:HEADS].tolist() == [0] * HEADS
    for row, length in list(enumerate(LENGTHS))[1:]:
        first = method.sinks
        n, local = length - first, 6
        base = torch.full((units,), length - 1 - first)
        tables, offsets = states[row].states[0].tables, (method.before, method.after)
        expected = candidates(tables, n, n - local, method.a, "paper", offsets, base)
        values = rows.pages.v[rows.pages.tables[row, 0].long()].transpose(1, 2).flatten(0, 1)[:length]
        for unit in range(units):
            entry = row * units + unit
            wanted = expected[1][expected[0][unit] : expected[0][unit + 1]]
            if marked is not None:
                blocks = marked[entry, : length // size].nonzero().T.to(torch.int32)
                _, wanted = join_blocks(torch.tensor([0, len(wanted)]), wanted, blocks, size, first, length - local)
            resting = idle[entry * each : (entry + 1) * each].bool()
            wanted = torch.arange(0) if resting.all() else wanted
            if n > method.budget(n):
                bits = found.marks[entry, :, None] >> torch.arange(16) & 1
                assert (bits.flatten()[: n - local].nonzero()[:, 0] + first).tolist() == wanted.tolist()
                seen = [*range(first), *wanted.tolist(), *range(length - local, length)]
                order = ranks[row, unit, first : first + len(wanted)]
                best = [first + at for at in best_by_sorting(order, method.best(n))]
                taken = [*range(first), *best, *range(first + len(wanted), len(seen))]
            else:
                seen = taken = list(range(length))
            assert found.lists.indices[entry, : found.lists.counts[entry]].tolist() == seen
            shares = []
            for head in range(entry * each, (entry + 1) * each):
                rests = bool(idle[head])
                own = list(range(first)) if rests else taken
                assert listed(chosen.lists, head).tolist() == [seen[at] for at in own]
                logit = logits[row, head - row * HEADS, own] * math.log(2)
                torch.testing.assert_close(lse.flatten()[head], logit.logsumexp(0))
                share = torch.softmax(logit, 0)
                read = values[[seen[at] for at in own], (head - row * HEADS) // (HEADS // KV_HEADS)]
                torch.testing.assert_close(out[row, head - row * HEADS], share @ read, rtol=1e-4, atol=1e-5)
                shares += [] if rests else [share]
            layer = states[row]._layers[0]
            keys = [seen[at] for at in taken if seen[at] >= first]
            count = int(layer.marks[unit, 2])
            assert Marks(*layer.marks[unit].tolist()) == Marks(length, 0, count)
            assert count == (len(keys) if shares else -1)
            if shares:
                assert layer.pending[unit, :count].tolist() == keys
                begins = len(taken) - len(keys)
                known = [share[begins : begins + count] for share in shares]
                gain = sum(share / share.sum() for share in known) / len(known) - 0.5 / max(1, count)
                torch.testing.assert_close(layer.gains[unit, :count], gain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("held", [32, 512])
def test_blocks_are_marked_by_one_program_and_by_parts(held, monkeypatch):
    monkeypatch.setattr(batched_best, "SPAN", 32)
    monkeypatch.setattr(batched_best, "SHORT", 1)
    monkeypatch.setattr(triton_row_blocks, "HELD", held)
    method, rng = LFPS(blocks=9, block_size=4), torch.Generator().manual_seed(5)
    rows, _ = opened(method, HEADS, rng)
    means = torch.randn(3, LONGEST // 4, KV_HEADS, 16, generator=rng).mul(2).round() / 2
    q = torch.randn(3, HEADS, 16, generator=rng).round()
    summaries = SimpleNamespace(pointers=torch.tensor([one.data_ptr() for one in means]))
    rows.q, rows.summaries = q, summaries  # type: ignore[assignment]
    marks = triton_row_blocks.best_blocks(rows, HEADS, 4)
    for row, length in list(enumerate(LENGTHS))[1:]:
        for head in range(HEADS):
            scores = means[row, : length // 4, head // 2] @ q[row, head]
            assert marks[row * HEADS + head, : length // 4].nonzero()[:, 0].tolist() == best_by_sorting(scores, 9)


@pytest.mark.parametrize("decay", [0.95, 0.0, 0.01])
def test_what_a_step_takes_in(decay):
    """Steps until stored values have to be scaled down, of units that learn and that do not, each of them run twice;
    and the thresholds of tables without spread and half empty."""
    method, units, rng = LFPS(r=decay, k=40, sinks=4), 3, torch.Generator().manual_seed(3)
    vertical, slash = torch.rand(2, units, 150, generator=rng) ** 12
    vertical[0], slash[1, 75:] = 0.125, 0.0
    host, device = (ScoreTables.of(vertical, slash, 4, 153) for _ in range(2))
    nothing = torch.zeros(KV_HEADS, 16)
    state = LFPSState(device, nothing, nothing, 0, torch.zeros(HEADS), 153)
    kv = SimpleNamespace(pool=SimpleNamespace(storage=SimpleNamespace(device=torch.device("cpu"))))
    row = RecordedTables(Opening([state], kv, SimpleNamespace(), 0, 155), method)
    layer, q = row._layers[0], torch.zeros(1, units, 16)
    for step in range(6):
        length = 155 + step  # of the row whose step has left what the next one takes in
        for unit in range(units):
            keys = torch.randperm(length - 4, generator=rng)[: 40 + unit].sort().values + 4
            gain = torch.rand(len(keys), generator=rng) - 0.5
            learns = unit != step % 4
            layer.pending[unit, : len(keys)], layer.gains[unit, : len(keys)] = keys.int(), gain
            layer.marks[unit, 0], layer.marks[unit, 2] = length, len(keys) if learns else -1
            host.row.fill_(length - 1)
            if learns:
                learnt(host, unit, keys, gain, decay)
        words, reals = torch.tensor([row.words(0)]), torch.tensor([row.reals(0)], dtype=torch.float64)
        pages = SimpleNamespace(lengths=torch.tensor([length + 1], dtype=torch.int32), longest=512)
        rows = SimpleNamespace(q=q, words=words, reals=reals, pages=pages, count=1)
        limits = [take_in(rows, units) for _ in range(2)]
        assert torch.equal(*limits)
        torch.testing.assert_close(device.scale, host.scale)
        for unit, scale in enumerate(host.scale.tolist()):
            host.refresh(unit)
            for name in ("vertical", "slash"):
                ours, expected = (getattr(tables, name)[unit, :400] for tables in (device, host))
                torch.testing.assert_close(ours, expected, rtol=1e-4, atol=max(1e-6, 1e-8 / scale))
            for table, sums in enumerate(host.sums[unit]):
                mean, tau = threshold(sums, length + 1 - 4, method.a)
                torch.testing.assert_close(limits[0][unit, 2 * table : 2 * table + 2], torch.tensor([mean, tau]))


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize(("unit", "probes"), [("q_head", 64), ("kv_head", 7)])
def test_who_rests_and_what_stands_for_the_rest(unit, probes, softcap):
    method = LFPS(k=12, least=1, probes=probes, unit=unit)
    query, state = row_of(method, 200, HEADS, KV_HEADS, 16, softcap=softcap)
    units, heads, first, stop = state.tables.units, query.shape.heads, 4, 194
    given = first, 6, state.mean_key, state.spread, math.log(196)
    expected = sink_share(query.q, query.kv, query.shape, *given, 0.2, softcap)
    share = torch.exp(expected[:, 0] - expected.logsumexp(1))
    method = replace(method, epsilon=float(share.sort().values[1:3].mean()))
    paged = query.kv.paged()
    kv = SimpleNamespace(pool=SimpleNamespace(storage=SimpleNamespace(device=torch.device("cpu"))))
    row = RecordedTables(Opening([state], kv, SimpleNamespace(), 0, 200), method)
    table = paged.block_table.expand(1, KV_HEADS, -1)
    pages = Pages(paged.k, paged.v, table, torch.tensor([200], dtype=torch.int32), 208)
    words, reals = torch.tensor([row.words(0)]), torch.tensor([row.reals(0)], dtype=torch.float64)
    none = torch.zeros(1, dtype=torch.int32)
    rows = LayerRows(0, query.q[:, 0][None], pages, words, reals, torch.zeros(1, 4), none, none, 0.2, softcap)
    idle, instead = bypasses(rows)
    assert torch.equal(idle.bool(), share > method.epsilon)
    assert 0 < int(idle.sum()) < heads
    torch.testing.assert_close(instead, expected[:, 1], rtol=1e-5, atol=1e-5)
    listed_keys = torch.rand(units, stop - first, generator=torch.Generator().manual_seed(1)) < 0.4
    listed_keys[0] = True  # nothing is left out
    offsets = torch.nn.functional.pad(listed_keys.sum(1).cumsum(0), (1, 0))
    indices = (listed_keys.nonzero()[:, 1] + first).int()
    rest = sampled_rest(query.q, query.kv, offsets, indices, first, stop, probes, 0.2, softcap)
    rest = torch.where(idle.bool(), expected[:, 1], rest)
    bits = torch.nn.functional.pad(listed_keys, (0, 208 - (stop - first))).unflatten(1, (-1, 16))
    marks = (bits.int() << torch.arange(16)).sum(2).int()
    parts, lse = torch.randn(1, units, 2, heads // units, 16), torch.randn(1, heads)
    own = parts.sum(2).view(heads, 16), lse[0]
    out, total = join_rest(rows, parts, lse, marks, listed_keys.sum(1).int(), idle, instead, units)
    value = state.mean_value.repeat_interleave(heads // KV_HEADS, 0)
    wanted = torch.logaddexp(own[1], rest)
    torch.testing.assert_close(total[0], wanted, rtol=1e-5, atol=1e-5)
    mixed = own[0] * (own[1] - wanted).exp()[:, None] + value * (rest - wanted).exp()[:, None]
    torch.testing.assert_close(out[0], mixed, rtol=1e-4, atol=1e-5)
