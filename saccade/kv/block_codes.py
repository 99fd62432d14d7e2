"""Block summaries in 4 bits: a cheap score that rules out most blocks, so that few need be scored by their full
summaries.

Bounds over runs of eight blocks were tried in their place and rule out hardly any block, on a trained model's keys as
on random ones (docs/tiers.md). The rounded copy of a block's summary takes a quarter of its bytes and has a known
error; csrc/block_codes.h passes over blocks that cannot be among the best. The choice is the same as without codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 16  # blocks whose codes lie together, channel by channel
LEAST_BLOCKS = 2048  # fewer are scored as fast without
KINDS = ("cuboid", "minmax", "stored_mean")  # that blocks are ranked by
LEVELS = 15
AT_ONCE = 256  # tiles that are rounded at once


class BlockCodes:
    """Codes of the first ``blocks`` of one layer's summaries [blocks, parts, kv_heads, head_dim], whole tiles of them.

    A block's channels, those of all parts in a row, are less ``frame[0]`` and over ``frame[1]`` (fp32 [2, kv_heads,
    channels], the mean and the deviation over the blocks that there were), then rounded between their least and their
    greatest. ``codes`` uint8 [kv_heads, tiles, channels / 8, 16, 4]: of eight channels in a row the first four in the
    low halves of four bytes, the others in the high ones; ``range`` fp32 [kv_heads, tiles, 2, 16], the least value and
    the step.
    """

    def __init__(self) -> None:
        empty = torch.empty(0, device="cpu")
        self.codes, self.range, self.frame = empty, empty, empty
        self.blocks = 0
        self._framed = 0  # blocks that there were when the frame was made

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.range, self.frame))

    @property
    def tiles(self) -> int:
        """Room."""
        return self.codes.shape[1]

    def follow(self, made: Tensor) -> None:
        """Take in the blocks that ``made`` has beyond those that are coded, as many as fill tiles. The frame is made
        anew, and all codes with it, once there are twice as many."""
        whole = len(made) // TILE * TILE
        if whole <= self.blocks:
            return
        if whole >= 2 * self._framed:
            values = _channels(made[: min(whole, AT_ONCE * TILE)] if not self._framed else made[:whole:2])
            mean, deviation = values.mean(1), values.std(1)
            floor = deviation.mean(-1, keepdim=True) / 1024 + torch.finfo(torch.float32).tiny
            self.frame = torch.stack([mean, torch.maximum(deviation, floor)]).contiguous()
            self._framed, self.blocks = whole, 0
        self._reserve(whole // TILE, made)
        while self.blocks < whole:
            stop = min(whole, self.blocks + AT_ONCE * TILE)
            self._round(made[self.blocks : stop])
            self.blocks = stop

    def truncate(self, blocks: int) -> None:
        """Forget blocks from ``blocks`` on."""
        self.blocks = min(self.blocks, blocks // TILE * TILE)

    def fork(self) -> BlockCodes:
        """A copy that goes its own way."""
        other = BlockCodes()
        other.codes, other.range, other.frame = self.codes.clone(), self.range.clone(), self.frame
        other.blocks, other._framed = self.blocks, self._framed
        return other

    def _reserve(self, tiles: int, made: Tensor) -> None:
        _, parts, kv_heads, head_dim = made.shape
        if self.codes.dim() > 1 and tiles <= self.tiles:
            return
        room = tiles if self.codes.dim() == 1 else max(tiles, self.tiles + self.tiles // 8)
        codes = torch.empty(kv_heads, room, parts * head_dim // 8, TILE, 4, dtype=torch.uint8, device="cpu")
        ranges = torch.empty(kv_heads, room, 2, TILE, device="cpu")
        if self.blocks:
            kept = self.blocks // TILE
            codes[:, :kept], ranges[:, :kept] = self.codes[:, :kept], self.range[:, :kept]
        self.codes, self.range = codes, ranges

    def _round(self, made: Tensor) -> None:
        """Write the codes of whole tiles ``made`` behind those that there are."""
        mean, deviation = self.frame
        values = (_channels(made) - mean[:, None]) / deviation[:, None]  # [G, n, channels]
        low, high = values.amin(-1), values.amax(-1)
        step = (high - low) / LEVELS
        divisor = step.clamp(min=torch.finfo(torch.float32).tiny)
        code = (
            ((values - low[..., None]) / divisor[..., None]).round_().nan_to_num_(0).clamp_(0, LEVELS).to(torch.uint8)
        )
        eights = code.unflatten(2, (-1, 2, 4))  # [G, n, channels / 8, 2, 4]
        pairs = eights[..., 0, :] | eights[..., 1, :] << 4
        tiles = slice(self.blocks // TILE, (self.blocks + len(made)) // TILE)
        self.codes[:, tiles] = pairs.unflatten(1, (-1, TILE)).transpose(2, 3)
        self.range[:, tiles] = torch.stack([low, step]).unflatten(2, (-1, TILE)).permute(1, 2, 0, 3)


def _channels(made: Tensor) -> Tensor:
    """Summaries [n, parts, kv_heads, head_dim] as fp32 [kv_heads, n, channels]."""
    return made.float().permute(2, 0, 1, 3).flatten(2)
