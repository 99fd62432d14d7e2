"""LFPS on a GPU: rows that recorded steps do not take (audited, drafted) against the same rows on the host, and the
candidates of recorded steps whose rows are long, against sorting and the host's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers import planted_heads
from lfps_row_cases import HEADS, KV_HEADS, best_by_sorting, opened

from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Query
from saccade.methods.lfps import LFPS
from saccade.methods.lfps.choosing import candidates, join_blocks
from saccade.methods.lfps.triton_row_begin import begin_step, look
from saccade.methods.lfps.triton_row_candidates import candidates as listed_candidates
from saccade.ops import Call, run
from saccade.selection import Candidates

N, PROMPT = 3000, 2985


def steps(method: LFPS, q, k, v, device: str):
    """(candidates, what was read, out, who rested) of every step, and the state behind the last."""
    q, k, v = (part.to(device) for part in (q, k, v))
    done = []
    whole = KVView.from_tensors(k, v, shuffle_seed=1)
    state = method.begin(Chunk.of(q[:, PROMPT - method.tail_rows : PROMPT], whole.upto(PROMPT)))
    for position in range(PROMPT, N):
        query = Query.of(q[:, position : position + 1], whole.upto(position + 1), step=position - PROMPT)
        selection = method.select_decode(query, state)
        ran = run(Call.of(query.q, query.kv, selection, want_weights=True))
        out = ran.out
        method.observe(query, ran.used, ran.weights, state)
        done.append((selection, ran, out, state.idle))
    return done, state


@pytest.mark.parametrize(
    "options",
    [{}, {"unit": "kv_head", "rest": None}, {"epsilon": 1.0, "blocks": 0}, {"bypass": "mean", "read_local": False}],
    ids=str,
)
def test_steps_are_those_of_the_host(options):
    """Keys at the edge of the best may change places, for the logits that rank them are rounded otherwise."""
    method = LFPS(**{"k": 200, "epsilon": 0.02, **options})
    q, k, v = planted_heads(8, 2, N, 64, 0)
    on_host, _ = steps(method, q, k, v, "cpu")
    on_device, state = steps(method, q, k, v, "cuda")
    for (expected, host, wanted, _), (found, device, out, idle) in zip(on_host, on_device):
        assert device.backend == "triton"
        assert isinstance(found, Candidates)
        moved = found.to(torch.device("cpu"))
        moved.check()
        awake = (~idle.cpu() if idle is not None else torch.ones(8, dtype=torch.bool)).view(found.units, -1)
        for unit in awake.any(1).nonzero()[:, 0].tolist():
            own, theirs = set(moved.listed(unit).tolist()), set(expected.listed(unit).tolist())
            assert len(own ^ theirs) <= 0.03 * len(theirs) + 2
        used, read = device.used.to(torch.device("cpu")).mask(), host.used.mask()
        assert (used ^ read).sum() <= 0.03 * read.sum()
        error = (out.cpu().double() - wanted.double()).norm() / wanted.double().norm()
        assert float(error) < 2e-2
    assert state.tables.vertical.is_cuda
    assert torch.isfinite(state.tables.sums).all()


@pytest.mark.parametrize("unit", ["q_head", "kv_head"])
def test_candidates_of_long_rows(unit):
    """Lists of many parts, each of which waits for those before, time and again the same."""
    method, rng = LFPS(unit=unit, epsilon=1.0), torch.Generator().manual_seed(7)
    units, lengths, longest = HEADS if unit == "q_head" else KV_HEADS, [140_003, 0, 70_000, 3001], 147_456
    rows, states = opened(method, units, rng, lengths, longest, "cuda")
    size = method.block_size
    means = torch.randn(4, longest // size, KV_HEADS, 16, generator=rng).cuda()
    means[2] = (means[2] * 2).round()  # ties
    rows.q = torch.randn(4, HEADS, 16, generator=rng).round().cuda()
    rows.summaries = SimpleNamespace(pointers=torch.tensor([one.data_ptr() for one in means], device="cuda"))
    made = []
    for _ in range(20):
        begun = begin_step(rows, units, size)
        seen = look(rows, units, begun)
        made.append((begun, seen, listed_candidates(rows, units, seen, begun.idle, size)))
    begun, seen, _ = made[0]
    for row, length in enumerate(lengths):
        first, n = method.sinks, length - method.sinks
        if not length:
            continue
        tables = states[row].states[0].tables
        base = torch.full((units,), length - 1 - first, device="cuda")
        offsets, indices = candidates(tables, n, n - 6, method.a, "paper", (1, 2), base)
        for unit_number in range(units):
            entry = row * units + unit_number
            scores = begun.scores[row, unit_number, : length // size]
            best = seen.blocks[entry, : length // size].nonzero()[:, 0].tolist()
            assert best == best_by_sorting(scores.cpu(), method.blocks)
            own = indices[offsets[unit_number] : offsets[unit_number + 1]].cpu()
            blocks = torch.tensor([best], dtype=torch.int32)
            _, wanted = join_blocks(torch.tensor([0, len(own)]), own, blocks, size, first, length - 6)
            keys = [*range(first), *wanted.tolist(), *range(length - 6, length)]
            for *_, again in made:
                lists = again.lists
                assert int(lists.counts[entry]) == len(keys)
                assert lists.indices[entry, : len(keys)].tolist() == keys
                assert int(again.listed[entry]) == len(wanted)
