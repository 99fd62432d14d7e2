"""LoopServe: in prefill a greedy choice of slash and vertical lines for the newly appended rows (Li et al., 2025, Alg.
2), in decode a choice of keys that is made anew every few tokens (eq. 7).

Rows of the turn are sampled at random, not only taken from its end, so that a question may stand anywhere. Choices
where the paper is silent or cannot be run as printed:

* chosen lines leave the candidates, and denominators are at least 1;
* ``overlap="exact"`` counts the cell that two lines share once, and only if it was sampled; the printed bookkeeping
  (``overlap="paper"``) subtracts every crossing whether it was seen or not, and on a small sample ends with all lines;
* diagonal 0 and column 0 are always read, so that no row is left without keys; with ``overlap="paper"`` diagonal 0
  alone, and only where a row would be;
* the sample's size is not given: ``samples`` rows, drawn anew for every layer and chunk from ``seed`` and their place
  alone, the same for all heads of a layer;
* the chunk's ``last_rows`` are looked at too. alpha is a mean over rows: of 4096 it may lose 20 whole ones, and chance
  leaves out most of a question's few, the very rows that look for the answer (docs/results/claims-prefill.md).
  ``samples=256, last_rows=0`` samples as the paper says;
* ``take="round"`` takes lines in rounds (rounds.py): one after another is a chain as long as the list, which a GPU
  waits for. By default single lines are taken one by one, as in the paper, and blocks in rounds, on every device;
* ``lines="block"`` covers the sampled rows by columns and distances of blocks of ``block_size`` keys (blocks.py), for a
  kernel that reads blocks: single lines cost it several dense pairs each (docs/performance-gpu.md). The last
  ``window_blocks`` distances are always read (docs/results/block-starts.md). Blocks are covered in rounds with exact
  overlaps: ``take="line"`` and ``overlap="paper"`` say how single lines are taken;
* 6.1.4 prints alpha = 0.955, but its own study calls 0.99 to 1 best: the default is 0.995.

With chunked prefill every chunk is a turn of its own.

Decode is dense until output step ``first``; then, at that step and every ``n_d`` steps, the queries of the last ``n_d``
tokens, the one at hand among them, choose the ``budget`` lines of the greatest summed weight. In between every row
reads those and all keys since. What is not chosen stays stored, and may be chosen next time. Where the paper is silent:

* the printed rule also fires at step 0 when ``n_d`` divides 16, against the text: ``at_start=true`` lets it;
* ``observed`` rows, evenly among the last ``n_d``, suffice to choose by (default: all, as in the paper, which costs as
  many products as dense decode);
* ``slashes``: columns and slashes of the observed rows compete for the budget, and a slash's key moves along with the
  row. Alg. 3 hands the slash lines to decoding without a formula; eq. 7 alone (``slashes=false``) chooses keys that
  past rows looked at, and so loses a copy that is under way: its next key is one that no row has looked at yet;
* nothing is forced but what is new: ``force=true`` adds the first ``sinks`` keys and those of the observed tokens;
* lines are chosen per KV head by weights summed over its group; ``unit="q_head"`` chooses per query head.

The columns that prefill chose are not carried into decode, and the answer's keys are not computed again when the next
turn begins: the paper gives no formula for the one, and leaves the other to the store. Its sample is drawn from the
last answer and the new input; the answer's rows are none of the chunk's, so ``answer_rows`` of them, the last ones, are
remembered and looked at beside the sample of the next turn's first chunk (default: none).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from saccade.errors import PolicyError
from saccade.methods.base import Chunk, Method, Query
from saccade.methods.device_state import DeviceState, Opening
from saccade.methods.fitting import Fitting, Sizes
from saccade.methods.loopserve import device
from saccade.methods.loopserve.blocks import select_blocks
from saccade.methods.loopserve.line_cover import cover_rows
from saccade.methods.loopserve.recorded import ChosenLines, RecordedLines
from saccade.methods.options import require_choice, require_number, require_whole
from saccade.methods.state import MethodState
from saccade.ops.scores import line_sums, row_weights, top_places
from saccade.selection import Dense, Lines, Selection, Shape, Tokens
from saccade.selection.csr import offsets_of
from saccade.selection.forms import PlanSpec
from saccade.selection.plan import DevicePlan


@dataclass
class LoopServeState(MethodState):
    """``rows`` [heads, at most n_d, head_dim]: the queries of the last tokens, the step's own still missing. ``chosen``
    int64 [units, budget]: lines, numbers below ``until`` columns and ``until`` + D the keys at distance D; None: none
    yet. They come from the keys before ``until``, the step's own that chose."""

    replaced: ClassVar[frozenset[str]] = frozenset({"rows", "chosen"})

    rows: Tensor
    chosen: Tensor | None = None
    until: int = 0

    def fit(self, sizes: Sizes, fitting: Fitting) -> None:
        """See MethodState."""
        fitting.tensor("rows", self.rows, sizes.dtype, sizes.heads, None, sizes.head_dim)
        fitting.within("until", self.until, 0, sizes.length)
        if self.chosen is not None:
            chosen = fitting.tensor("chosen", self.chosen, torch.int64, sizes.units, None)
            fitting.within("chosen", chosen, 0, 2 * self.until)


@dataclass
class AnsweringState(LoopServeState):
    """``answer`` [heads, m, head_dim]: the queries of the last tokens of the answer, the last one at ``end`` - 1."""

    replaced: ClassVar[frozenset[str]] = LoopServeState.replaced | {"answer"}

    answer: Tensor | None = None
    end: int = 0

    def fit(self, sizes: Sizes, fitting: Fitting) -> None:
        """See MethodState."""
        super().fit(sizes, fitting)
        fitting.within("end", self.end, 0, sizes.length)
        if self.answer is not None:
            fitting.tensor("answer", self.answer, sizes.dtype, sizes.heads, None, sizes.head_dim)


@dataclass(frozen=True)
class LoopServe(Method):
    """Prefill: per query head the lines, by new weight per new cell, that recover ``alpha`` of the attention of
    ``samples`` of the appended rows and the ``last_rows``: columns and distances of single keys, or of blocks of
    ``block_size`` (``lines="block"``; the last ``window_blocks`` in any case). Fewer than ``min_rows`` rows are dense:
    lines cannot pay for their choice. ``alpha=1`` is dense. Decode: ``budget`` lines, a key each, chosen at output step
    ``first`` and every ``n_d`` steps."""

    name: ClassVar[str] = "loopserve"
    paper: ClassVar[str] = "LoopServe, arXiv:2507.13681"
    phases: ClassVar[tuple[str, ...]] = ("prefill", "decode")

    alpha: float = 0.995
    samples: int = 448
    last_rows: int = 64
    overlap: str = "exact"
    take: str = "auto"
    lines: str = "token"
    block_size: int = 128
    window_blocks: int = 2
    min_rows: int = 64
    seed: int = 0
    budget: int = 1024
    n_d: int = 16
    first: int = 16
    unit: str = "kv_head"
    observed: int | None = None
    at_start: bool = False
    force: bool = False
    sinks: int = 4
    slashes: bool = True
    answer_rows: int = 0

    def __post_init__(self) -> None:
        require_number("alpha", self.alpha, 0.0, 1.0)
        require_whole("samples", self.samples, 1)
        require_whole("last_rows", self.last_rows, 0)
        require_choice("overlap", self.overlap, ("exact", "paper"))
        require_choice("take", self.take, ("auto", "line", "round"))
        if self.take == "round" and self.overlap != "exact":
            raise PolicyError("take=round does not go with overlap=paper, which orders lines by their whole weight")
        require_choice("lines", self.lines, ("token", "block"))
        require_choice("block_size", self.block_size, (32, 64, 128))
        if self.lines == "block" and not self._by_rounds:
            given = "take=line" if self.overlap == "exact" else f"overlap={self.overlap}"
            raise PolicyError(
                f"lines=block does not go with {given}, which says how single lines are taken; blocks are covered in "
                "rounds with exact overlaps: leave it out, or give lines=token"
            )
        require_whole("window_blocks", self.window_blocks, 1)
        require_whole("min_rows", self.min_rows, 1)
        require_whole("seed", self.seed, 0)
        for name in ("budget", "n_d"):
            require_whole(name, getattr(self, name), 1)
        for name in ("first", "sinks", "answer_rows"):
            require_whole(name, getattr(self, name), 0)
        require_choice("unit", self.unit, ("q_head", "kv_head"))
        if self.observed is not None:
            require_whole("observed", self.observed, 1)
        for name in ("at_start", "force", "slashes"):
            require_choice(name, getattr(self, name), (False, True))
        object.__setattr__(self, "tail_rows", self.n_d)
        object.__setattr__(self, "recalled", max(self.n_d, self.answer_rows))

    def reads_all(self, start: int, stop: int) -> bool:
        return self.alpha >= 1.0 or stop - start < self.min_rows

    @property
    def _by_rounds(self) -> bool:
        """Whether lines may be taken in rounds, which blocks are."""
        return self.overlap == "exact" and self.take != "line"

    def select_prefill(self, chunk: Chunk) -> Selection:
        shape = chunk.shape
        if self.reads_all(shape.q_start, shape.q_start + shape.q_len):
            return Dense(shape)
        by_block = self.lines == "block"
        if by_block and shape.k_len <= (1 + self.window_blocks) * self.block_size:  # with the first block all are read
            return Dense(shape)
        rows, answer, looked = self._drawn(chunk), self._answer(chunk), chunk
        if answer is not None:  # looked at as if it were of the chunk, for whose rows alone the selection is
            count = answer.shape[1]
            longer = Shape.suffix(shape.heads, shape.kv_heads, count + shape.q_len, shape.k_len, shape.device)
            rows = torch.cat([torch.arange(count, device="cpu"), count + rows])
            looked = replace(chunk, q=torch.cat([answer, chunk.q], 1), shape=longer)
        chunk.cost.scored += rows.numel() * shape.k_len
        if not by_block:
            return replace(self._cover(looked, rows.to(chunk.q.device)), shape=shape)
        return select_blocks(looked, rows, self.alpha, self.block_size, shape, self.window_blocks)

    @property
    def asks_states(self) -> bool:
        return self.answer_rows > 0

    def _answer(self, chunk: Chunk) -> Tensor | None:
        """The rows of the last answer that end where the chunk begins, [heads, m, head_dim]."""
        state = chunk.states[chunk.layer] if chunk.layer < len(chunk.states) else None
        if self.answer_rows == 0 or not isinstance(state, AnsweringState) or state.end != chunk.shape.q_start:
            return None
        return None if state.answer is None else state.answer[:, -self.answer_rows :].to(chunk.q.device)

    def _cover(self, chunk: Chunk, rows: Tensor) -> Lines:
        """The lines that recover the weight of the chunk's ``rows``."""
        if device.serves(chunk, self.overlap) is None:
            return device.select_lines(chunk, rows, self.alpha, self.take == "round")
        at = chunk.q, chunk.kv, chunk.shape, rows, self.alpha, chunk.scale, chunk.softcap
        lines = cover_rows(*at, overlap=self.overlap, rounds=self.take == "round")
        return Lines.from_lists(chunk.shape, *zip(*lines))

    def sample(self, chunk: Chunk) -> Tensor:
        """The rows of the chunk that are looked at, sorted, int64: ``samples``, uniform without replacement whatever
        else runs, and the ``last_rows`` behind them."""
        return self._drawn(chunk).to(chunk.q.device)

    def _drawn(self, chunk: Chunk) -> Tensor:
        """:meth:`sample` on the CPU, where it is drawn."""
        shape = chunk.shape
        earlier = shape.q_len - self.last_rows
        if earlier <= self.samples:
            return torch.arange(shape.q_len, device="cpu")
        rng = np.random.default_rng([self.seed, chunk.layer, shape.q_start, shape.q_len])
        drawn = np.sort(rng.choice(earlier, self.samples, replace=False))
        chosen = np.concatenate([drawn, np.arange(earlier, shape.q_len)])
        return torch.from_numpy(chosen)

    def begin(self, segment: Chunk) -> LoopServeState:
        rows = segment.q[:, -self.n_d :].clone()
        return AnsweringState(rows) if self.answer_rows else LoopServeState(rows)

    def select_decode(self, query: Query, state: LoopServeState) -> Selection:
        shape, n = query.shape, query.shape.k_len
        if self._due(query.step) and n > self.budget:
            state.chosen, state.until = self._choose(query, state), n - 1
            query.cost.searches = shape.heads
        if state.chosen is None:
            return Dense(shape)
        query.cost.searches = query.cost.searches or 0
        # Several lines may meet in one key, and distances reach keys that are new and read anyway.
        chosen, until = state.chosen, state.until
        new = torch.arange(until, n, device=chosen.device).expand(len(chosen), -1)
        keys = torch.cat([torch.where(chosen < until, chosen, n - 1 + until - chosen), new], 1).sort(1).values
        fresh = torch.nn.functional.pad(keys.diff(dim=1) > 0, (1, 0), value=True)
        return Tokens(shape, offsets_of(fresh.sum(1)), keys[fresh].to(torch.int32))

    def _due(self, step: int) -> bool:
        """Whether output step ``step``, from 0, chooses."""
        return (step >= self.first or self.at_start) and (step - self.first) % self.n_d == 0

    def _choose(self, query: Query, state: LoopServeState) -> Tensor:
        """The lines of greatest weight over the observed rows, ties to columns and the lower: int64 [units, budget],
        rising, as in the state. The row's own key is no candidate: it is read anyway."""
        shape, n = query.shape, query.shape.k_len
        rows = torch.cat([state.rows, query.q], 1)[:, -self.n_d :]
        seen = rows.shape[1]
        count = seen if self.observed is None else min(seen, self.observed)
        which = seen - 1 - torch.arange(count, device=rows.device).flip(0) * seen // count  # the last one always
        block = Shape.suffix(shape.heads, shape.kv_heads, seen, n, shape.device)
        query.cost.scored += int((block.q_start + 1 + which).sum())
        if count == seen:
            columns, slashes = line_sums(rows, query.kv, block, seen, query.scale, query.softcap)
        else:
            groups = range(shape.kv_heads)
            weights = torch.cat(
                [row_weights(rows, query.kv, block, g, which, query.scale, query.softcap) for g in groups]
            )
            columns, slashes = weights.sum(1), torch.zeros_like(weights[:, 0])
            for at, row in enumerate((block.q_start + which).tolist()):
                slashes[:, : row + 1] += weights[:, at, : row + 1].flip(1)
        if self.unit == "kv_head":
            columns, slashes = (part.unflatten(0, (shape.kv_heads, -1)).sum(1) for part in (columns, slashes))
        columns = columns[:, : n - 1]
        if self.force:
            columns[:, : self.sinks] = columns[:, n - seen :] = torch.inf
        if not self.slashes:
            return top_places(columns, self.budget)
        slashes[:, 0] = -1.0  # the row's own key
        return top_places(torch.cat([columns, slashes], 1), self.budget)

    def device_plan(self, spec: PlanSpec) -> DevicePlan | None:
        return None if self.answer_rows else DevicePlan.alike(self, spec, ChosenLines.of(self))

    def device_state(self, opening: Opening) -> DeviceState:
        return RecordedLines(opening, self)

    def whole_upto(self, opening: Opening) -> int:
        if any(state is None or state.chosen is not None for state in opening.states):
            return 0
        return self.budget if self.at_start else max(self.budget, opening.turn + self.first)

    def observe(self, query: Query, selection: Selection, weights: Tensor | None, state: LoopServeState) -> None:
        self.recall(state, query.q, query.shape.k_len)

    def recall(self, state: LoopServeState, rows: Tensor, length: int) -> None:
        state.rows = torch.cat([state.rows, rows], 1)[:, -self.n_d :]
        if isinstance(state, AnsweringState):
            answer = rows if state.answer is None else torch.cat([state.answer, rows], 1)
            state.answer, state.end = answer[:, -self.answer_rows :], length
