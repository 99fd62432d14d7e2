"""Weights by groups: values against numpy's, to the bit, in torch and in planes, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from saccade.errors import SaccadeError
from saccade.ops import cpu
from saccade.ops.group_weights import FORMATS, GroupMatrix, PermutedMatrix, by_groups, group_matrix, packed_codes
from saccade.ops.planes import PlaneMatrix, packed


def drawn(bits: int, group: int, kind: torch.dtype, outputs: int = 37, channels: int = 384):
    """The parts of a matrix, and its values by numpy in float64."""
    rng = np.random.default_rng(bits * group)
    codes = rng.integers(0, 1 << bits, (outputs, channels), dtype=np.uint8)
    zeros = rng.integers(0, 1 << bits, (outputs, channels // group), dtype=np.uint8)
    drawn = rng.standard_normal((outputs, channels // group)) * 2.0 ** rng.integers(-12, 3, zeros.shape)
    scales = torch.from_numpy(drawn).to(kind)
    groups = np.arange(channels) // group
    values = scales.double().numpy()[:, groups] * (codes.astype(np.float64) - zeros[:, groups])
    weight = packed_codes(torch.from_numpy(codes), bits)
    return weight, scales, torch.from_numpy(zeros), torch.from_numpy(values)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128, 96, 192, 384])
def test_values_are_scale_times_code_less_zero(bits, group, kind):
    *parts, values = drawn(bits, group, kind)
    bias = torch.linspace(-1, 1, 37)
    held = group_matrix(*parts, bits, bias)
    assert isinstance(held, FORMATS[str(held.format)])
    assert (held.outputs, held.channels, held.group) == (37, 384, {96: 32, 192: 64, 384: 128}.get(group, group))
    assert held.nbytes == 37 * (384 * bits // 8 + 384 // held.group * (1 + parts[1].itemsize) + 4)
    assert held.weight.data_ptr() == parts[0].data_ptr()  # nothing is unpacked
    every = torch.arange(37)
    for one in (held, packed(held)):
        assert isinstance(one, PlaneMatrix) == (one is not held and cpu.available() and kind != torch.float32)
        assert one.format == held.format
        assert torch.equal(one.rows(every, torch.float32), values.float())
        assert torch.equal(one.rows(torch.tensor([36, 5, 5]), torch.bfloat16), values.float().bfloat16()[[36, 5, 5]])
        x = torch.randn(5, 384, generator=torch.Generator().manual_seed(1))
        exact = x.double() @ values.T + bias.double()
        size = x.double().abs() @ values.abs().T + 1
        assert float(((one.product(x).double() - exact).abs() / size).max()) < 2e-6
    first, second = held.split([30, 7])
    again = GroupMatrix.join([second, first])
    assert torch.equal(again.rows(torch.tensor([0, 7]), torch.float32), values.float()[[30, 0]])
    assert torch.equal(again.bias[[0, 7]], bias[[30, 0]])


def test_a_product_of_many_rows_dequantises_a_piece_at_a_time(monkeypatch):
    monkeypatch.setattr("saccade.ops.dequantised.PIECE", 384 * 7)
    seen: list[int] = []
    real = GroupMatrix.codes
    monkeypatch.setattr(
        GroupMatrix, "codes", lambda self, which: (seen.append(len(made := real(self, which))), made)[1]
    )
    *parts, values = drawn(4, 64, torch.float16)
    x = torch.randn(3, 384)
    made = group_matrix(*parts, 4).product(x)
    torch.testing.assert_close(made.double(), x.double() @ values.T, rtol=1e-5, atol=1e-4)
    assert (max(seen), sum(seen)) == (7, 37)


def test_channels_in_an_order_of_their_own():
    """Groups of channels that lie anywhere; numbers that say nothing count as none."""
    weight, scales, zeros, _ = drawn(4, 64, torch.float16)
    codes = group_matrix(weight, scales, zeros, 4).codes().double()
    which = torch.arange(384).flip(0).view(6, 64).t().flatten() // 64
    values = scales.double()[:, which] * (codes - zeros.double()[:, which])
    bias = torch.linspace(-1, 1, 37)
    held = by_groups(weight, scales, zeros, 4, bias, 64, which.int())
    x = torch.randn(20, 384, generator=torch.Generator().manual_seed(1))
    for one in (held, packed(held)):
        assert isinstance(one, PermutedMatrix)
        assert (one.outputs, one.channels, one.format, one.native(torch.float32)) == (37, 384, "INT4_64", None)
        assert torch.equal(one.rows(torch.tensor([36, 5, 5]), torch.float32), values.float()[[36, 5, 5]])
        for rows in (1, 20):
            exact = x[:rows].double() @ values.T + bias.double()
            added = (x[:rows].abs().double() @ values.abs().T).max()  # a sum's rounding grows with what is added up
            torch.testing.assert_close(one.product(x[:rows]).double(), exact, rtol=1e-5, atol=max(1e-4, 2e-7 * added))
        first, second = one.split([16, 21])
        assert torch.equal(second.rows(torch.arange(21), torch.float32), values.float()[16:])
        assert first.alike(second)
        joined = first.join([first, second])
        assert joined.outputs == 37
        assert torch.equal(joined.product(x), one.product(x))
    other = by_groups(weight, scales, zeros, 4, None, 64, which.flip(0).contiguous())
    bare = packed(other)
    assert bare.join(bare.split([16, 21])).outputs == 37  # no bias tells how many there are
    assert not held.alike(other)
    assert not held.alike(held.inner)
    for plain in (None, torch.zeros(384), -torch.ones(384).int(), torch.arange(384) // 64):
        assert isinstance(by_groups(weight, scales, zeros, 4, None, 64, plain), GroupMatrix)
    with pytest.raises(SaccadeError, match="g_idx has other groups than such of 64 channels"):
        by_groups(weight, scales, zeros, 4, None, 64, which // 2)


@pytest.mark.parametrize(
    ("change", "bits"),
    [
        ({}, 3),
        ({"weight": torch.zeros(37, 8, dtype=torch.uint8)}, 4),
        ({"weight": torch.zeros(37, 192, dtype=torch.int8)}, 4),
        ({"scales": torch.zeros(37, 5, dtype=torch.float16)}, 4),
        ({"scales": torch.zeros(37, 0, dtype=torch.float16)}, 4),
        ({"scales": torch.zeros(37, 3, dtype=torch.float64)}, 4),
        ({"zeros": torch.zeros(36, 3, dtype=torch.uint8)}, 4),
        ({"zeros": torch.zeros(37, 3, dtype=torch.int32)}, 4),
    ],
)
def test_other_parts_are_refused(change, bits):
    parts = dict(zip(("weight", "scales", "zeros"), drawn(4, 128, torch.float16)))
    with pytest.raises(SaccadeError, match=r"codes of 4 or 8 bits, groups of multiples of 32 channels .* got "):
        group_matrix(**(parts | change), bits=bits)
