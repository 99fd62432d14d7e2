"""Parts of decode merge into the softmax over all of them, however many there are and wherever their maxima lie."""

from __future__ import annotations

import math

import pytest
import torch

from saccade.ops.triton.merge import merge

BATCH, UNITS, PER, WIDTH = 2, 2, 2, 5


def expected(part_out: torch.Tensor, part_lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of parts [..., parts, per, width] with base-2 sums, in float64; a part without keys has no row."""
    logs = part_lse.double() * math.log(2)
    weights = logs.softmax(-2).nan_to_num(0.0)
    rows = torch.where(torch.isneginf(logs)[..., None], 0.0, part_out.double())
    return (weights[..., None] * rows).sum(-3), logs.logsumexp(-2)


@pytest.mark.parametrize(("programs", "order"), [(1, 0), (3, 1), (33, 1), (33, -1), (70, 1), (70, 0)])
def test_any_number_of_parts(programs, order):
    """``order``: the maxima rise from part to part, fall, or neither. Some parts read nothing, and one row has none."""
    rng = torch.Generator().manual_seed(programs)
    rows = torch.randn(BATCH, UNITS, programs, PER, WIDTH, generator=rng)
    logs = torch.randn(BATCH, UNITS, programs, PER, generator=rng) * 3
    logs += order * torch.linspace(-40, 40, programs)[:, None]
    empty = torch.rand(logs.shape, generator=rng) < 0.2
    empty[1, 0, :, 1] = True
    logs[empty], rows[empty] = -torch.inf, torch.nan
    out, lse = torch.empty(BATCH, UNITS * PER, WIDTH), torch.empty(BATCH, UNITS * PER)
    merge(rows, logs, out, lse, programs=programs)
    want, want_lse = expected(rows, logs)
    torch.testing.assert_close(out, want.flatten(1, 2).float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, want_lse.flatten(1).float(), atol=1e-5, rtol=1e-5)
    assert torch.isneginf(lse[1, 1])


@pytest.mark.parametrize("programs", [2, 33])
def test_of_each_program_the_last_turn_before_the_stop_counts(programs):
    rng = torch.Generator().manual_seed(programs)
    turns = 2 * programs + 1
    rows = torch.randn(BATCH, UNITS, turns, PER, WIDTH, generator=rng)
    logs = torch.randn(BATCH, UNITS, turns, PER, generator=rng) * 20
    stops = torch.tensor([[turns, 1], [programs + 1, 2 * programs]], dtype=torch.int32)
    words = torch.full((BATCH, UNITS, turns * PER), -1)
    out, lse = torch.empty(BATCH, UNITS * PER, WIDTH), torch.empty(BATCH, UNITS * PER)
    merge(rows, logs, out, lse, programs=programs, stops=stops, words=words)
    for row in range(BATCH):
        for unit in range(UNITS):
            stop = int(stops[row, unit])
            last = sorted({turn % programs: turn for turn in range(stop)}.values())
            want, want_lse = expected(rows[row, unit, last], logs[row, unit, last])
            heads = slice(unit * PER, (unit + 1) * PER)
            torch.testing.assert_close(out[row, heads], want.float(), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(lse[row, heads], want_lse.float(), atol=1e-5, rtol=1e-5)
    assert (words == 0).all()
