"""True attention beside what a method read, in blocks of rows.

Everything here is the layer's own dense attention: causal, within its sliding window, soft-capped and with its sink
logits where it has them, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.engine.watch.observe import AttentionCall
from saccade.ops.reference import logits
from saccade.selection import Selection

BLOCK_ENTRIES = 2**22  # scores of one block of rows: 16 MiB in float32


@dataclass(frozen=True, eq=False)
class TrueRows:
    """Dense attention of some rows of one KV head's group.

    ``heads``: the query heads; ``rows`` int64 [r], numbers within the call; ``scores`` fp32 [group, r, n], -inf where
    the layer may not look; ``values`` fp32 [n, head_dim]; ``sinks`` [group], extra logits that carry no value, or None.
    """

    heads: slice
    rows: Tensor
    scores: Tensor
    values: Tensor
    sinks: Tensor | None

    def weights(self, mask: Tensor | None = None) -> Tensor:
        """Softmax weights fp32 [group, r, n]; with ``mask`` (bool, like scores) those of a run that reads only what it
        allows. A row that may read nothing has weights 0."""
        scores = self.scores if mask is None else self.scores.masked_fill(~mask, -torch.inf)
        total = torch.logsumexp(scores, -1, keepdim=True)
        if self.sinks is not None:
            total = torch.logaddexp(total, self.sinks[:, None, None])
        return torch.exp(scores - torch.where(torch.isneginf(total), 0.0, total))


def true_rows(call: AttentionCall, rows: Tensor | None = None, entries: int = BLOCK_ENTRIES) -> Iterator[TrueRows]:
    """Dense attention of the call's ``rows`` (int64, sorted, numbers within the call; all by default), one KV head at
    a time in blocks of at most ``entries`` scores (at least one row)."""
    shape, spec, device = call.selection.shape, call.spec, call.q.device
    chosen = torch.arange(shape.q_len, device=device) if rows is None else rows.to(device)
    step = max(1, entries // (shape.group * shape.k_len))
    columns = torch.arange(shape.k_len, device=device)
    for kv_head in range(shape.kv_heads):
        heads = slice(kv_head * shape.group, (kv_head + 1) * shape.group)
        keys, values = (part.float() for part in call.kv.take(columns, kv_head))
        sinks = None if spec.sinks is None else spec.sinks[heads].float()
        for part in chosen.split(step):
            scores = logits(call.q[heads, part].float(), keys, spec.scale, spec.softcap)
            distance = (shape.q_start + part)[:, None] - columns
            hidden = distance < 0 if spec.window is None else (distance < 0) | (distance >= spec.window)
            yield TrueRows(heads, part, scores.masked_fill_(hidden, -torch.inf), values, sinks)


def selected_rows(selection: Selection, heads: slice, rows: Tensor) -> Tensor:
    """bool [heads, r, n]: what a selection reads in some rows (int64 [r], sorted, numbers within the call)."""
    per_unit = selection.shape.heads // selection.units
    units = [head // per_unit for head in range(heads.start, heads.stop)]
    masks = {unit: torch.cat([selection.row_mask(unit, a, b) for a, b in _runs(rows)]) for unit in set(units)}
    return torch.stack([masks[unit] for unit in units])


def _runs(rows: Tensor) -> list[tuple[int, int]]:
    """Sorted numbers as half-open runs."""
    listed = rows.tolist()
    starts = [row for i, row in enumerate(listed) if i == 0 or listed[i - 1] != row - 1]
    stops = [row + 1 for i, row in enumerate(listed) if i == len(listed) - 1 or listed[i + 1] != row + 1]
    return list(zip(starts, stops))
