"""What audits of recorded steps compute: every place of a batch in one launch, against torch in float32."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from helpers import generator

from saccade.engine.device.tap import Tap
from saccade.engine.watch.audit import Audit, AuditOptions
from saccade.kv.paged import Paged
from saccade.kv.view import KVView
from saccade.ops.triton.batch import Pages
from saccade.ops.triton.truth import Given, compare
from saccade.ops.truth import by_torch

LENGTHS = [1, 40, 333]
PLACES = [(0, 2, 1, 0), (1, 0, 0, 0), (1, 1, 1, 7), (1, 2, 0, 100), (0, 1, 0, 4000), (1, 2, 1, 1)]


@pytest.mark.parametrize(("dtype", "width", "heads", "softcap", "table_rows"), [
    (torch.float32, 48, 6, None, 2), (torch.float16, 32, 2, 3.0, 1), (torch.float16, 32, 10, None, 2),
    (torch.float16, 16, 18, None, 1),  # too many heads a group for the parts of weights to share a product
])  # fmt: skip
def test_places_of_a_batch_are_compared_with_true_attention(dtype, width, heads, softcap, table_rows):
    """Layers, rows of several lengths, windows, tables for each KV head; what no row owns is NaN. The interpreter
    multiplies float16, but no bfloat16."""
    rng, layers, kv_heads, size = generator(heads), 2, 2, 16
    rows, blocks = len(LENGTHS), -(-max(LENGTHS) // size)
    slots = layers * rows * table_rows * blocks
    pool = torch.full((2, slots, kv_heads, size, width), float("nan"), dtype=dtype)
    order = torch.randperm(slots, generator=rng).int().view(layers, rows, table_rows, blocks)
    tables = torch.zeros(layers, rows, table_rows, blocks + 3, dtype=torch.int32)
    for row, length in enumerate(LENGTHS):
        tables[:, row, :, : -(-length // size)] = order[:, row, :, : -(-length // size)]
        for layer in range(layers):
            for at in range(length):
                for head in range(kv_heads):
                    slot = tables[layer, row, head % table_rows, at // size]
                    pool[:, slot, head, at % size] = torch.randn(2, width, generator=rng).to(dtype)
    shape = layers, rows, heads
    q, out = torch.randn(2, *shape, width, generator=rng).to(dtype)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # as the layers leave it: heads outermost
    lse = torch.randn(shape, generator=rng) + 1
    tap = Tap()
    for layer in range(layers):  # rows of two groups, the later one first
        for at in (slice(1, rows), slice(0, 1)):
            tap.take(layer, at, q[layer, at], out[layer, at], lse[layer, at], None)
    given = Given(tap.addresses(), tap.dtype, tap.heads)
    for taken, whole in zip(tap.row(1, 2), (q, out, lse)):
        assert torch.equal(taken, whole[1, 2])
    pages = Pages(pool[0].contiguous(), pool[1].contiguous(), tables, torch.tensor(LENGTHS), max(LENGTHS))
    found = compare(torch.tensor(PLACES, dtype=torch.int32), given, pages, scale=0.2, softcap=softcap)
    fmt = KVView.from_tensors(
        torch.zeros(kv_heads, 1, width, dtype=dtype), torch.zeros(kv_heads, 1, width, dtype=dtype), size
    )
    wanted = Audit(AuditOptions(1.0), 0)
    kept = []
    wanted.found = lambda values, whole, places: kept.append(values[0])
    for layer, row, head, window in PLACES:
        kv = KVView(Paged(pages.k, pages.v, tables[layer, row].contiguous(), LENGTHS[row], fmt.format))
        group = slice(head * heads // 2, (head + 1) * heads // 2)
        truth = by_torch(q[layer, row, group], kv, head, scale=0.2, softcap=softcap, window=window or None)
        wanted.observe(out[layer, row, group], lse[layer, row, group], truth, True, (layer, head))
    torch.testing.assert_close(found, torch.stack(kept), rtol=1e-4, atol=1e-5)
    assert found.isfinite().all()
    pool[0, tables[0, 2, 0, 3], :, 5] = float("nan")  # in pages too, where the first table row finds it
    pages.k.copy_(pool[0])
    again = compare(torch.tensor([(0, 2, 0, 0)], dtype=torch.int32), given, pages, scale=0.2, softcap=softcap)
    assert again.isnan().all()
