"""Counting the pairs of query rows and keys that a selection holds, for reports."""

from __future__ import annotations

from torch import Tensor

from saccade.ops import triton
from saccade.selection import Blocks, Corrected, Selection


def pairs(selection: Selection) -> Tensor:
    """``selection.pairs()``, int64 [heads], or one entry for all; of lists of blocks on a GPU in one launch."""
    read = selection.inner if isinstance(selection, Corrected) else selection
    if isinstance(read, Blocks) and read.offsets.is_cuda and triton.available():
        from saccade.ops.triton.block_pairs import pairs as on_device

        return on_device(read)
    return selection.unit_pairs().repeat_interleave(selection.shape.heads // selection.units)
