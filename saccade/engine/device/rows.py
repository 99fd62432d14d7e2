"""The buffers that a batched decode step reads: they stay where they are, so that a recorded graph finds them again,
and are brought up to date where a row's sequence or plan has changed."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from saccade.engine.device.words import RowWords
from saccade.kv.blocks import BlockManager
from saccade.kv.sequence import SequenceKV
from saccade.machine import sent
from saccade.models.interface import LayerAttention, ModelSpec
from saccade.ops.tallies import Counted
from saccade.ops.triton import pages
from saccade.selection.plan import DevicePlan

MANY = 64  # summaries of blocks that a step makes first: it takes longer than those like it


@dataclass
class _Row:
    """What lies in one row of the buffers."""

    kv: weakref.ref[SequenceKV] | None = None
    version: int = -1
    plan: DevicePlan | None = None
    room: int = 0  # blocks that the summaries have room for
    places: list[int] = field(default_factory=list)  # of the summaries, by layer
    blocks: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # logical ones, of which it shows


class Asked(NamedTuple):
    """What attention was asked by the tokens of a prefill: ``q`` [layers, tokens, heads, head_dim] in the model's
    dtype. ``specs``: by layer, what it asks for."""

    q: Tensor
    specs: dict[int, LayerAttention]

    def take(self, layer: int, tokens: slice, q: Tensor, spec: LayerAttention) -> None:
        """Of ``tokens``, [tokens, heads, head_dim]."""
        self.q[layer, tokens].copy_(q)
        self.specs[layer] = spec  # also while a graph is recorded, as above


class RowBuffers:
    """``rows`` rows of up to ``blocks`` KV blocks a layer, on ``device``.

    A row is a sequence's; it may have several tokens, ``each`` at most. int64 [rows * each] are
    ``tokens``, their ``positions``, how many keys each has ``seen``, its own among them, and of each row ``lengths``,
    the keys that it has after the step; 0 for padding. int64 [rows] are ``reads`` and ``writes``, the slots from and
    to which layers that keep a state move it; -1 for padding.
    ``logical`` int32 [rows, blocks]: each row's logical blocks. ``tables`` int32 [layers, rows, table_rows, blocks],
    ``table_rows`` a sequence: the slots that hold them, which every step looks up for itself (``resolve``).
    ``pointers`` int64 [layers, rows]: where block summaries lie (see ops.triton.batched_decode.Summaries). ``first``,
    ``second`` int32 and ``share`` float32 [layers, rows]: the numbers of each layer's reading
    (selection.forms.Numbers). ``reach`` int32 [layers, rows, kv_heads]: how far stopping rules went in the last step,
    by which the next one reads, never what it finds. ``own``: what methods keep of rows, and what is counted of them.
    ``asked``: where steps that prefill leave queries that methods learn from.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        blocks: int,
        table_rows: int,
        kv_heads: int,
        heads: int,
        device: torch.device,
        each: int = 1,
    ) -> None:
        self.layers, self.rows, self.blocks, self.device = layers, rows, blocks, device
        pinned = device.type == "cuda"
        self._staging = torch.zeros(6, rows * each, dtype=torch.int64, pin_memory=pinned, device="cpu")
        self._inputs = torch.zeros(6, rows * each, dtype=torch.int64, device=device)
        self.tokens, self.positions, self.seen, self.lengths, self.reads, self.writes = self._inputs
        self.logical = torch.zeros(rows, blocks, dtype=torch.int32, device=device)
        self.tables = torch.zeros(layers, rows, table_rows, blocks, dtype=torch.int32, device=device)
        self.pointers = torch.zeros(layers, rows, dtype=torch.int64, device=device)
        self.first, self.second = torch.zeros(2, layers, rows, dtype=torch.int32, device=device)
        self.share = torch.zeros(layers, rows, dtype=torch.float32, device=device)
        self.reach = torch.zeros(layers, rows, kv_heads, dtype=torch.int32, device=device)
        self.own = RowWords(layers, rows, heads, device)
        self.asked: Asked | None = None
        self._held = [_Row() for _ in range(rows)]
        self._moved: list[np.ndarray] = []  # places in ``logical`` and what goes there, int64 [2, n] each
        self.ahead = False  # whether a step was launched that was not asked for yet
        self._before: list[Tensor] = []  # sums as they were before it, where it counts

    def asked_for(self, spec: ModelSpec, tokens: int) -> None:
        """Have room for the queries of so many tokens."""
        if self.asked is None or self.asked.q.shape[1] < tokens:
            shape = self.layers, tokens, spec.heads, spec.head_dim
            self.asked = Asked(torch.zeros(shape, dtype=spec.dtype, device=self.device), {})

    def last_tokens(self, rows: int, each: int) -> Tensor:
        """Where the last token of each of the first ``rows`` rows stands among those of all, ``each`` a row: int64
        [rows]. 0 and on for padding."""
        firsts = self.positions[: rows * each : each]
        last = (self.lengths[:rows] - firsts - 1).clamp(min=0)
        return last + torch.arange(0, rows * each, each, device=self.device)

    def fits(self, rows: int, blocks: int) -> bool:
        return rows <= self.rows and blocks <= self.blocks

    def hold(self, row: int, kv: SequenceKV, plan: DevicePlan, length: int) -> bool:
        """Make ``row`` show ``kv``, whose ``length`` th key this step stores, under ``plan``. Returns whether summaries
        of many blocks had to be made first."""
        held, choice = self._held[row], plan.summarized
        wanted = 0 if choice is None else length // choice.size
        if held.plan is None or (held.plan is not plan and held.plan.numbers != plan.numbers):
            self._write_numbers(row, plan)
        same = held.kv is not None and held.kv() is kv
        if not same:
            self.reach[:, row] = 0
        same = same and held.version == kv.version
        full = 0 if choice is None else kv.length // choice.size
        made = 0 if choice is None else kv.summarized_blocks(choice.summary, choice.size)
        if same and held.plan is plan and wanted <= held.room and made >= full:
            return False
        room, places = 0, held.places
        if choice is not None:
            summaries = kv.summary_buffers(choice.summary, choice.size, wanted)
            room, places = min(map(len, summaries)), [one.data_ptr() for one in summaries]
            if places != held.places:
                self.pointers[:, row].copy_(torch.tensor(places, device="cpu"))
        blocks = held.blocks if same else self._note_blocks(row, held.blocks, kv)
        self._held[row] = _Row(weakref.ref(kv), kv.version, plan, room, places, blocks)
        return full > max(made, 0) + MANY

    def load(
        self, inputs: list[tuple[int, int, int]], lengths: list[int], states: list[tuple[int, int]] | None = None
    ) -> None:
        """Take each token, its position and what it sees over to the device, and each row's length, and where its state
        is read and written, where layers keep one."""
        self._write_blocks()
        count = len(inputs)
        self._staging[:3, :count] = torch.tensor(inputs, dtype=torch.int64, device="cpu").T
        self._staging[:3, count:] = 0
        self._staging[3, : len(lengths)] = torch.tensor(lengths, dtype=torch.int64, device="cpu")
        self._staging[3, len(lengths) :] = 0
        self._staging[4:] = -1
        if states is not None:
            self._staging[4:, : len(states)] = torch.tensor(states, dtype=torch.int64, device="cpu").T
        self._inputs.copy_(self._staging, non_blocking=True)

    def advance(self, tokens: Tensor, swaps: bool = False) -> None:
        """Go on with ``tokens`` int64 [rows] after those that the rows have, where these are no padding, from the
        states that were written; with ``swaps`` the next ones go where those before them are, and leave them alone."""
        count = len(tokens)
        self.tokens[:count] = tokens.clamp(min=0)  # a token of no number ends a row on the host
        self._inputs[1:4, :count] += self.lengths[:count].sign()
        self._inputs[4:, :count] = self._inputs[4:, :count].flip(0) if swaps else self.writes[:count].clone()

    def go_ahead(self, counts: bool) -> None:
        """A step comes that was not asked for yet. ``counts``: it adds to what rules or readings have done."""
        self._write_blocks()
        self.ahead, self._before = True, [one.clone() for one in self._sums] if counts else []

    def come_back(self, asked: bool) -> None:
        """That step was ``asked`` for, or will not be: then it counts for nothing."""
        if self.ahead and not asked:
            for one, before in zip(self._sums, self._before):
                one.copy_(before)
        self.ahead, self._before = False, []

    @property
    def _sums(self) -> tuple[Tensor, ...]:
        return self.own.tallies, self.own.least

    def take(self, row: int) -> Counted:
        """What was counted in ``row`` since the last time; counting begins anew."""
        self.come_back(False)
        return self.own.take(row)

    def resolve(self, pool: BlockManager, rows: int, longest: int) -> Tensor:
        """Where the blocks of the first ``rows`` rows lie as this runs: their number of keys as int32 [rows], and
        ``tables`` filled up to there. A recorded step does so each time it is replayed, so a block may have moved
        since."""
        lengths = self.lengths[:rows].to(torch.int32)
        absent = -1 if pool.tiers is None else pool.tiers.guard
        pages.resolve(pool.slots, self.logical[:rows], lengths, pool.format.block_size, longest, self.tables, absent)
        return lengths

    def _note_blocks(self, row: int, before: np.ndarray, kv: SequenceKV) -> np.ndarray:
        """All blocks that ``kv`` has, those that it will fill later among them. Those that ``row`` does not show yet
        are written with other rows' before the step: a transfer of its own would wait for what runs."""
        blocks = kv.block_table.numpy()[: self.blocks]
        both = min(len(before), len(blocks))
        fresh = np.concatenate([np.flatnonzero(before[:both] != blocks[:both]), np.arange(both, len(blocks))])
        if len(fresh):
            self._moved.append(np.stack([row * self.blocks + fresh, blocks[fresh]]))
        return blocks

    def _write_blocks(self) -> None:
        """Bring ``logical`` up to date, in one transfer without a wait."""
        if self._moved:
            moved, self._moved = sent(torch.from_numpy(np.concatenate(self._moved, 1)), self.device), []
            self.logical.view(-1).index_copy_(0, moved[0], moved[1].to(torch.int32))

    def _write_numbers(self, row: int, plan: DevicePlan) -> None:
        numbers = plan.numbers
        whole = torch.tensor([one[:2] for one in numbers], dtype=torch.int32, device="cpu").to(self.device)
        self.first[:, row], self.second[:, row] = whole[:, 0], whole[:, 1]
        self.share[:, row].copy_(torch.tensor([one.share for one in numbers], device="cpu"))
