"""What a verification saw, and the draft that reads there: the kernels' weights, whose row counts, and what is read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_helpers import make, tokens
from helpers import generator
from kv_helpers import poisoned_pool
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.scheduling.draft_rounds import Round
from saccade.engine.steps.carried import REGION, Carried, Weighed
from saccade.errors import PolicyError, SaccadeError
from saccade.kv.sequence import SequenceKV
from saccade.methods.arkvale import ArkVale
from saccade.methods.base import Query
from saccade.methods.policy import Policy
from saccade.methods.psa import PSA
from saccade.methods.quest import Quest
from saccade.ops import Call, cpu, run
from saccade.ops.block_scores import ranked_blocks
from saccade.ops.cpu_plans import PlannedRow, PlannedRows
from saccade.ops.cpu_readings import Readings
from saccade.selection import Blocks
from saccade.selection.readings import Everything

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the C++ kernels")
LAYERS, HEADS, KV_HEADS, DIM = 2, 6, 2, 32


class Spec:
    layers, heads, kv_heads, head_dim, windows = LAYERS, HEADS, KV_HEADS, DIM, (None,) * LAYERS


def sequence(length: int, dtype: torch.dtype, rows: int = 0):
    """A sequence of ``length`` keys whose last ``rows`` are not stored yet, and these rows' q, k and v."""
    rng = generator(length)
    kv = SequenceKV(poisoned_pool(LAYERS * (length // 32 + 2), KV_HEADS, DIM, layers=LAYERS, dtype=dtype))
    kv.reserve(length)
    for layer in range(LAYERS):
        kv.append(layer, *torch.randn(2, KV_HEADS, length - rows, DIM, generator=rng).to(dtype))
    q = torch.randn(HEADS, max(1, rows), DIM, generator=rng).to(dtype) * 2
    k, v = torch.randn(2, KV_HEADS, max(1, rows), DIM, generator=rng).to(dtype)
    return kv, q, k, v


@pytest.mark.parametrize("isa", cpu.supported_isas())
@pytest.mark.parametrize(("dtype", "rows", "softcap"), [(torch.float32, 5, None), (torch.bfloat16, 16, 3.0)])
def test_a_verification_says_what_each_row_saw(dtype, rows, softcap, isa):
    """Over several parts of the keys; nothing of the last ones, of which some rows see a part."""
    kv, q, k, v = sequence(2500, dtype, rows)
    peaks = torch.full((LAYERS, rows, KV_HEADS, -(-2500 // REGION)), torch.nan)
    row = PlannedRow(
        0, 2500 - rows, kv.tables, Readings([Everything()] * LAYERS), length=rows, peaks=peaks, region=REGION
    )
    storage = kv.pool.storage
    cpu.set_isa(isa)
    try:
        plain = PlannedRows([row._replace(peaks=None)], storage.k, storage.v)
        given = q, k, v
        out, other = torch.empty(2, rows, HEADS, DIM, dtype=dtype)
        plain.run(1, *given, other, 0.3, softcap, 2)
        PlannedRows([row], storage.k, storage.v).run(1, *given, out, 0.3, softcap, 2)
    finally:
        cpu.set_isa(None)
    assert torch.equal(out, other)
    kv.stored(rows)
    keys = kv.view(1).keys().float()
    scores = torch.einsum("ghrd,gnd->ghrn", q.float().view(KV_HEADS, -1, rows, DIM), keys) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = torch.arange(2500) <= torch.arange(2500 - rows, 2500)[:, None]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    whole = (2500 - rows) // 128 * 128
    expected = weights[..., :whole].unflatten(-1, (-1, REGION)).amax(-1).sum(1)  # [kv_heads, rows, regions]
    found = peaks[1].transpose(0, 1)
    limit = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(found[..., : whole // REGION], expected, atol=limit, rtol=0.05 if limit > 1e-4 else 1e-4)
    assert not found[..., whole // REGION :].any()


@pytest.mark.parametrize("method", [
    Quest(budget=96, dense_layers=0), Quest(budget=96, block_size=8, dense_layers=1, unit="q_head"),
    ArkVale(budget=512, block_size=64, sinks=1, window=1), Quest(budget=512, block_size=128, dense_layers=0),
])  # fmt: skip
def test_a_draft_reads_them_within_its_budget(method):
    kv, q, _, _ = sequence(1500, torch.float32)
    plan = method.device_plan(Spec)
    choice = next(one for one in plan.layers if hasattr(one, "take"))
    peaks = torch.rand(LAYERS, KV_HEADS, 1500 // REGION, generator=generator(3))
    peaks[:, :, 30:] = 0.0
    carried = Carried(peaks, 0.5).blocks(choice)
    assert carried.shape[1] == choice.units
    out = torch.empty(1, HEADS, DIM)
    parts = kv.summaries(choice.source.summary, choice.size)
    row = PlannedRow(0, 1499, kv.tables, Readings(plan.layers), parts, carried=carried)
    planned = PlannedRows([row], kv.pool.storage.k, kv.pool.storage.v)
    planned.attend(1, q, out, 0.3, None, 2)
    query = Query.of(q, kv.view(1), scale=0.3, layer=1)
    own = method.select_decode(query, None)
    last = -(-1500 // choice.size) - choice.last
    lists = []
    for unit, blocks in enumerate(own.indices.split(own.offsets.diff().tolist())):
        ends = [int(b) for b in blocks if b < choice.first or b >= last]
        taken = [int(b) for b in carried[1, unit] if choice.first <= b < last][: choice.take]
        lists.append((ends, taken, [int(b) for b in blocks if choice.first <= b < last]))
    summary = query.kv.summary(choice.source.summary, choice.size)
    best = ranked_blocks(q[:, 0], summary, choice.units, choice.first, last).tolist()
    joined = []
    for (ends, taken, _), order in zip(lists, best):
        more = [b for b in order if b not in taken][: choice.take - len(taken)]
        joined.append(torch.tensor(sorted([*ends, *taken, *more]), dtype=torch.int32))
    assert any(set(taken) - set(chosen) for _, taken, chosen in lists)  # it makes a difference
    expected = run(Call(q, query.kv, Blocks.from_lists(own.shape, choice.size, joined), 0.3, None), "reference").out
    torch.testing.assert_close(out.transpose(0, 1), expected, atol=1e-5, rtol=1e-4)
    assert own.offsets.diff().tolist() == [len(one) for one in joined]


@pytest.mark.parametrize("method", [
    PSA(epsilon=0.3, block_size=16, microbatch=2, rank="cuboid"),
    PSA(epsilon=0.5, microbatch=3, rest="min", rank="cuboid"),
    PSA(epsilon=0.2, block_size=8, microbatch=1, unit="layer", stop="mean", rank="cuboid"),
])  # fmt: skip
def test_a_draft_with_a_rule_reads_them_first(method):
    kv, q, _, _ = sequence(1500, torch.float32)
    choice = method.device_plan(Spec).layers[1]
    peaks = torch.rand(LAYERS, KV_HEADS, 1500 // REGION, generator=generator(3))
    carried = Carried(peaks, 0.5).blocks(choice)
    assert carried.shape[1:] == (choice.units, 256 // choice.size)
    parts, out = kv.summaries(choice.source.summary, choice.size), torch.empty(2, 1, HEADS, DIM)
    query = Query.of(q, kv.view(1), scale=0.3, layer=1)
    own = method.select_decode(query, None)
    ranked = own.complete() if own.complete is not None else own.order
    orders = []
    for unit, blocks in enumerate(ranked.tolist()):
        first = [block for block in carried[1, unit].tolist() if block in blocks]
        orders.append([*first, *(block for block in blocks if block not in first)])
    led = replace(own, order=torch.tensor(orders, dtype=torch.int32), complete=None, ranked=None)
    for at, (row, selection) in enumerate([(None, replace(led, order=ranked)), (carried, led)]):
        step = PlannedRow(0, 1499, kv.tables, Readings([choice] * LAYERS), parts, carried=row)
        planned = PlannedRows([step], kv.pool.storage.k, kv.pool.storage.v)
        planned.attend(1, q, out[at], 0.3, None, 2)
        expected = run(Call(q, query.kv, selection, 0.3, None), "reference")
        torch.testing.assert_close(out[at].transpose(0, 1), expected.out, atol=1e-5, rtol=1e-4)
        read = planned.ruled(0).used[1] + own.always.shape[1]
        assert read.tolist() == expected.used.offsets.diff().tolist()
    assert not torch.allclose(out[0], out[1], atol=1e-4)


def test_the_heaviest_regions_become_blocks():
    peaks = torch.zeros(1, 2, 10)
    peaks[0, 0, 4], peaks[0, 0, 7], peaks[0, 1, 2] = 0.5, 0.7, 0.1
    fine = Quest(budget=16 * 9, dense_layers=0).device_plan(Spec).layers[0]  # takes 8 blocks of 16
    assert sorted(Carried(peaks, 0.5).blocks(fine)[0, 0].tolist()) == [8, 9, 14, 15]
    assert sorted(Carried(peaks, 0.5).blocks(fine)[0, 1].tolist()) == [-1, -1, 4, 5]
    wide = Quest(budget=64 * 3, block_size=64, dense_layers=0, unit="layer").device_plan(Spec).layers[0]
    assert Carried(peaks, 0.5).blocks(wide)[0].tolist() == [[3]]
    assert Carried(peaks, 0.1).blocks(fine) is None
    assert Weighed(7, peaks[:, None], peaks).carried(8, 0.5) is None


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("wide"), max_position_embeddings=2048, head_dim=32)
    return make(folder, blocks=3000, exact=False)


@pytest.mark.parametrize("draft", ["quest(budget=160, dense_layers=0)", "psa(epsilon=0.3, microbatch=1, rank=cuboid)"])
def test_the_last_row_that_stayed_says_where_the_next_draft_reads(llm, monkeypatch, draft):
    """Rows that were rejected say nothing; answers stay dense attention's, alone and in a batch."""
    seen: list[tuple[int, int, bool]] = []  # rows of the verification, which one counts
    begin = Round.__init__

    def noted(self, request, rows, steps, most):
        begin(self, request, rows, steps, most)
        weighed, carried = self.speculation.weighed, request.sequence.memories[request.sequence.id].carried
        if weighed is not None:
            row = rows.start - 1 - weighed.start
            seen.append((weighed.peaks.shape[1], row, torch.equal(carried.peaks, weighed.peaks[:, row])))
            assert carried.peaks.sum() > 0

    monkeypatch.setattr(Round, "__init__", noted)
    prompts = [random_ids(length, seed=length) for length in (800, 700)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    policy = f"lossless(draft={draft}, tokens=4, lookup=0)"
    dense = llm.generate(prompts, params)
    both = llm.generate(prompts, params, policy=policy)
    alone = llm.generate(prompts[1], params, policy=policy)[0]
    assert [tokens(one) for one in both] == [tokens(one) for one in dense]
    assert tokens(alone) == tokens(dense[1])
    assert alone.report["speculation"]["accepted"] == both[1].report["speculation"]["accepted"]
    assert all(same and 0 <= row < rows for rows, row, same in seen)
    assert seen
    assert "psa" in draft or any(row < rows - 1 for rows, row, _ in seen)  # some were rejected
    without = llm.generate(prompts, params, policy=policy.replace("lookup=0", "lookup=0, carried=0"))
    assert [tokens(one) for one in without] == [tokens(one) for one in dense]
    for one, other in zip(both, without) if "quest" in draft else ():  # no more is read
        left, right = one.report["speculation"]["draft"], other.report["speculation"]["draft"]
        assert left["keys_attended"] / left["tokens"] <= right["keys_attended"] / right["tokens"] * 1.02


def test_values_out_of_range_are_refused():
    with pytest.raises(PolicyError, match=r"carried=1.5"):
        Policy.parse("lossless(draft=quest, carried=1.5)")
    kv, *_ = sequence(300, torch.float32, 4)
    row = PlannedRow(0, 296, kv.tables, Readings([Everything()] * LAYERS), length=4, peaks=torch.zeros(2, 4, 2, 5))
    with pytest.raises((ValueError, SaccadeError), match="regions of 1 to 128 keys"):
        PlannedRows([row._replace(region=REGION)], kv.pool.storage.k, kv.pool.storage.v)
