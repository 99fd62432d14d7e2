"""The buffers that a batched decode step reads: they stay where they are, so that a recorded graph finds them again,
and are brought up to date where a row's sequence has changed."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

from saccade.engine.batched_plan import BestBlocks
from saccade.kv.sequence import SequenceKV


@dataclass
class _Row:
    """What lies in one row of the buffers."""

    kv: weakref.ref[SequenceKV] | None = None
    version: int = -1
    blocks: BestBlocks | None = None
    room: int = 0  # blocks that the summaries have room for


@dataclass
class RowBuffers:
    """``rows`` rows of up to ``pages`` blocks a layer, on ``device``. ``numbers`` int64 [3, rows]: token, position and
    number of keys, the row's own among them, 0 for padding. ``tables`` int32 [layers, rows, pages], ``pointers`` int64
    [layers, rows] (see ops.triton.batched_decode.Summaries). ``read`` int64 [layers, rows, kv_heads]: keys that rules
    let each row read since this was last taken."""

    layers: int
    rows: int
    pages: int
    kv_heads: int
    device: torch.device
    held: list[_Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        on = self.device
        self.staging = torch.zeros(3, self.rows, dtype=torch.int64, pin_memory=self.device.type == "cuda", device="cpu")
        self.numbers = torch.zeros(3, self.rows, dtype=torch.int64, device=on)
        self.tables = torch.zeros(self.layers, self.rows, self.pages, dtype=torch.int32, device=on)
        self.pointers = torch.zeros(self.layers, self.rows, dtype=torch.int64, device=on)
        self.read = torch.zeros(self.layers, self.rows, self.kv_heads, dtype=torch.int64, device=on)
        self.held = [_Row() for _ in range(self.rows)]

    def fits(self, rows: int, pages: int) -> bool:
        return rows <= self.rows and pages <= self.pages

    def hold(self, row: int, kv: SequenceKV, blocks: BestBlocks | None, length: int) -> None:
        """Make ``row`` show ``kv``, whose ``length`` th key this step stores."""
        held = self.held[row]
        wanted = 0 if blocks is None else length // blocks.choice.size
        same = held.kv is not None and held.kv() is kv and held.version == kv.version and held.blocks == blocks
        if same and wanted <= held.room:
            return
        pages = -(-length // kv.pool.block_size)
        self.tables[:, row, :pages].copy_(kv.tables[:, :pages])
        room = 0
        if blocks is not None:
            buffers = kv.summary_buffers(blocks.choice.kind, blocks.choice.size, wanted)
            room = min(len(one) for one in buffers)
            self.pointers[:, row].copy_(torch.tensor([one.data_ptr() for one in buffers], device="cpu"))
        self.held[row] = _Row(weakref.ref(kv), kv.version, blocks, room)

    def load(self, numbers: list[tuple[int, int, int]]) -> None:
        """Take each row's token, position and length over to the device."""
        count = len(numbers)
        self.staging[:, :count] = torch.tensor(numbers, dtype=torch.int64, device="cpu").T
        self.staging[:, count:] = 0
        self.numbers.copy_(self.staging, non_blocking=True)
