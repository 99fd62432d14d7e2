"""The KV store: what goes in comes out, blocks are counted to the last one, and unwritten memory never matters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_helpers import poisoned_pool

from saccade.errors import CapacityError, SaccadeError
from saccade.kv import BlockManager, KVFormat, KVStorage, KVView, SequenceKV, summaries
from saccade.kv.row_formats import AUTO, INT8
from saccade.ops import attend

G, D, LAYERS = 2, 16, 3


def poisoned(blocks: int, size: int = 16, dtype: torch.dtype = torch.float32, layers: int = LAYERS) -> BlockManager:
    return poisoned_pool(blocks, G, D, layers=layers, block_size=size, dtype=dtype)


def rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(G, count, D, generator=rng), torch.randn(G, count, D, generator=rng)


def append(kv: SequenceKV, count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Reserve and append ``count`` rows to every layer; what was stored, by layer."""
    kv.reserve(kv.length + count)
    parts = [rows(count, seed * 100 + layer) for layer in range(kv.layers)]
    for layer, (k, v) in enumerate(parts):
        kv.append(layer, k, v)
    return parts


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 2), st.integers(1, 70)),
        st.tuples(st.just("truncate"), st.integers(0, 2), st.integers(0, 100)),
        st.tuples(st.just("free"), st.integers(0, 2), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(actions=ACTIONS, size=st.sampled_from([16, 32, 64]))
def test_any_history_equals_plain_tensors(actions, size):
    """Three sequences share a pool that is too small at times: contents, accounting and summaries stay right."""
    pool = poisoned(40, size)
    stores = [SequenceKV(pool) for _ in range(3)]
    plain = [[(torch.empty(G, 0, D), torch.empty(G, 0, D))] * LAYERS for _ in range(3)]
    for step, (what, which, amount) in enumerate(actions):
        kv, mine = stores[which], plain[which]
        if what == "append":
            before = pool.free_blocks, kv.blocks, kv.length
            missing = kv.missing_blocks(kv.length + amount)
            if missing > pool.free_blocks:
                with pytest.raises(CapacityError, match=f"{missing} KV blocks wanted but {pool.free_blocks} of 40"):
                    kv.reserve(kv.length + amount)
                assert (pool.free_blocks, kv.blocks, kv.length) == before
                continue
            for layer, (k, v) in enumerate(append(kv, amount, step)):
                mine[layer] = torch.cat([mine[layer][0], k], 1), torch.cat([mine[layer][1], v], 1)
        else:
            length = amount if what == "truncate" else 0
            kv.truncate(length) if what == "truncate" else kv.free()
            plain[which] = [(k[:, :length], v[:, :length]) for k, v in mine]
        assert pool.used_blocks == sum(store.blocks for store in stores)
        assert pool.free_blocks + pool.used_blocks == 40
        for store, expected in zip(stores, plain):
            assert store.length == expected[0][0].shape[1]
            assert store.blocks == pool.slots_for(store.length)
            for layer in range(LAYERS):
                view, (k, v) = store.view(layer), expected[layer]
                assert torch.equal(view.keys(), k)
                assert torch.equal(view.values(), v)
                for kind in ("cuboid", "mean"):
                    fresh = KVView.from_tensors(k, v, size).summary(kind, 16) if k.shape[1] else torch.empty(0)
                    got = view.summary(kind, 16)
                    assert got.shape[0] == k.shape[1] // 16
                    if got.numel():
                        assert torch.equal(got, fresh)
    for store in stores:
        store.free()
    assert pool.used_blocks == 0


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 127, 128, 129, 300])
def test_spans_and_gathers_equal_slices(size, n):
    k, v = rows(n, n)
    view = KVView.from_tensors(k, v, size, shuffle_seed=n)
    assert view.blocks == -(-n // size)
    for start, stop in ((0, n), (0, 0), (n, n), (n // 3, n // 2), (n - 1, n), (0, 1)):
        assert torch.equal(view.keys(start, stop), k[:, start:stop])
        assert torch.equal(view.values(start, stop), v[:, start:stop])
    positions = torch.randint(0, n, (50,), generator=torch.Generator().manual_seed(0))
    for head in range(G):
        got_k, got_v = view.take(positions, head)
        assert torch.equal(got_k, k[head, positions])
        assert torch.equal(got_v, v[head, positions])
    for start, stop in ((-1, 1), (0, n + 1), (2, 1)):
        with pytest.raises(SaccadeError, match="stored tokens"):
            view.keys(start, stop)


def test_storage_rounds_to_its_type_once():
    k, v = rows(40, 1)
    kv = SequenceKV(poisoned(9, 16, torch.bfloat16, layers=1))
    kv.reserve(40)
    kv.append(0, k, v)
    keys = k.bfloat16()
    assert torch.equal(kv.view(0).keys(), keys)
    assert kv.view(0).summary("mean", 16).dtype == torch.float32
    extremes = kv.view(0).summary("minmax", 16)  # in the keys' dtype: they are keys' values
    assert extremes.dtype == torch.bfloat16
    for block in range(2):
        own = keys[:, 16 * block : 16 * block + 16]
        assert torch.equal(extremes[block], torch.stack([own.amax(1), own.amin(1)]))
    cuboids = kv.view(0).summary("cuboid", 16)
    exact = summaries.summarize(keys[:, :32].unflatten(1, (2, 16)), "cuboid").permute(2, 0, 1, 3)
    assert torch.equal(cuboids, exact.bfloat16())


def test_many_summaries_are_made_a_tile_at_a_time(monkeypatch):
    view = KVView.from_tensors(*rows(331, 1), shuffle_seed=1)
    whole = [view.summary(kind, 16) for kind in summaries.KINDS]
    monkeypatch.setattr(summaries, "TILE_KEYS", 64)
    for kind, expected in zip(summaries.KINDS, whole):
        assert torch.equal(view.summary(kind, 16), expected)
        assert expected.shape == (20, summaries.parts_of(kind, 16, D), G, D)
    assert view.upto(15).summary("minmax", 16).shape == (0, 2, G, D)


def test_layers_may_be_ahead_of_each_other_within_a_step():
    kv = SequenceKV(poisoned(30))
    kv.reserve(20)
    kv.append(0, *rows(20, 1))
    kv.append(1, *rows(20, 2))
    assert kv.length == 0
    assert kv.view(0).length == 20
    kv.truncate(0)
    assert [kv.view(layer).length for layer in range(LAYERS)] == [0, 0, 0]
    assert kv.pool.used_blocks == 0


def test_appending_without_room_is_an_error():
    kv = SequenceKV(poisoned(30))
    kv.reserve(16)
    with pytest.raises(SaccadeError, match=r"no room for 17 tokens after 0: reserve\(\) first"):
        kv.append(0, *rows(17, 1))
    assert kv.view(0).length == 0


def test_reserving_what_is_there_takes_nothing():
    kv = SequenceKV(poisoned(30))
    kv.reserve(33)
    assert kv.blocks == 9
    kv.reserve(48)
    kv.reserve(1)
    assert kv.blocks == 9
    assert kv.missing_blocks(49) == 3


def test_a_slot_serves_one_sequence_and_layer_only():
    pool = poisoned(24)
    stores = [SequenceKV(pool) for _ in range(2)]
    for turn in range(3):
        for store in stores:
            append(store, 17, turn)
            store.truncate(store.length - 9)
    taken = [slot for store in stores for slot in store.tables[:, 0, : store.blocks // LAYERS].flatten().tolist()]
    assert len(taken) == len(set(taken)) == pool.used_blocks
    assert min(taken) >= 0


def test_attention_after_truncation_never_sees_what_was_forgotten():
    """Blocks given back and reused by another sequence, stale rows behind the end: all as in a fresh store."""
    pool = poisoned(24, layers=1)
    kv, other = SequenceKV(pool), SequenceKV(pool)
    k, v = rows(100, 5)
    kv.reserve(100)
    kv.append(0, k, v)
    kv.truncate(37)
    other.reserve(90)
    other.append(0, *rows(90, 6))
    kv.reserve(50)
    kv.append(0, k[:, 50:63], v[:, 50:63])
    q = torch.randn(4, 3, D, generator=torch.Generator().manual_seed(1))
    expected = torch.cat([k[:, :37], k[:, 50:63]], 1), torch.cat([v[:, :37], v[:, 50:63]], 1)
    assert torch.equal(attend(q, kv.view(0))[0], attend(q, KVView.from_tensors(*expected, 16))[0])


def test_a_view_taken_earlier_stays_at_its_length():
    kv = SequenceKV(poisoned(24, layers=1))
    kv.reserve(80)
    k, v = rows(80, 7)
    kv.append(0, k[:, :40], v[:, :40])
    early = kv.view(0)
    kv.append(0, k[:, 40:], v[:, 40:])
    assert early.length == 40
    assert torch.equal(early.keys(), k[:, :40])
    assert early.summary("mean", 16).shape[0] == 2
    assert kv.view(0).summary("mean", 16).shape[0] == 5


def test_summaries_by_hand():
    keys = torch.tensor([[1.0, -4.0], [3.0, 0.0], [2.0, 10.0], [2.0, 2.0]])
    assert summaries.summarize(keys, "mean").tolist() == [[2.0, 2.0]]
    assert summaries.summarize(keys, "minmax").tolist() == [[3.0, 10.0], [1.0, -4.0]]
    # centres 2 and 3; mean distances (1+1+0+0)/4 and (7+3+7+1)/4
    assert summaries.summarize(keys, "cuboid").tolist() == [[2.5, 7.5], [1.5, -1.5]]
    with pytest.raises(SaccadeError, match="known: cuboid, minmax, mean"):
        summaries.summarize(keys, "median")


def test_pool_refuses_nonsense():
    with pytest.raises(SaccadeError, match="block_size=24 is not one of"):
        KVFormat(torch.float32, G, D, block_size=24)
    with pytest.raises(SaccadeError, match="kv_heads=0 and head_dim=16"):
        KVFormat(torch.float32, 0, D)
    with pytest.raises(SaccadeError, match="keys of format 'int8' and values of 'auto': kernels"):
        KVFormat(torch.float32, G, D, k=INT8)
    with pytest.raises(CapacityError, match="raise kv_memory"):
        KVStorage(KVFormat(torch.float32, G, D), 0)
    with pytest.raises(SaccadeError, match="must both be"):
        KVView.from_tensors(torch.ones(G, 3, D), torch.ones(G, 4, D))
    with pytest.raises(SaccadeError, match="layers=0"):
        poisoned(4, layers=0)


def test_the_format_says_what_memory_is_taken():
    for dtype in (torch.float32, torch.bfloat16):
        layout = KVFormat(dtype, G, D, 64)
        storage = KVStorage(layout, 3)
        assert storage.k.nbytes + storage.v.nbytes == 3 * layout.block_bytes
        assert storage.k.shape == storage.v.shape == layout.shape(3, AUTO)
        assert storage.k.is_contiguous()
        assert storage.v.is_contiguous()
        assert [layout.blocks(tokens) for tokens in (0, 1, 64, 65)] == [0, 1, 1, 2]
