"""Attention over blocks of which some lie in host memory and are attended there equals attention over all of them in
one place; what is fetched instead follows what either takes. CPU tensors stand for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_helpers import GREEDY, tokens
from helpers import generator
from tier_helpers import nothing_left
from tiny_models import make_checkpoint, random_ids

from saccade import LLM
from saccade.kv import BlockManager, KVFormat, KVStorage, KVView, SequenceKV
from saccade.kv.compute import Compute
from saccade.kv.host import HostTier
from saccade.ops import Call, run
from saccade.ops.down import Down
from saccade.selection import Band, Blocks, Candidates, Dense, Shape, Tokens

HEADS, KV_HEADS, N, DIM = 4, 2, 330, 32
FORMAT = KVFormat(torch.float32, KV_HEADS, DIM, 16)  # 21 blocks
SHAPE = Shape.suffix(HEADS, KV_HEADS, 1, N)
POLICIES = [
    "dense",
    "streaming(sinks=2, window=40)",
    "quest(budget=48, block_size=8, dense_layers=1)",
    "arkvale(budget=64, block_size=64)",
    "topk(k=16, sinks=2, local=8)",
    "topk(k=16, unit=q_head)",
    "lfps(k=24, blocks=2, least=1)",
    "lfps(k=24, unit=kv_head)",
    "h2o(budget=60)",
    "psa(epsilon=0.4, block_size=16, microbatch=1)",
]


def selections():
    rng = generator(3)
    listed = [torch.randperm(N, generator=rng)[:60] for _ in range(HEADS)]
    some = [torch.randperm(-(-N // 32), generator=rng)[:5] for _ in range(KV_HEADS)]
    few = [torch.randperm(N // 8, generator=rng)[:20] for _ in range(KV_HEADS)]
    rising = [torch.randperm(N - 24, generator=rng)[:70].sort().values + 4 for _ in range(HEADS)]
    candidates = torch.arange(HEADS + 1) * 70, torch.cat(rising).to(torch.int32), torch.tensor([7, 70, 1, 12])
    return {
        "dense": Dense(SHAPE),
        "band": Band(SHAPE, window=100, sinks=20),
        "tokens of query heads": Tokens.from_lists(SHAPE, listed),
        "tokens of KV heads": Tokens.from_lists(SHAPE, listed[:2]),
        "coarse blocks": Blocks.from_lists(SHAPE, 32, some),
        "fine blocks of all": Blocks.from_lists(SHAPE, 8, few[:1]),
        "candidates": Candidates(SHAPE, *candidates, 4, 20),
        "all keys": Candidates.all_keys(SHAPE, HEADS, 25, 4, 20),
        "candidates of KV heads": Candidates.all_keys(SHAPE, KV_HEADS, 25, 4, 20),
    }


def stored(compute: str, apart: bool, slots: int = 30):
    storage = KVStorage(FORMAT, slots, "cpu")
    tier = HostTier(1 << 20, storage, apart, compute)
    pool = BlockManager(storage, 2, heads_apart=apart, tier=tier, debug=True)
    kv, rows = SequenceKV(pool), torch.randn(2, 2, KV_HEADS, N, DIM, generator=generator(1))
    kv.reserve(N)
    for start in range(0, N, 110):
        for layer, (k, v) in enumerate(rows):
            kv.append(layer, k[:, start : start + 110], v[:, start : start + 110])
    return pool, kv, rows


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", list(selections()))
def test_both_parts_are_one_attention(name, apart):
    selection, q = selections()[name], torch.randn(HEADS, 1, DIM, generator=generator(2))
    pool, kv, rows = stored("host", apart)
    before, here = pool.tiers.counts.copy(), name != "candidates of KV heads"
    for layer, (k, v) in enumerate(rows):
        for weighs in (False, name != "band"):
            expected = run(Call.of(q, KVView.from_tensors(k, v), selection, softcap=5.0, want_weights=weighs))
            got = run(Call.of(q, kv.view(layer), selection, softcap=5.0, want_weights=weighs))
            torch.testing.assert_close(got.out, expected.out, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(got.lse, expected.lse, atol=1e-5, rtol=1e-5)
            assert torch.equal(got.used.unit_mask(), expected.used.unit_mask())
            if weighs:
                torch.testing.assert_close(got.weights, expected.weights, atol=1e-5, rtol=1e-5)
    moved = pool.tiers.counts.since(before)
    assert (moved.attended_on_host > 0) == here
    if here:  # sinks and the window of candidates are read on the device; nothing else is fetched
        assert moved.misses <= 2 * len(pool.tiers.each) * (3 if isinstance(selection, Candidates) else 0)
    kv.free()
    nothing_left(pool)


def test_a_copy_of_another_block_is_never_attended():
    pool, kv, _ = stored("host", False)
    gone = next(at for at, one in enumerate(kv.block_table.tolist()) if not pool.resident(0, one))
    pool.tiers.tier._owner[pool.tiers._cell[0, kv.block_table[gone]] - 1, 2] += 1
    q = torch.randn(HEADS, 1, DIM)
    with pytest.raises(Exception, match="cannot be read back"):
        run(Call.of(q, kv.view(0), Tokens.from_lists(SHAPE, [torch.tensor([gone * 16])])))
    assert pool.tiers.counts.attended_on_host == 0


def test_parts_are_attended_there_until_that_took_as_long_as_their_fetch():
    compute, some = Compute("auto"), np.array([3, 5, 9])
    assert compute.rents(0, some, True).all()  # the first is measured
    compute.attended(0, some[:2], 2, 2.0)
    assert not compute.rents(0, some, True).any()  # and the first fetch
    assert compute.measures()
    compute.fetched(0, some[:0], 4, 10.0)  # 2.5 seconds a part against one
    assert not compute.measures()
    assert compute.rents(0, some, True).tolist() == [True, True, True]
    compute.attended(0, some[:1], 1, 1.0)
    assert compute.rents(0, some, True).tolist() == [False, True, True]  # twice is as much as a fetch
    assert compute.rents(1, some, True).all()
    compute.fetched(0, some[:1], 1, None)
    assert compute.rents(0, some, True).all()
    compute.here = 3.0
    assert not compute.rents(1, some, True).any()
    assert not compute.rents(1, some, False).any()
    compute.here = 2.4
    assert compute.rents(0, some, False).all()  # what cannot stay is not worth a fetch
    assert not Compute("device").rents(0, some, False).any()


def test_a_query_on_the_host_is_where_it_is():
    q = torch.randn(2, 1, 4)
    assert Down(q).wait() is q


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=1024, head_dim=32)


@pytest.mark.parametrize(
    ("compute", "unit", "slots"), [("host", "block", 30), ("host", "head", 16), ("auto", "block", 24)]
)
def test_answers_are_those_of_a_device_that_holds_everything(folder, compute, unit, slots):
    settings = {"dtype": "float32", "prefill_chunk": 64, "device": "cpu"}
    prompts = [random_ids(180 + 17 * i, seed=i) for i in range(len(POLICIES))]
    with LLM(folder, kv_memory="64MiB", **{"enable_prefix_caching": False, **settings}) as whole:
        expected = [tokens(one) for one in whole.generate(prompts, GREEDY, policy=POLICIES)]
    size = KVFormat(torch.float32, 2, 32, 32).block_bytes
    with LLM(
        folder,
        kv_memory=slots * size,
        kv_host="64MiB",
        kv_compute=compute,
        kv_unit=unit,
        **{"enable_prefix_caching": False, **settings},
    ) as llm:
        done = llm.generate(prompts, GREEDY, policy=POLICIES)
        assert dict(zip(POLICIES, map(tokens, done))) == dict(zip(POLICIES, expected))
        there = {policy: one.report["tiers"]["attended_on_host"] for policy, one in zip(POLICIES, done)}
        assert sum(there.values()) == llm.pool.tiers.counts.attended_on_host > 0
        if compute == "host":
            assert all(there[policy] for policy in POLICIES[:1] + POLICIES[2:4] + POLICIES[5:7])
        nothing_left(llm.pool)
