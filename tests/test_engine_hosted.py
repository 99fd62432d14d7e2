"""LFPS where host memory keeps the keys: answers are those of an engine that holds all on the device, and nothing
but queries, new rows and results crosses the link. CPU tensors stand for the device."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import EVERY, GREEDY, tokens
from helpers import generator
from tier_helpers import nothing_left
from tiny_models import make_checkpoint, random_ids
from torch.utils._python_dispatch import TorchDispatchMode

from saccade import LLM, SamplingParams
from saccade.engine.rows.hosted import HostedRows, goes_to_host
from saccade.errors import SaccadeError
from saccade.eval.suite import make
from saccade.kv import BlockManager, KVFormat, KVStorage, SequenceKV
from saccade.kv.host import HostTier
from saccade.kv.hosted import HostedKV
from saccade.kv.tier import TierFull
from saccade.methods.policy import Policy
from saccade.models.llama import LlamaDecoder
from saccade.ops.cpu_plans import PlannedRows
from saccade.ops.down import Lane

LAYERS, HEADS, KV_HEADS, DIM = 3, 4, 2, 32
SLOT = KVFormat(torch.float32, KV_HEADS, DIM, 32).block_bytes
LFPS = "lfps(k=24, blocks=2, least=1)"
ETF = "etf"  # whose prefills leave out rows in deep layers
POLICIES = [
    LFPS,
    "lfps(k=24, unit=kv_head)",
    "lfps(k=20, epsilon=0.05, least=1)",  # heads rest on their first keys
    "lfps(k=20, blocks=0, least=1, rest=none, slash_shift_on_read=false, bypass=mean, bypass_shift=false, "
    "read_local=false)",  # the paper to the letter: chosen for layer by layer
    "lfps(k=20, bypass=mean, least=1)",  # as is this one, and the next
    "lfps(k=16, a=none, gate=off)",
    "lfps(k=16, sinks=0)",
    "lfps",  # reads all of so few keys
    "topk(k=16, unit=q_head)",
    "quest(budget=48, block_size=8, dense_layers=1)",
]
PROMPTS = [random_ids(180 + 17 * i, seed=i) for i in range(len(POLICIES))]
FORMAT = KVFormat(torch.float32, 2, 16, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=1024, head_dim=DIM)


@pytest.fixture(scope="module")
def whole(folder):
    with LLM(
        folder, dtype="float32", kv_memory="64MiB", prefill_chunk=64, device="cpu", enable_prefix_caching=False
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(whole):
    return whole.generate(PROMPTS, GREEDY, policy=POLICIES)


def hosting(folder, slots: int, host="64MiB", **options) -> LLM:
    settings = {"dtype": "float32", "prefill_chunk": 64, "device": "cpu", "kv_compute": "host", **options}
    return LLM(folder, kv_memory=slots * SLOT, kv_host=host, **{"enable_prefix_caching": False, **settings})


@pytest.mark.parametrize(
    ("slots", "unit", "exact"), [(30, "block", True), (30, "block", False), (300, "block", False), (16, "head", False)]
)
def test_answers_are_those_of_a_device_that_holds_everything(folder, expected, slots, unit, exact):
    with hosting(folder, slots, kv_unit=unit, exact=exact) as llm:
        done = llm.generate(PROMPTS, GREEDY, policy=POLICIES)
        assert not {policy: one.error for policy, one in zip(POLICIES, done) if one.error is not None}
        assert dict(zip(POLICIES, map(tokens, done))) == dict(zip(POLICIES, map(tokens, expected)))
        for one, want in zip(done, expected):
            for name in ("keys_attended", "keys_scored", "keys_estimated"):
                assert one.report["decode"][name] == want.report["decode"][name]
        told = {policy: one.report["tiers"] for policy, one in zip(POLICIES, done)}
        counts = llm.pool.tiers.counts
        for name in ("attended_on_host", "bytes_down", "bytes_up"):
            there = [one[name] for policy, one in told.items() if policy.startswith("lfps")]
            assert min(there) > 0, name
            assert sum(there) <= getattr(counts, name)
        nothing_left(llm.pool)


def test_the_trained_model_answers_alike():
    prompts, policies = [], ["lfps(least=64)", "lfps(blocks=0, least=64, rest=none)", "lfps(least=64)"]
    for task in ("span_copy", "table_copy", "common"):
        turn = make(task, 1024, 0).turns[0]
        prompts.append("".join(turn.context) + turn.question)
    settings, answers = {"dtype": "float32", "device": "cpu", "exact": False}, []
    part = KVFormat(torch.float32, 1, 64, 32).block_bytes
    for options in ({"kv_memory": "64MiB"}, {"kv_memory": 60 * part, "kv_host": "64MiB", "kv_compute": "host"}):
        with LLM("reference", **settings, **{"enable_prefix_caching": False, **options}) as llm:
            answers.append([tokens(one) for one in llm.generate(prompts, GREEDY, policy=policies)])
    assert answers[0] == answers[1]


def in_parts(llm, monkeypatch) -> list[int]:
    """Have steps cut into sub-batches, as on a GPU; how many each pass had."""
    seen: list[int] = []
    llm.engine.worker.host._hosting.most_parts = 2
    real = LlamaDecoder.run_parts

    def noted(self, hidden, rotary, parts, turns):
        seen.append(len(parts))
        real(self, hidden, rotary, parts, turns)

    monkeypatch.setattr(LlamaDecoder, "run_parts", noted)
    return seen


@pytest.mark.parametrize("fails", [False, True])
def test_sub_batches_take_turns(folder, whole, monkeypatch, fails):
    """Five requests in two parts, some chosen for layer by layer; what breaks is tried again one by one."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts, policies = [random_ids(120 + 57 * i, seed=20 + i) for i in range(5)], [*POLICIES[:4], LFPS]
    want = [tokens(one) for one in whole.generate(prompts, params, policy=policies)]
    with hosting(folder, 30, exact=False) as llm:
        seen, calls, real = in_parts(llm, monkeypatch), [], HostedRows.attend

        def attend(self, layer, spec):
            calls.append(layer)
            if fails and len(seen) == 3 and layer == 1 and -1 not in calls:
                calls.append(-1)
                raise RuntimeError("a cosmic ray")
            real(self, layer, spec)

        monkeypatch.setattr(HostedRows, "attend", attend)
        done = llm.generate(prompts, params, policy=policies)
        assert [one.error for one in done] == [None] * 5
        assert [tokens(one) for one in done] == want
        assert set(seen) == {2}
        assert "0, 0, 1, 1, 2, 2" in str(calls)
        nothing_left(llm.pool)


def test_only_queries_new_rows_and_results_cross_the_link(folder, whole):
    params, prompt = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), random_ids(400, seed=9)
    (want,) = whole.generate([prompt], params, policy=LFPS)
    with hosting(folder, 60) as llm:
        (done,) = llm.generate([prompt], params, policy=LFPS)
        moved, steps = done.report["tiers"], 39
        assert tokens(done) == tokens(want)
        down, up = (HEADS + 2 * KV_HEADS) * DIM * 4, HEADS * DIM * 4
        assert moved["bytes_down"] == steps * LAYERS * down
        assert moved["bytes_up"] == steps * LAYERS * up
        blocks = -(-439 // 32) * LAYERS
        assert 0 < moved["attended_on_host"] <= steps * blocks
        for phase in ("keys_attended", "keys_scored"):
            assert done.report["decode"][phase] == want.report["decode"][phase]
        counts = llm.pool.tiers.counts
        assert counts.bytes_read <= 3 * blocks * SLOT  # prefill, and summaries: no decode step brings anything in


def start(llm, ids, params, policy):
    return llm.engine.add(ids, params, Policy.parse(policy))


def test_requests_come_and_go(folder, whole):
    long = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [random_ids(150 + 31 * i, seed=40 + i) for i in range(4)]
    want = [tokens(one) for one in whole.generate(prompts, long, policy=LFPS)]
    with hosting(folder, 24, exact=False) as llm:
        engine, together = llm.engine, []

        def steps(count):
            for _ in range(count):
                engine.step()
                together.append(sum(memory.hosted is not None for memory in engine.worker.memories.values()))

        requests = [start(llm, ids, long, LFPS) for ids in prompts[:2]]
        steps(12)
        requests += [start(llm, prompts[2], long, LFPS), start(llm, random_ids(300, seed=2), long, ETF)]
        steps(6)
        engine.cancel(requests[1])
        requests.append(start(llm, prompts[3], long, LFPS))
        while engine.busy:
            steps(1)
        assert [requests[at].final_ids for at in (0, 2, 4)] == [want[0], want[2], want[3]]
        assert max(together) == 3
        nothing_left(llm.pool)


def test_preempted_and_forked_sequences_go_back_and_forth(folder, whole):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [random_ids(length, seed=length) for length in (127, 125, 126)]
    want = [tokens(one) for one in whole.generate(prompts, params, policy=LFPS)]
    with hosting(folder, 20, host=(3 * LAYERS * 4 + 4 + 8 - 19) * SLOT) as llm:  # little more than two fit
        done = llm.generate(prompts, params, policy=LFPS)
        assert [tokens(one) for one in done] == want
        assert sum(one.report["preemptions"] for one in done) > 0
        nothing_left(llm.pool)
    several = SamplingParams(temperature=0.9, seed=5, n=3, max_tokens=20, ignore_eos=True)
    (one,) = whole.generate(prompts[:1], several, policy=LFPS)
    with hosting(folder, 24) as llm:
        (other,) = llm.generate(prompts[:1], several, policy=LFPS)
        assert [sample.token_ids for sample in other.outputs] == [sample.token_ids for sample in one.outputs]
        nothing_left(llm.pool)


def test_turns_of_a_session_under_other_policies(folder, whole):
    """Every turn finds the keys that the one before wrote on the host, whoever reads them."""
    turns = [(random_ids(90 + 40 * i, seed=70 + i), policy) for i, policy in enumerate((LFPS, "dense", LFPS, "psa"))]
    params, answers = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), []
    with hosting(folder, 20) as llm:
        for engine in (whole, llm):
            with engine.session() as session:
                answers.append([tokens(session.generate(ids, params, policy=policy)) for ids, policy in turns])
    assert answers[0] == answers[1]


def test_a_prompt_that_others_share_is_attended_by_all(folder, whole):
    base, params = random_ids(160, seed=3), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [base + random_ids(20 + i, seed=i) for i in range(3)]
    policies = [LFPS, "quest(budget=48, block_size=8, dense_layers=1)", LFPS]
    want = [tokens(one) for one in whole.generate(prompts, params, policy=policies)]
    with hosting(folder, 12, enable_prefix_caching=True) as llm:
        llm.generate([[*base, 5]], params, policy=LFPS)
        done = llm.generate(prompts, params, policy=policies)
        assert [tokens(one) for one in done] == want
        assert all(one.report["cached_tokens"] for one in done)


def test_audits_see_the_whole_of_attention(folder):
    params, prompt, told = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), random_ids(197, seed=4), []
    audited = {"audit": 1.0, "audit_steps": 1.0}
    alone = LLM(
        folder,
        dtype="float32",
        kv_memory="64MiB",
        prefill_chunk=64,
        device="cpu",
        **{"enable_prefix_caching": False, **audited},
    )
    for llm in (alone, hosting(folder, 30, **audited)):
        with llm:
            (done,) = llm.generate([prompt], params, policy=LFPS)
            told.append(done.report["audit"])
    for name in ("output_error", "output_error_scaled"):
        assert told[1][name]["mean"] == pytest.approx(told[0][name]["mean"], rel=1e-4)
    assert told[0]["output_error"]["mean"] > 0.01


def test_where_host_memory_is_short_the_device_serves_and_says_so(folder, whole):
    prompt = random_ids(330, seed=1)
    (want,) = whole.generate([prompt], GREEDY, policy=LFPS)
    with hosting(folder, 40, host=(LAYERS * 11 - 10) * SLOT) as llm:
        (done,) = llm.generate([prompt], GREEDY, policy=LFPS)
        assert tokens(done) == tokens(want)
        assert any("raise kv_host" in note for note in done.report["notes"])
        nothing_left(llm.pool)


def test_who_goes_to_the_host(folder):
    with hosting(folder, 20) as llm:
        assert goes_to_host(llm.pool, Policy.parse(LFPS))
        assert not goes_to_host(llm.pool, Policy.parse("quest"))
        llm.pool.tiers.tier.compute.lodges_all = True
        assert goes_to_host(llm.pool, Policy.parse("quest"))
    with hosting(folder, 20, kv_compute="auto") as llm:
        assert not goes_to_host(llm.pool, Policy.parse(LFPS))


@pytest.mark.parametrize("parts", [1, 2])
def test_all_methods_may_live_there(folder, whole, monkeypatch, parts):
    """By plans, by lists and layer by layer: answers are the same, and what the CPU reads is counted."""
    policies = [
        "dense",
        "quest(budget=48, block_size=8, dense_layers=1)",
        "topk(k=16, unit=q_head)",
        "topk(k=16)",
        "psa(epsilon=0.5)",
        "streaming(window=40)",
        "cis",
        LFPS,
    ]
    prompts = [random_ids(150 + 23 * i, seed=60 + i) for i in range(len(policies))]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    want = whole.generate(prompts, params, policy=policies)
    with hosting(folder, 40, exact=False) as llm:
        if parts > 1:
            in_parts(llm, monkeypatch)
        llm.pool.tiers.tier.compute.lodges_all = True
        done = llm.generate(prompts, params, policy=policies)
        assert {policy: one.error for policy, one in zip(policies, done) if one.error is not None} == {}
        assert dict(zip(policies, map(tokens, done))) == dict(zip(policies, map(tokens, want)))
        blocks = {}
        for policy, prompt, one, other in zip(policies, prompts, done, want):
            blocks[policy] = one.report["tiers"]["attended_on_host"]
            assert 0 < blocks[policy] <= 11 * LAYERS * -(-(len(prompt) + 12) // 32)
            for name in ("keys_attended", "keys_scored", "keys_estimated"):
                assert one.report["decode"][name] == other.report["decode"][name]
        assert blocks["dense"] == LAYERS * sum(-(-(len(prompts[0]) + step) // 32) for step in range(1, 12))
        nothing_left(llm.pool)


def test_every_method_may_live_there_by_head(folder, whole):
    policies = [one.text for one in EVERY]
    prompts = [random_ids(180 + 23 * i % 160, seed=i) for i in range(len(policies))]
    want = whole.generate(prompts, GREEDY, policy=policies)
    with hosting(folder, 60, exact=False, kv_unit="head") as llm:
        llm.pool.tiers.tier.compute.lodges_all = True
        done = llm.generate(prompts, GREEDY, policy=policies)
        assert {policy: one.error for policy, one in zip(policies, done) if one.error is not None} == {}
        assert dict(zip(policies, map(tokens, done))) == dict(zip(policies, map(tokens, want)))
        assert min(one.report["tiers"]["attended_on_host"] for one in done) > 0
        nothing_left(llm.pool)


def test_candidates_are_found_before_the_query_is_there(folder, monkeypatch):
    """At every layer: candidates, then the query, then attention."""
    seen = []
    for owner, name in ((PlannedRows, "foresee"), (Lane, "wait"), (PlannedRows, "run")):
        real = getattr(owner, name)

        def noted(self, *args, real=real, name=name, **named):
            seen.append(name)
            return real(self, *args, **named)

        monkeypatch.setattr(owner, name, noted)
    with hosting(folder, 20) as llm:
        llm.generate([random_ids(200, seed=1)], SamplingParams(temperature=0, max_tokens=3), policy=LFPS)
    assert seen[: 3 * LAYERS] == ["foresee", "wait", "run"] * LAYERS


def test_tables_cost_the_device_nothing(folder):
    """A step under LFPS has as many tensor operations as one that reads everything: what is its own, kernels do."""

    class Counting(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), named=None):
            self.calls += 1
            return function(*args, **(named or {}))

    counts = {}
    with hosting(folder, 40, exact=False) as llm:
        llm.pool.tiers.tier.compute.lodges_all = True
        for policy in ("dense", "lfps(k=24, blocks=0, least=1, rest=none)"):
            request = start(llm, random_ids(200, seed=1), SamplingParams(temperature=0, max_tokens=8), policy)
            while len(request.output_ids) < 4:
                llm.engine.step()
            with Counting() as counting:
                llm.engine.step()
            counts[policy] = counting.calls
            while llm.engine.busy:
                llm.engine.step()
    dense, lfps = counts.values()
    assert 0 < lfps <= dense + LAYERS


def lodged(slots: int = 40, cells: int = 60):
    storage = KVStorage(FORMAT, slots, "cpu")
    pool = BlockManager(storage, 2, tier=HostTier(cells * FORMAT.block_bytes, storage, compute="host"), debug=True)
    kv, rows = SequenceKV(pool), torch.randn(2, 2, 2, 150, 16, generator=generator(1))
    kv.reserve(120)
    for layer, (k, v) in enumerate(rows):
        kv.append(layer, k[:, :100], v[:, :100])
    return pool, kv, rows


def test_keys_live_in_cells_alone_and_are_written_there():
    pool, kv, rows = lodged()
    hosted = HostedKV(kv)
    hosted.settle()
    assert not (pool.lookup(kv.block_table.tolist()) >= 0).any()
    for layer, (k, v) in enumerate(rows):
        view = hosted.view(layer)
        assert torch.equal(view.keys(), k[:, :100])
        assert torch.equal(view.values(), v[:, :100])
        view.upto(100)
        where = hosted.tables[layer, 0, 100 // 16]
        pool.tiers.tier.k[where, :, 100 % 16] = k[:, 100]
        pool.tiers.tier.v[where, :, 100 % 16] = v[:, 100]
    hosted.stored(1)
    hosted.close()
    for layer, (k, v) in enumerate(rows):  # as anybody else reads them, through slots
        assert torch.equal(kv.view(layer).keys(), k[:, :101])
        assert torch.equal(kv.view(layer).values(), v[:, :101])
    hosted = HostedKV(kv)
    hosted.settle()
    kv.reserve(160)  # into blocks that nothing was written to
    hosted.settle()
    assert (hosted.tables[:, :, :10] >= 0).all()
    assert len(hosted.tables[:, :, :10].unique()) == 20
    hosted.close()
    kv.free()
    nothing_left(pool)


def test_cells_of_the_hosted_are_nobody_elses():
    """A block that a device request brings back in keeps its cell, however short cells are."""
    pool, kv, rows = lodged(slots=20, cells=32)
    hosted = HostedKV(kv)
    hosted.settle()
    before = hosted.tables[:, :, :8].clone()
    pool.tiers.fetch(0, kv.block_table[:6].numpy()).release()  # resident, too
    other = SequenceKV(pool)
    other.reserve(16 * 13)
    noise = torch.randn(2, 2, 2, 16 * 13, 16, generator=generator(2))
    for layer, (k, v) in enumerate(noise):
        other.append(layer, k, v)
    hosted.settle()
    assert torch.equal(hosted.tables[:, :, :8], before)
    for layer, (k, _) in enumerate(rows):
        assert torch.equal(hosted.view(layer).keys(), k[:, :100])
        assert torch.equal(other.view(layer).keys(), noise[layer, 0])
    other.free()
    hosted.close()
    kv.free()
    nothing_left(pool)


def test_host_memory_without_room_takes_nothing():
    pool, kv, rows = lodged(slots=40, cells=12)
    hosted = HostedKV(kv)
    with pytest.raises(TierFull, match="raise kv_host"):
        hosted.settle()
    for layer, (k, _) in enumerate(rows):
        assert torch.equal(kv.view(layer).keys(), k[:, :100])
    kv.free()
    nothing_left(pool)


@pytest.mark.parametrize("options", [{"kv_disk": "1GiB"}, {"kv_host": None}])
def test_what_does_not_go_together_is_refused(folder, tmp_path, options):
    if "kv_disk" in options:
        options = {"kv_disk": f"{tmp_path}:1GiB"}
    with pytest.raises(SaccadeError, match="kv_compute"):
        LLM(
            folder,
            **{
                "enable_prefix_caching": False,
                "kv_memory": 20 * SLOT,
                "kv_host": "1MiB",
                "kv_compute": "host",
                "device": "cpu",
                **options,
            },
        )
