"""Blocks in order of their scores on a GPU, at the sizes of long contexts, against torch's stable sort."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from rank_cases import KINDS, ordered, pages_of, scores_of

from saccade.ops.triton.batched_choice import choose_in_parts
from saccade.ops.triton.batched_rank import Tiles, choose_ranked, rank_blocks, tiles_for
from saccade.selection.forms import Rule, Summarized
from saccade.selection.readings import Choice


@pytest.mark.parametrize("blocks", [100, 1000, 1025, 6144, 20_000, 65_536])
def test_ranks_are_those_of_a_stable_sort(blocks):
    scores = torch.stack([scores_of(kind, (2, blocks), seed) for seed, kind in enumerate(KINDS)])
    lengths = [blocks * 16 - 7 * row for row in range(len(KINDS) - 1)] + [60]
    choice = Choice(Summarized(16, "cuboid"), 2, 3, 1, 80, rule=Rule(0.5, 2, "min", "all"))
    pages, dense_upto = pages_of(lengths, blocks * 16, "cuda"), torch.full((len(KINDS),), 80).int().cuda()
    fit = tiles_for(blocks)
    for tiles in (fit, Tiles(512, 1, 128, 4, 2), Tiles(256, 1, 256, 2, 8), Tiles(2048, 4, 512, 1, 4)):
        _, order, counts = rank_blocks(scores.cuda(), pages, choice, dense_upto, tiles)
        for at, (own, count) in enumerate(zip(order.cpu(), counts[1].tolist())):
            row = at // 2
            wanted = ordered(scores[row, at % 2], 3, lengths[row] // 16 - 1) if lengths[row] > 80 else []
            assert own[:count].tolist() == wanted


@pytest.mark.parametrize("take", [1, 62, 1000])
@pytest.mark.parametrize("blocks", [1024, 3072, 40_000])
def test_the_best_are_those_of_a_stable_sort(blocks, take):
    scores = torch.stack([scores_of(kind, (2, blocks), seed) for seed, kind in enumerate(KINDS)])
    lengths = [blocks * 32 - 33 * row for row in range(len(KINDS))]
    choice = Choice(Summarized(32, "cuboid"), 2, 1, 1, (take + 2) * 32, take=take).form
    takes = torch.tensor([max(1, take - row) for row in range(len(KINDS))]).int()
    pages, dense_upto = pages_of(lengths, blocks * 32, "cuda"), torch.full((len(KINDS),), (take + 2) * 32).int().cuda()
    ways = [partial(choose_ranked, tiles=tiles) for tiles in (None, Tiles(256, 1, 64, 4, 2), Tiles(2048, 4, 128, 1, 2))]
    for choose in (*ways, choose_in_parts):
        lists = choose(scores.cuda(), pages, choice, takes.cuda(), dense_upto)
        for at, (own, count) in enumerate(zip(lists.indices.cpu(), lists.counts.tolist())):
            row, every = at // 2, -(-lengths[at // 2] // 32)
            if lengths[row] > (take + 2) * 32:
                best = ordered(scores[row, at % 2], 1, every - 1)[: int(takes[row])]
                if choose is choose_in_parts:  # whose order is free, and which takes nothing that is -inf
                    best = sorted(block for block in best if scores[row, at % 2, block] > -torch.inf)
                    assert own[:count].sort().values.tolist() == [0, *best, every - 1]
                else:
                    assert own[:count].tolist() == [0, every - 1, *best]
            else:
                assert own[:count].tolist() == list(range(every))
