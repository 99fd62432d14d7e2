"""Every format of blocks against the gguf package's dequantiser, bit for bit: values, products, parts."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from saccade.ops import dequantised
from saccade.ops.block_weights import FORMATS

HALVES = {  # where a block's half-precision numbers stand
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}  # fmt: skip
# Of scales that make weights of about 0.1, where the numbers that they multiply are large.
SIZES = {
    "Q8_0": 0.001,
    "Q3_K": 0.002,
    "Q4_K": 0.0003,
    "Q5_K": 0.0002,
    "Q6_K": 0.0001,
    "IQ4_NL": 0.002,
    "IQ4_XS": 0.0001,
}


def random_blocks(kind: str, outputs: int, blocks: int, seed: int = 0, even: bool = False) -> np.ndarray:
    """uint8 [outputs, bytes]: any bytes, with scales of every size: zero, subnormal, negative, the largest.
    ``even``: scales that make weights of a model's size, 0.1 or so."""
    rng = np.random.default_rng([seed, int(Kind[kind])])
    made = rng.integers(0, 256, (outputs, blocks, FORMATS[kind].block_bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = rng.standard_normal((outputs, blocks)) * SIZES.get(kind, 0.01)
        if not even:
            scales *= 2.0 ** rng.integers(-20, 10, scales.shape)
            for place, extreme in enumerate((0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 65504.0, -65504.0)):
                scales.flat[place % scales.size] = extreme
        made[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    if kind == "MXFP4":
        made[..., 0] = rng.integers(117, 122, (outputs, blocks)) if even else rng.integers(0, 256, (outputs, blocks))
        if not even:
            made[0, :, 0] = np.resize([0, 1, 2, 3, 255], blocks)
    return made.reshape(outputs, -1)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32)


def test_every_type_that_the_formats_name_is_ggmls():
    assert HALVES.keys() == FORMATS.keys()
    for name, kind in FORMATS.items():
        assert kind.format == name
        assert gguf.GGML_QUANT_SIZES[Kind[name]] == (kind.block, kind.block_bytes)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("outputs", "blocks"), [(1, 1), (37, 3), (16, 7)])
def test_values_are_the_gguf_packages_bit_for_bit(kind, outputs, blocks):
    stored = random_blocks(kind, outputs, blocks)
    expected = torch.from_numpy(gguf.dequantize(stored, Kind[kind]))
    held = FORMATS[kind](torch.from_numpy(stored))
    assert (held.outputs, held.channels, held.nbytes) == (*expected.shape, stored.nbytes)
    found = held.rows(torch.arange(outputs), torch.float32)
    assert torch.equal(bits(found), bits(expected))
    last = torch.tensor([outputs - 1, 0, outputs - 1])
    assert torch.equal(held.rows(last, torch.bfloat16), expected[last].bfloat16())


@pytest.mark.parametrize("kind", FORMATS)
def test_products_by_pieces_are_those_of_the_values(kind, monkeypatch):
    """Also of the parts of a matrix and of parts that are joined, with a bias; a piece is 5 rows."""
    stored = random_blocks(kind, 23, 2, even=True)
    values = torch.from_numpy(gguf.dequantize(stored, Kind[kind]))
    bias = torch.linspace(-1, 1, 23)
    held = FORMATS[kind](torch.from_numpy(stored), bias)
    monkeypatch.setattr(dequantised, "PIECE", 5 * held.channels)
    x = torch.randn(3, held.channels, generator=torch.Generator().manual_seed(1))
    exact = x.double() @ values.double().T + bias.double()
    torch.testing.assert_close(held.product(x).double(), exact, rtol=1e-5, atol=1e-4)
    first, second = held.split([20, 3])
    torch.testing.assert_close(second.product(x).double(), exact[:, 20:], rtol=1e-5, atol=1e-4)
    joined = FORMATS[kind].join([second, first])
    torch.testing.assert_close(joined.product(x).double(), exact.roll(3, 1), rtol=1e-5, atol=1e-4)
