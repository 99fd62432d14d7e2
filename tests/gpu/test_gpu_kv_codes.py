"""Keys and values in 8 bits on a GPU, int8 and e4m3: kernels against the reference over a plain pool of the values that
codes stand for, engines against a CPU's."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch
from coded_rows import adversarial, rounded
from engine_helpers import EVERY, GREEDY, tokens
from gpu_helpers import BOUND
from helpers import KINDS, generator, planted_heads, random_selection
from test_gpu_engine import settled
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.device import attention as device_attention
from saccade.kv import KVFormat, KVStorage, KVView, offers
from saccade.kv import rows as by_torch
from saccade.kv.paged import Paged
from saccade.kv.row_formats import FORMATS, RowFormat
from saccade.ops import Call, run
from saccade.ops.triton import pages
from saccade.ops.triton.batch import Pages
from saccade.ops.triton.batched_decode import Summaries, append_rows
from saccade.ops.triton.block_summaries import summarize
from saccade.ops.triton.few_rows import attend_few, attend_groups
from saccade.selection import Dense, Shape

BOTH = pytest.mark.parametrize("rows", ["int8", "fp8"], indirect=True)


@pytest.fixture(scope="module")
def rows(request):
    return FORMATS[getattr(request, "param", "int8")]


@BOTH
@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_stores_and_summarizes_what_torch_does(rows, dtype, head_dim):
    one = adversarial(torch.float32, head_dim).clamp(-6e4, 6e4).to("cuda", dtype)
    k, v = torch.stack([one, one.flip(0)]), torch.stack([one.roll(3, 0), one.roll(5, 0)])
    layout = KVFormat(dtype, 2, head_dim, 16, rows, rows)
    table = torch.tensor([[2, 0], [1, 2]], dtype=torch.int32).cuda()
    storages = [KVStorage(layout, 3, device) for device in ("cuda", "cuda", "cpu")]  # on a GPU torch divides otherwise
    ours, appended, theirs = (Paged(one.k.zero_(), one.v.zero_(), table.to(one.device), 25, layout) for one in storages)
    pages.store(ours, 9, k, v)
    by_torch.store(theirs, 9, k.cpu(), v.cpu())
    at = Pages(appended.k, appended.v, table[None].expand(16, -1, -1), torch.arange(10, 26).int().cuda(), 25)
    append_rows(k.transpose(0, 1), v.transpose(0, 1), at)
    for one in (ours, appended):
        for mine, other in ((one.k.cpu(), theirs.k), (one.v.cpu(), theirs.v)):
            assert torch.equal(mine[..., :head_dim], other[..., :head_dim])  # a scale may be any that is not a number
            values = [rows.decode(part, torch.float32).nan_to_num(7) for part in (mine, other)]
            assert torch.equal(*values)
    read = pages.gather(ours.k, table, 9, 25, dtype)
    assert torch.equal(read.cpu().nan_to_num(7), rounded(k.cpu(), rows).nan_to_num(7))
    stored = pages.gather(ours.k, table, 9, 25)
    pages.store(ours, 2, stored[:, 4:11], stored[:, 4:11])
    assert torch.equal(by_torch.gather(ours.v, table, 2, 9), stored[:, 4:11])
    k, v = (part.nan_to_num(1, 1, 1) for part in (k, v))
    coded, plain = KVView.from_tensors(k, v, 16, rows=rows), KVView.from_tensors(rounded(k, rows), rounded(v, rows), 16)
    for kind in ("minmax", "cuboid", "mean_value"):  # sums may be added up in another order
        close(*(summarize(one.paged(), kind, 8, 0, 2) for one in (coded, plain)), dtype)
    made, own = torch.zeros(1, 2, 2, head_dim, dtype=dtype, device="cuda"), coded.paged()
    at = Pages(own.k, own.v, own.block_table[None], torch.tensor([16]).int().cuda(), 16)
    append_rows(k[:, 15][None], v[:, 15][None], at, Summaries(torch.tensor([made.data_ptr()]).cuda(), 16, "cuboid"))
    close(made, summarize(coded.paged(), "cuboid", 16, 0, 1), dtype)


def close(ours, theirs, dtype) -> None:
    """But for a rounding of the greatest value."""
    bound = 2 * torch.finfo(dtype).eps * float(theirs.abs().max())
    torch.testing.assert_close(ours, theirs, atol=max(bound, 1e-6), rtol=0)


def views(rows, dtype, n, head_dim, scale=1.0):
    """Queries, and views of codes, of what they stand for, and of that in the queries' dtype."""
    q, k, v = planted_heads(8, 2, n, head_dim, seed=n)
    v[:, 5] *= 40 * scale
    v[1, 8:40] *= 2.0**-12
    k[:, 9] *= 30
    q, k, v = (part.to("cuda", dtype) for part in (q, k, v))
    exact = [rounded(part.float(), rows) for part in (k, v)]
    plain = [
        KVView.from_tensors(*parts, 32, shuffle_seed=2) for parts in (exact, [one.to(dtype).float() for one in exact])
    ]
    return q, KVView.from_tensors(k, v, 32, shuffle_seed=1, rows=rows), *plain


@BOTH
@pytest.mark.parametrize(("dtype", "head_dim", "count"), [
    *((torch.bfloat16, 128, count) for count in (1, 3, 150, 2500)), (torch.bfloat16, 256, 1), (torch.float16, 80, 1),
    (torch.float16, 64, 2500), (torch.float32, 64, 1), (torch.float32, 64, 150),
])  # fmt: skip
def test_attention_over_every_selection(rows, dtype, head_dim, count):
    """One row multiplies codes; more rows, and a band's, what they stand for in the queries' dtype, as the reference
    does."""
    n = 3000 if count > 300 else 333
    q, coded, exact, held = views(rows, dtype, n, head_dim)
    shape, q = Shape.suffix(8, 2, count, n), q[:, -count:]
    bound = min(BOUND[dtype], 6e-3)
    for kind in KINDS if count == 1 else KINDS[:6]:
        selection = random_selection(kind, shape, 2, generator(0))
        got = run(Call.of(q, coded, selection))
        codes = count == 1 and kind != "band"
        want = run(Call.of(q.float(), exact if codes else held, selection), "reference")
        assert got.backend == "triton"
        error = (got.out.float() - want.out).norm() / want.out.norm()
        assert float(error) < bound, (kind, float(error))
        torch.testing.assert_close(got.lse, want.lse, atol=2e-2, rtol=1e-2)
    if count == 3:
        out, _ = attend_few(q, [coded], scale=0.1)
        want = run(Call.of(q.float(), exact, random_selection("dense", shape, 2, generator(0)), scale=0.1), "reference")
        error = (out.float() - want.out).norm() / want.out.norm()
        assert float(error) < bound, float(error)


@pytest.mark.parametrize(("dtype", "head_dim", "heads", "count"), [
    (torch.float32, 128, 1, 64), (torch.float32, 256, 8, 8), (torch.bfloat16, 256, 16, 16), (torch.bfloat16, 128, 71, 3)
])  # fmt: skip
@pytest.mark.parametrize("rows", ["auto", "int8"], indirect=True)
def test_a_few_rows_of_many_or_wide_heads(rows, dtype, head_dim, heads, count):
    """What did not fit a multiprocessor's shared memory, and a tile's rows."""
    q, k, v = (part.to("cuda", dtype) for part in planted_heads(heads, 1, 700, head_dim, seed=3))
    coded = KVView.from_tensors(k, v, 32, shuffle_seed=1, rows=rows)
    exact = KVView.from_tensors(*(rounded(part.float(), rows).float() for part in (k, v)), 32)
    q, shape = q[:, -count:], Shape.suffix(heads, 1, count, 700)
    want = run(Call.of(q.float(), exact, Dense(shape), scale=0.1), "reference")
    for out, lse in (
        attend_few(q, [coded], scale=0.1),
        attend_groups(q, coded, 700 - count, scale=0.1),
    ):
        error = (out.float() - want.out).norm() / want.out.norm()
        assert float(error) < max(BOUND[dtype], 1e-5), float(error)
        torch.testing.assert_close(lse, want.lse, atol=2e-2, rtol=1e-2)


@BOTH
def test_queries_and_values_far_beyond_float16(rows):
    """Products are of float16; scales are not."""
    for factor in (1e-6, 1e6):
        q, coded, plain, _ = views(rows, torch.bfloat16, 333, 128, factor)
        shape = Shape.suffix(8, 2, 1, 333)
        for kind in ("dense", "ranking"):
            selection = random_selection(kind, shape, 2, generator(0))
            for part in (q[:, -1:] * 1e4, q[:, -1:] * 1e-6):
                got = run(Call.of(part, coded, selection, scale=1e-4))
                want = run(Call.of(part.float(), plain, selection, scale=1e-4), "reference")
                assert float((got.out.float() - want.out).norm() / want.out.norm()) < 8e-3, (factor, kind)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=2048, head_dim=32)


@pytest.fixture(scope="module")
def engines(folder, rows):
    """A CPU and a GPU engine of it."""
    options = {"kv_memory": "64MiB", "prefill_chunk": 256, "kv_dtype": rows.name}
    return [LLM(folder, device=device, **options) for device in ("cpu", "cuda")]


@pytest.mark.parametrize(
    ("rows", "policy"),
    [(kind, settled(policy)) for kind, some in (("int8", EVERY), ("fp8", EVERY[:2])) for policy in some],
    indirect=["rows"],
    ids=lambda one: getattr(one, "text", one),
)
def test_tokens_equal_those_of_the_cpu(engines, policy):
    prompt = random_ids(400, seed=5)
    on_cpu, on_gpu = (engine.generate(prompt, GREEDY, policy=policy)[0] for engine in engines)
    assert on_cpu.error is None, on_cpu.error
    assert on_gpu.error is None, on_gpu.error
    assert tokens(on_gpu) == tokens(on_cpu)
    backends = on_gpu.report["prefill"]["backends"] | on_gpu.report["decode"]["backends"]
    assert not any(name.startswith("cpu") for name in backends)


HALVES = [
    "dense",
    "quest(budget=64, dense_layers=0)",
    "psa(epsilon=0.2, block_size=16)",
    "psa(epsilon=0.4, rank=keys, rest=estimate, block_size=16)",
    "cis(k=40, sinks=3, local=6, tau=0.0)",
    "lfps(k=60, blocks=4)",
    "lfps(k=60, unit=kv_head)",
    "topk(k=40)",
    "h2o(budget=80)",
    "rocketkv(capacity=160, window=16, kernel=9, keys=60)",
    "loopserve(budget=80)",
    "flexprefill(min_budget=64)",
]


@pytest.fixture(scope="module")
def answering(folder, rows):
    """What answers from rows of 8 bits in bfloat16, from plain rows of what they stand for, and in float32: a policy
    and prompts to tokens, each with its log-probability."""
    settings = {"device": "cuda", "kv_memory": "32MiB", "prefill_chunk": 256, "kv_rotate": rows.turned}
    kinds = (rows.name, "bfloat16"), ("auto", "bfloat16"), (rows.name, "float32")
    served = [LLM(folder, kv_dtype=kv_dtype, dtype=dtype, **settings) for kv_dtype, dtype in kinds]
    asked = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    store, put = pages.store, device_attention.append_rows

    def answers(number: int, policy: str, prompts: list[list[int]]) -> list[list[tuple[int, float]]]:
        with pytest.MonkeyPatch.context() as patch:
            if number == 1:
                patch.setattr(RowFormat, "encode", lambda self, values, dtype: rounded(values, rows))
                patch.setattr(
                    pages, "store", lambda at, start, k, v: store(at, start, rounded(k, rows), rounded(v, rows))
                )
                patch.setattr(
                    device_attention, "append_rows", lambda k, v, *a: put(rounded(k, rows), rounded(v, rows), *a)
                )
            found = served[number].generate(prompts, asked, policy=policy)
        for done in found:
            assert done.error is None, done.error
        return [
            [(token, next(iter(one.values())).logprob) for token, one in zip(tokens(done), done.outputs[0].logprobs)]
            for done in found
        ]

    yield answers
    for llm in served:
        llm.close()


def apart(ours: list[list[tuple[int, float]]], theirs: list[list[tuple[int, float]]]) -> list[float]:
    """By how much log-probabilities differ, until answers part."""
    found = []
    for mine, other in zip(ours, theirs):
        for (token, one), (its, two) in zip(mine, other):
            if token != its:
                break
            found.append(abs(one - two))
    return found


@pytest.mark.parametrize(
    ("rows", "policy"),
    [("int8", one) for one in HALVES] + [("fp8", "psa(epsilon=0.2, block_size=16)")],
    indirect=["rows"],
)
def test_a_model_in_bfloat16_answers_as_from_a_plain_pool_of_the_values(answering, policy):
    """It is as far from float32's log-probabilities as that. Rounding alone moves single ones by as much as 0.8 where
    it changes which keys are read, so that no two answers in bfloat16 are held against each other token by token."""
    prompts = [random_ids(length, seed=length) for length in (700, 411, 520, 333)]
    ours, plain, exact = (answering(number, policy, prompts) for number in range(3))
    mine, other = apart(ours, exact), apart(plain, exact)
    assert min(len(mine), len(other)) >= 8
    assert statistics.median(mine) <= 2 * statistics.median(other) + 0.02, (mine, other)


def test_recorded_steps_turn_queries_and_keys(folder):
    """As the rows before them, which prefill has stored."""
    answers, prompt = [], random_ids(300, seed=4)
    for turned in (True, False):
        with LLM(folder, dtype="float32", device="cuda", kv_memory="32MiB", kv_rotate=turned) as llm:
            answers.append(tokens(llm.generate(prompt, GREEDY)[0]))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("count", [2, 15])
def test_recorded_verifications_give_dense_tokens(engines, folder, rows, count):
    options = {"kv_memory": "64MiB", "prefill_chunk": 256, "device": "cuda", "exact": False, "kv_dtype": rows.name}
    prompts = [random_ids(length, seed=length) for length in (300, 513, 129)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    want = engines[1].generate(prompts, params)
    with LLM(folder, **options) as gpu:
        policy = f"lossless(draft=quest(budget=64, dense_layers=0), tokens={count}, lookup=2)"
        got = gpu.generate(prompts, params, policy=policy)
        assert list(map(tokens, got)) == list(map(tokens, want))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("unit", ["block", "head"])
@pytest.mark.parametrize("policy", ["quest(budget=64, block_size=16, dense_layers=0)", "dense"])
def test_recorded_steps_bring_in_what_they_read(tmp_path, rows, policy, unit, in_place, monkeypatch):
    monkeypatch.setattr(offers, "READS_HOST", in_place)
    folder = make_checkpoint("llama", tmp_path / "m", max_position_embeddings=1024, head_dim=32, num_hidden_layers=2)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompt, size = random_ids(900, seed=3), KVFormat(torch.float32, 2, 32, 16, rows, rows).block_bytes
    settings = {"dtype": "float32", "block_size": 16, "device": "cuda", "prefill_chunk": 256, "kv_dtype": rows.name}
    with LLM(folder, kv_memory="16MiB", **settings) as whole:
        (want,) = whole.generate([prompt], params, policy=policy)
    with LLM(folder, kv_memory=90 * size, kv_host="16MiB", kv_unit=unit, **settings) as llm:  # of 118 parts
        (done,) = llm.generate([prompt], params, policy=policy)
        assert tokens(done) == tokens(want)
        assert llm.pool.tiers.counts.misses > 0
        assert (llm.pool.tiers.offer().host is not None) == in_place


@pytest.mark.parametrize("policy", ["lfps(k=24, blocks=2, least=1)", "quest(budget=64, block_size=16, dense_layers=0)"])
def test_the_cpu_attends_codes_in_host_memory(folder, rows, policy):
    prompt, params = random_ids(700, seed=2), replace(GREEDY, max_tokens=20)
    settings = {"dtype": "float32", "prefill_chunk": 64, "block_size": 16, "kv_dtype": rows.name}
    with LLM(folder, kv_memory="64MiB", device="cpu", **settings) as whole:
        (want,) = whole.generate([prompt], params, policy=policy)
        slot = whole.pool.storage.format.block_bytes
    with LLM(folder, device="cuda", kv_memory=110 * slot, kv_host="64MiB", kv_compute="host", **settings) as llm:
        (done,) = llm.generate([prompt], params, policy=policy)
        assert done.error is None, done.error
        assert tokens(done) == tokens(want)
        assert llm.pool.tiers.counts.attended_on_host > 0
