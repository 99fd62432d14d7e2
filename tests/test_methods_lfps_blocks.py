"""What joins LFPS's tables: blocks that summaries point at, a floor of k, and the history of the turn before."""

from __future__ import annotations

import math

import pytest
import torch
from engine_helpers import GREEDY, make
from helpers import generator
from tiny_models import random_ids

from saccade.errors import PolicyError
from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Query
from saccade.methods.lfps import LFPS
from saccade.ops import Trace, attend, candidates


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(("size", "first", "stop"), [(8, 4, 194), (16, 0, 200), (32, 9, 70), (16, 50, 51)])
def test_blocks_join_lists(monkeypatch, kernels, size, first, stop):
    if not kernels:
        monkeypatch.setattr(candidates.cpu_decode, "holds", lambda table: False)
    rng = generator(size)
    lists = [
        sorted(i for i in range(first, stop) if torch.rand((), generator=rng) < share) for share in (0.3, 0.0, 1.0)
    ]
    blocks = torch.stack([torch.randperm(200 // size, generator=rng)[:2].sort().values for _ in lists]).int()
    offsets = torch.tensor([0, *(len(part) for part in lists)]).cumsum(0)
    flat = torch.tensor([i for part in lists for i in part], dtype=torch.int32)
    got_offsets, got = candidates.join_blocks(offsets, flat, blocks, size, first, stop)
    assert got.dtype == torch.int32
    for unit, part in enumerate(lists):
        inside = {i for b in blocks[unit].tolist() for i in range(b * size, (b + 1) * size) if first <= i < stop}
        assert got[got_offsets[unit] : got_offsets[unit + 1]].tolist() == sorted(inside | set(part))
    assert int(got_offsets[-1]) == got.numel()


@pytest.mark.parametrize("unit", ["q_head", "kv_head"])
def test_a_key_that_no_query_asked_for_is_found_by_its_block(unit):
    """All rows of the prompt look at one key; the next row asks for another, which only a summary can know of."""
    rng, n, old, new = generator(0), 400, 60, 215
    k, v = torch.randn(2, 2, n, 32, generator=rng)
    q = 0.1 * torch.randn(4, n, 32, generator=rng)
    asked = torch.nn.functional.normalize(torch.randn(2, 2, 32, generator=rng), dim=-1) * 12
    k[:, old], k[:, new] = asked
    q[:, :-1] += asked[0].repeat_interleave(2, 0)[:, None]
    q[:, -1] += asked[1].repeat_interleave(2, 0)
    whole, found = KVView.from_tensors(k, v), {}
    for blocks in (0, 2):
        method = LFPS(k=16, unit=unit, blocks=blocks, epsilon=1.0)
        state = method.begin(Chunk.of(q[:, n - 33 : n - 1], whole.upto(n - 1)))
        query, trace = Query.of(q[:, -1:], whole), Trace()
        attend(query.q, whole, method.select_decode(query, state), trace=trace)
        found[blocks] = [new in part.tolist() for part in trace.used.lists()]
        assert query.cost.estimated == (n // 16 if blocks else 0)
    assert all(found[2])
    assert not any(found[0])


def test_k_has_a_floor_where_it_is_a_share():
    assert LFPS().budget(2000) == 128
    assert LFPS().budget(100_000) == 2000
    assert LFPS(least=1).budget(2000) == 40
    assert LFPS(k=7).budget(2000) == 7


@pytest.mark.parametrize("options", [{"blocks": -1}, {"block_size": 24}, {"least": 0}, {"history": "forget"}], ids=str)
def test_bad_options(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        LFPS(**options)


# --- what stands for the rest


def test_probes_of_every_key_are_the_rest_itself():
    rng, n = generator(1), 120
    k, v = torch.randn(2, 2, n, 16, generator=rng)
    q = torch.randn(4, 1, 16, generator=rng)
    lists = [[4, 5, 9, 100], [], list(range(4, 110)), [60]]
    offsets = torch.tensor([0, *(len(part) for part in lists)]).cumsum(0)
    indices = torch.tensor([i for part in lists for i in part], dtype=torch.int32)
    view = KVView.from_tensors(k, v, shuffle_seed=2)
    got = candidates.sampled_rest(q, view, offsets, indices, 4, 110, 200, 0.25)
    for head, part in enumerate(lists):
        left = [i for i in range(4, 110) if i not in part]
        expected = (0.25 * k[head // 2, left].double() @ q[head, 0].double()).logsumexp(0) if left else -math.inf
        assert float(got[head]) == pytest.approx(float(expected), abs=1e-5)


def test_few_probes_come_close():
    rng, n = generator(2), 20_000
    k, q = torch.randn(1, n, 16, generator=rng), torch.randn(2, 1, 16, generator=rng)
    view = KVView.from_tensors(k, k)
    offsets, indices = torch.tensor([0, 0, 300]), torch.arange(500, 800, dtype=torch.int32)
    got = candidates.sampled_rest(q, view, offsets, indices, 0, n, 64, 0.1)
    logits = 0.1 * k[0].double() @ q[:, 0].double().T
    outside = torch.ones(n, dtype=torch.bool)
    outside[500:800] = False
    assert float(got[0]) == pytest.approx(float(logits[:, 0].logsumexp(0)), abs=0.2)
    assert float(got[1]) == pytest.approx(float(logits[outside, 1].logsumexp(0)), abs=0.2)


@pytest.mark.parametrize("unit", ["q_head", "kv_head"])
def test_a_head_that_averages_keeps_its_average(unit):
    """Flat attention over values with a common part: what is read holds a tenth of the weight, the mean the rest."""
    rng, n = generator(3), 600
    k, v = 0.05 * torch.randn(2, n, 32, generator=rng), torch.randn(2, n, 32, generator=rng) + 1.0
    q = torch.randn(4, n, 32, generator=rng)
    whole = KVView.from_tensors(k, v)
    query, error = Query.of(q[:, -1:], whole), {}
    dense = attend(query.q, whole)[0]
    for rest in ("sample", None):
        method = LFPS(k=30, unit=unit, rest=rest, blocks=0, epsilon=1.0)
        state = method.begin(Chunk.of(q[:, n - 33 : n - 1], whole.upto(n - 1)))
        out = attend(query.q, whole, method.select_decode(query, state))[0]
        error[rest] = float((out - dense).norm() / dense.norm())
    assert error["sample"] < 0.1
    assert error[None] > 0.15


# --- turns


@pytest.fixture(scope="module")
def llm(tiny_llama):
    return make(tiny_llama)


def true_tables(session, layer: int) -> torch.Tensor:
    """Vertical and slash, [2, units, capacity], in float64."""
    tables = session.sequence.states[layer].tables
    return torch.stack([tables.vertical, tables.slash]).double() * tables.scale[:, None]


@pytest.mark.parametrize("rows", [9, 60])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_kept_history_decays_by_a_step_a_row(llm, layer, rows):
    """Tables after the second prefill: those of a restart, and r to the rows (at most s) of what turn one left."""
    first, second = random_ids(150, seed=1), random_ids(rows, seed=2)
    after = {}
    for history in ("restart", "keep"):
        with llm.session(f"lfps(k=20, epsilon=1.0, s=32, history={history})") as session:
            session.generate(first, GREEDY)
            before = true_tables(session, layer)
            stream = session.stream(second, GREEDY)
            next(stream)  # the first token comes from the prefill
            after[history] = true_tables(session, layer)
            learnt = session.sequence.states[layer].tables.steps
            stream.close()
    assert learnt == 0
    n = 150 + 10 + rows - 4
    share = 0.95 ** min(32, rows + 1)  # the last sampled token joins the prefill
    width = min(before.shape[2], n)
    expected = (1 - share) * after["restart"]
    expected[..., :width] += share * before[..., :width]
    torch.testing.assert_close(after["keep"][..., :n], expected[..., :n], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(after["keep"].sum(-1), torch.full_like(before[..., 0], 10.0), atol=1e-3, rtol=1e-3)


def test_what_a_cut_leaves_is_no_history(llm):
    """A context that goes on elsewhere restarts: its tables saw tokens that are gone."""
    ids = random_ids(180, seed=3)
    other = ids[:120] + random_ids(50, seed=4)
    got = {}
    for history in ("keep", "restart"):
        with llm.session(f"lfps(k=20, epsilon=1.0, history={history})") as session:
            session.complete(ids, GREEDY)
            session.complete(other, GREEDY, keep=120)
            got[history] = true_tables(session, 1)
    assert torch.equal(got["keep"], got["restart"])
