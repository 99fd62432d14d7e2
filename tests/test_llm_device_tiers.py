"""Batched steps over KV most of which lies in host memory: blocks are brought in within the step, and answers are those
of an engine whose device holds everything. CPU tensors, Triton's interpreter, no graphs."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import Once, device_of, put_on_device
from engine_helpers import tokens
from tier_helpers import nothing_left
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.device import backend as device
from saccade.kv import offers
from saccade.kv.format import KVFormat
from saccade.ops.triton import residency

SLOT = KVFormat(torch.float32, 2, 32, 16).block_bytes
POLICIES = [
    "quest(budget=64, block_size=16, dense_layers=0)",
    "arkvale(budget=96, block_size=32)",
    "streaming(sinks=2, window=40)",
    "quest(budget=64, block_size=16, dense_layers=1)",
    "dense",
    "topk(k=24)",
    "psa(epsilon=0.05, block_size=16, microbatch=1)",
    "psa(epsilon=0.05, block_size=16, microbatch=1, rank=keys, rest=estimate)",
]
PROMPTS = [random_ids(length, seed=length) for length in (203, 190, 170, 140, 90, 120, 180, 185)]
SOME = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(
        "llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=1024, head_dim=32, num_hidden_layers=2
    )


def engine(folder, slots: int | None, mirrored: bool = False, **options) -> LLM:
    settings = {"dtype": "float32", "prefill_chunk": 64, "exact": False, "block_size": 16, "device": "cpu"}
    if slots is None:
        return LLM(folder, kv_memory="16MiB", **{"enable_prefix_caching": False, **settings})
    made = LLM(
        folder, kv_memory=slots * SLOT, **{"enable_prefix_caching": False, "kv_host": "16MiB", **settings, **options}
    )
    if mirrored:  # as a GPU has it: what steps move is written down on the host afterwards
        made.pool.slots = made.pool.slots.clone()
    put_on_device(made)
    return made


@pytest.fixture(scope="module")
def expected(folder):
    with engine(folder, None) as whole:
        return [tokens(one) for one in whole.generate(PROMPTS, SOME, policy=POLICIES)]


@pytest.mark.parametrize(
    ("slots", "replacement", "which", "unit"),
    [
        (30, "fifo", (0, 2, 4, 5), "block"),
        (34, "clock", (5, 0), "block"),
        (30, "clock", (1, 3, 5), "head"),
        (40, "per_layer", (0, 3), "block"),
        pytest.param(40, "lru", (0, 3), "block", marks=pytest.mark.thorough),
        pytest.param(34, "lru", (5, 0, 6), "head", marks=pytest.mark.thorough),
        pytest.param(34, "lru", (7, 0, 6), "head", marks=pytest.mark.thorough),
    ],
)
def test_answers_under_a_small_device(folder, expected, slots, replacement, which, unit):
    policies, prompts = [POLICIES[at] for at in which], [PROMPTS[at] for at in which]
    options = {"kv_pool": replacement} if replacement == "per_layer" else {"kv_replacement": replacement}
    with engine(folder, slots, unit == "head", **options, kv_unit=unit) as llm:
        done = llm.generate(prompts, SOME, policy=policies)
        assert not {policy: one.error for policy, one in zip(policies, done) if one.error is not None}
        want = dict(zip(policies, [expected[at] for at in which]))
        assert dict(zip(policies, [tokens(one) for one in done])) == want
        counts = llm.pool.tiers.counts
        assert min(counts.misses, counts.evicted, counts.bytes_read) > 0
        assert counts.lost == 0
        if llm.pool.layers_apart:
            assert llm.pool.tiers.offers is None  # a device would take slots of any layer
        nothing_left(llm.pool)


@pytest.mark.parametrize("which", [0, 4])
def test_what_lies_on_the_disk_comes_through_host_memory(folder, tmp_path, expected, which):
    """A device takes parts from host memory alone: a step that wants others is done by the host, and then by itself."""
    with engine(folder, 24, kv_host=30 * SLOT, kv_disk=f"{tmp_path}:64MiB") as llm:
        done = llm.generate([PROMPTS[which], PROMPTS[1]], SOME, policy=[POLICIES[which], POLICIES[1]])
        assert [tokens(one) for one in done] == [expected[which], expected[1]]
        numbers = llm.pool.tiers.numbers()
        assert min(numbers[name] for name in ("disk_bytes_read", "disk_bytes_written", "bytes_read")) > 0
        assert numbers["lost"] == 0
        assert sum(one.report["decode"]["backends"]["triton"] for one in done) > 0
        nothing_left(llm.pool)


@pytest.mark.parametrize(
    ("which", "unit", "in_place"),
    [
        (0, "block", False),
        (0, "block", True),
        (6, "block", True),
        (0, "head", True),
        pytest.param(6, "head", True, marks=pytest.mark.thorough),
        pytest.param(7, "block", True, marks=pytest.mark.thorough),
        (0, "head", False),
        *(pytest.param(6, unit, False, marks=pytest.mark.thorough) for unit in ("block", "head")),
        *(pytest.param(7, unit, False, marks=pytest.mark.thorough) for unit in ("block", "head")),
    ],
)
def test_one_sequence_is_served_by_its_own_steps(folder, expected, which, unit, in_place, monkeypatch):
    monkeypatch.setattr(offers, "READS_HOST", in_place)
    monkeypatch.setattr(offers, "MOST_LATE", 3)
    monkeypatch.setattr(offers, "FIRST_RANKED", 2)
    monkeypatch.setattr(residency, "LEAST_RANKED", 2)
    with engine(folder, 24, True, kv_unit=unit) as llm:  # 28 or 26 blocks in 23 slots
        (done,) = llm.generate([PROMPTS[which]], SOME, policy=POLICIES[which])
        assert tokens(done) == expected[which]
        backends = done.report["decode"]["backends"]
        assert backends["triton"] > 0.7 * sum(backends.values()), backends
        assert (llm.pool.tiers.offer().host is not None) == in_place
        moved = done.report["tiers"]
        assert min(moved["hits"], moved["misses"], moved["bytes_read"]) > 0
        assert moved["misses"] <= llm.pool.tiers.counts.misses
        nothing_left(llm.pool)


def test_a_step_that_fails_leaves_what_it_moved_where_it_lies(folder, expected, monkeypatch):
    with engine(folder, 40) as llm:
        monkeypatch.setattr(device, "fetch_tokens", Once(device.fetch_tokens, RuntimeError("no tokens"), at=5))
        done = llm.generate(PROMPTS[:2], SOME, policy=POLICIES[:2])
        assert [tokens(one) for one in done] == expected[:2]
        assert device_of(llm)._tiers._begun is None
        nothing_left(llm.pool)
