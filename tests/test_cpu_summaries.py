"""Summaries by C++, of all layers in one call or of plain rows: what torch makes of them."""

import pytest
import torch

from saccade.kv import rows
from saccade.kv.blocks import BlockManager
from saccade.kv.format import KVFormat
from saccade.kv.sequence import SequenceKV
from saccade.kv.storage import KVStorage
from saccade.kv.summaries import KINDS, summarize_view
from saccade.ops import cpu, cpu_pages
from saccade.ops.movers import row_mover

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the C++ kernels")

LAYERS, CPU = 3, torch.device("cpu")


def sequences(dtype, heads, head_dim, page, blocks=96):
    """The same sequence twice: one that torch summarizes, one that the kernels do."""
    made = []
    for mover in (rows, row_mover(CPU)):
        layout = KVFormat(dtype, heads, head_dim, page)
        pool = BlockManager(KVStorage(layout, LAYERS * blocks, CPU, mover), LAYERS)
        other = SequenceKV(pool)
        other.reserve(3 * page)  # so that slots are no running numbers
        kv = SequenceKV(pool)
        kv.reserve(page)
        other.free()
        made.append(kv)
    return made


def append(kvs, count, seed, spoil=None):
    generator = torch.Generator().manual_seed(seed)
    layout = kvs[0].pool.format
    for kv in kvs:
        kv.reserve(kv.length + count)
    for layer in range(LAYERS):
        k, v = torch.randn(2, layout.kv_heads, count, layout.head_dim, generator=generator) * 3
        for place, value in (spoil or {}).items():
            k[:, place, 1] = value
        for kv in kvs:
            kv.append(layer, k.to(layout.dtype), v.to(layout.dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "page", "size"),
    [
        (torch.bfloat16, 2, 64, 16, 16),
        (torch.float32, 1, 80, 16, 8),
        (torch.float32, 3, 16, 16, 48),
        (torch.bfloat16, 2, 32, 32, 256),
        (torch.float32, 2, 128, 16, 1),
    ],
)
def test_what_torch_makes(kind, dtype, heads, head_dim, page, size):
    kvs = sequences(dtype, heads, head_dim, page)
    for seed, count in enumerate((size // 2, size, 2 * size + 3, 5, 1, size)):  # none at first, then some, or one
        append(kvs, count, seed)
        torch_made, ours = (kv.summaries(kind, size) for kv in kvs)
        full = kvs[0].length // size
        for layer in range(LAYERS):
            assert ours[layer].dtype == torch_made[layer].dtype
            # torch sums the channels behind its last whole vectors in another order
            near = 0.0 if head_dim % 64 == 0 else 1e-5 if dtype == torch.float32 or "mean" in kind else 1e-2
            assert torch.allclose(ours[layer][:full].float(), torch_made[layer][:full].float(), rtol=near, atol=near)
            assert torch.equal(ours[layer][:full], summarize_view(kvs[1].view(layer), kind, size, 0, full))
    assert kvs[1].summarized_blocks(kind, size) == full > 3


@pytest.mark.parametrize("kind", ["cuboid", "minmax", "stored_mean", "moments"])
def test_keys_that_are_no_finite_numbers(kind):
    inf = float("inf")
    kvs = sequences(torch.float32, 1, 16, 16)
    append(kvs, 64, 1, {3: float("nan"), 20: inf, 40: -inf, 41: inf})
    torch_made, ours = (kv.summaries(kind, 16)[1] for kv in kvs)
    assert torch.allclose(ours[:4], torch_made[:4], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert ours[0].isnan().any()
    assert not ours[3].isnan().any()


def test_one_call_serves_all_layers_and_what_was_cut_off_is_made_anew(monkeypatch):
    _, kv = kvs = sequences(torch.bfloat16, 2, 32, 16)
    append(kvs, 70, 1)
    calls, real = [], cpu_pages.fill_summaries
    monkeypatch.setattr(cpu_pages, "fill_summaries", lambda *a: calls.append(a[5:7]) or real(*a))
    version = kv.version
    kv.summaries("minmax", 16)
    assert kv.version > version
    kv.summaries("minmax", 16)
    for one in kvs:
        one.truncate(40)
    append(kvs, 30, 2)
    torch_made, ours = (one.summaries("minmax", 16) for one in kvs)
    assert calls == [(0, 4), (2, 4)]
    assert all(torch.equal(a[:4], b[:4]) for a, b in zip(ours, torch_made))


def test_a_block_in_no_slot_is_an_error():
    _, kv = kvs = sequences(torch.float32, 1, 16, 16)
    append(kvs, 32, 1)
    tables = kv.tables.clone()
    tables[2, 0, 1] = -1
    storage, out = kv.pool.storage, [torch.empty(2, 1, 1, 16) for _ in range(LAYERS)]
    pool, dtype = (storage.k, storage.v), storage.format.dtype
    with pytest.raises(ValueError, match="block 1 is in no slot"):
        cpu_pages.fill_summaries(pool, dtype, tables, "mean", 16, 0, 2, out)
    with pytest.raises(ValueError, match="block table"):
        cpu_pages.fill_summaries(pool, dtype, kv.tables[:, :, :1], "mean", 16, 0, 2, out)
