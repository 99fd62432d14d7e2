"""Selections say what they mean: masks, counts, unions and checks agree with definitions spelt out key by key."""

from __future__ import annotations

import pytest
import torch
from covering import covered
from helpers import KINDS, generator, random_selection

from saccade.errors import SaccadeError
from saccade.selection import Band, Blocks, Dense, Lines, Mixed, Ranking, Shape, Tokens, Tri

SHAPES = [  # heads, kv_heads, q_len, k_len, q_start: block borders +-1, ragged starts, rows that are not the last keys
    (4, 2, 1, 1, 0),
    (4, 2, 31, 31, 0),
    (4, 2, 33, 65, 32),
    (4, 2, 70, 129, 31),
    (8, 1, 5, 100, 64),
    (3, 3, 64, 96, 32),
    (4, 4, 1, 97, 96),
    (4, 1, 2, 128, 95),
    (6, 2, 63, 127, 33),
]


def shapes_of(kind: str) -> list[tuple]:
    return [shape for shape in SHAPES if kind != "ranking" or shape[2] == 1]


CASES = [(kind, shape, unit) for kind in KINDS for shape in shapes_of(kind) for unit in ("layer", "kv", "q")]


def units_of(shape: Shape, unit: str) -> int:
    return {"layer": 1, "kv": shape.kv_heads, "q": shape.heads}[unit]


def by_definition(selection, head: int, row: int, key: int) -> bool:
    """Whether ``key`` is read, from the class docstrings alone."""
    shape = selection.shape
    position = shape.q_start + row
    if key > position:
        return False
    unit = head // (shape.heads // selection.units)
    if isinstance(selection, Mixed):
        return by_definition(selection.parts[selection.choice[head]], head, row, key)
    if isinstance(selection, Dense):
        return True
    if isinstance(selection, Band):
        return key < selection.sinks or position - key < selection.window
    if isinstance(selection, Tri):
        if row >= shape.q_len - selection.dense_rows:
            return True
        return key < selection.sinks or position - key < selection.window
    if isinstance(selection, Blocks):
        at = unit * selection.q_blocks + position // selection.block_size - shape.q_start // selection.block_size
        chosen = selection.indices[selection.offsets[at] : selection.offsets[at + 1]].tolist()
        return key // selection.block_size in chosen
    if isinstance(selection, Lines):
        columns = selection.columns[selection.v_offsets[unit] : selection.v_offsets[unit + 1]].tolist()
        distances = selection.distances[selection.s_offsets[unit] : selection.s_offsets[unit + 1]].tolist()
        return key in columns or position - key in distances
    if isinstance(selection, Tokens):
        at = unit * shape.q_len + row
        return key in selection.indices[selection.offsets[at] : selection.offsets[at + 1]].tolist()
    if isinstance(selection, Ranking):
        blocks = selection.always[unit].tolist() + selection.order[unit].tolist()
        return key // selection.block_size in blocks
    raise TypeError(selection)


@pytest.mark.parametrize(("kind", "dims", "unit"), CASES)
def test_mask_pairs_and_density_follow_the_definition(kind, dims, unit):
    shape = Shape(*dims)
    selection = random_selection(kind, shape, units_of(shape, unit), generator(sum(dims)))
    selection.check()
    mask = selection.mask()
    assert mask.shape == (shape.heads, shape.q_len, shape.k_len)
    rng = generator(1)
    probes = [(0, 0, 0), (shape.heads - 1, shape.q_len - 1, shape.k_len - 1)]
    probes += [tuple(int(torch.randint(0, m, (), generator=rng)) for m in mask.shape) for _ in range(150)]
    for head, row, key in probes:
        assert bool(mask[head, row, key]) == by_definition(selection, head, row, key), (head, row, key)
    assert not (mask & ~shape.causal_mask()).any()
    assert selection.pairs().tolist() == mask.flatten(1).sum(1).tolist()
    assert selection.density() == pytest.approx(mask.double().sum().item() / shape.heads / shape.causal_pairs)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ranking"])
def test_row_tiles_put_together_are_the_whole_mask(kind):
    shape = Shape(4, 2, 70, 129, 31)
    selection = random_selection(kind, shape, 2, generator(3))
    for unit in range(selection.units):
        whole = selection.row_mask(unit, 0, 70)
        tiles = [selection.row_mask(unit, a, b) for a, b in ((0, 1), (1, 32), (32, 34), (34, 70))]
        assert torch.equal(torch.cat(tiles), whole)


@covered({"left": KINDS, "right": KINDS, "units": [(1, 4), (2, 1), (4, 2), (2, 2)]})
def test_merge_is_the_union_of_masks(left, right, units):
    one_row = "ranking" in (left, right)
    shape = Shape(4, 2, 1, 97, 96) if one_row else Shape(4, 2, 37, 97, 41)
    a = random_selection(left, shape, units[0], generator(5))
    b = random_selection(right, shape, units[1], generator(6))
    merged = a.merge(b)
    merged.check()
    assert torch.equal(merged.mask(), a.mask() | b.mask())
    assert merged.pairs().tolist() == (a.mask() | b.mask()).flatten(1).sum(1).tolist()


def test_merge_of_bands_with_neither_edge_in_common_is_still_the_union():
    shape = Shape(2, 1, 40, 90, 50)
    a, b = Band(shape, window=9, sinks=2), Band(shape, window=3, sinks=20)
    assert torch.equal(a.merge(b).mask(), a.mask() | b.mask())
    c = Band(shape, window=30, sinks=2)
    assert isinstance(a.merge(c), Band)
    assert torch.equal(a.merge(c).mask(), a.mask() | c.mask())


def test_merge_of_a_tri_with_bands_and_tris_is_the_union():
    shape = Shape(2, 1, 40, 90, 50)
    a = Tri(shape, window=9, sinks=2, dense_rows=5)
    for b in (Band(shape, 12, 3), Tri(shape, 5, 1, 11), Tri(shape, 9, 7, 0), Band(shape, 12, 1), Tri(shape, 3, 20, 60)):
        assert torch.equal(a.merge(b).mask(), a.mask() | b.mask())
        assert torch.equal(b.merge(a).mask(), a.mask() | b.mask())
    assert isinstance(a.merge(Band(shape, 12, 3)), Tri)


def test_bad_tris_are_refused():
    for options in ({"window": 0}, {"window": 4, "sinks": -1}, {"window": 4, "dense_rows": -1}):
        with pytest.raises(SaccadeError):
            Tri(Shape(2, 1, 4, 8, 4), **options)


def test_merge_of_blocks_on_different_grids_is_the_union():
    shape = Shape(4, 2, 37, 97, 41)
    a = random_selection("blocks", shape, 2, generator(1), block_size=16)
    b = random_selection("blocks", shape, 4, generator(2), block_size=32)
    assert torch.equal(a.merge(b).mask(), a.mask() | b.mask())


def test_merge_works_when_neither_unit_count_divides_the_other():
    shape = Shape(6, 6, 20, 64, 44)
    for kind in ("blocks", "lines", "tokens"):
        a, b = (random_selection(kind, shape, units, generator(units)) for units in (2, 3))
        a.check(), b.check()
        assert torch.equal(a.merge(b).mask(), a.mask() | b.mask())


def test_merging_different_shapes_is_an_error():
    with pytest.raises(SaccadeError, match="different shapes"):
        Dense(Shape(2, 1, 4, 8, 4)).merge(Dense(Shape(2, 1, 4, 9, 5)))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def longs(*values: int) -> torch.Tensor:
    return torch.tensor(values)


ONE = Shape(2, 1, 1, 40, 39)
TWO = Shape(2, 1, 2, 40, 30)
BAD = {
    "tokens unsorted": Tokens(ONE, longs(0, 2), ints(5, 3)),
    "tokens duplicate": Tokens(ONE, longs(0, 2), ints(5, 5)),
    "tokens acausal": Tokens(TWO, longs(0, 1, 2), ints(31, 31)),
    "tokens negative": Tokens(ONE, longs(0, 1), ints(-1)),
    "tokens count": Tokens(ONE, longs(0, 3), ints(1, 2)),
    "tokens falling offsets": Tokens(TWO, longs(0, 2, 1), ints(1, 2)),
    "tokens units": Tokens(Shape(4, 2, 1, 40, 39), longs(0, 1, 2, 3), ints(1, 2, 3)),
    "blocks unsorted": Blocks(ONE, 8, longs(0, 2), ints(4, 1)),
    "blocks duplicate": Blocks(ONE, 8, longs(0, 2), ints(1, 1)),
    "blocks acausal": Blocks(TWO, 8, longs(0, 1), ints(4)),
    "blocks out of range": Blocks(ONE, 8, longs(0, 1), ints(5)),
    "lines column acausal": Lines(TWO, longs(0, 1), ints(32), longs(0, 1), ints(0)),
    "lines distance beyond": Lines(TWO, longs(0, 1), ints(0), longs(0, 1), ints(32)),
    "lines duplicate": Lines(TWO, longs(0, 2), ints(3, 3), longs(0, 1), ints(0)),
    "lines unsorted distances": Lines(TWO, longs(0, 1), ints(3), longs(0, 2), ints(4, 2)),
    "lines unequal units": Lines(TWO, longs(0, 1), ints(3), longs(0, 1, 2), ints(2, 4)),
    "mixed choice": Mixed(ONE, (Dense(ONE),), longs(0, 1)),
    "mixed count": Mixed(ONE, (Dense(ONE),), longs(0)),
    "mixed shape": Mixed(ONE, (Dense(TWO),), longs(0, 0)),
    "mixed part": Mixed(ONE, (Tokens(ONE, longs(0, 2), ints(5, 3)), Dense(ONE)), longs(0, 1)),
    "ranking duplicate": Ranking(ONE, 8, ints(0)[None], ints(1, 1)[None], 0.9),
    "ranking always in order": Ranking(ONE, 8, ints(0)[None], ints(1, 0)[None], 0.9),
    "ranking out of range": Ranking(ONE, 8, ints(0)[None], ints(1, 5)[None], 0.9),
    "ranking many rows": Ranking(TWO, 8, ints(0)[None], ints(1)[None], 0.9),
}


@pytest.mark.parametrize("what", BAD)
def test_check_catches(what):
    with pytest.raises(SaccadeError):
        BAD[what].check()


def test_check_accepts_empty_lists():
    Tokens(TWO, longs(0, 0, 1), ints(4)).check()
    Blocks(TWO, 8, longs(0, 0), ints()).check()
    Lines(TWO, longs(0, 0), ints(), longs(0, 0), ints()).check()


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ((3, 2, 1, 4, 3), "multiple of kv_heads"),
        ((2, 1, 3, 4, 2), "do not lie within"),
        ((2, 1, 0, 4, 0), "lie within"),
    ],
)
def test_impossible_shapes_are_refused(dims, message):
    with pytest.raises(SaccadeError, match=message):
        Shape(*dims)


def test_from_lists_sorts_and_makes_unique():
    tokens = Tokens.from_lists(TWO, [longs(9, 3, 9), longs()])
    tokens.check()
    assert [part.tolist() for part in tokens.lists()] == [[3, 9], []]
    blocks = Blocks.from_lists(ONE, 8, [longs(4, 0, 4)])
    blocks.check()
    assert blocks.indices.tolist() == [0, 4]
    lines = Lines.from_lists(ONE, [longs(5, 1, 5)], [longs(2, 0)])
    lines.check()
    assert (lines.columns.tolist(), lines.distances.tolist()) == ([1, 5], [0, 2])


def test_ranking_prefix_is_always_plus_the_first_of_the_order():
    shape = Shape(4, 2, 1, 100, 99)
    ranking = Ranking(shape, 16, ints(0, 6).expand(2, -1), torch.stack([ints(3, 1, 5), ints(2, 4, 1)]), 0.9)
    ranking.check()
    blocks = ranking.prefix([2, 0])
    blocks.check()
    assert blocks.block_mask()[:, 0].nonzero().tolist() == [[0, 0], [0, 1], [0, 3], [0, 6], [1, 0], [1, 6]]
    assert blocks.pairs().tolist() == [16 * 3 + 4] * 2 + [16 + 4] * 2
    assert torch.equal(ranking.as_blocks().mask(), ranking.mask())
