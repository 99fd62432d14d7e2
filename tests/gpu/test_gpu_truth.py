"""Audits of recorded steps: true attention of single KV heads in float32, of bfloat16 keys too."""

from __future__ import annotations

import pytest
import torch

from saccade.engine.device.tap import Tap
from saccade.engine.watch.audit import Audit, AuditOptions
from saccade.kv.paged import Paged
from saccade.kv.view import KVView
from saccade.ops.triton.batch import Pages
from saccade.ops.triton.truth import Given, compare
from saccade.ops.truth import by_torch

LENGTHS = [5000, 70, 20001]
PLACES = [(0, 2, 1, 0), (1, 0, 0, 0), (1, 1, 1, 7), (1, 2, 0, 4096), (0, 1, 0, 9000), (1, 2, 1, 0)]


@pytest.mark.parametrize(("dtype", "width", "heads", "softcap"), [
    (torch.bfloat16, 128, 8, None), (torch.float32, 64, 6, 4.0), (torch.bfloat16, 80, 2, None),
    (torch.bfloat16, 128, 24, 20.0), (torch.float16, 128, 14, None),
])  # fmt: skip
def test_places_of_a_batch_are_compared_with_true_attention(dtype, width, heads, softcap):
    """Within 1e-3, which torch's own float32 needs: what bfloat16 weights would lose is ten times that."""
    torch.manual_seed(0)
    layers, kv_heads, size, rows = 2, 2, 32, len(LENGTHS)
    blocks = -(-max(LENGTHS) // size)
    slots = layers * rows * blocks
    k, v = torch.randn(2, slots, kv_heads, size, width, device="cuda").to(dtype)
    tables = torch.randperm(slots, device="cuda").int().view(layers, rows, 1, blocks)
    shape = layers, rows, heads
    q, out = (torch.randn(2, *shape, width, device="cuda") / 4).to(dtype)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # as the layers leave it: heads outermost
    lse = torch.full(shape, 8.0, device="cuda")
    pages = Pages(k, v, tables, torch.tensor(LENGTHS, device="cuda"), max(LENGTHS))
    places = torch.tensor(PLACES, dtype=torch.int32, device="cuda")
    tap = Tap()
    for layer in range(layers):
        tap.take(layer, slice(0, rows), q[layer], out[layer], lse[layer], None)
    given = Given(tap.addresses(), tap.dtype, tap.heads)
    found = compare(places, given, pages, scale=0.1, softcap=softcap)
    form = KVView.from_tensors(k[0, :, :1], v[0, :, :1], size).format
    wanted, audit = [], Audit(AuditOptions(1.0), 0)
    audit.found = lambda values, whole, places: wanted.append(values[0])
    for layer, row, head, window in PLACES:
        kv = KVView(Paged(k, v, tables[layer, row], LENGTHS[row], form))
        group = slice(head * heads // 2, (head + 1) * heads // 2)
        truth = by_torch(q[layer, row, group], kv, head, scale=0.1, softcap=softcap, window=window or None)
        audit.observe(out[layer, row, group], lse[layer, row, group], truth, True, (layer, head))
    torch.testing.assert_close(found, torch.stack(wanted), rtol=1e-3, atol=1e-4)
