"""True attention of one KV head: the kernels of every instruction set, and torch, against brute force in float64."""

from __future__ import annotations

import pytest
import torch
from covering import covered
from helpers import generator

from saccade.engine.watch.audit import Audit, AuditOptions, RowAudit
from saccade.errors import SaccadeError
from saccade.kv.paged import Paged
from saccade.kv.view import KVView
from saccade.models.interface import LayerAttention
from saccade.ops import cpu
from saccade.ops.truth import by_torch, group_truth

SCALE = 0.3
# (keys, head_dim, heads, KV heads, softcap, window, block size)
CASES = [
    (1, 16, 1, 1, None, None, 16),
    (33, 48, 6, 2, None, 1, 16),
    (700, 64, 12, 4, 2.0, None, 32),
    (2100, 128, 8, 8, None, 1333, 64),
    (3000, 80, 10, 2, 5.0, 5000, 16),
]


def made(length, width, heads, kv_heads, size, dtype, rng):
    k, v = torch.randn(2, kv_heads, length, width, generator=rng).to(dtype)
    v[:, length // 2] *= 50
    q = torch.randn(heads, 2 * width, generator=rng).to(dtype)[:, ::2]  # its channels apart
    return q, k, v, KVView.from_tensors(k, v, size, shuffle_seed=length)


def brute_force(q, k, v, softcap, window):
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.T * SCALE
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    if window is not None:
        scores, v = scores[:, -window:], v[-window:]
    weights = torch.softmax(scores, -1)
    return weights @ v, scores.logsumexp(-1), weights @ v.norm(dim=-1)


@covered({"isa": cpu.supported_isas() or [None], "dtype": [torch.float32, torch.bfloat16], "case": CASES})
def test_truth_is_brute_force_to_float32_whatever_the_storage(case, dtype, isa):
    """Within 2e-5 of the greatest value: keys and queries are bfloat16, arithmetic is not."""
    length, width, heads, kv_heads, softcap, window, size = case
    q, k, v, kv = made(length, width, heads, kv_heads, size, dtype, generator(length))
    group = heads // kv_heads
    if isa is not None:
        cpu.set_isa(isa)
    try:
        for g in range(kv_heads):
            wanted = brute_force(q[g * group :][:group], k[g], v[g], softcap, window)
            asked = {"scale": SCALE, "softcap": softcap, "window": window}
            found = [group_truth(q, kv, g, threads=threads, **asked) for threads in (1, 3)]
            for one, two in zip(*found):
                assert torch.equal(one, two)  # on any number of threads
            for truth in (found[0], by_torch(q[g * group :][:group], kv, g, **asked)):
                for got, right in zip(truth, wanted):
                    assert got.dtype == torch.float32
                    torch.testing.assert_close(got.double(), right, rtol=2e-5, atol=2e-5 * float(right.abs().max()))
    finally:
        cpu.set_isa(None)


def test_heads_that_lie_apart_and_keys_that_are_gone():
    """KV heads with tables of their own; blocks that are not resident are an error, where a window reads them."""
    rng = generator(3)
    q, k, v, kv = made(256, 32, 4, 2, 16, torch.float32, rng)
    one = kv.paged()
    table = torch.stack([one.block_table[0] * 2 + g for g in range(2)])  # the storage as slots of single heads
    slots = one.k.shape[0]

    def apart(pool):
        wide = torch.full((slots * 2, 2, 16, 32), torch.nan)
        for g in range(2):
            wide[g::2, g] = pool[:, g]
        return wide

    own = KVView(Paged(apart(one.k), apart(one.v), table.int(), 256, one.format))
    for g in range(2):
        for got, right in zip(group_truth(q, own, g, scale=SCALE), brute_force(q[2 * g :][:2], k[g], v[g], None, None)):
            torch.testing.assert_close(got.double(), right, rtol=2e-5, atol=2e-5)
    table[1, 3] = -1
    gone = KVView(Paged(own.paged().k, own.paged().v, table.int(), 256, one.format))
    assert group_truth(q, gone, 0, scale=SCALE).lse.isfinite().all()
    assert group_truth(q, gone, 1, scale=SCALE, window=100).lse.isfinite().all()
    with pytest.raises(SaccadeError, match="in a tier"):
        group_truth(q, gone, 1, scale=SCALE)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_keys_that_are_not_finite_fail_nothing_and_are_counted(bad):
    q, k, v, _ = made(128, 16, 2, 1, 16, torch.float32, generator(4))
    k[0, 70] = bad
    kv = KVView.from_tensors(k, v, 16)
    audit = Audit(AuditOptions(1.0), 0)
    row = RowAudit(audit, {0: [0]}, True)
    assert row.take(0, q, torch.zeros(2, 16), torch.zeros(2), kv, LayerAttention(SCALE)) is None
    assert (audit.as_dict()["left_out"], audit.as_dict()["output_error"]) == (1, None)


def test_sinks_weigh_and_carry_nothing():
    q, k, v, kv = made(100, 16, 6, 2, 16, torch.float32, generator(5))
    sinks = torch.randn(6, generator=generator(6)) + 3
    truth = group_truth(q, kv, 1, scale=SCALE, window=37, softcap=2.0).with_sinks(sinks[3:])
    scores = 2.0 * torch.tanh(q[3:] @ k[1, 63:].T * SCALE / 2.0)
    weights = torch.softmax(torch.cat([scores, sinks[3:, None]], 1), -1)[:, :-1]
    torch.testing.assert_close(truth.out, weights @ v[1, 63:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(truth.lse, scores.logsumexp(-1))
    torch.testing.assert_close(truth.scale, weights @ v[1, 63:].norm(dim=-1), rtol=1e-4, atol=1e-4)
