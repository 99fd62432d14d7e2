"""Lines on the device: inside a window, in lists with room behind them, and with rows two tiles at a time."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from test_triton_attention import agrees, data

from saccade.ops.triton import line_blocks
from saccade.selection import Band, Cone, Dense, Lines, Mixed, Shape, Tri, Windowed, cut

# Rows of a tile share their start, tiles do, none do; with and without sinks; and one that hides whole tiles.
CONES = [
    Cone(0.4, sinks=16, local=64, block_size=128),
    Cone(0.7, sinks=5, local=0, block_size=1),
    Cone(1.0, sinks=70, local=40, block_size=1),
    Cone(0.9, sinks=3, local=7, block_size=48),
]


def lines_of(shape: Shape, units: int, columns: int, seed: int = 0) -> Lines:
    """Columns anywhere; a unit in two has distances, alone and in stretches, the others none near the row."""
    rng, last = torch.Generator().manual_seed(seed), shape.q_start + shape.q_len
    runs = (torch.arange(3, last, 90)[:, None] + torch.arange(20)).flatten()
    far = torch.arange(40, last, 150)
    return Lines.from_lists(
        shape,
        [torch.randperm(last, generator=rng)[:columns] for _ in range(units)],
        [(runs[runs < last], far)[unit % 2] for unit in range(units)],
    )


@pytest.mark.parametrize("cone", CONES, ids=str)
@pytest.mark.parametrize(("dtype", "head_dim", "columns"), [(torch.float32, 32, 12), (torch.float16, 80, 0)])
def test_lines_inside_a_window(cone, dtype, head_dim, columns):
    for q_start, q_len in ((0, 260), (317, 100)):
        q, view, shape = data(2, 1, q_len, q_start + q_len, head_dim, dtype)
        selection = Windowed(lines_of(shape, 2, columns, seed=q_start), cone)
        agrees(q, view, selection, atol=1e-5 if dtype == torch.float32 else 2e-3)


def test_a_row_whose_lines_are_all_hidden_reads_itself_and_one_without_lines_nothing():
    q, view, shape = data(2, 1, 300, 300, 64)
    lines = Lines.from_lists(shape, [torch.tensor([40, 41])] * 2, [torch.empty(0, dtype=torch.int32)] * 2)
    selection = Windowed(lines, Cone(0.5, sinks=0))
    counts = selection.unit_mask().sum(-1)[0]
    assert (counts[:40] == 0).all()
    assert (counts[120:] == 1).all()
    agrees(q, view, selection)


def test_heads_of_two_kinds_inside_a_window():
    q, view, shape = data(2, 1, 140, 330, 32)
    cone = Cone(0.6, sinks=4, local=20, block_size=64)
    parts = lines_of(shape, 2, 10), lines_of(shape, 2, 0, seed=1)
    selection = cut(Mixed(shape, parts, torch.tensor([1, 0])), cone)
    assert all(isinstance(part, Windowed) for part in selection.parts)
    agrees(q, view, selection)


@pytest.mark.parametrize(("q_len", "n"), [(300, 300), (150, 467)])
def test_two_tiles_of_rows_and_lists_with_room_behind_them(q_len, n):
    q, view, shape = data(2, 1, q_len, n, 64, torch.float16)
    lines = lines_of(shape, 2, 30)
    agrees(q, view, lines, atol=2e-3)
    rest = torch.full((70,), 10**6, dtype=torch.int32)
    roomy = Lines(
        shape, lines.v_offsets, torch.cat([lines.columns, rest]), lines.s_offsets, torch.cat([lines.distances, -rest])
    )
    roomy.check()
    assert torch.equal(roomy.unit_pairs(), lines.unit_mask().flatten(1).sum(1))
    agrees(q, view, roomy, atol=2e-3)


@pytest.mark.parametrize("cone", [None, CONES[0]], ids=str)
def test_keys_laid_out_in_one_piece_first(cone, monkeypatch):
    q, view, shape = data(4, 2, 150, 467, 32)
    lines = lines_of(shape, 4, 30)
    monkeypatch.setattr("saccade.ops.triton.lines.LONG", 1)
    agrees(q, view, lines if cone is None else Windowed(lines, cone))


@pytest.mark.parametrize(("q_len", "n", "softcap"), [(300, 300, None), (150, 331, 5.0)])
@pytest.mark.parametrize(("ratio", "crowd"), [(0.0, 1), (1.5, 1), (0.0, 30), (0.0, 1000)])
def test_tiles_of_many_lines_read_masked_blocks(q_len, n, softcap, ratio, crowd, monkeypatch):
    """All tiles, or those for which blocks are fewer steps; two heads have many lines, two have few. Columns that are
    few in their block are gathered: none, some, all."""
    q, view, shape = data(4, 2, q_len, n, 32, torch.float16)
    rng, last = torch.Generator().manual_seed(n), shape.q_start + q_len
    some = [torch.randperm(last, generator=rng)[: last // 5] for _ in range(4)]
    few = [torch.tensor([1, 200]), torch.tensor([0, 131])]
    lines = Lines.from_lists(shape, [some[0], few[0], some[1][:0], few[0][:0]], [some[2], few[1], some[3], few[1]])
    monkeypatch.setattr("saccade.ops.triton.lines.LONG", 1)
    monkeypatch.setattr(line_blocks, "serves", lambda q: True)
    monkeypatch.setattr(line_blocks, "STEPS", ratio)
    monkeypatch.setattr(line_blocks, "CROWD", crowd)
    covers = []
    monkeypatch.setattr(
        line_blocks, "cover", lambda *at, cover=line_blocks.cover: covers.append(cover(*at)) or covers[-1]
    )
    agrees(q, view, lines, atol=2e-3, softcap=softcap)
    marks = covers[0].marks.bool()
    assert marks.any()
    assert marks.all() == (ratio == 0.0)


@pytest.mark.parametrize("cone", [None, CONES[0], CONES[1]], ids=str)
@pytest.mark.parametrize("dense_rows", [0, 50, 500])
def test_bands_tri_shapes_and_everything_inside_a_window(cone, dense_rows):
    q, view, shape = data(2, 1, 120, 250, 32)
    kinds = [Tri(shape, window=40, sinks=70, dense_rows=dense_rows)]
    if cone is not None and dense_rows == 0:
        kinds += [Band(shape, window=100, sinks=3), Dense(shape)]
    for selection in kinds:
        agrees(q, view, selection if cone is None else Windowed(selection, cone))
