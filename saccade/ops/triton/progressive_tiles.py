"""How a progressive read (progressive.py) is cut into tiles, by what was measured on a Hopper GPU (docs/results)."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kv.row_formats import format_of
from saccade.ops.triton.batch import Pages
from saccade.ops.triton.common import processors
from saccade.ops.triton.decode import Tiles

PLAIN = Tiles(keys=64, warps=4, stages=2, registers=128, resident=4)
CODES = Tiles(keys=64, warps=2, stages=2, registers=None, resident=4)  # of 8 bits
FEW_CODES = Tiles(keys=64, warps=1, stages=2, registers=None, resident=8)  # and up to 8 query heads to a KV head
# Of integers with scales, in blocks that are no larger than a tile; and where those programs would not fill the device.
SCALED = Tiles(keys=32, warps=1, stages=2, registers=None, resident=8)
SCALED_FEW = Tiles(keys=64, warps=4, stages=2, registers=None, resident=2)
WINDOW = 64  # published microbatches looked at in one go, and programs of a unit at most


def tiles_for(q: Tensor, pages: Pages, size: int, units: int) -> Tiles:
    """For blocks of ``size`` keys and so many units: what was fastest there."""
    stored = format_of(pages.k, q.dtype)
    if not stored.coded or q.dtype == torch.float32 or q.shape[-1] > 128:
        return PLAIN
    if pages.k.dtype != torch.int8:
        few = q.shape[1] <= 8 * pages.k.shape[1] and size <= FEW_CODES.keys
        return FEW_CODES if few else CODES
    if size > SCALED.keys:
        return CODES
    return SCALED if SCALED.resident * processors(q.device) // units <= WINDOW else SCALED_FEW
