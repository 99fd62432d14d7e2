"""Products of few rows on the device: under Triton's interpreter against float64, and as a model's decode step."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from torch.nn.functional import linear, silu

from saccade.ops.fp8 import E4M3
from saccade.ops.fp8_weights import ScaledFp8Matrix
from saccade.ops.matrices import DenseMatrix
from saccade.ops.triton import products
from saccade.ops.triton.products import _cut, gated, product, scaled, serves


def draw(*size, seed=0, dtype=torch.float16):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def matrix(outputs, channels, seed=1, biased=False):
    wide = 0.1 * draw(outputs, channels + 8, seed=seed)
    return DenseMatrix(wide[:, :channels], draw(outputs, seed=seed + 1) if biased else None)


@pytest.mark.parametrize(
    ("rows", "outputs", "channels", "biased"),
    [(1, 64, 128, False), (5, 200, 1152, True), (17, 130, 2048, False), (32, 64, 4096, True), (3, 1, 256, True)],
)
def test_products_are_those_of_float64(rows, outputs, channels, biased):
    x, held = draw(rows, 2 * channels)[:, ::2], matrix(outputs, channels, biased=biased)
    assert serves(x, held)
    bias = None if held.bias is None else held.bias.double()
    exact = linear(x.double(), held.weight.double(), bias)
    made = product(x, held)
    assert made.is_contiguous()
    torch.testing.assert_close(made.double(), exact, rtol=2e-3, atol=2e-3)
    again = product(x, held)  # counters of the programs that share an output are left as they were found
    assert torch.equal(made, again)


def test_several_programs_share_the_channels_of_few_outputs():
    assert _cut(2, 32, 4, False) == (2, 6)
    assert _cut(2, 4, 4, False) == (1, 6)  # too few channels
    assert _cut(64, 32, 132, False) == (2, 6)
    assert _cut(96, 32, 132, False) == (1, 6)
    assert _cut(2004, 32, 132, False) == (1, 4)
    assert _cut(224, 32, 132, True) == (1, 4)


@pytest.mark.parametrize(
    ("rows", "inner", "channels"), [(1, 96, 256), (8, 200, 256), (3, 80, 2048)]
)  # the last in parts
def test_a_gated_product_rounds_as_its_three_parts(rows, inner, channels):
    x, gate, up = draw(rows, channels), matrix(inner, channels, seed=3), matrix(inner, channels, seed=5)
    parts = [linear(x.double(), one.weight.double()).to(torch.float16) for one in (gate, up)]
    wanted = silu(parts[0].float()).to(torch.float16) * parts[1]
    # Where a sum lies on the edge of two float16, either is right.
    torch.testing.assert_close(gated(x, gate, up), wanted, rtol=3e-3, atol=1e-4)


def test_a_row_is_what_it_is_alone():
    x, held, up = draw(16, 1024), matrix(192, 1024), matrix(192, 1024, seed=9)
    all_rows, all_gated = product(x, held), gated(x, held, up)
    for count in (1, 3, 15):  # more than 16 are another product for NumPy, which multiplies under the interpreter
        assert torch.equal(product(x[:count], held), all_rows[:count])
        assert torch.equal(gated(x[:count], held, up), all_gated[:count])


def test_infinities_and_nans_stay_in_their_rows():
    x, held = draw(4, 256), matrix(70, 256)
    calm = product(x, held)
    x[1, 3], x[2, 5] = float("inf"), float("nan")
    made = product(x, held)
    assert torch.equal(made[[0, 3]], calm[[0, 3]])
    assert not made[1].isfinite().any()
    assert made[2].isnan().all()


@pytest.mark.parametrize(
    ("x", "held"),
    [
        (draw(33, 256), matrix(64, 256)),  # many rows
        (draw(2, 200), matrix(64, 200)),  # channels that are no whole tiles
        (draw(2, 256, dtype=torch.float32), DenseMatrix(draw(64, 256, dtype=torch.float32))),
        (draw(2, 256), DenseMatrix(draw(256, 64).T)),  # weights that lie the other way
    ],
)
def test_other_products_are_torchs(x, held, monkeypatch):
    monkeypatch.setattr(products, "_launch", None)
    assert not serves(x, held)
    assert torch.equal(product(x, held), linear(x, held.weight))
    gate = linear(x, held.weight)
    torch.testing.assert_close(gated(x, held, held), silu(gate) * gate, rtol=2e-3, atol=2e-3)


def test_gates_with_a_bias_are_torchs(monkeypatch):
    monkeypatch.setattr(products, "_launch", None)
    x, held = draw(2, 256), matrix(64, 256, biased=True)
    gate = linear(x, held.weight, held.bias)
    torch.testing.assert_close(gated(x, held, held), silu(gate) * gate, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("rows", "outputs", "channels", "width", "biased"),
    [(1, 64, 128, 128, False), (5, 200, 1152, 128, True), (17, 130, 2048, 256, False), (3, 70, 512, None, True)],
)
def test_weights_in_e4m3_are_read_as_they_lie(rows, outputs, channels, width, biased):
    """By blocks of 128 outputs, or a scale for each; all finite bytes, subnormal ones too."""
    x, generator = draw(rows, 2 * channels)[:, ::2], torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (outputs, channels), dtype=torch.uint8, generator=generator)
    codes[codes & 127 == 127] = 1  # no number
    runs = 1 if width is None else -(-channels // width)
    scales = (0.002 * draw(-(-outputs // 128), runs, seed=4).float()).repeat_interleave(128, 0)[:outputs].contiguous()
    bias = draw(outputs, seed=5) if biased else None
    held = ScaledFp8Matrix(codes.view(E4M3), scales, width or channels, bias, torch.float16)
    worth = held.dequantised(slice(None)).double()
    exact = linear(x.double(), worth, None if bias is None else bias.double())
    made, most = scaled(x, held), x.double().abs() @ worth.abs().T
    assert bool(((made.double() - exact).abs() <= 1e-3 * (most + exact.abs())).all())
    assert torch.equal(scaled(x[-1:], held), made[-1:])
    assert scaled(draw(33, channels), held) is None
    assert not held.has_kernel  # on a CPU
