"""LFPS's kernels against what they mean, under Triton's interpreter: scan, update, bypass, probes, and whole steps."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from helpers import planted_heads
from test_methods_lfps import Stream

from saccade.kv.view import KVView
from saccade.methods.lfps import LFPS
from saccade.methods.lfps import method as method_module
from saccade.methods.lfps import stand_ins as reference
from saccade.methods.lfps import tables as score_tables
from saccade.methods.lfps import triton_stand_ins as stand_ins
from saccade.methods.lfps import triton_tables as kernels
from saccade.methods.lfps.stand_ins import GOLDEN, sink_share
from saccade.methods.lfps.tables import GATES, ScoreTables, join_blocks
from saccade.ops.block_scores import block_scores
from saccade.selection import Shape, Tokens

FIRST = 4


@pytest.fixture(autouse=True)
def _by_torch(monkeypatch):
    """What the kernels are compared with runs in plain torch."""
    monkeypatch.setattr(score_tables.cpu, "serves", lambda table: "patched")
    monkeypatch.setattr(score_tables.cpu, "serves_keys", lambda q, kv: "patched")


def tables_of(units: int, n: int, seed: int = 0) -> ScoreTables:
    rng = torch.Generator().manual_seed(seed)
    vertical, slash = (torch.rand(2, units, n, generator=rng) ** 12).unbind(0)
    vertical[0], slash[0, n // 2 :] = 0.125, 0.0  # no spread; a table that is half empty
    return ScoreTables.of(vertical, slash, FIRST, FIRST + n)


@pytest.mark.parametrize(("gate", "a", "offsets"), [
    (0, 0.2, (1, 2)), (1, 0.9, (1, 2)), (2, 0.9, (9, 3)), (0, None, (1, 2)), (2, None, (0, 0)), (0, 0.9, (0, 0)),
])  # fmt: skip
def test_candidates_are_those_of_the_definition(gate, a, offsets, monkeypatch):
    monkeypatch.setattr(kernels, "SPAN", 256)  # neighbours reach across programs
    tables, n = tables_of(3, 700), 690
    stop = n - 6
    idle = torch.tensor([False, False, True, False, True, True])  # the last unit rests, of the second one head does
    blocks = torch.zeros(3, n // 16, dtype=torch.int8)
    blocks[torch.arange(3)[:, None], torch.tensor([0, 7, 41])] = 1
    base = tables.row - FIRST
    lists, indices = score_tables.candidates(tables, n, stop, a, GATES[gate], offsets, base)
    joined = join_blocks(lists, indices, torch.tensor([[0, 7, 41]] * 3, dtype=torch.int32), 16, FIRST, FIRST + stop)
    for who, marked, expected in ((None, None, (lists, indices)), (idle, blocks, joined)):
        found, listed, marks = kernels.candidates(tables, n, stop, a, gate, offsets, who, marked, 16)
        for unit in range(3):
            wanted = expected[1][expected[0][unit] : expected[0][unit + 1]].tolist()
            got = listed[found[unit] : found[unit + 1]].tolist()
            assert got == ([] if who is not None and unit == 2 else wanted)
            assert (marks[unit].nonzero()[:, 0] + FIRST).tolist() == got


@pytest.mark.parametrize("decay", [0.95, 0.0, 0.01])
@pytest.mark.parametrize(("heads", "lists"), [(3, 3), (6, 3), (6, 6)])
def test_what_a_step_adds(heads, lists, decay, monkeypatch):
    """Steps until stored values have to be scaled down; heads that rest, alone and with all of their unit."""
    n, rng = 500, torch.Generator().manual_seed(heads + lists)
    host, device = tables_of(3, n), tables_of(3, n)
    shape = Shape.suffix(heads, 1, 1, FIRST + n)
    for step in range(6):
        idle = None if step == 0 else torch.rand(heads, generator=rng) < 0.4
        own = [torch.randperm(n, generator=rng)[: 40 + unit].sort().values + FIRST for unit in range(3)]
        parts = [torch.cat([torch.arange(FIRST), own[unit]]) for unit in range(3) for _ in range(lists // 3)]
        read = Tokens.from_lists(shape, parts)
        weights = torch.rand(heads // lists, read.indices.numel(), generator=rng)
        for tables in (host, device):
            tables.row += 1
        stop = FIRST + n - (step % 2) * 60  # the last positions read teach nothing
        score_tables.learn(host, read, weights, idle, decay, stop)
        kernels.learn(device, read, weights, idle, decay, stop)
        torch.testing.assert_close(device.scale, host.scale)
        for unit, scale in enumerate(host.scale.tolist()):
            rounding = 1e-8 / scale  # of a weight less its share, which may all but cancel, as it is stored
            for name in ("vertical", "slash"):
                ours, expected = getattr(device, name)[unit], getattr(host, name)[unit]
                torch.testing.assert_close(ours, expected, rtol=1e-4, atol=max(1e-6, rounding))
        torch.testing.assert_close(device.sums, host.sums, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_who_rests_and_what_stands_for_the_rest(softcap):
    n, local = 300, 6
    q, k, v = planted_heads(4, 2, n, 48, 0)
    q, view, shape = q[:, -1:], KVView.from_tensors(k, v, shuffle_seed=1), Shape.suffix(4, 2, 1, n)
    mean, spread = k[:, FIRST:].mean(1), torch.rand(4, generator=torch.Generator().manual_seed(0)) * 0.02
    expected = sink_share(q, view, shape, FIRST, local, mean, spread, 5.5, 0.2, softcap)
    share = torch.exp(expected[:, 0] - expected.logsumexp(1))
    epsilon = float(share.sort().values[1:3].mean())
    parts, idle = stand_ins.sink_share(q, view, shape, FIRST, local, mean, spread, 5.5, 0.2, softcap, epsilon)
    torch.testing.assert_close(parts, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(idle, share > epsilon)
    assert 0 < int(idle.sum()) < 4
    rng = torch.Generator().manual_seed(1)
    for units in (4, 2):
        for stop, probes in ((n - local, 64), (FIRST + 90, 64), (FIRST + 30, 64), (n - local, 7)):
            marks = (torch.rand(units, stop - FIRST, generator=rng) < 0.4).to(torch.int8)
            marks[0] = 1  # nothing is left out
            offsets = torch.nn.functional.pad(marks.sum(1).cumsum(0), (1, 0))
            listed = (marks.nonzero()[:, 1] + FIRST).to(torch.int32)
            wanted = reference.sampled_rest(q, view, offsets, listed, FIRST, stop, probes, 0.2, softcap)
            places = stand_ins.probe_places(probes, GOLDEN, q.device)
            got = stand_ins.sampled_rest(q, view, offsets, marks, FIRST, places, None, 0.2, softcap)
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
            bypassed = (idle, parts[:, 1])
            got = stand_ins.sampled_rest(q, view, offsets, marks, FIRST, places, bypassed, 0.2, softcap)
            torch.testing.assert_close(got, torch.where(idle, expected[:, 1], wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("units", [8, 4, 2, 1])
def test_scores_of_mean_keys(units):
    q, means = torch.randn(8, 48), torch.randn(70, 1, 4, 48)
    torch.testing.assert_close(stand_ins.mean_scores(q, means[:, 0], units), block_scores(q, means, units))


@pytest.mark.parametrize("options", [
    {}, {"unit": "kv_head", "rest": None, "bypass": "sink"}, {"epsilon": 1.0, "blocks": 0},
    {"bypass": "mean", "read_local": False, "gate": "off_for_c0"},
], ids=str)  # fmt: skip
def test_steps_read_what_they_read_on_the_host(options, monkeypatch):
    method = LFPS(**{"k": 12, "blocks": 3, "epsilon": 0.01, "least": 1, **options})
    made = Stream.make(n=123, prompt=118, seed=1)
    rested, steps = 0, 0
    host = [(deepcopy(state), selection, out, read) for _, selection, state, out, read in made.run(method)]
    monkeypatch.setattr(method_module.device, "serves", lambda *_: None)
    monkeypatch.setattr(method_module, "learn", kernels.learn)
    for (expected, _, wanted_out, wanted_read), (_, selection, state, out, read) in zip(
        host, made.run(method, "triton")
    ):
        steps += 1
        idle = torch.zeros(4, dtype=torch.bool) if state.idle is None else state.idle
        rested += int(idle.sum())
        assert torch.equal(idle, torch.zeros_like(idle) if expected.idle is None else expected.idle)
        torch.testing.assert_close(state.tables.sums, expected.tables.sums, rtol=1e-4, atol=1e-6)
        assert torch.equal(read.mask(), wanted_read.mask())
        torch.testing.assert_close(out, wanted_out, rtol=1e-4, atol=1e-5)
        assert selection.most is not None
        assert int(read.offsets.diff().max()) <= selection.most
    assert steps == 5
    assert (rested > 0) == (options.get("epsilon", 0.0) < 1)
