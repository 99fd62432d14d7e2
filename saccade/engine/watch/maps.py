"""What each head read, over the attention it would have paid when dense, on a grid of cells."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.engine.messages import MapOrder
from saccade.engine.watch.observe import AttentionCall
from saccade.engine.watch.truth import selected_rows, true_rows
from saccade.errors import RequestError, SaccadeError, shown, whole_number
from saccade.selection.head_part import WHOLE, HeadPart

FLOOR = 1e-4  # weights below it are not drawn
MOST_PIXELS, MOST_STEPS = 256, 65  # of a map that a request orders
ROWS_PER_CELL = 8  # most query rows looked at for one row of cells of a prefill map


class HeadMap:
    """One phase of one layer, on a grid of cells: ``read`` and ``unread`` fp32 [heads, rows, columns] are the greatest
    true weight of a cell among the keys read and among the others; ``share`` is the part of its causal pairs that was
    read (NaN where there is none)."""

    def __init__(self, heads: int, rows: int, columns: int, cell: int) -> None:
        self.cell = cell
        self.read, self.unread = torch.zeros(2, heads, rows, columns, device="cpu")
        self._pairs = torch.zeros(2, heads, rows, columns, device="cpu")  # read, visible
        self._mass = torch.zeros(2, heads, device="cpu")  # kept, rows

    def add(self, call: AttentionCall, rows: Tensor, grid_rows: Tensor) -> None:
        """Add the call's ``rows`` to the grid's rows ``grid_rows`` (both int64 [r])."""
        for true in true_rows(call, rows):
            at = grid_rows[torch.searchsorted(rows, true.rows.cpu())]
            chosen = selected_rows(call.selection, true.heads, true.rows)
            visible = ~torch.isneginf(true.scores)
            weights = true.weights()
            kept = weights * chosen
            for grid, part in ((self.read, kept), (self.unread, weights * ~chosen)):
                cells = self._cells(part).amax(-1).cpu()
                grid[true.heads] = grid[true.heads].scatter_reduce(1, at[None, :, None].expand_as(cells), cells, "amax")
            for pairs, part in zip(self._pairs, (chosen & visible, visible)):
                pairs[true.heads] = pairs[true.heads].index_add(1, at, self._cells(part.float()).sum(-1).cpu())
            self._mass[0, true.heads] += (kept.sum(-1) / weights.sum(-1)).sum(-1).cpu()
            self._mass[1, true.heads] += true.rows.numel()

    @classmethod
    def of_heads(cls, parts: Sequence[HeadMap], heads: HeadPart) -> HeadMap:
        """One map of the heads of a layer, of which ``heads`` says what each of ``parts`` has."""
        whole = cls(0, 0, 0, parts[0].cell)
        for name, dim in (("read", 0), ("unread", 0), ("_pairs", 1), ("_mass", 1)):
            setattr(whole, name, heads.join([getattr(one, name) for one in parts], dim))
        return whole

    @property
    def share(self) -> Tensor:
        return self._pairs[0] / torch.where(self._pairs[1] > 0, self._pairs[1], torch.nan)

    @property
    def density(self) -> Tensor:
        """Keys read over keys visible, per head, over the rows looked at."""
        totals = self._pairs.sum((-1, -2))
        return totals[0] / totals[1]

    @property
    def mass(self) -> Tensor:
        """Mean retained attention mass per head over the rows looked at."""
        return self._mass[0] / self._mass[1]

    def _cells(self, part: Tensor) -> Tensor:
        """Keys in cells: [heads, r, n] -> [heads, r, columns, cell]."""
        room = self.read.shape[2] * self.cell - part.shape[2]
        return torch.nn.functional.pad(part, (0, room)).unflatten(-1, (-1, self.cell))


@dataclass
class Inspection:
    """What ``Maps`` saw: maps by (phase, layer), the prompt's tokens, and all tokens computed with decode steps."""

    maps: dict[tuple[str, int], HeadMap]
    prompt: int
    total: int


class Maps:
    """An observer that draws every call it sees into ``HeadMap`` s of at most ``pixels`` cells a side.

    ``prompt`` tokens are read in prefill, at most ``steps`` in decode. Long prompts are max-pooled over keys, and over
    ``ROWS_PER_CELL`` evenly spaced query rows of each cell. ``joined``: asks the processes that share out the heads
    what each saw, for what this one did; ``part`` says which heads they have.
    """

    joined: Callable[[Inspection], Sequence[Inspection]] | None = None
    part: HeadPart = WHOLE

    def __init__(self, prompt: int, steps: int, layers: Sequence[int], pixels: int = 160) -> None:
        if not 16 <= pixels <= 2048:
            raise SaccadeError(f"pixels={pixels} must be from 16 to 2048")
        self.prompt, self.steps, self.layers = prompt, steps, set(layers)
        self.cell = -(-(prompt + steps) // pixels)
        every = max(1, self.cell // ROWS_PER_CELL)
        self.positions = torch.arange(every // 2, prompt, every)
        self.seen = Inspection({}, prompt, prompt)
        self._done: set[tuple[int, int]] = set()

    @staticmethod
    def ordered(order: MapOrder, prompt: int, max_tokens: int | None, layers: int) -> Maps:
        """What a request ordered. RequestError for layers that a model of ``layers`` lacks, or sizes out of range."""
        if not order.layers or not all(whole_number(layer, 0, layers - 1) for layer in order.layers):
            raise RequestError(f"layers={shown(list(order.layers))} must be some of 0 to {layers - 1}")
        if not whole_number(order.pixels, 16, MOST_PIXELS):
            raise RequestError(f"pixels={shown(order.pixels)} must be from 16 to {MOST_PIXELS}")
        if max_tokens is None or max_tokens > MOST_STEPS:
            raise RequestError(f"max_tokens={shown(max_tokens)} must be from 1 to {MOST_STEPS} for a selection map")
        return Maps(prompt, max_tokens - 1, order.layers, order.pixels)

    def __call__(self, call: AttentionCall) -> None:
        shape = call.selection.shape
        if call.layer not in self.layers or (call.layer, shape.q_start) in self._done:
            return
        self._done.add((call.layer, shape.q_start))
        prefill = call.phase == "prefill"
        height = -(-self.prompt // self.cell) if prefill else self.steps
        if (call.phase, call.layer) not in self.seen.maps:
            columns = -(-(self.prompt + self.steps) // self.cell)
            self.seen.maps[call.phase, call.layer] = HeadMap(shape.heads, height, columns, self.cell)
        positions = self.positions if prefill else torch.arange(self.prompt, self.prompt + self.steps, device="cpu")
        here = positions[(positions >= shape.q_start) & (positions < shape.q_start + shape.q_len)]
        self.seen.total = max(self.seen.total, shape.q_start + shape.q_len)
        if here.numel():
            grid_rows = here // self.cell if prefill else here - self.prompt
            self.seen.maps[call.phase, call.layer].add(call, here - shape.q_start, grid_rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, see docs/server.md. Grids are bytes in base64, heads x rows x columns: ``read`` and
        ``unread`` hold true weights on a log scale, 0 for ``FLOOR`` and less, 255 for 1; ``share`` holds 0 to 254 for
        the part of the pairs that was read, and 255 where there is no pair."""
        parts, maps = [], self.seen.maps
        if self.joined is not None:
            every = self.joined(self.seen)
            maps = {key: HeadMap.of_heads([one.maps[key] for one in every], self.part.at(key[1])) for key in maps}
        for (phase, layer), found in sorted(maps.items()):
            rows = found.read.shape[1] if phase == "prefill" else self.seen.total - self.prompt
            share = torch.where(found.share.isnan(), 255.0, found.share * 254)
            weights = {name: 255 * _log_scale(grid) for name, grid in (("read", found.read), ("unread", found.unread))}
            parts.append(
                {
                    "phase": phase,
                    "layer": layer,
                    "heads": found.read.shape[0],
                    "rows": rows,
                    "columns": found.read.shape[2],
                    "density": [round(value, 6) for value in found.density.tolist()],
                    "mass": [round(value, 6) for value in found.mass.tolist()],
                    **{name: _bytes(grid[:, :rows]) for name, grid in {**weights, "share": share}.items()},
                }
            )
        return {"prompt_tokens": self.prompt, "tokens": self.seen.total, "cell": self.cell, "maps": parts}


def _log_scale(weights: Tensor) -> Tensor:
    return 1 - torch.log10(weights.clamp(FLOOR, 1.0)) / math.log10(FLOOR)


def _bytes(grid: Tensor) -> str:
    return base64.b64encode(grid.round().to(torch.uint8).contiguous().numpy().tobytes()).decode()
