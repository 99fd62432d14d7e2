"""Blocks in order of their scores (ops/triton/batched_rank.py), under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from rank_cases import KINDS, ordered, pages_of, scores_of

from saccade.ops.triton.batched_choice import choose_blocks, choose_in_parts, way_of
from saccade.ops.triton.batched_decode import choose_best
from saccade.ops.triton.batched_rank import Tiles, choose_ranked, rank_blocks, tiles_for
from saccade.ops.triton.sorting import in_line, neighbours, sort_falling
from saccade.selection.forms import Rule, Summarized
from saccade.selection.readings import Choice

SMALL = Tiles(chunk=32, warps=1, looked_up=16, others=2, rank_warps=1)


@triton.jit
def _sort(given, out, BITS: tl.constexpr, EACH: tl.constexpr):
    COUNT: tl.constexpr = 1 << BITS
    words = in_line(tl.load(given + neighbours(0, COUNT, EACH)), COUNT)
    tl.store(out + tl.arange(0, COUNT), sort_falling(words, BITS, EACH))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("bits", "each"), [(1, 1), (4, 1), (5, 4), (8, 8), (8, 256), (10, 8)])
def test_the_network_sorts(bits, each, dtype):
    rng = torch.Generator().manual_seed(bits)
    info = torch.iinfo(dtype)
    for low, high in ((info.min, info.max), (-2, 2)):
        words = torch.randint(low, high, (1 << bits,), generator=rng, dtype=dtype)
        words[:2] = torch.tensor([info.min, info.max], dtype=dtype)
        found = torch.empty_like(words)
        _sort[(1,)](words, found, bits, each)
        assert torch.equal(found, words.sort(descending=True).values)


def ranks_agree(scores, lengths, choice, dense_upto, tiles=None):
    """Every list of ``rank_blocks`` against torch's stable sort; returns how many blocks were ranked."""
    units, blocks = scores.shape[1:]
    pages = pages_of(lengths, blocks * choice.size)
    own = torch.tensor(dense_upto, dtype=torch.int32)
    always, order, counts = rank_blocks(scores, pages, choice, own, tiles)
    for row, length in enumerate(lengths):
        for unit in range(units):
            at = row * units + unit
            every, stop = -(-length // choice.size), length // choice.size - choice.last
            forced, ranked = always[at, : counts[0, at]], order[at, : counts[1, at]]
            if length <= dense_upto[row]:
                assert forced.tolist() == list(range(every))
                assert ranked.numel() == 0
            else:
                assert forced.tolist() == [*range(choice.first), *range(stop, every)]
                assert ranked.tolist() == ordered(scores[row, unit], choice.first, stop)
    return int(counts[1].sum())


def ranked_blocks(first, last, dense_upto, size=16):
    return Choice(Summarized(size, "cuboid"), 2, first, last, dense_upto, rule=Rule(0.5, 2, "min", "all"))


@pytest.mark.parametrize(
    ("tiles", "first", "last"),
    [(SMALL, 1, 1), (Tiles(64, 1, 64, 1, 1), 0, 0), (Tiles(32, 1, 32, 4, 1), 3, 2), (Tiles(256, 2, 64, 1, 2), 1, 1)],
)
def test_ranks_are_those_of_a_stable_sort(tiles, first, last):
    """One chunk and many, which end within one, with dense rows and padding between."""
    lengths = [150 * 16] * 5 + [149 * 16 + 1, 128 * 16 + 15, 129 * 16, 100, 0, 64, 97, 530]
    scores = torch.stack([scores_of(KINDS[row % 8], (1, 150), row) for row in range(len(lengths))])
    dense_upto = [96 if row % 2 else 64 for row in range(len(lengths))]
    assert ranks_agree(scores, lengths, ranked_blocks(first, last, 96), dense_upto, tiles)


def test_a_chunk_may_have_no_block_to_rank():
    """More first blocks than a chunk has, and an end right at a chunk's."""
    scores = scores_of("tied", (3, 1, 160))
    choice = ranked_blocks(first=40, last=1, dense_upto=700)
    assert ranks_agree(scores, [160 * 16, 97 * 16, 65 * 16], choice, [700, 700, 656], SMALL) == 119 + 56 + 24


@pytest.mark.parametrize("blocks", [1, 2, 128, 129, 1024, 1025, 2500])
def test_lists_of_any_length_rank(blocks):
    scores = torch.stack([scores_of(kind, (1, blocks)) for kind in ("random", "tied")])
    ranks_agree(scores, [16 * blocks, 16 * blocks - 1], ranked_blocks(0, 0, 15), [0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [9000, pytest.param(65_536, marks=pytest.mark.thorough)])
def test_long_lists_rank(blocks):
    scores = scores_of("tied", (1, 1, blocks)) + scores_of("tied", (1, 1, blocks), 1) / 64
    assert ranks_agree(scores, [16 * blocks], ranked_blocks(1, 1, 64), [64]) == blocks - 2


@pytest.mark.parametrize("tiles", [SMALL, None])
def test_blocks_with_nan_have_a_rank_of_their_own(tiles):
    scores = scores_of("infinite", (1, 1, 200))
    scores[0, 0, 5:200:13] = torch.nan
    scores[0, 0, 6:200:31] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # a negative one, all bits set
    (own,) = rank_blocks(scores, pages_of([3200], 3200), ranked_blocks(2, 3, 128), torch.tensor([128]).int(), tiles)[1]
    ranked = own[:195].tolist()
    assert sorted(ranked) == list(range(2, 197))
    numbers = [block for block in ranked if not scores[0, 0, block].isnan()]
    assert numbers == [block for block in ordered(scores[0, 0], 2, 197) if not scores[0, 0, block].isnan()]


@pytest.mark.parametrize(
    ("tiles", "take"), [(SMALL, 1), (SMALL, 62), (Tiles(64, 2, 64, 4, 2), 5), (Tiles(128, 1, 16, 1, 1), 16), (None, 30)]
)
def test_the_best_are_those_of_a_stable_sort(take, tiles):
    """Each row with its own number of best ones, with dense rows and padding between."""
    lengths = [150 * 32, 0, 149 * 32 + 1, 64 * 32, 4500, 64 * 32 + 1, 150 * 32, 4096]
    scores = torch.stack([scores_of(KINDS[row], (2 if take == 5 else 1, 150), row) for row in range(len(lengths))])
    takes = [max(1, take - row % 3) for row in range(len(lengths))]
    choice = Choice(Summarized(32, "cuboid"), 2, 1, 1, 64 * 32, take=take).form
    dense_upto = [64 * 32] * len(lengths)
    pages = pages_of(lengths, 150 * 32)
    given = torch.tensor(takes, dtype=torch.int32), torch.tensor(dense_upto, dtype=torch.int32)
    lists = choose_ranked(scores, pages, choice, *given, tiles)
    free = scores.clone()  # choose_best leaves out what is -inf, and wants that of the forced ones
    for row, length in enumerate(lengths):
        free[row, :, 0], free[row, :, max(0, -(-length // 32) - 1) :] = -torch.inf, -torch.inf
    others = choose_best(free, pages, choice, *given)
    for row, length in enumerate(lengths):
        for unit in range(scores.shape[1]):
            at = row * scores.shape[1] + unit
            every = -(-length // 32)
            chosen = lists.indices[at, : lists.counts[at]].tolist()
            wanted = list(range(every))
            if length > dense_upto[row]:
                wanted = [0, every - 1, *ordered(scores[row, unit], 1, every - 1)[: takes[row]]]
            assert chosen == wanted
            if KINDS[row] != "infinite":
                assert sorted(chosen) == others.indices[at, : others.counts[at]].tolist()


@pytest.mark.parametrize(("take", "chunk"), [(1, 64), (62, 32), (62, 128), (5, 256), (30, 16)])
def test_the_best_of_parts_are_the_best(take, chunk):
    """Parts with more and with fewer blocks than are taken, and such as have none."""
    lengths = [150 * 32, 0, 149 * 32 + 1, 64 * 32, 4500, 64 * 32 + 1, 150 * 32, 4096]
    scores = torch.stack([scores_of(KINDS[row], (2, 150), row) for row in range(len(lengths))])
    takes = torch.tensor([max(1, take - row % 3) for row in range(len(lengths))], dtype=torch.int32)
    choice = Choice(Summarized(32, "cuboid"), 2, 2, 1, 66 * 32, take=take).form
    dense_upto = torch.full((len(lengths),), 65 * 32, dtype=torch.int32)
    for row, length in enumerate(lengths):
        scores[row, :, :2], scores[row, :, max(0, -(-length // 32) - 1) :] = -torch.inf, -torch.inf
    at = scores, pages_of(lengths, 150 * 32), choice, takes, dense_upto
    lists, others = choose_in_parts(*at, chunk), choose_best(*at)
    assert lists.counts.tolist() == others.counts.tolist()
    for own, other, count in zip(lists.indices, others.indices, lists.counts.tolist()):
        assert sorted(own[:count].tolist()) == other[:count].tolist()


@pytest.mark.parametrize(
    ("blocks", "take", "way"),
    [(80, 20, choose_ranked), (300, 70, choose_best), (4200, 70, choose_ranked), (8300, 130, choose_in_parts)],
)
def test_every_way_to_choose_gives_the_same_lists(blocks, take, way):
    assert way_of(1, 3, blocks, take) is way
    scores = scores_of("tied", (1, 3, blocks), 1)
    scores[..., 0] = scores[..., -1] = -torch.inf
    numbers = torch.tensor([[take], [(take + 2) * 16]], dtype=torch.int32)
    choice = Choice(Summarized(16, "minmax"), 3, 1, 1, (take + 2) * 16, take=take)
    at = scores, pages_of([blocks * 16], blocks * 16), choice, *numbers
    lists, others = choose_blocks(*at), choose_best(*at)
    assert lists.counts.tolist() == others.counts.tolist() == [take + 2] * 3
    assert lists.indices.view(3, -1).sort(1).values.tolist() == others.indices.view(3, -1).tolist()


def test_lists_without_best_blocks():
    """All that is read is forced: nothing is sorted."""
    choice = Choice(Summarized(16, "minmax"), 1, 2, 3, 128, take=0).form
    numbers = torch.tensor([[0], [128]], dtype=torch.int32)
    for choose in (choose_ranked, choose_in_parts):
        lists = choose(torch.full((1, 1, 100), torch.nan), pages_of([1600], 1600), choice, *numbers)
        assert lists.indices[0, : lists.counts[0]].tolist() == [0, 1, 97, 98, 99]


@pytest.mark.parametrize("take", [None, 1, 62, 1000])
def test_tiles_fit(take):
    """Of every length: a word for each thread at least, and programs that look up whole parts of a chunk."""
    for blocks in range(1, 70_000, 37):
        tiles = tiles_for(blocks, take)
        assert all(number & (number - 1) == 0 for number in tiles)
        assert 32 * tiles.warps <= tiles.chunk <= 4096
        assert tiles.looked_up >= 16
