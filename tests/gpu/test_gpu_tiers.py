"""Host memory behind a GPU's: what the kernel copies over the link, and answers under a small part of the need."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import EVERY, GREEDY, finish, start, tokens
from tier_helpers import nothing_left
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.device.ahead import Ahead
from saccade.errors import CapacityError
from saccade.kv import offers
from saccade.kv.format import KVFormat
from saccade.kv.pinned import PinnedMemory
from saccade.ops.triton import pages

SLOT = KVFormat(torch.float32, 2, 32, 32).block_bytes
POLICIES = [policy.text for policy in EVERY]
PROMPTS = [random_ids(180 + 23 * i % 160, seed=i) for i in range(len(POLICIES))]


def test_blocks_come_and_go_over_pinned_memory():
    device = torch.device("cuda", torch.cuda.current_device())
    memory = PinnedMemory(1 << 26, device)
    kept = tuple(half.view(torch.bfloat16).view(-1, 8, 32, 128) for half in memory.data.chunk(2))
    cells = len(kept[0])
    for part in kept:
        part.copy_(torch.randn(part.shape))
    slots = tuple(torch.zeros(300, 8, 32, 128, dtype=torch.bfloat16, device=device) for _ in range(2))
    which, where = torch.randperm(cells)[:200], torch.randperm(300)[:200]
    pages.copy_blocks(kept, which, slots, where)
    for home, part in zip(kept, slots):
        assert torch.equal(part[where.to(device)].cpu(), home[which])
        part.neg_()
    pages.copy_blocks(slots, where[:77], kept, which[:77])
    torch.cuda.synchronize()
    for home, part in zip(kept, slots):
        assert torch.equal(
            home[which], torch.cat([1.0 * part[where.to(device)[:77]], -part[where.to(device)[77:]]]).cpu()
        )
    memory.close()
    memory.close()


def test_memory_that_there_is_not_is_refused_and_the_device_works_on():
    with pytest.raises(CapacityError, match=r"kv_host=.* is more than"):
        PinnedMemory(1 << 50, torch.device("cuda"))
    assert torch.ones(3, device="cuda").sum().item() == 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=1024, head_dim=32)


@pytest.fixture(scope="module")
def expected(folder):
    with LLM(
        folder, dtype="float32", kv_memory="64MiB", prefill_chunk=64, device="cuda", enable_prefix_caching=False
    ) as whole:
        return [tokens(one) for one in whole.generate(PROMPTS, GREEDY, policy=POLICIES)]


@pytest.mark.parametrize(
    ("slots", "replacement", "unit"),
    [(9, "fifo", "block"), (40, "lru", "block"), (60, "clock", "block"), (9, "lru", "head"), (60, "clock", "head")],
)
def test_every_method_in_a_small_part_of_the_memory(folder, expected, slots, replacement, unit):
    options = {"kv_memory": slots * SLOT, "kv_host": "64MiB", "kv_replacement": replacement, "kv_unit": unit}
    with LLM(
        folder, dtype="float32", prefill_chunk=64, device="cuda", **{"enable_prefix_caching": False, **options}
    ) as llm:
        done = llm.generate(PROMPTS, GREEDY, policy=POLICIES)
        errors = {policy: one.error for policy, one in zip(POLICIES, done) if one.error is not None}
        assert not errors
        got = dict(zip(POLICIES, [tokens(one) for one in done]))
        assert got == dict(zip(POLICIES, expected))
        counts = llm.pool.tiers.counts
        assert min(counts.misses, counts.evicted, counts.bytes_written) > 50
        assert counts.lost == 0
        nothing_left(llm.pool)


@pytest.mark.parametrize(("slots", "replacement"), [(9, "lru"), (60, "clock")])
def test_every_method_over_a_little_host_memory_and_a_disk(folder, tmp_path, expected, slots, replacement):
    options = {"kv_memory": slots * SLOT, "kv_host": 100 * SLOT, "kv_disk": f"{tmp_path}:64MiB"}
    with LLM(
        folder,
        dtype="float32",
        prefill_chunk=64,
        device="cuda",
        kv_replacement=replacement,
        **{"enable_prefix_caching": False, **options},
    ) as llm:
        done = llm.generate(PROMPTS, GREEDY, policy=POLICIES)
        assert not {policy: one.error for policy, one in zip(POLICIES, done) if one.error is not None}
        assert dict(zip(POLICIES, [tokens(one) for one in done])) == dict(zip(POLICIES, expected))
        numbers = llm.pool.tiers.numbers()
        assert min(numbers[name] for name in ("disk_bytes_read", "disk_bytes_written", "bytes_read")) > 0
        assert numbers["lost"] == 0
        nothing_left(llm.pool)


@pytest.mark.parametrize(("compute", "unit"), [("host", "block"), ("host", "head"), ("auto", "block")])
def test_what_lies_in_host_memory_is_attended_there(folder, expected, compute, unit):
    options = {"kv_memory": 30 * SLOT, "kv_host": "64MiB", "kv_compute": compute, "kv_unit": unit}
    with LLM(
        folder, dtype="float32", prefill_chunk=64, device="cuda", **{"enable_prefix_caching": False, **options}
    ) as llm:
        done = llm.generate(PROMPTS, GREEDY, policy=POLICIES)
        assert dict(zip(POLICIES, map(tokens, done))) == dict(zip(POLICIES, expected))
        assert llm.pool.tiers.counts.attended_on_host > 50
        assert any("cpu/" in one for output in done for one in output.report["decode"]["backends"])
        nothing_left(llm.pool)


@pytest.mark.parametrize("slots", [30, 400])
def test_lfps_lives_where_host_memory_keeps_the_keys(folder, slots):
    policies = ["lfps(k=24, blocks=2, least=1)", "lfps(k=20, epsilon=0.05, least=1)", "lfps(k=24, unit=kv_head)"] * 2
    prompts = [random_ids(180 + 41 * i, seed=i) for i in range(len(policies))]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    settings = {"dtype": "float32", "prefill_chunk": 64}
    with LLM(folder, kv_memory="64MiB", device="cpu", **{"enable_prefix_caching": False, **settings}) as whole:
        want = [tokens(one) for one in whole.generate(prompts, params, policy=policies)]
    options = {"kv_memory": slots * SLOT, "kv_host": "64MiB", "kv_compute": "host"}
    with LLM(folder, device="cuda", **settings, **{"enable_prefix_caching": False, **options}) as llm:
        done = llm.generate(prompts, params, policy=policies)
        assert [tokens(one) for one in done] == want
        for one in done:
            assert all("cpu" in name for name in one.report["decode"]["backends"])
            assert min(one.report["tiers"][name] for name in ("attended_on_host", "bytes_down", "bytes_up")) > 0
        nothing_left(llm.pool)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("unit", ["block", "head"])
@pytest.mark.parametrize(
    "policy", ["quest(budget=64, block_size=16, dense_layers=0)", "psa(epsilon=0.05, block_size=16)", "dense"]
)
def test_recorded_steps_bring_in_what_they_read(tmp_path, policy, unit, in_place, monkeypatch):
    monkeypatch.setattr(offers, "READS_HOST", in_place)
    folder = make_checkpoint("llama", tmp_path / "m", max_position_embeddings=1024, head_dim=32, num_hidden_layers=2)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompt, size = random_ids(900, seed=3), KVFormat(torch.float32, 2, 32, 16).block_bytes
    settings = {"dtype": "float32", "block_size": 16, "device": "cuda", "prefill_chunk": 256}
    with LLM(folder, kv_memory="16MiB", **{"enable_prefix_caching": False, **settings}) as whole:
        (want,) = whole.generate([prompt], params, policy=policy)
    with LLM(
        folder, kv_memory=90 * size, kv_host="16MiB", kv_unit=unit, **{"enable_prefix_caching": False, **settings}
    ) as llm:  # of 118 parts
        (done,) = llm.generate([prompt], params, policy=policy)
        assert tokens(done) == tokens(want)
        backends, counts = done.report["decode"]["backends"], llm.pool.tiers.counts
        assert counts.misses > 0
        assert (llm.pool.tiers.offer().host is not None) == in_place
        if policy != "dense":  # which does not fit: the row path brings it in, a layer at a time
            assert backends["triton"] > 0.5 * sum(backends.values()), (backends, done.report["notes"])
            assert llm.engine.worker.device.graphs.recorded > 0
            assert done.report["tiers"]["hits"] > done.report["tiers"]["misses"]
        nothing_left(llm.pool)


def test_while_the_device_suffices_steps_are_those_without_a_tier(folder, expected):
    with LLM(
        folder,
        dtype="float32",
        prefill_chunk=64,
        device="cuda",
        kv_memory="32MiB",
        kv_host="64MiB",
        enable_prefix_caching=False,
    ) as llm:
        done = llm.generate(PROMPTS[:6], GREEDY, policy=POLICIES[:6])
        assert [tokens(one) for one in done] == expected[:6]
        assert not any(vars(llm.pool.tiers.counts).values())


@pytest.mark.parametrize("parts", [1, 2])
def test_every_method_may_live_in_host_memory(folder, parts):
    """Compute.lodges_all, as benchmarks/gpu/hosted.py has it."""
    policies = ["dense", "quest(budget=64, dense_layers=0)", "topk(k=20, unit=q_head)", "lfps(k=24, blocks=2, least=1)"]
    prompts = [random_ids(180 + 41 * i, seed=i) for i in range(len(policies))]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    settings = {"dtype": "float32", "prefill_chunk": 64, "exact": False}
    with LLM(folder, kv_memory="64MiB", device="cpu", **{"enable_prefix_caching": False, **settings}) as whole:
        want = [tokens(one) for one in whole.generate(prompts, params, policy=policies)]
    with LLM(
        folder,
        device="cuda",
        kv_memory=60 * SLOT,
        kv_host="64MiB",
        kv_compute="host",
        **{"enable_prefix_caching": False, **settings},
    ) as llm:
        llm.pool.tiers.tier.compute.lodges_all = True
        llm.engine.worker.host._hosting.most_parts = parts
        done = llm.generate(prompts, params, policy=policies)
        assert [tokens(one) for one in done] == want
        for one in done:
            assert all("cpu" in name for name in one.report["decode"]["backends"])
            assert min(one.report["tiers"][name] for name in ("attended_on_host", "bytes_down", "bytes_up")) > 0
        nothing_left(llm.pool)


@pytest.mark.parametrize("unit", ["block", "head"])
@pytest.mark.parametrize(
    "policy",
    [
        "quest(budget=64, block_size=16, dense_layers=0)",
        "arkvale(budget=96, block_size=32)",
        "psa(epsilon=0.05, block_size=16)",
        "streaming(sinks=2, window=40)",
    ],
)
def test_steps_launched_ahead_bring_in_what_they_read(tmp_path, monkeypatch, policy, unit):
    """Requests that join, are cancelled and preempted, and sessions that go on, over steps that are launched before
    they are asked for; and the counts of a request whose steps are not."""
    folder = make_checkpoint("llama", tmp_path / "m", max_position_embeddings=1024, head_dim=32, num_hidden_layers=2)
    prompts, slot = [random_ids(n, seed=n) for n in (800, 700, 750)], KVFormat(torch.float32, 2, 32, 16).block_bytes
    settings = {"dtype": "float32", "block_size": 16, "device": "cuda", "prefill_chunk": 256, "exact": False}
    long, short = (SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (60, 20))
    asked: list[bool] = []
    real = Ahead.serves

    def noted(self, step, placed, key):
        came = real(self, step, placed, key)
        if self.launched.key.absent:
            asked.append(came)
        return came

    monkeypatch.setattr(Ahead, "serves", noted)
    with LLM(folder, kv_memory="16MiB", **{"enable_prefix_caching": False, **settings}) as whole:
        want = [tokens(whole.generate([prompt], long, policy=policy)[0]) for prompt in prompts]
        with whole.session(policy=policy) as session:
            turns = [tokens(session.generate(prompts[1], short)), tokens(session.generate([5, 6, 7], short))]
    with LLM(
        folder, kv_memory=150 * slot, kv_host="16MiB", kv_unit=unit, **{"enable_prefix_caching": False, **settings}
    ) as llm:  # of 290 parts
        core = llm.engine
        for _ in range(3):
            first, gone = start(llm, prompts[0], long, policy), start(llm, prompts[1], long, policy)
            for _ in range(25):
                core.step()
            core.cancel(gone)  # whatever is on its way
            for _ in range(4):
                core.step()
            second = start(llm, prompts[2], long, policy)
            for _ in range(12):
                core.step()
            core.scheduler.preempt(second)
            finish(core)
            assert [first.output_ids, second.output_ids] == [want[0], want[2]]
            assert gone.output_ids == want[1][: len(gone.output_ids)]
            with llm.session(policy=policy) as session:
                assert tokens(session.generate(prompts[1], short)) == turns[0]
                assert tokens(llm.generate(prompts[:1], long, policy=policy)[0]) == want[0]
                assert tokens(session.generate([5, 6, 7], short)) == turns[1]
        assert llm.pool.tiers.counts.misses > 0
        if "psa" not in policy:  # whose steps may take more than lists are sure to have for two
            assert {True, False} <= set(asked)
        nothing_left(llm.pool)
    reports = []
    for ahead in (False, True):
        asked.clear()
        with LLM(
            folder, kv_memory=90 * slot, kv_host="16MiB", kv_unit=unit, **{"enable_prefix_caching": False, **settings}
        ) as llm:
            llm.engine.worker.device.runs_ahead = ahead
            (done,) = llm.generate([prompts[0]], long, policy=policy)
            assert tokens(done) == want[0]
            reports.append(done.report)
            nothing_left(llm.pool)
        assert ahead == (True in asked) or "psa" in policy
    for name in ("tokens", "keys_attended", "keys_causal", "keys_estimated", "selections"):
        assert reports[0]["decode"][name] == reports[1]["decode"][name], name
