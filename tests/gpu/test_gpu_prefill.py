"""The Triton prefill kernels on a GPU against float64, on random and structured inputs, outputs poisoned first."""

from __future__ import annotations

import pytest
import torch
from gpu_helpers import agrees, data, random_blocks

from saccade.kv.view import KVView
from saccade.ops import Call, attend, run
from saccade.ops.triton.means import Means
from saccade.ops.triton.prefill import Config, attend_prefill
from saccade.selection import Band, Corrected, Dense, Shape


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize(("head_dim", "dtype"), [
    (128, torch.bfloat16), (64, torch.bfloat16), (80, torch.float16), (96, torch.bfloat16), (256, torch.bfloat16),
    (128, torch.float32), (128, torch.float16),
])  # fmt: skip
def test_dense_prefill(head_dim, dtype, structured):
    q, k, v, view, shape = data(8, 2, 333, 1000, head_dim, dtype, structured)
    agrees(q, k, v, view, Dense(shape))


def test_dense_prefill_with_softcap():
    q, k, v, view, shape = data(8, 2, 200, 500, 128)
    agrees(q, k, v, view, Dense(shape), softcap=4.0)


@pytest.mark.parametrize(("window", "sinks"), [(100, 0), (64, 4)])
def test_bands(window, sinks):
    q, k, v, view, shape = data(8, 2, 333, 1000, 128)
    agrees(q, k, v, view, Band(shape, window=window, sinks=sinks))


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize(("size", "units"), [(128, 8), (64, 8), (128, 2), (128, 1)])
def test_block_sparse_prefill(size, units, structured):
    q, k, v, view, shape = data(8, 2, 777, 2000, 128, structured=structured)
    agrees(q, k, v, view, random_blocks(shape, size, units))


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("keys", [64, 128])
def test_every_tile(keys, copy):
    q, _, _, view, shape = data(8, 2, 777, 2000, 128)
    expected, _ = attend(q, view, Dense(shape))
    got, _ = attend_prefill(q, view, Dense(shape), scale=128**-0.5, config=Config(128, keys, 8, 2, copy))
    torch.testing.assert_close(got, expected, atol=1e-2, rtol=1e-2)
    lists = random_blocks(shape, 128, 8).to(q.device)
    expected, _ = attend(q, view, lists)
    got, _ = attend_prefill(q, view, lists, scale=128**-0.5, config=Config(128, keys, 8, 2, copy))
    torch.testing.assert_close(got, expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(("head_dim", "dtype"), [(128, torch.bfloat16), (64, torch.float32), (256, torch.bfloat16)])
@pytest.mark.parametrize(("size", "units"), [(128, 8), (64, 2)])
def test_means_join_within_the_kernel(size, units, head_dim, dtype):
    q, k, v, view, shape = data(8, 2, 777, 2000, head_dim, dtype, structured=True)
    lists = random_blocks(shape, size, units, share=0.2).to(q.device)
    ran = run(Call.of(q, view, Corrected(lists, size)))
    assert ran.backend == "triton"
    host = KVView.from_tensors(k.cpu().float(), v.cpu().float())
    expected = run(Call.of(q.cpu().float(), host, Corrected(lists.to("cpu"), size)), "reference")
    loose = 3e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(ran.out.cpu().float(), expected.out, atol=loose, rtol=loose)
    torch.testing.assert_close(ran.lse.cpu(), expected.lse, atol=loose, rtol=loose)
    one = Shape.suffix(8, 2, 1, 2000)
    last = random_blocks(one, size, units, share=0.2).to(q.device)
    ran = run(Call.of(q[:, -1:], view, Corrected(last, size)))
    expected = run(Call.of(q[:, -1:].cpu().float(), host, Corrected(last.to("cpu"), size)), "reference")
    torch.testing.assert_close(ran.out.cpu().float(), expected.out, atol=loose, rtol=loose)
    torch.testing.assert_close(ran.lse.cpu(), expected.lse, atol=loose, rtol=loose)


@pytest.mark.parametrize("copy", [False, True])
def test_means_in_every_tile(copy):
    q, _, _, view, shape = data(8, 2, 777, 2000, 128)
    lists = random_blocks(shape, 128, 8, share=0.2).to(q.device)
    expected = run(Call.of(q, view, Corrected(lists, 128)), "reference").out
    config, means = Config(128, 128, 8, 3, copy), Means.of(view, lists, q.dtype)
    got, _ = attend_prefill(q, view, lists, scale=128**-0.5, config=config, means=means)
    torch.testing.assert_close(got, expected, atol=1e-2, rtol=1e-2)


def test_long_context_rows_agree_with_float64():
    """128K keys: a chunk's rows against float64 over the keys their lists name."""
    n, rows = 131072, 256
    rng = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(8, rows, 128, device="cuda", generator=rng).bfloat16()
    k, v = torch.randn(2, 2, n, 128, device="cuda", generator=rng).bfloat16()
    view, shape = KVView.from_tensors(k, v, shuffle_seed=1), Shape.suffix(8, 2, rows, n)
    for selection in (Dense(shape), random_blocks(shape, 128, 8, 0.1)):
        out, _ = attend(q, view, selection)
        for head in (0, 5):
            mask = selection.row_mask(head * selection.units // 8, 0, rows).cuda()
            scores = (q[head].double() @ k[head // 4].double().T) * 128**-0.5
            weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1)
            expected = weights @ v[head // 4].double()
            assert float((out[head].double() - expected).norm() / expected.norm()) < 2e-2
