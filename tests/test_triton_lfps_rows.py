"""LFPS's recorded steps a stage at a time, under Triton's interpreter: candidates across the borders of parts, what is
chosen of them with its weights and what is learnt, and the values it reads, against the host path and plain sums."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)

from saccade.methods.device_state import Opening
from saccade.methods.lfps import LFPS, triton_row_blocks, triton_row_candidates, triton_row_choice
from saccade.methods.lfps import tables as score_tables
from saccade.methods.lfps.method import LFPSState
from saccade.methods.lfps.recorded import RecordedTables
from saccade.methods.lfps.tables import ScoreTables, join_blocks
from saccade.methods.lfps.triton_row_learning import take_in
from saccade.ops.triton import batched_best, best_near
from saccade.ops.triton.batched_rows import LayerRows, listed
from saccade.ops.triton.decode import Pages

HEADS, KV_HEADS, LENGTHS, LONGEST = 4, 2, [0, 77, 500], 512
OPTIONS = [
    {"k": 40, "before": 63, "after": 0, "blocks": 3, "block_size": 16},
    {"k": 300, "before": 1, "after": 58, "gate": "off", "a": 0.9, "unit": "kv_head", "blocks": 2, "block_size": 4},
    {"k": 12, "gate": "off_for_c0", "a": None, "slash_shift_on_read": False, "read_local": False, "sinks": 5},
    {"k": 30, "before": 3, "after": 17, "sinks": 3, "blocks": 9, "block_size": 8, "unit": "kv_head"},
    {"k": 6, "blocks": 1, "block_size": 32, "sinks": 0, "bypass": "mean"},  # forced keys alone
]


def opened(method: LFPS, units: int, rng: torch.Generator) -> tuple[LayerRows, list]:
    words, reals = torch.zeros(3, 32, dtype=torch.int64), torch.zeros(3, 8, dtype=torch.float64)
    states: list = [None] * 3
    for row, length in enumerate(LENGTHS):
        if length:
            sinks = method.sinks
            vertical, slash = torch.rand(2, units, length - 1 - sinks, generator=rng) ** 40
            tables = ScoreTables.of(vertical, slash, sinks, length - 2)
            nothing = torch.zeros(KV_HEADS, 16)
            state = LFPSState(tables, nothing, nothing, 0, torch.zeros(HEADS), length - 1)
            kv = SimpleNamespace(pool=SimpleNamespace(storage=SimpleNamespace(device=torch.device("cpu"))))
            states[row] = RecordedTables(Opening([state], kv, SimpleNamespace(kv_heads=KV_HEADS), 0, length), method)
            words[row, : len(states[row].words(0))] = torch.tensor(states[row].words(0))
            reals[row, :4] = torch.tensor(states[row].reals(0), dtype=torch.float64)
    pool, none = torch.randn(40, KV_HEADS, 16, 16, generator=rng), torch.zeros(3, dtype=torch.int32)
    table = torch.randperm(40, generator=rng)[:32].to(torch.int32).repeat(3, 1, 1)
    pages = Pages(pool, pool, table, torch.tensor(LENGTHS, dtype=torch.int32), LONGEST)
    q = torch.zeros(3, HEADS, 16)
    return LayerRows(0, q, pages, words, reals, torch.zeros(3, 4, dtype=torch.float64), none, none, 1.0), states


def best_by_sorting(ranks: torch.Tensor, take: int) -> list[int]:
    return sorted(torch.sort(ranks, descending=True, stable=True).indices[: max(0, take)].tolist())


@pytest.mark.parametrize("short", [0, 8], ids=["by parts", "by one program"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_is_foreseen_chosen_learnt_and_read(options, short, monkeypatch):
    for module, sizes in (
        (triton_row_candidates, {"SPAN": 256, "TILE": 16}),
        (triton_row_choice, {"KEYS": 16}),
        (batched_best, {"SPAN": 64, "SHORT": short}),
        (best_near, {"SAMPLE": 16}),
    ):
        for name, size in sizes.items():
            monkeypatch.setattr(module, name, size)
    monkeypatch.setattr(score_tables.cpu, "serves", lambda table: "patched")
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
        n, local = length - first, 6 if method.read_local else 1
        base = torch.full((units,), length - 2 + method.slash_shift_on_read - first)
        tables, offsets = states[row].states[0].tables, (method.before, method.after)
        expected = score_tables.candidates(tables, n, n - local, method.a, method.gate, offsets, base)
        values = rows.pages.v[rows.pages.tables[row, 0].long()].transpose(1, 2).flatten(0, 1)[:length]
        for unit in range(units):
            entry = row * units + unit
            wanted = expected[1][expected[0][unit] : expected[0][unit + 1]]
            if marked is not None:
                blocks = marked[entry, : length // size].nonzero().T.to(torch.int32)
                _, wanted = join_blocks(torch.tensor([0, len(wanted)]), wanted, blocks, size, first, length - local)
            resting = idle[entry * each : (entry + 1) * each].bool()
            wanted = torch.arange(0) if resting.all() else wanted
            if n - (not method.read_local) > method.budget(n):
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
                own = taken if not rests else [] if method.bypass == "mean" else list(range(first))
                assert listed(chosen.lists, head).tolist() == [seen[at] for at in own]
                logit = logits[row, head - row * HEADS, own] * math.log(2)
                torch.testing.assert_close(lse.flatten()[head], logit.logsumexp(0))
                share = torch.softmax(logit, 0)
                read = values[[seen[at] for at in own], (head - row * HEADS) // (HEADS // KV_HEADS)]
                torch.testing.assert_close(out[row, head - row * HEADS], share @ read, rtol=1e-4, atol=1e-5)
                shares += [] if rests else [share]
            layer = states[row]._layers[0]
            keys = [seen[at] for at in taken if seen[at] >= first and seen[at] < length - (not method.read_local)]
            count = int(layer.marks[unit, 2])
            assert layer.marks[unit, 0] == length
            assert count == (len(keys) if shares else -1)
            if shares:
                assert layer.pending[unit, :count].tolist() == keys
                begins = len(taken) - len(keys) - (not method.read_local)
                known = [share[begins : begins + count] for share in shares]
                gain = sum(share / share.sum() for share in known) / len(known) - 0.5 / max(1, count)
                torch.testing.assert_close(layer.gains[unit, :count], gain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("held", [64, 512])
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
