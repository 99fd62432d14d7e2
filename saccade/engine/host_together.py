"""The rows of verifications on a GPU: requests that verify as many rows are attended in one call a layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from saccade.engine.host_calls import Chosen, Setting, finish
from saccade.models.interface import LayerAttention
from saccade.ops import Result, triton
from saccade.selection import Dense


@dataclass
class TogetherRows:
    """Requests of a layer whose rows wait for others with as many rows."""

    setting: Setting
    waiting: dict[int, list[Chosen]] = field(default_factory=dict)  # by number of rows

    def takes(self, chosen: Chosen) -> bool:
        """Whether the rows can wait for others; if so, they do."""
        chunk = chosen.chunk
        if self.setting.backend not in ("auto", "triton"):
            return False
        if type(chosen.selection) is not Dense or chunk.shape.q_start == 0:
            return False
        if triton.serves(chunk.q, chunk.kv, chosen.selection) is not None:
            return False
        self.waiting.setdefault(chunk.shape.q_len, []).append(chosen)
        return True

    def run(self, q: Tensor, spec: LayerAttention, out: Tensor) -> None:
        """Attend for the rows that wait, of the packed ``q`` [heads, rows, head_dim], into ``out``."""
        for count, some in self.waiting.items():
            try:
                self._attend(count, some, q, spec, out)
            except Exception as error:
                for one in some:
                    one.rows.failed(one.chunk.layer, error)
        self.waiting = {}

    def _attend(self, count: int, some: Sequence[Chosen], q: Tensor, spec: LayerAttention, out: Tensor) -> None:
        from saccade.ops.triton.few_rows import attend_few  # needs Triton

        where = _places([one.rows.first for one in some], count)
        views = [one.chunk.kv for one in some]
        attended, lse = attend_few(q[:, where], views, scale=spec.scale, softcap=spec.softcap)
        for number, one in enumerate(some):
            here = slice(number * count, (number + 1) * count)
            ran = Result(attended[:, here], lse[:, here], one.selection, "triton")
            out[:, one.rows.first : one.rows.first + count] = finish(self.setting, one, spec, ran)


def _places(firsts: Sequence[int], count: int) -> slice | list[int]:
    """Where ``count`` rows from each of ``firsts`` on stand among the packed ones."""
    if all(after - first == count for first, after in itertools.pairwise(firsts)):
        return slice(firsts[0], firsts[-1] + count)
    return [row for first in firsts for row in range(first, first + count)]
