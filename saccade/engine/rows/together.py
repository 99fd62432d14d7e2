"""Rows of several requests on a GPU, attended in one call a layer: verifications of equally many rows, and chunks of
prefills whose selections are alike."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from saccade.engine.rows.calls import Chosen, RequestRows, Setting, backend_of, call_of, finish, read
from saccade.kv.view import KVView
from saccade.models.interface import LayerAttention
from saccade.ops import Result, debug, triton
from saccade.ops.backends import FA4
from saccade.selection import Band, Dense

if TYPE_CHECKING:
    from saccade.ops.triton.prefill_together import Part


SHORT = 1024  # rows up to which a chunk of a prefill waits for others; more of them keep a GPU busy by themselves


@dataclass
class TogetherRows:
    """Requests of a layer whose rows wait for others like them."""

    setting: Setting
    waiting: dict[tuple[int, int | None], list[Chosen]] = field(
        default_factory=dict
    )  # verifications, by rows and window
    chunks: dict[tuple[int, ...], list[Chosen]] = field(default_factory=dict)  # of prefills, by form

    def takes(self, q: Tensor, chosen: Chosen) -> bool:
        """Whether the rows, of the packed ``q`` [heads, rows, head_dim], can wait for others; if so, they do."""
        chunk, selection = chosen.chunk, chosen.selection
        if self.setting.backend not in ("auto", "triton"):
            return False
        if triton.serves(chunk.q, chunk.kv, selection) is not None:
            return False
        if not chosen.rows.together:
            return self._takes_chunk(q, chosen)
        window = None
        if isinstance(selection, Band) and not selection.sinks and not chunk.kv.format.joined:
            window = selection.window
        elif not isinstance(selection, Dense):
            return False
        if chunk.shape.q_start == 0:
            return False
        self.waiting.setdefault((chunk.shape.q_len, window), []).append(chosen)
        return True

    def _takes_chunk(self, q: Tensor, chosen: Chosen) -> bool:
        from saccade.ops.triton.prefill_together import form  # needs Triton

        if self.setting.watch.clock is not None or type(chosen.chunk.kv) is not KVView:
            return False
        if backend_of(self.setting, call_of(self.setting, chosen)) == FA4.name:
            return False
        found = form(q, _part(chosen))
        if found is not None:
            self.chunks.setdefault(found, []).append(chosen)
        return found is not None

    def run(self, q: Tensor, spec: LayerAttention, out: Tensor) -> None:
        """Attend for the rows that wait, of the packed ``q`` [heads, rows, head_dim], into ``out``."""
        for (count, window), some in self.waiting.items():
            try:
                self._attend(count, window, some, q, spec, out)
            except Exception as error:
                for one in some:
                    one.rows.failed(one.chunk.layer, error)
        for some in self.chunks.values():
            self._attend_chunks(some, q, spec, out)
        self.waiting, self.chunks = {}, {}

    def _attend(
        self, count: int, window: int | None, some: Sequence[Chosen], q: Tensor, spec: LayerAttention, out: Tensor
    ) -> None:
        from saccade.ops.triton.few_rows import attend_few  # needs Triton

        where = _places([one.rows.first for one in some], count)
        views = [one.chunk.kv for one in some]
        attended, lse = attend_few(q[:, where], views, scale=spec.scale, softcap=spec.softcap, window=window)
        for number, one in enumerate(some):
            here = slice(number * count, (number + 1) * count)
            ran = Result(attended[:, here], lse[:, here], one.selection, "triton")
            out[:, one.rows.first : one.rows.first + count] = finish(self.setting, one, spec, ran)

    def _attend_chunks(self, some: Sequence[Chosen], q: Tensor, spec: LayerAttention, out: Tensor) -> None:
        """In one launch; where that fails, or there is but one, each by itself."""
        from saccade.ops.triton.prefill_together import attend_together

        lse = None
        if len(some) > 1:
            with suppress(Exception):
                for one in some if debug.ON else ():
                    debug.check(one.chunk.kv, one.selection)
                lse = attend_together(q, list(map(_part, some)), out, scale=spec.scale, softcap=spec.softcap)
        for one in some:
            here = slice(one.rows.first, one.rows.first + one.chunk.shape.q_len)
            try:
                if lse is None:
                    ran = read(self.setting, one)
                else:
                    ran = Result(out[:, here], lse[:, here], one.selection, "triton")
                done = finish(self.setting, one, spec, ran)
                if lse is None or done is not ran.out:  # else it lies there already
                    out[:, here] = done
            except Exception as error:  # one request's failure must not take the others down
                one.rows.failed(one.chunk.layer, error)


def waits(rows: RequestRows, q: Tensor) -> bool:
    """Whether a chunk may be attended with those of other requests."""
    return rows.scheduled.phase == "prefill" and 1 < rows.scheduled.length <= SHORT and q.is_cuda


def _part(chosen: Chosen) -> Part:
    from saccade.ops.triton.prefill_together import Part

    return Part(chosen.rows.first, chosen.chunk.kv, chosen.selection)


def _places(firsts: Sequence[int], count: int) -> slice | list[int]:
    """Where ``count`` rows from each of ``firsts`` on stand among the packed ones."""
    if all(after - first == count for first, after in itertools.pairwise(firsts)):
        return slice(firsts[0], firsts[-1] + count)
    return [row for first in firsts for row in range(first, first + count)]
