"""Products of few rows on a GPU: against float64, in graphs, and row by row."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, silu

from saccade.ops.matrices import DenseMatrix
from saccade.ops.triton.products import gated, product, serves
from saccade.ops.triton.rows import add_norm

SHAPES = [
    (6144, 4096, True),
    (4096, 4096, False),
    (4096, 14336, False),
    (128256, 4096, False),
    (896, 128, True),
    (64, 128, False),
]


def draw(*size, seed=0, dtype=torch.bfloat16):
    return torch.randn(*size, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize(("outputs", "channels", "biased"), SHAPES)
def test_products(dtype, rows, outputs, channels, biased):
    x, weight = draw(rows, channels, dtype=dtype), (0.02 * draw(outputs, channels, seed=1)).to(dtype)
    bias = draw(outputs, seed=2, dtype=dtype) if biased else None
    held = DenseMatrix(weight, bias)
    assert serves(x, held)
    exact = linear(x.float(), weight.float(), None if bias is None else bias.float())
    theirs = (linear(x, weight, bias).float() - exact).abs().max()
    ours = (product(x, held).float() - exact).abs().max()
    assert float(ours) <= 1.5 * float(theirs) + 1e-6


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("inner", [14336, 4096, 200])
def test_gated_products(rows, inner):
    x, gate, up = draw(rows, 4096), 0.02 * draw(inner, 4096, seed=1), 0.02 * draw(inner, 4096, seed=2)
    made = gated(x, DenseMatrix(gate), DenseMatrix(up)).float()
    exact = silu(linear(x.float(), gate.float())) * linear(x.float(), up.float())
    torch.testing.assert_close(made, exact, rtol=2.5e-2, atol=2e-2)


def test_a_row_is_what_it_is_alone():
    x, held, up = (
        draw(32, 4096),
        DenseMatrix(0.02 * draw(4096, 4096, seed=1)),
        DenseMatrix(0.02 * draw(4096, 4096, seed=2)),
    )
    all_rows, all_gated = product(x, held), gated(x, held, up)
    for count in (1, 2, 15, 16, 17, 31):
        assert torch.equal(product(x[:count], held), all_rows[:count])
        assert torch.equal(gated(x[:count], held, up), all_gated[:count])


def test_rows_of_launches_that_start_early_are_right_in_graphs():
    """Each launch takes its places while those before it run: what it reads must be what they wrote."""
    hidden, norm = draw(8, 4096), draw(4096, seed=1)
    shapes = [(14336, 4096), (14336, 4096), (4096, 14336), (4096, 4096)]
    gate, up, down, square = (DenseMatrix(0.02 * draw(*shape, seed=seed)) for seed, shape in enumerate(shapes, 2))

    def layers(hidden, product, gated):
        delta = None
        for _ in range(6):
            x = add_norm(hidden, delta, norm, 1e-5)
            delta = product(x, square)
            x = add_norm(hidden, delta, norm, 1e-5)
            delta = product(gated(x, gate, up), down)
        return add_norm(hidden, delta, norm, 1e-5)

    alone = hidden.clone()
    wanted = layers(
        alone, lambda *given: waited(product(*given)), lambda *given: waited(gated(*given))
    )  # the same launches one at a time
    held, graph = hidden.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = layers(held, product, gated)
    for _ in range(50):
        held.copy_(hidden)
        graph.replay()
        assert torch.equal(made, wanted)
        assert torch.equal(held, alone)


def waited(x):
    torch.cuda.synchronize()
    return x
