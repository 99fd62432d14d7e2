"""tail=mean on the device: the means of unread blocks join within the kernels, as the reference says."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from helpers import generator, random_selection
from test_mean_tail import brute, problem

from saccade.ops import Call, run
from saccade.ops.mean_tail import mean_tail
from saccade.ops.triton.means import attend_means
from saccade.selection import Blocks, Corrected, Shape


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    ("rows", "n", "units", "size", "dtype"),
    [
        (77, 203, 6, 32, torch.float32),  # begins within a block
        (203, 203, 2, 64, torch.float32),
        (18, 1100, 1, 16, torch.float32),  # more means than a tile
        (40, 60, 2, 64, torch.float32),  # no block that a row sees whole
        (77, 203, 2, 32, torch.float16),
    ],
)
def test_prefills_with_means_are_as_brute_force_says(rows, n, units, size, dtype, softcap):
    q, view = problem(6, 2, rows, n, d=48 if size == 32 else 32, dtype=dtype)
    q = torch.cat([q, q], -1)[..., : q.shape[-1]]  # rows that lie apart
    shape = Shape.suffix(6, 2, rows, n)
    inner = random_selection("blocks", shape, units, generator(rows), block_size=size)
    ran = run(Call.of(q, view, Corrected(inner, size), softcap=softcap), "triton")
    assert ran.backend == "triton"
    assert ran.used is inner
    out, lse = brute(q, view, inner, size, q.shape[-1] ** -0.5, softcap)
    loose = {"atol": 2e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 4e-3, "rtol": 4e-3}
    torch.testing.assert_close(ran.out.double(), out, **loose)
    torch.testing.assert_close(ran.lse.double(), lse, **loose)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("n", "units", "size"), [(203, 6, 32), (1100, 2, 8), (299, 1, 16), (20, 2, 32), (64, 2, 64)])
def test_means_of_one_row_are_the_reference_s(n, units, size, softcap):
    q, view = problem(6, 2, 1, n, d=48)
    shape = Shape.suffix(6, 2, 1, n)
    used = random_selection("blocks", shape, units, generator(n), block_size=size)
    if n == 64:  # everything is read: nothing stands for anything
        used = Blocks.from_block_mask(shape, size, torch.ones(units, 1, 1, dtype=torch.bool))
    out, lse = attend_means(q, view, used, 0.2, softcap)
    expected, expected_lse = mean_tail(q, view, Corrected(used, size), used, scale=0.2, softcap=softcap)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-4)
