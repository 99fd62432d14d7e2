"""Keys and values in e4m3, and in int8 on a GPU: what is stored, and that all that reads it computes what it does of
the values that the codes stand for, held in a plain pool. Kernels of a GPU run in Triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from coded_rows import adversarial, rounded, same_values, views
from device_helpers import put_on_device
from engine_helpers import GREEDY, tokens
from helpers import KINDS, generator, random_selection
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SaccadeError, SamplingParams
from saccade.engine.device import attention as device_attention
from saccade.kv import KVFormat, KVStorage, KVView
from saccade.kv import rows as by_torch
from saccade.kv.paged import Paged
from saccade.kv.row_formats import FP8, INT8, RowFormat
from saccade.methods.flexprefill.triton_pooled import pooled_shares
from saccade.ops import Call, cpu, cpu_rows, run
from saccade.ops.triton import antidiagonals, block_sums, fp8_tiles, pages, row_shares, row_weights
from saccade.ops.triton.batch import Pages, pages_of, rows_between
from saccade.ops.triton.batched_decode import Summaries, append_rows
from saccade.ops.triton.block_energies import energies
from saccade.ops.triton.block_summaries import summarize
from saccade.ops.triton.decode import attend_decode
from saccade.ops.triton.dispatch import key_lists
from saccade.ops.triton.few_rows import attend_few
from saccade.ops.triton.line_sums import token_sums
from saccade.ops.truth import by_torch as truth_by_torch
from saccade.ops.truth import group_truth
from saccade.selection import Shape

DTYPES = torch.float32, torch.bfloat16
CPU = pytest.mark.skipif(not cpu.available(), reason="needs the C++ kernels")
BOTH = pytest.mark.parametrize("rows", [INT8, FP8], ids=lambda rows: rows.name)
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_the_nearest_multiples_of_the_least_power_of_two(dtype):
    rows = adversarial(dtype)
    stored = FP8.encode(rows, torch.uint8)
    assert stored.dtype == torch.uint8
    assert stored.shape == (16, 64 + 8) == (16, FP8.width(64))
    codes = E4M3[E4M3.isfinite()]
    for row, kept in zip(rows.double(), stored):
        scale = float(kept[64:68].contiguous().view(torch.float32))
        assert not kept[68:].any()
        if not row.isfinite().all():
            assert math.isnan(scale)
            continue
        assert math.frexp(scale)[0] == 0.5
        assert float(row.abs().max()) <= 448 * scale
        assert scale == 2.0**-126 or float(row.abs().max()) > 448 * scale / 2
        values = E4M3[kept[:64].long()] * scale
        nearest = (row[:, None] - codes * scale).abs().amin(1)
        assert torch.equal((row - values).abs(), nearest)
        ties = ((row[:, None] - codes * scale).abs() == nearest[:, None]).sum(1) > 2  # of two values, or of 0 and -0
        assert not (kept[:64][ties] & 1).any()
    read = FP8.decode(stored, dtype)
    assert read.dtype == dtype
    assert read[6:8].isnan().all()
    assert torch.equal(read[0], rows[0])
    assert torch.equal(read[8], rows[8])
    assert torch.equal(FP8.encode(stored, torch.uint8), stored)  # what is stored goes back as it is
    finite = read.float().nan_to_num(0)
    assert torch.equal(FP8.decode(stored, torch.float32).nan_to_num(0), finite)  # whatever the dtype


@CPU
@pytest.mark.parametrize("dtype", DTYPES)
def test_cpp_stores_the_same_bytes(dtype):
    rows = adversarial(dtype)[None].expand(2, -1, -1)
    pools = torch.zeros(2, 3, 2, 16, 72, dtype=torch.uint8)
    cpu_rows.store(rows, rows, *pools, [(i, 1, i) for i in range(16)])
    for pool in pools:
        assert torch.equal(pool[1], FP8.encode(rows, torch.uint8))
        assert not pool[[0, 2]].any()


@BOTH
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_gpu_stores_the_same_bytes_and_reads_them(rows, dtype, head_dim):
    one = adversarial(torch.float32, head_dim).clamp(-6e4, 6e4).to(dtype)
    k = torch.stack([one, one.flip(0)])
    v = torch.stack([one.roll(3, 0), one.roll(5, 0)])
    layout = KVFormat(dtype, 2, head_dim, 16, rows, rows)
    table = torch.tensor([[2, 0], [1, 2]], dtype=torch.int32)
    ours, theirs = (KVStorage(layout, 3) for _ in range(2))
    paged = []
    for storage in (ours, theirs):
        storage.k.zero_()
        storage.v.zero_()
        paged.append(Paged(storage.k, storage.v, table, 25, layout))
    pages.store(paged[0], 9, k, v)
    by_torch.store(paged[1], 9, k, v)
    for one, other in ((ours.k, theirs.k), (ours.v, theirs.v)):
        assert torch.equal(one[..., :head_dim], other[..., :head_dim])  # a scale may be any that is not a number
        assert torch.equal(*(rows.decode(part, torch.float32).nan_to_num(7) for part in (one, other)))
        finite = other[..., head_dim:].contiguous().view(torch.bfloat16).isfinite()
        assert torch.equal(*(part[..., head_dim:].contiguous().view(torch.int16)[finite] for part in (one, other)))
    stored = pages.gather(ours.k, table, 9, 25)
    assert torch.equal(stored, by_torch.gather(ours.k, table, 9, 25))
    read = pages.gather(ours.k, table, 9, 25, dtype)
    assert torch.equal(read.nan_to_num(7), rounded(k, rows).nan_to_num(7))
    pages.store(paged[0], 2, stored[:, 4:11], stored[:, 4:11])  # as it is stored
    assert torch.equal(by_torch.gather(ours.v, table, 2, 9), stored[:, 4:11])


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_give_the_values(dtype):
    _, coded, plain = views(dtype, 77, rows=FP8)
    assert coded.dtype == dtype
    assert coded.format.block_bytes == 2 * 2 * 32 * 72
    for ours, theirs in same_values(coded, plain):
        assert torch.equal(ours, theirs)


@CPU
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_of_a_cpu_compute_what_they_do_of_the_values(dtype):
    n, rng = 333, generator(0)
    q, coded, plain = views(dtype, n, rows=FP8)
    for rows in (1, 3, 150):
        shape = Shape.suffix(8, 2, rows, n)
        for kind in KINDS if rows == 1 else KINDS[:6]:
            selection = random_selection(kind, shape, 2, rng)
            ours, theirs = (
                run(Call.of(q[:, -rows:], view, selection, threads=2), "auto" if kind == "tokens" else "cpu")
                for view in (coded, plain)
            )
            assert torch.equal(ours.out, theirs.out), (kind, rows)
            assert torch.equal(ours.lse, theirs.lse), (kind, rows)
    for make in (lambda view: group_truth(q[:, -1], view, 1, scale=0.1), lambda view: view.summary("cuboid", 16)):
        for ours, theirs in zip(make(coded), make(plain), strict=True):
            assert torch.equal(ours, theirs)
    for ours, theirs in zip(*(truth_by_torch(q[4:, -1], view, 1, scale=0.1) for view in (coded, plain))):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("rows", "head_dim"), [
    (INT8, 80), (FP8, 64), *(pytest.param(*one, marks=pytest.mark.thorough) for one in ((INT8, 64), (FP8, 48))),
])  # fmt: skip
def test_attention_of_a_gpu_computes_what_it_does_of_the_values(rows, head_dim):
    n, rng = 150, generator(0)
    q, coded, plain = views(torch.float32, n, head_dim, heads=4, rows=rows)
    for count in (1, 70):
        shape = Shape.suffix(4, 2, count, n)
        for kind in KINDS if count == 1 else KINDS[:6]:
            selection = random_selection(kind, shape, 2, rng)
            ours, theirs = (run(Call.of(q[:, -count:], view, selection), "triton") for view in (coded, plain))
            torch.testing.assert_close(ours.out, theirs.out, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(ours.lse, theirs.lse, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(*(attend_few(q[:, -3:], [view], scale=0.1) for view in (coded, plain))):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [INT8, pytest.param(FP8, marks=pytest.mark.thorough)], ids=lambda rows: rows.name)
def test_what_chooses_on_a_gpu_reads_the_values_too(rows):
    n, scale = 150, 0.125
    q, coded, plain = views(torch.float32, n, 32, heads=4, rows=rows)
    shape, active = Shape.suffix(4, 2, 70, n), torch.ones(4, dtype=torch.bool)
    some, last = torch.tensor([3, 40, 69]), q[:, -70:]

    def pooled(view: KVView) -> torch.Tensor:
        means = view.summary("mean", 64)[:, 0]
        return pooled_shares(last, view, means, shape, 64, scale, active)

    def packed(view: KVView) -> list[torch.Tensor]:
        tiles = fp8_tiles.pack_keys(view, n, 8, True)
        return [tiles.values.float(), tiles.scale, fp8_tiles.centre(view, n)]

    for make in (
        lambda view: token_sums(last, view, shape, 20, scale),
        lambda view: block_sums.line_sums(last, view, shape, 64, scale),
        lambda view: [antidiagonals.shares(last, view, shape, 8, 64, scale)],
        lambda view: [row_shares.shares(last, view, shape, 4, 64, scale)],
        lambda view: [row_weights.row_weights(last, view, shape, range(1, 3), some, scale)],
        lambda view: [energies(last, view, shape, 64, scale)],
        lambda view: [pooled(view)],
        packed,
        lambda view: [
            summarize(view.paged(), kind, 16, 1, 8) for kind in ("minmax", "cuboid", "mean", "mean_value", "moments")
        ],
    ):
        for ours, theirs in zip(make(coded), make(plain), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5, equal_nan=True)


@BOTH
def test_a_block_that_new_rows_fill_is_summarized_as_it_is_stored(rows):
    rng, layout = generator(1), KVFormat(torch.float32, 2, 32, 16, rows, rows)
    k, v = torch.randn(2, 2, 32, 32, generator=rng)
    storage, table = KVStorage(layout, 2), torch.tensor([[1, 0]], dtype=torch.int32)
    paged = Paged(storage.k, storage.v, table, 32, layout)
    by_torch.store(paged, 0, k[:, :31], v[:, :31])
    made = torch.zeros(2, 2, 2, 32)
    kept = Summaries(torch.tensor([made.data_ptr()]), 16, "cuboid")
    at = Pages(storage.k, storage.v, table[None], torch.tensor([32], dtype=torch.int32), 32)
    assert at.head_dim == 32
    append_rows(k[:, 31][None], v[:, 31][None], at, kept)
    view = KVView(paged)
    for part, values in zip(view.stored(), (k, v)):
        assert torch.equal(part, rows.encode(values, part.dtype))
    assert torch.equal(made[1], view.summary("cuboid", 16)[1])


@BOTH
def test_blocks_of_host_memory_are_read_where_they_lie(rows):
    q, coded, _ = views(torch.float32, 150, 32, heads=4, rows=rows)
    own = coded.paged()
    row = own.k.shape[-1]
    room = torch.zeros(own.k.numel() * 2 + 2 * row, dtype=torch.uint8)
    halves = []
    for number, pool in enumerate((own.k, own.v)):
        start = number * (pool.numel() + row)
        start += (pool.data_ptr() - room.data_ptr() - start) % row
        halves.append(room[start : start + pool.numel()].view(pool.dtype).view(pool.shape))
        halves[-1].copy_(pool)
    tables = own.block_table.clone()[None]
    tables[..., 1::2] = -1 - tables[..., 1::2]
    here = pages_of([coded])
    away = replace(here, tables=tables, host=(halves[0], halves[1]))
    assert rows_between(own.k, halves[0]) is not None
    for slot in own.block_table[0, 1::2].tolist():
        own.k[slot] = 0x7F
        own.v[slot] = 0x7F
    far = attend_decode(q[:, -1][None], away, None, scale=0.1)[0]
    whole = KVView.from_tensors(*(rows.decode(part, torch.float32) for part in _values_of(halves, coded)), 32)
    near = attend_decode(q[:, -1][None], pages_of([whole]), None, scale=0.1)[0]
    torch.testing.assert_close(far, near, atol=1e-5, rtol=1e-5)
    some = key_lists(random_selection("tokens", Shape.suffix(4, 2, 1, 150), 2, generator(0)))
    far = attend_decode(q[:, -1][None], away, some, scale=0.1)[0]
    near = attend_decode(q[:, -1][None], pages_of([whole]), some, scale=0.1)[0]
    torch.testing.assert_close(far, near, atol=1e-5, rtol=1e-5)


def _values_of(halves, view):
    return [by_torch.gather(half, view.paged().block_table, 0, view.length) for half in halves]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(
        "llama", tmp_path_factory.mktemp("wide"), max_position_embeddings=1024, head_dim=32, num_hidden_layers=2
    )


OPTIONS = {
    "dtype": "float32",
    "kv_memory": "8MiB",
    "prefill_chunk": 64,
    "block_size": 16,
    "exact": False,
    "enable_prefix_caching": False,
}
POLICIES = [
    "quest(budget=64, block_size=16, dense_layers=0)",
    "psa(epsilon=0.4, block_size=16, microbatch=1)",
]
THOROUGH = [
    "cis(k=20, sinks=3, local=6, tau=0.0, r=2, m=9)",
    "dense",
    "lfps(k=30, least=1, blocks=4, epsilon=0.1)",
    "lossless(draft=quest(budget=64, block_size=16, dense_layers=0), tokens=3)",
    "arkvale(budget=96, block_size=32)",
    "streaming(sinks=2, window=40)",
    "topk(k=24, unit=kv_head, sinks=2, local=4)",
    "psa(epsilon=0.6, rank=moments, microbatch=2, block_size=16, rest=estimate)",
    "psa(epsilon=0.4, rank=keys, rest=estimate, microbatch=1, block_size=16)",
    "loopserve(alpha=1, budget=40, first=2, n_d=3, observed=2)",
    "snapkv(capacity=40, window=8, unit=q_head)",
    "h2o(budget=40)",
    "rocketkv(capacity=60, window=8, kernel=5, keys=20, channels=0.5)",
    "hshare(source=prompt, heavy=20, sinks=3, local=5, every=3)",
    "double_sparsity(dense_upto=0, source=prompt, dense_layers=1, k=24, channels=0.5)",
]


def answers(model, policies, monkeypatch, values: RowFormat | None = None, **options):
    """Tokens and log-probabilities of each policy; ``values``: from plain pools of what codes of it stand for."""
    ids = random_ids(100, seed=5)
    asked = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    with monkeypatch.context() as patch, LLM(model, **OPTIONS, **options) as llm:
        if values is not None:
            store = device_attention.append_rows

            def append(k, v, *rest):
                store(rounded(k, values), rounded(v, values), *rest)

            patch.setattr(RowFormat, "encode", lambda self, rows, dtype: rounded(rows, values))
            patch.setattr(cpu_rows, "stores", lambda *rest: False)
            patch.setattr(device_attention, "append_rows", append)
        put_on_device(llm)
        done = [llm.generate(ids, asked, policy=policy)[0] for policy in policies]
        for policy, one in zip(policies, done):
            assert one.error is None, policy
            assert set(one.report["decode"]["backends"]) == {"triton"}, policy
        return [(tokens(one), one.outputs[0].cumulative_logprob) for one in done]


def check_recorded(model, policies, rows, monkeypatch) -> None:
    codes = answers(model, policies, monkeypatch, kv_dtype=rows.name, kv_rotate=rows.turned)
    plain = answers(model, policies, monkeypatch, values=rows, kv_rotate=rows.turned)
    for policy, ours, theirs in zip(policies, codes, plain):
        assert ours[0] == theirs[0], policy
        assert ours[1] == pytest.approx(theirs[1], abs=1e-4), policy


def test_recorded_steps_turn_queries_and_keys(model, monkeypatch):
    """As the rows before them, which prefill has stored."""
    (turned,), (plain,) = (answers(model, ["dense"], monkeypatch, kv_rotate=one) for one in (True, False))
    assert turned[0] == plain[0]
    assert turned[1] == pytest.approx(plain[1], abs=1e-4)


@BOTH
def test_recorded_steps_answer_as_from_a_plain_pool_of_the_values(model, rows, monkeypatch):
    check_recorded(model, POLICIES[: 1 if rows is FP8 else None], rows, monkeypatch)


@pytest.mark.thorough
@BOTH
@pytest.mark.parametrize("policy", THOROUGH)
def test_other_methods_do_too(model, policy, rows, monkeypatch):
    check_recorded(model, [policy], rows, monkeypatch)


@CPU
def test_engines_on_a_cpu_answer_as_the_reference(model):
    ids, answers = random_ids(150, seed=5), []
    for backend in ("reference", "auto"):
        with LLM(model, **OPTIONS, kv_dtype="fp8", backend=backend) as llm:
            answers.append([tokens(llm.generate(ids, GREEDY, policy=policy)[0]) for policy in POLICIES])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("unit", ["block", pytest.param("head", marks=pytest.mark.thorough)])
def test_a_small_device_with_host_memory_behind_it_changes_no_token(model, unit):
    slot = KVFormat(torch.float32, 2, 32, 16, FP8, FP8).block_bytes
    ids, policy = random_ids(190, seed=7), "quest(budget=64, block_size=16, dense_layers=0)"
    with LLM(model, **OPTIONS, kv_dtype="fp8") as llm:
        want = tokens(llm.generate(ids, GREEDY, policy=policy)[0])
    with LLM(model, **OPTIONS | {"kv_memory": 24 * slot}, kv_host="8MiB", kv_unit=unit, kv_dtype="fp8") as llm:
        llm.pool.slots = llm.pool.slots.clone()  # as a GPU has it
        put_on_device(llm)
        (done,) = llm.generate([ids], GREEDY, policy=policy)
        assert tokens(done) == want
        assert min(done.report["tiers"]["misses"], done.report["tiers"]["bytes_read"]) > 0
        assert llm.pool.tiers.offer().host is not None  # read where it lies
        storage, tier = llm.pool.storage, llm.pool.tiers.tier
        for here, there in ((storage.k, tier.k), (storage.v, tier.v)):
            assert rows_between(here, there) is not None
            assert there.data_ptr() % 16 == 0


def test_steps_are_the_distances_of_neighbouring_numbers():
    stored = FP8.encode(adversarial(torch.float32)[[1, 2, 8, 10, 11]], torch.uint8)
    finite = E4M3[E4M3.isfinite()].unique()
    for row, steps in zip(stored, FP8.step(stored, torch.float32).double()):
        scale = float(row[64:68].contiguous().view(torch.float32))
        at = torch.searchsorted(finite, E4M3[row[:64].long()])
        above = finite[(at + 1).clamp(max=len(finite) - 1)] - finite[at]
        below = finite[at] - finite[(at - 1).clamp(min=0)]
        assert torch.equal(steps, torch.maximum(above, below) * scale)


def test_what_it_refuses():
    with pytest.raises(SaccadeError, match="kv_dtype='fp8' takes a head_dim that is a multiple of 8, got 12; leave"):
        KVFormat(torch.float32, 2, 12, 16, FP8, FP8)
