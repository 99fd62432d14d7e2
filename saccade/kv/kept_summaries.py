"""Summaries of one layer's full blocks, extended as blocks fill and kept contiguous for scoring."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kv.block_codes import KINDS as CODED
from saccade.kv.block_codes import LEAST_BLOCKS, BlockCodes
from saccade.kv.summaries import summarize_view
from saccade.kv.view import KVView

MANY = 4096  # blocks from which room is made for an eighth as many more, not for twice as many


class KeptSummaries:
    """``buffer`` [>= filled, parts, kv_heads, head_dim]: what ``summarize_view`` makes of the first ``filled`` blocks;
    what lies behind them means nothing."""

    def __init__(self, kind: str, block_size: int, buffer: Tensor | None = None, filled: int = 0) -> None:
        self.kind, self.block_size = kind, block_size
        self.filled = filled
        self.buffer = torch.empty(0, device="cpu") if buffer is None else buffer
        self._codes: BlockCodes | None = None

    @property
    def made(self) -> Tensor:
        """The summaries there are."""
        return self.buffer[: self.filled]

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes + (0 if self._codes is None else self._codes.nbytes)

    def codes(self) -> BlockCodes | None:
        """What is known of the summaries there are in 4 bits; None where they are few, or on a device."""
        if self.filled < LEAST_BLOCKS or self.kind not in CODED or self.buffer.device.type != "cpu":
            return None
        if self._codes is None:
            self._codes = BlockCodes()
        self._codes.follow(self.made)
        return self._codes

    def upto(self, view: KVView) -> Tensor:
        """[full blocks, parts, kv_heads, head_dim], those of blocks that filled since made now."""
        full = view.length // self.block_size
        if full > self.filled or self.buffer.dim() == 1:
            fresh = summarize_view(view, self.kind, self.block_size, self.filled, full)
            self.reserve(full, fresh)
            self.buffer[self.filled : full] = fresh
            self.filled = full
        return self.buffer[:full]

    def room(self, blocks: int, view: KVView) -> Tensor:
        """The whole buffer, summaries up to date, with room for ``blocks``."""
        self.upto(view)
        self.reserve(blocks, self.buffer, self.buffer.shape[0] + self.buffer.shape[0] // 8)
        return self.buffer

    def reserve(self, blocks: int, like: Tensor, ahead: int | None = None) -> None:
        """Have room for ``blocks``, and if more is to be made for ``ahead``, by default as many as memory has room for
        anyway, of summaries ``like`` [any, parts, kv_heads, head_dim]; a first buffer, even for no block, has parts."""
        if self.buffer.dim() > 1 and blocks <= self.buffer.shape[0]:
            return
        if ahead is None:
            ahead = max(self.filled + (self.filled if self.filled < MANY else self.filled // 8), 16)
        grown = like.new_empty(max(blocks, ahead), *like.shape[1:])
        if self.filled:
            grown[: self.filled] = self.made
        self.buffer = grown

    def extend(self, made: Tensor) -> None:
        """Take over summaries of the blocks that follow those there are."""
        count = self.filled + len(made)
        self.reserve(count, made, self.filled + self.filled // 2)
        self.buffer[self.filled : count] = made
        self.filled = count

    def truncate(self, length: int) -> None:
        """Forget blocks that are not full any more when ``length`` tokens are left."""
        self.filled = min(self.filled, length // self.block_size)
        if self._codes is not None:
            self._codes.truncate(self.filled)

    def fork(self, length: int) -> KeptSummaries:
        """A copy, of the blocks that are full with ``length`` tokens, that goes its own way."""
        filled = min(self.filled, length // self.block_size)
        made = self.buffer.clone() if filled == self.filled else self.buffer[:filled].clone()
        other = KeptSummaries(self.kind, self.block_size, made, filled)
        if self._codes is not None:
            other._codes = self._codes.fork()
            other._codes.truncate(filled)
        return other
