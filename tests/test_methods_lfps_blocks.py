"""What joins LFPS's tables: blocks that summaries point at, a floor of k, and the history of the turn before."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from engine_helpers import GREEDY, make
from helpers import generator
from tiny_models import random_ids

from saccade import SamplingParams
from saccade.errors import PolicyError
from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Query
from saccade.methods.lfps import LFPS, choosing, stand_ins
from saccade.ops import Call, attend, cpu, cpu_blocks, run
from saccade.ops.block_scores import ranked_blocks, top_blocks


@pytest.mark.parametrize(("size", "first", "stop"), [(8, 4, 194), (16, 0, 200), (32, 9, 70), (16, 50, 51)])
def test_blocks_join_lists(size, first, stop):
    rng = generator(size)
    lists = [
        sorted(i for i in range(first, stop) if torch.rand((), generator=rng) < share) for share in (0.3, 0.0, 1.0)
    ]
    blocks = torch.stack([torch.randperm(200 // size, generator=rng)[:2].sort().values for _ in lists]).int()
    offsets = torch.tensor([0, *(len(part) for part in lists)]).cumsum(0)
    flat = torch.tensor([i for part in lists for i in part], dtype=torch.int32)
    got_offsets, got = choosing.join_blocks(offsets, flat, blocks, size, first, stop)
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
        query = Query.of(q[:, -1:], whole)
        ran = run(Call.of(query.q, whole, method.select_decode(query, state)))
        found[blocks] = [new in part.tolist() for part in ran.used.lists()]
        assert query.cost.estimated == (n // 8 if blocks else 0)
    assert all(found[2])
    assert not any(found[0])


@pytest.mark.parametrize("isa", cpu.supported_isas())
@pytest.mark.parametrize("units", [1, 2, 4, 12])
@pytest.mark.parametrize("blocks", [5, 263, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_ranked_by_their_mean_keys(isa, units, blocks, dtype):
    rng = generator(blocks)
    q = torch.randn(12, 80, generator=rng).to(dtype)
    means = torch.randn(blocks, 1, 4, 80, generator=rng).to(dtype)
    assert cpu_blocks.serves_summary(q, means, units) is None
    cpu.set_isa(isa)
    try:
        every = ranked_blocks(q, means, units, 2, blocks)
        best = {count: top_blocks(q, means, units, count, 2, blocks) for count in (1, blocks // 2 - 1)}
    finally:
        cpu.set_isa(None)
    scores = torch.stack([means[:, 0, head // 3].double() @ q[head].double() for head in range(12)])
    scores = scores.view(units, 12 // units, blocks).mean(1)
    for unit in range(units):
        falling = scores[unit, every[unit].long()]
        assert sorted(every[unit].tolist()) == list(range(2, blocks))
        assert bool((falling.diff() < 1e-4).all())
        for count, chosen in best.items():
            assert chosen[unit].tolist() == sorted(every[unit, :count].tolist())


def test_equal_means_keep_their_order():
    means = torch.randn(5, 1, 2, 32, generator=generator(1))[torch.arange(203) % 5].contiguous()
    q = torch.randn(4, 32, generator=generator(2))
    for unit, row in enumerate(ranked_blocks(q, means, 2, 2, 203).tolist()):
        scores = (means[:5, 0, unit] @ q[2 * unit : 2 * unit + 2].mean(0)).tolist()
        kinds = sorted(range(5), key=lambda kind: -scores[kind])
        assert row == [block for kind in kinds for block in range(2, 203) if block % 5 == kind]


def test_k_has_a_floor_where_it_is_a_share():
    assert LFPS().budget(2000) == 256
    assert LFPS().budget(100_000) == 2000
    assert LFPS(least=1).budget(2000) == 40
    assert LFPS(k=7).budget(2000) == 7


@pytest.mark.parametrize("options", [{"blocks": -1}, {"block_size": 24}, {"least": 0}, {"history": "forget"}], ids=str)
def test_bad_options(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        LFPS(**options)


# --- what stands for the rest


def listed(*lists: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = torch.tensor([0, *(len(part) for part in lists)]).cumsum(0)
    return offsets, torch.tensor([i for part in lists for i in part], dtype=torch.int32)


@pytest.mark.parametrize(("dtype", "softcap"), [("float32", None), ("float32", 2.0), ("bfloat16", None)])
def test_probes_of_every_key_are_the_rest_itself(dtype, softcap):
    rng, n = generator(1), 120
    k, v = torch.randn(2, 2, n, 16, generator=rng).to(getattr(torch, dtype))
    q = torch.randn(4, 1, 16, generator=rng).to(k.dtype)
    lists = [[4, 5, 9, 100], [], list(range(4, 110)), [60]]
    view = KVView.from_tensors(k, v, shuffle_seed=2)
    got = stand_ins.sampled_rest(q, view, *listed(*lists), 4, 110, 200, 0.25, softcap)
    for head, part in enumerate(lists):
        left = [i for i in range(4, 110) if i not in part]
        logits = 0.25 * k[head // 2, left].double() @ q[head, 0].double()
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        assert float(got[head]) == pytest.approx(float(logits.logsumexp(0)) if left else -math.inf, abs=1e-5)


@pytest.mark.parametrize("probes", [1, 7, 64])
def test_probes_stand_for_what_they_pass_over(probes):
    """Two lists, each for two query heads: probes on a list do not count, the others for as many keys as are left."""
    rng, n, first, stop = generator(5), 900, 4, 893
    k, q = torch.randn(2, n, 32, generator=rng), torch.randn(4, 1, 32, generator=rng)
    lists = [sorted(set(torch.randint(first, stop, (300,), generator=rng).tolist())), list(range(40, 700))]
    got = stand_ins.sampled_rest(
        q, KVView.from_tensors(k, k, shuffle_seed=1), *listed(*lists), first, stop, probes, 0.2
    )
    golden = (math.sqrt(5) - 1) / 2
    places = sorted(first + int((i + 0.5) * golden % 1.0 * (stop - first)) for i in range(probes))
    for head in range(4):
        part = lists[head // 2]
        left = [i for i in places if i not in part]
        logits = 0.2 * k[head // 2, left].double() @ q[head, 0].double()
        share = (stop - first - len(part)) / max(1, len(left))
        want = float(logits.logsumexp(0)) + math.log(share) if left else -math.inf
        assert float(got[head]) == pytest.approx(want, abs=1e-5)


def test_few_probes_come_close():
    rng, n = generator(2), 20_000
    k, q = torch.randn(1, n, 16, generator=rng), torch.randn(2, 1, 16, generator=rng)
    view = KVView.from_tensors(k, k)
    got = stand_ins.sampled_rest(q, view, *listed([], list(range(500, 800))), 0, n, 64, 0.1)
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
    tables = session.sequence.memories[session.sequence.id].states[layer].tables
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
            session.generate(second, SamplingParams(temperature=0, max_tokens=1))  # its token comes from the prefill
            after[history] = true_tables(session, layer)
            learnt = session.sequence.memories[session.sequence.id].states[layer].tables.steps
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


def _dropping(engine, session):
    """``engine.step``, before whose fourth call from now, and in its thread, the session's keys go."""
    step, calls = engine.step, []

    def stepped():
        calls.append(len(calls))
        if len(calls) == 4:
            session.sequence.drop_kv()
        return step()

    return stepped


@pytest.mark.parametrize("when", ["within", "before"])
@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_a_kept_history_follows_a_turn_whose_keys_were_dropped(llm, cut, cancelled, when, monkeypatch):
    """Turn two, on all that was said or where the last ten tokens were cut off, and turn three: tokens and tables are
    the same if preemption takes the keys within each, or before turn two begins, and if turn two is cancelled."""
    first, second, third = (random_ids(length, seed=length) for length in (130, 41, 23))
    got = []
    for dropped in (False, True):
        with llm.session("lfps(k=20, epsilon=1.0, history=keep)") as session:
            session.generate(first, GREEDY)
            said = session.token_ids[:-10] if cut else session.token_ids
            session.sequence.truncate(len(said))
            for ids in (second, third):
                cancels = ids is second and cancelled
                with monkeypatch.context() as patch:
                    if dropped and when == "before" and ids is second:
                        session.sequence.drop_kv()
                    elif dropped:
                        patch.setattr(llm.engine, "step", _dropping(llm.engine, session))
                    steps = session.stream(ids, replace(GREEDY, max_tokens=200) if cancels else GREEDY)
                    if cancels:
                        answered = 0
                        while answered < 3:  # well into its decode steps
                            answered += len(next(steps).new_tokens)
                        steps.close()
                        assert session.token_ids == said
                    else:
                        list(steps)
            got.append((session.token_ids, true_tables(session, 1)))
    assert got[0][0] == got[1][0]
    torch.testing.assert_close(got[0][1], got[1][1], atol=1e-5, rtol=1e-4)
