"""Attention of rows that a policy chooses for, at one layer, and what it read."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from saccade.kv import rows as by_torch
from saccade.methods.base import Chunk
from saccade.methods.dense import DenseMethod
from saccade.methods.policy import Policy
from saccade.ops import Call
from saccade.ops import run as run_call
from saccade.ops.movers import row_mover
from saccade.ops.pairs import pairs
from saccade.selection import Selection, Shape, cut
from saccade_vllm.rows import Rows, view

EVERY = 10.0  # seconds between two lines of what was read
_MOST = 256  # counts that wait on a device


@dataclass
class Counts:
    """Of one process since it began. A pair is a query row of a head and a key that it reads, ``causal`` those that
    dense attention reads; ``whole`` calls chose to read everything."""

    rows: int = 0
    read: int = 0
    causal: int = 0
    calls: int = 0
    whole: int = 0
    notes: set[str] = field(default_factory=set)
    waiting: list[Tensor] = field(default_factory=list)  # of a device, not asked for yet

    def take(self, used: Selection, notes: list[str]) -> None:
        shape = used.shape
        known = used.even_pairs()
        self.calls += 1
        self.rows += shape.q_len
        self.causal += shape.causal_pairs * shape.heads
        self.notes.update(notes)
        if known is None:
            counted = pairs(used)
            self.waiting.append(counted.sum() if counted.numel() > 1 else counted.sum() * shape.heads)
            if len(self.waiting) >= _MOST:
                self.settle()
        else:
            self.read += known * shape.heads
            self.whole += known == shape.causal_pairs

    def settle(self) -> None:
        """Fetch what waits."""
        if self.waiting:
            self.read += int(torch.stack(self.waiting).sum())
            self.waiting = []

    @property
    def density(self) -> float:
        """The share of the causal pairs that were read."""
        self.settle()
        return self.read / self.causal if self.causal else 1.0


class Prefill:
    """``policy`` in a model of ``layers`` layers. ``note``: called at most every few seconds with a line for a log."""

    def __init__(self, policy: Policy, layers: int, threads: int | None = None) -> None:
        self.policy, self.layers, self.threads = policy, layers, threads
        self.counts = Counts()
        self._dense = DenseMethod()
        self._lock = threading.Lock()
        self._said = time.monotonic()

    def attend(
        self, q: Tensor, pages: Tensor, rows: Rows, layer: int, scale: float, softcap: float | None, out: Tensor
    ) -> None:
        """The packed rows ``q`` [rows, heads, head_dim] of one sequence, whose keys ``pages`` holds (see rows.view),
        into ``out`` of q's shape."""
        kv = view(pages, rows.table, rows.length, row_mover(q.device) or by_torch)
        q = q.transpose(0, 1)
        shape = Shape.suffix(q.shape[0], kv.kv_heads, q.shape[1], rows.length, q.device)
        window = self.policy.window.at(layer, self.layers) if rows.prefill and self.policy.window is not None else None
        chunk = Chunk(q, kv, shape, scale, softcap, layer, self.layers, window=window)
        selection = (self.policy.prefill if rows.prefill else self._dense).select_prefill(chunk)
        if window is not None:
            selection = cut(selection, window)
        done = run_call(Call(q, kv, selection, scale, softcap, self.threads))
        out.copy_(done.out.transpose(0, 1))
        if rows.prefill:
            with self._lock:
                notes = list(chunk.cost.notes)
                if q.is_cuda and done.backend == "reference":
                    notes.append(f"no GPU kernel serves {type(selection).__name__} here; torch did")
                self.counts.take(done.used, notes)

    def line(self) -> str | None:
        """What was read so far, at most every EVERY seconds; None in between, and where nothing was."""
        now = time.monotonic()
        if not self.counts.calls or now - self._said < EVERY:
            return None
        self._said = now
        return self.text()

    def text(self) -> str:
        """What was read so far."""
        counts = self.counts
        with self._lock:
            share = counts.density
            tokens = counts.rows // self.layers
            text = f"saccade: '{self.policy.text}' read {100 * share:.1f} % of the keys of {tokens} prompt tokens in "
            text += f"{self.layers} layers"
            if counts.whole:
                text += f", all of them in {counts.whole} of {counts.calls} calls"
            return "; ".join([text, *sorted(counts.notes)])
