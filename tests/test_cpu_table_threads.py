"""LFPS's tables and the thread pool: what is found and learnt hangs on no number of threads, and is torch's."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from cpu_helpers import problem
from helpers import generator

from saccade.kv.view import KVView
from saccade.methods.base import Query
from saccade.methods.lfps import LFPS
from saccade.methods.lfps import cpu as lfps_cpu
from saccade.methods.lfps.choosing import choose
from saccade.methods.lfps.state import LFPSState
from saccade.methods.lfps.tables import ScoreTables, learn
from saccade.ops import Call, cpu, run
from saccade.selection import Candidates, Shape, Tokens

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C++ kernels here")
LENGTH = 40_001
THREADS = (1, 2, 3, 16, 32)


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    cpu.set_isa(None)


def made(units: int, few: bool, seed: int) -> ScoreTables:
    """Heavy entries, and in one of the two tables of a unit very many light ones: some lie above the mean and below the
    threshold."""
    rng = generator(seed)
    both = torch.zeros(2, units, LENGTH)
    for which, table in enumerate(both):
        heavy = torch.rand(units, LENGTH, generator=rng) < 0.01
        light = torch.rand(units, LENGTH, generator=rng) < (0.0 if few else 0.3 if which else 0.002)
        table[heavy] = 1 + torch.rand(int(heavy.sum()), generator=rng)
        table[light & ~heavy] = 0.2
    return ScoreTables.of(both[0], both[1], 4, LENGTH + 3)


@pytest.mark.parametrize("isa", cpu.supported_isas())
@pytest.mark.parametrize(("units", "few"), [(1, True), (3, False), (8, False)])
def test_candidates_are_those_of_one_thread(isa, units, few):
    cpu.set_isa(isa)
    method = LFPS(k=100, a=0.05, rest=None, blocks=0)
    keys, rng = torch.zeros(units, LENGTH + 4, 16), generator(units)
    keys[:, :4] = 1.0  # that the third head looks at alone
    q = torch.randn(units, 1, 16, generator=rng) - 6.0
    q[2:3] = 9.0
    query, tables = Query.of(q, KVView.from_tensors(keys, keys)), made(units, few, units)
    state = LFPSState(tables, torch.zeros(units, 16), torch.zeros(units, 16), LENGTH, torch.zeros(units), LENGTH + 3)
    found = []
    for threads in THREADS:
        torch.set_num_threads(threads)
        found.append(lfps_cpu.choose(method, query, state, LENGTH, 6))
    tables.row.fill_(LENGTH + 3)
    want = choose(method, query, state, LENGTH, 6)
    counts = want.offsets.diff()
    assert int(counts.max()) > 500
    assert units < 3 or int(counts[2]) == 0
    for one in found:
        assert torch.equal(one.offsets, want.offsets)
        assert torch.equal(one.indices, want.indices)


@pytest.mark.parametrize("isa", cpu.supported_isas())
@pytest.mark.parametrize(
    ("units", "steps", "scale", "decay"), [(8, 3, 1.0, 0.95), (2, 62, 1.0, 0.9), (2, 0, 1.05e-8, 0.9), (3, 0, 1.0, 0.0)]
)
def test_tables_learn_what_one_thread_learns(isa, units, steps, scale, decay):
    """Also where power sums are made anew, where stored values are scaled back and where nothing is left of them."""
    cpu.set_isa(isa)
    rng = generator(units)
    heads, count = 2 * units, 3000
    lists = [torch.randperm(LENGTH + 4, generator=rng)[:count].sort().values.int() for _ in range(units)]
    read = Tokens(Shape.suffix(heads, units, 1, LENGTH + 4), torch.arange(units + 1) * count, torch.cat(lists))
    weights = torch.rand(2, units * count, generator=rng)
    idle = torch.arange(heads) // 2 == 1
    idle[0] = True

    def learnt(threads: int | None) -> ScoreTables:
        tables = made(units, True, 7)
        tables.steps = steps
        tables.scale.fill_(scale)
        for _ in range(2):
            if threads is None:
                learn(tables, read, weights, idle, decay)
            else:
                lfps_cpu.learn(tables, read, weights, idle, decay, threads)
        return tables

    one, *others = (learnt(threads) for threads in THREADS)
    parts = ("vertical", "slash", "vertical_max", "slash_max", "sums", "scale")
    for other in others:
        assert all(torch.equal(getattr(one, part), getattr(other, part)) for part in parts)
    torchs = learnt(None)
    for part in parts:
        assert torch.allclose(getattr(one, part), getattr(torchs, part), rtol=1e-4, atol=1e-6 / scale), part
    assert torch.equal(one.vertical[1], made(units, True, 7).vertical[1])  # its heads are all idle


def test_callers_who_share_the_pool_get_what_they_asked_for():
    """More of them than cores, with long rows cut into parts of parts, on any number of threads."""
    shape, rng = Shape.suffix(8, 4, 1, 9001), generator(3)
    q, view = problem(shape, 32, torch.float32, seed=1)
    lists = [torch.randperm(8000, generator=rng)[:3000].sort().values + 3 for _ in range(4)]
    listed = Candidates(shape, torch.arange(5) * 3000, torch.cat(lists).int(), torch.tensor([2000] * 4), 3, 70)
    want = run(Call.of(q, view, listed, threads=1, want_weights=True), "cpu")
    wrong: list[str] = []

    def caller(number: int) -> None:
        for turn in range(12):
            got = run(Call.of(q, view, listed, threads=1 + (5 * number + turn) % 17, want_weights=True), "cpu")
            for name in ("out", "lse", "weights"):
                if not torch.equal(getattr(got, name), getattr(want, name)):
                    wrong.append(name)

    callers = [threading.Thread(target=caller, args=(number,)) for number in range(6)]
    for one in callers:
        one.start()
    for one in callers:
        one.join()
    assert not wrong
