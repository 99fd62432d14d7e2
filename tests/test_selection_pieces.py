"""Selections in pieces: together they read what the whole reads, each key once, and only in blocks that were named."""

from __future__ import annotations

import pytest
import torch

from saccade.selection import Band, Blocks, Candidates, Cone, Dense, Lines, Mixed, Sampled, Shape, Tokens, Tri, cut
from saccade.selection.pieces import between, grid_of, read_blocks, read_blocks_by_head

ROWS = Shape.suffix(4, 2, 150, 700)  # at the end of a long context, on no border
ROW = Shape.suffix(4, 2, 1, 701)


def masked(shape: Shape, share: float, units: int, seed: int) -> torch.Tensor:
    mask = torch.rand(units, shape.q_len, shape.k_len, generator=torch.Generator().manual_seed(seed)) < share
    mask[:, 3 % shape.q_len] = False  # a row that reads nothing
    return mask


def blocks(shape: Shape, size: int, units: int = 2) -> Blocks:
    rng = torch.Generator().manual_seed(size)
    q_blocks = Blocks(shape, size, torch.zeros(1), torch.zeros(0)).q_blocks
    return Blocks.from_block_mask(
        shape, size, torch.rand(units, q_blocks, -(-shape.k_len // size), generator=rng) < 0.3
    )


LINES = Lines.from_lists(
    ROWS,
    [torch.tensor([0, 5, 300]), torch.tensor([128])],
    [torch.tensor([0, 1, 40]), torch.tensor([], dtype=torch.int64)],
)
TOKENS = Tokens.from_mask(ROW, masked(ROW, 0.02, 2, 1))
LISTED = Candidates(
    ROW, torch.tensor([0, 3, 5]), torch.tensor([9, 300, 301, 64, 500], dtype=torch.int32), torch.tensor([2, 2]), 4, 6
)
SELECTIONS = {
    "dense": Dense(ROWS),
    "dense row": Dense(ROW),
    "band": Band(ROWS, window=70, sinks=20),
    "wide band": Band(ROWS, window=10**6),
    "blocks of 16": blocks(ROWS, 16),
    "blocks of 64": blocks(ROW, 64, 4),
    "blocks of 128": blocks(ROWS, 128, 1),
    "tokens": Tokens.from_mask(ROWS, masked(ROWS, 0.01, 4, 2)),
    "one row's tokens": TOKENS,
    "sampled": Sampled(TOKENS, torch.rand(TOKENS.indices.numel())),
    "candidates": LISTED,
    "all candidates": Candidates.all_keys(ROW, 2, 5, sinks=3),
    "lines": LINES,
    "lines in a window": cut(LINES, Cone(share=0.5, sinks=2)),
    "tri": Tri(ROWS, window=33, sinks=7, dense_rows=10),
    "tri without dense rows": Tri(ROWS, window=33, sinks=7),
    "mixed": Mixed(ROWS, (LINES, Band(ROWS, window=9)), torch.tensor([0, 1, 1, 0])),
}


@pytest.mark.parametrize("size", [16, 32, 128])
@pytest.mark.parametrize("name", SELECTIONS)
def test_pieces_make_up_the_whole(name, size):
    selection = SELECTIONS[name]
    mask, length = selection.mask(), selection.shape.k_len
    named = read_blocks(selection, size).repeat_interleave(size)[:length]
    assert not (mask & ~named).any()
    if name in ("one row's tokens", "sampled", "candidates"):
        read = torch.nn.functional.pad(mask.flatten(0, 1).any(0), (0, -length % size)).view(-1, size).any(1)
        assert torch.equal(read_blocks(selection, size), read)
    heads = read_blocks_by_head(selection, size)
    assert (heads is not None) == (name in ("blocks of 16", "blocks of 64", "tokens", "one row's tokens"))
    if heads is not None:  # of two query heads each
        read = mask.view(2, -1, mask.shape[-1]).any(1)
        exact = torch.nn.functional.pad(read, (0, -length % size)).view(2, -1, size).any(2)
        assert not (exact & ~heads).any()
        assert torch.equal(heads.any(0), read_blocks(selection, size))
        assert torch.equal(heads, exact) or name != "one row's tokens"
        assert not torch.equal(heads[0], heads[1]) or name != "blocks of 64"
    grid, found = grid_of(selection, size), torch.zeros_like(mask)
    assert grid % size == 0
    for first in range(0, length, 2 * grid):
        part = between(selection, first, min(length, first + 2 * grid))
        part.check()
        own = part.mask()
        assert not (own & found).any()
        assert not own[..., :first].any()
        assert not own[..., first + 2 * grid :].any()
        found |= own
    assert torch.equal(found, mask)
