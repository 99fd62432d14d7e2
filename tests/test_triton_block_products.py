"""Products with the blocks of GGUF files by the GPU's kernel, under Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from test_planes import blocks, draw

from saccade.ops.block_weights import FORMATS
from saccade.ops.triton import block_products


@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("name", block_products.FORMATS)
def test_products_of_few_rows_equal_the_dequantised_weights(name, wild):
    """35 outputs, more than a program has; rows that lie apart; scales as models have them, and of every size."""
    held = blocks(name, 35, 512, seed=3, wild=wild)
    values = held.dequantised(slice(None)).double()
    x = draw(3, 2 * 512, seed=4)[:, ::2]
    assert block_products.serves(x, held)
    made, exact = block_products.product(x, held).double(), x.double() @ values.T
    most = x.double().abs() @ values.abs().T  # what rounding is relative to
    assert bool(((made - exact).abs() <= 2e-6 * most).all())
    assert torch.equal(block_products.product(x[1:2], held), made[1:2].float())


def test_formats_without_a_kernel_and_many_rows_are_left_to_torch():
    for name in set(FORMATS) - set(block_products.FORMATS):
        assert not block_products.serves(draw(1, 512), blocks(name, 3, 512))
    assert not block_products.serves(draw(33, 512), blocks("Q4_K", 3, 512))
