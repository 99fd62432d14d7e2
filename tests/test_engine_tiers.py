"""The engine over memory and a tier, disk or host memory: answers are those of one whose memory holds everything."""

from __future__ import annotations

import errno
from functools import partial

import numpy as np
import pytest
import torch
from covering import thorough
from drafters import Perfect, drafting
from engine_helpers import EVERY, GREEDY, tokens
from helpers import UNTIMED
from tier_helpers import FaultySystem, nothing_left
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.rows.backend import RowBackend
from saccade.engine.rows.resolved import ResolvedRow
from saccade.errors import CapacityError, SaccadeError
from saccade.kv.block_codes import BlockCodes
from saccade.kv.disk import DiskTier
from saccade.kv.format import KVFormat
from saccade.kv.host_disk import HostAndDisk
from saccade.server.engine_metrics import _TIERS

SLOT = KVFormat(torch.float32, 2, 32, 32).block_bytes
MIXED = (
    "flexprefill(gamma=0.5, block_size=64, min_budget=0)+psa(epsilon=0.4, block_size=16, microbatch=1, rank=cuboid)",
    "loopserve+topk(k=16, sinks=2, local=8)",
    "xattention+lfps(k=24, blocks=2, least=1)",
)
POLICIES = [*dict.fromkeys(policy.text for policy in EVERY), *MIXED]
PROMPTS = [random_ids(180 + 23 * i % 160, seed=i) for i in range(len(POLICIES))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose heads the C++ kernels read."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=1024, head_dim=32)


@pytest.fixture(scope="module")
def whole(folder):
    with LLM(folder, dtype="float32", kv_memory="64MiB", prefill_chunk=64, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(whole):
    return [tokens(one) for one in whole.generate(PROMPTS, GREEDY, policy=POLICIES)]


def small(folder, tmp_path, slots: int, disk="64MiB", system=None, monkeypatch=None, host=False, **options) -> LLM:
    """An engine with so many slots in memory (all prompts together need some 900): over a disk, over ``host`` memory,
    or over 60 blocks of that and a "disk"."""
    if system is not None:
        for tier in (DiskTier, HostAndDisk):
            monkeypatch.setattr(f"saccade.pools.{tier.__name__}", partial(tier, system=system))
    if host == "disk":
        options["kv_host"] = 60 * SLOT
    elif host:
        return LLM(
            folder,
            dtype="float32",
            kv_memory=slots * SLOT,
            kv_host=disk,
            prefill_chunk=64,
            device="cpu",
            **{"enable_prefix_caching": False, **options},
        )
    return LLM(
        folder,
        dtype="float32",
        device="cpu",
        kv_memory=slots * SLOT,
        kv_disk=f"{tmp_path}:{disk}",
        prefill_chunk=64,
        **{"enable_prefix_caching": False, **options},
    )


@pytest.mark.parametrize(
    ("slots", "replacement", "each", "host", "unit"),
    [
        (10, "fifo", 4, False, "block"),
        (18, "clock", 1, False, "block"),
        (10, "lru", 4, True, "block"),
        (30, "clock", 2, True, "head"),
        (10, "lru", 4, "disk", "block"),
        *thorough([(100, "lru", 3, False, "block"), (30, "clock", 3, "disk", "block")]),
        *thorough([(30, "clock", 1, True, "head")]),
        *thorough([(30, "clock", 1, True, "block"), (10, "lru", 3, True, "head"), (30, "clock", 1, "disk", "block")]),
    ],
)
def test_every_method_in_a_small_part_of_the_memory(folder, tmp_path, expected, slots, replacement, each, host, unit):
    with small(folder, tmp_path, slots, kv_replacement=replacement, host=host, kv_unit=unit) as llm:
        policies = POLICIES[::each]
        done = llm.generate(PROMPTS[::each], GREEDY, policy=policies)
        assert {policy: tokens(one) for policy, one in zip(policies, done)} == dict(zip(policies, expected[::each]))
        counts = llm.pool.tiers.counts
        assert min(counts.misses, counts.evicted) > 50
        assert counts.lost == counts.retries == 0
        if host == "disk":
            assert min(vars(llm.pool.tiers.tier.disk.counts)[name] for name in ("bytes_read", "bytes_written")) > 0
        asked = [one.report["tiers"] for one in done if one.report["tiers"] is not None]
        assert 0.9 * counts.bytes_read < sum(one["bytes_read"] for one in asked) <= counts.bytes_read
        assert sum(one["misses"] for one in asked) <= counts.misses
        nothing_left(llm.pool)


@pytest.mark.parametrize(
    ("slots", "replacement", "each", "host", "unit"),
    [(30, "clock", 4, True, "block"), (28, "lru", 5, True, "head"), (40, "random", 5, False, "block")],
)
def test_a_pool_a_layer_gives_the_same_and_keeps_each_layer_to_its_share(
    folder, tmp_path, expected, slots, replacement, each, host, unit
):
    options = {"kv_replacement": replacement, "host": host, "kv_unit": unit, "kv_pool": "per_layer"}
    with small(folder, tmp_path, slots, **options) as llm:
        pool, most = llm.pool, []
        share = (slots - 1) // pool.layers
        admit, allocate = pool.admit, pool.allocate

        def look() -> None:
            lying = np.stack([(pool.map_of(row) >= 0).sum(1) for row in range(pool.rows)])
            assert (lying == pool._taken).all()
            assert all(lying[row].max() <= one.share <= share for row, one in enumerate(pool.tiers.each))
            most.append(int(lying.max()))

        pool.admit = lambda *given: (admit(*given), look())[0]
        pool.allocate = lambda *given: (allocate(*given), look())[0]
        done = llm.generate(PROMPTS[::each], GREEDY, policy=POLICIES[::each])
        assert [tokens(one) for one in done] == expected[::each]
        assert max(most) == share  # it is used up
        assert min(pool.tiers.counts.misses, pool.tiers.counts.evicted) > 50
        nothing_left(pool)


def one_call_rows(monkeypatch) -> list[ResolvedRow]:
    """The rows that take one call a layer, once for each layer."""
    found, attend = [], ResolvedRow._attend
    monkeypatch.setattr(ResolvedRow, "_attend", lambda row, *a, **k: (attend(row, *a, **k), found.append(row))[0])
    return found


def test_many_blocks_over_a_small_memory_are_chosen_by_codes(folder, tmp_path, whole, monkeypatch):
    policies = [
        "quest(budget=48, block_size=8, dense_layers=0)",
        "arkvale(budget=64, block_size=16)",
        "quest(budget=256, block_size=64, dense_layers=0)",
        "psa(epsilon=0.3, block_size=8, microbatch=1, rank=cuboid)",
        "psa(epsilon=0.99, block_size=8, microbatch=2, rank=cuboid)",
    ]
    prompts = [random_ids(700 + 30 * i, seed=i) for i in range(len(policies))]
    long = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)  # so that blocks fill
    expected = whole.generate(prompts, long, policy=policies)
    monkeypatch.setattr("saccade.kv.kept_summaries.LEAST_BLOCKS", 16)
    monkeypatch.setattr("saccade.methods.psa.method.FIRST_RANKED", 4)
    asked = []
    follow = BlockCodes.follow
    monkeypatch.setattr(BlockCodes, "follow", lambda codes, made: (follow(codes, made), asked.append(codes.blocks)))
    resolved = one_call_rows(monkeypatch)
    with small(folder, tmp_path, 30) as llm:
        done = llm.generate(prompts, long, policy=policies)
        assert [tokens(one) for one in done] == [tokens(one) for one in expected]
        for one, same in zip(done[:3], expected):
            assert one.report["decode"] | UNTIMED == same.report["decode"] | UNTIMED
        assert llm.pool.tiers.counts.misses > 50
        nothing_left(llm.pool)
    assert max(asked) >= 64
    assert len(resolved) > 50  # of 99 layers; summaries take the room of slots


def test_rows_with_a_rule_read_what_it_lets_in_in_one_call(folder, tmp_path, whole, monkeypatch):
    policies = [
        "psa(epsilon=0.05, block_size=8, microbatch=1, rank=cuboid)",
        "psa(epsilon=0.4, block_size=16, microbatch=2, rank=cuboid)",
        "psa(epsilon=0.99, block_size=32, microbatch=1, rank=cuboid)",
    ]
    prompts = [random_ids(900 + 20 * i, seed=i) for i in range(len(policies))]
    long = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = whole.generate(prompts, long, policy=policies)
    monkeypatch.setattr("saccade.engine.rows.resolved.FIRST_RANKED", 4)
    resolved = one_call_rows(monkeypatch)
    with small(folder, tmp_path, 70, host=True, max_requests=1) as llm:  # of 87 parts and more
        done = llm.generate(prompts, long, policy=policies)
        assert [tokens(one) for one in done] == [tokens(one) for one in expected]
        for one, same in zip(done, expected):
            assert one.report["decode"] | UNTIMED == same.report["decode"] | UNTIMED
            assert one.report["tiers"]["step_bytes"] > 0
        assert llm.pool.tiers.counts.misses > 50
        nothing_left(llm.pool)
    assert len(resolved) == 3 * 3 * 11  # requests, layers, steps


def test_steps_that_are_certified_are_certified_over_a_tier_too(folder, tmp_path):
    prompt, asked = random_ids(700, seed=3), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, bounds=1.0)
    with small(folder, tmp_path, 30) as llm:
        [done] = llm.generate([prompt], asked, policy="quest(budget=48, block_size=8, dense_layers=0)")
        assert llm.pool.tiers.counts.misses > 0
        assert (done.report["bounds"]["steps"], done.report["bounds"]["left_out"]) == (7, 0)
        nothing_left(llm.pool)


def test_heads_that_read_different_blocks_move_fewer_bytes(folder, tmp_path, whole):
    policies = ["quest(budget=64, dense_layers=0)", "psa(epsilon=0.3, block_size=32, microbatch=1, rank=cuboid)"]
    prompts = [random_ids(900, seed=seed) for seed in range(len(policies))]
    expected = [tokens(one) for one in whole.generate(prompts, GREEDY, policy=policies)]
    read = {}
    for unit in ("block", "head"):
        with small(folder, tmp_path, 40, host=True, kv_unit=unit, max_requests=1) as llm:
            done = llm.generate(prompts, GREEDY, policy=policies)
            assert [tokens(one) for one in done] == expected
            read[unit] = [one.report["tiers"]["bytes_read"] for one in done]
            nothing_left(llm.pool)
    assert all(by_head < by_block for by_head, by_block in zip(read["head"], read["block"])), read


def test_under_chosen_lines_a_step_asks_for_these_and_what_came_since(folder, tmp_path, whole):
    """LoopServe's Table 2: decode needs its lines and the keys since, however long the context is."""
    policy = "streaming(sinks=2, window=64)+loopserve(budget=8, n_d=64, first=2, sinks=1, slashes=false)"
    most = (2 * 8 + 2) * 3 * SLOT  # a block for each line of a KV head at worst, and the last ones, in every layer
    asked = {}
    for length in (600, 960):
        ids = random_ids(length, seed=length)
        (expected,) = whole.generate([ids], GREEDY, policy=policy)
        with small(folder, tmp_path, 40, host=True) as llm:
            (done,) = llm.generate([ids], GREEDY, policy=policy)
            assert tokens(done) == tokens(expected)
            asked[length] = done.report["tiers"]["step_bytes"]
            assert 0 < asked[length] <= most
            assert llm.pool.tiers.counts.misses > 0
            nothing_left(llm.pool)
    assert asked[960] < 0.6 * 31 * 3 * SLOT  # of all blocks


def test_while_memory_suffices_nothing_moves(folder, tmp_path, expected):
    with small(folder, tmp_path, 1500, max_requests=4) as llm:
        done = llm.generate(PROMPTS[::3], GREEDY, policy=POLICIES[::3])
        assert [tokens(one) for one in done] == expected[::3]
        assert not any(vars(llm.pool.tiers.counts).values())


@pytest.mark.parametrize("host", [False, True, "disk"])
def test_sessions_samples_and_prefixes(folder, tmp_path, whole, host):
    warm = SamplingParams(temperature=1, seed=5, max_tokens=6, ignore_eos=True, n=3)

    def talk(llm: LLM) -> list[list[int]]:
        said = []
        sessions = [llm.session(policy) for policy in ("dense", "h2o(budget=64)", MIXED[0], MIXED[2])]
        for turn in range(3):
            for number, session in enumerate(sessions):
                out = session.generate(random_ids(60 + 10 * turn, seed=10 * turn + number), GREEDY)
                assert out.error is None, out.error
                said.append(tokens(out))
        for session in sessions:
            session.close()
        (many,) = llm.generate([PROMPTS[3]], warm)
        said += [one.token_ids for one in many.outputs]
        return said

    with small(folder, tmp_path, 24, enable_prefix_caching=True, host=host) as llm:
        assert talk(llm) == talk(whole)
        again = [PROMPTS[3][:150] + random_ids(20, seed=seed) for seed in range(6)]
        done = llm.generate(again, GREEDY)
        assert [tokens(one) for one in done] == [tokens(one) for one in whole.generate(again, GREEDY)]
        assert max(one.report["cached_tokens"] for one in done) > 0
        llm.reset_prefix_cache()
        nothing_left(llm.pool)


def test_a_saved_session_comes_back_into_a_small_memory(folder, tmp_path, whole):
    ask = [random_ids(150, seed=1), random_ids(40, seed=2)]
    with whole.session("quest(budget=64, dense_layers=0)") as session:
        want = [tokens(session.generate(ids, GREEDY)) for ids in ask]
    with small(folder, tmp_path, 12) as llm:
        session = llm.session("quest(budget=64, dense_layers=0)")
        assert tokens(session.generate(ask[0], GREEDY)) == want[0]
        session.save(tmp_path / "saved")
        with llm.restore(tmp_path / "saved") as back:
            assert tokens(back.generate(ask[1], GREEDY)) == want[1]
        (sequence,) = llm.engine.sessions.values()
        block = sequence.kv.block_table[2:3].numpy()
        with llm.pool.tiers.fetch(1, block):
            pass
        llm.pool.tiers.lose(1, block)
        session.save(tmp_path / "text alone")
        assert tokens(session.generate(ask[1], GREEDY)) == want[1]
        session.close()
        with llm.restore(tmp_path / "text alone") as back:
            assert tokens(back.generate(ask[1], GREEDY)) == want[1]
        nothing_left(llm.pool)


def test_drafted_rows_over_a_small_memory(folder, tmp_path, whole):
    long = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    policies = ["dense", "topk(k=24)", "psa(epsilon=0.4, block_size=16, microbatch=1, rank=cuboid)"]
    want = [tokens(one) for one in whole.generate(PROMPTS[:3], long, policy=policies)]
    with small(folder, tmp_path, 14) as llm:
        with drafting(llm, Perfect([ids + answer for ids, answer in zip(PROMPTS, want)])):
            done = llm.generate(PROMPTS[:3], long, policy=policies)
        assert [tokens(one) for one in done] == want
        assert all(one.report["accepted_tokens"] > 10 for one in done)
        assert set(llm.loop.statistics().tiers) == set(_TIERS)
        nothing_left(llm.pool)


@pytest.mark.parametrize("host", [False, True])
def test_what_no_tier_can_hold_is_refused_and_what_both_can_is_not(folder, tmp_path, expected, host):
    with small(folder, tmp_path, 20, disk=f"{60 * SLOT}", host=host) as llm:  # 71 slots, 23 blocks of all layers
        with pytest.raises(CapacityError, match=f"raise kv_memory or kv_{'host' if host else 'disk'}"):
            llm.generate([random_ids(23 * 32, seed=1)], GREEDY)
        done = llm.generate(PROMPTS[:12], GREEDY, policy=POLICIES[:12])  # preempted: recomputed, as without a tier
        assert [tokens(one) for one in done] == expected[:12]
        nothing_left(llm.pool)
    for settings in (
        {"kv_disk": 5},
        {"kv_disk": ":5GiB"},
        {"kv_disk": "/dev/null/x:5GiB"},
        {"kv_disk": f"{tmp_path}:1GiB", "kv_replacement": "best"},
        {"kv_disk": f"{tmp_path}:1GiB", "kv_unit": "head"},
        {"kv_host": "1GiB", "kv_unit": "layer"},
        {"kv_disk": f"{tmp_path}:1GiB", "device": "cuda"},
        {"kv_disk": f"{tmp_path}:1GiB", "kv_memory": 8 * SLOT},
        {"kv_host": "much"},
        {"kv_host": "1000TiB", "kv_memory": "1MiB"},
        {"kv_host": 100, "kv_memory": "1MiB"},
        {"kv_host": "1MiB", "kv_memory": 8 * SLOT},
        {"kv_host": 7 * SLOT, "kv_disk": f"{tmp_path}:1GiB", "kv_memory": "1MiB"},
        {"kv_pool": "per_layer"},
        {"kv_host": "1MiB", "kv_pool": "each"},
        {"kv_host": "1MiB", "kv_pool": "per_layer", "kv_memory": 24 * SLOT},
        {"kv_host": "1MiB", "kv_disk": f"{tmp_path}:1GiB", "kv_unit": "head"},
        {"kv_host": "1MiB", "kv_disk": f"{tmp_path}:1GiB", "kv_compute": "host"},
    ):
        with pytest.raises(SaccadeError):
            LLM(folder, dtype="float32", **{"enable_prefix_caching": False, **settings})


@pytest.mark.filterwarnings("ignore:a request failed")
@pytest.mark.parametrize("host", [False, "disk"])
def test_faults_end_in_the_right_answer_or_a_named_error(folder, tmp_path, expected, monkeypatch, host):
    system = FaultySystem(0.05, seed=3)
    prompts, policies, expected = PROMPTS[::3], POLICIES[::3], expected[::3]
    with small(folder, tmp_path, 40, system=system, monkeypatch=monkeypatch, host=host) as llm:
        done = llm.generate(prompts, GREEDY, policy=policies)
        failed = [one for one in done if one.error is not None]
        assert all("TierError" in one.error or "LostKV" in one.error for one in failed), [one.error for one in failed]
        assert len(failed) < len(done) / 2
        for one, want in zip(done, expected):
            assert one.error is not None or tokens(one) == want
        counts, tier = llm.pool.tiers.counts, llm.pool.tiers.tier
        assert (tier.disk if host else tier).counts.retries > 0
        assert sum(system.met.values()) > 20
        assert counts.lost > 0
        assert any("computed again" in " ".join(one.report["notes"]) for one in done)
        nothing_left(llm.pool)
        system.rate = 0
        assert [tokens(one) for one in llm.generate(prompts, GREEDY, policy=policies)] == expected


@pytest.mark.filterwarnings("ignore:a request failed")
def test_a_full_disk_ends_requests_one_by_one(folder, tmp_path, expected, monkeypatch):
    system = FaultySystem()
    system.writes = errno.ENOSPC
    with small(folder, tmp_path, 120, system=system, monkeypatch=monkeypatch) as llm:
        done = llm.generate(PROMPTS[::2], GREEDY, policy=POLICIES[::2])
        answered = [tokens(one) == want for one, want in zip(done, expected[::2]) if one.error is None]
        assert all(answered)
        assert answered
        assert all("cannot be written to the disk" in one.error for one in done if one.error is not None)
        nothing_left(llm.pool)


@pytest.mark.parametrize("slots", [None, 60])
def test_decode_rows_share_calls_in_steps_that_prefill(folder, tmp_path, whole, monkeypatch, slots):
    """The last layer leaves out most rows of a prompt: those that decode come before them and stay where they are."""
    policies = ["psa(epsilon=0.4, block_size=16, microbatch=1, rank=cuboid)", "dense", "topk(k=24)", "dense"]
    prompts = [random_ids(length, seed=length) for length in (150, 90, 120, 800)]
    asked = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    alone = [tokens(whole.generate([ids], asked, policy=one)[0]) for ids, one in zip(prompts, policies)]
    plan, mixed = RowBackend.plan, []

    def planned(*given):
        made = plan(*given)
        attention = made.attention
        decoding = [one for one in attention.rows if one.decodes]
        if attention.frozen is not None and decoding:
            mixed.append((len(decoding), len(attention.together) + len(attention.resolved)))
        return made

    monkeypatch.setattr(RowBackend, "plan", planned)
    if slots is None:
        made = LLM(
            folder, dtype="float32", kv_memory="64MiB", prefill_chunk=64, exact=False, enable_prefix_caching=False
        )
    else:
        made = small(folder, tmp_path, slots, host=True, exact=False)
    with made as llm:
        assert [tokens(one) for one in llm.generate(prompts, asked, policy=policies)] == alone
        if slots is not None:
            assert llm.pool.tiers.counts.misses > 0
            nothing_left(llm.pool)
    assert len(mixed) > 5
    assert sum(shared for _, shared in mixed) > (0 if slots else sum(count for count, _ in mixed) - 1)
