"""``SACCADE_DEBUG=1``: look at every selection before a kernel reads it. A kernel trusts its lists and its tables."""

from __future__ import annotations

import os

from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.selection import Selection

ON = os.environ.get("SACCADE_DEBUG", "") not in ("", "0")


def check(kv: KVView, selection: Selection) -> None:
    """SaccadeError where lists are not sorted, unique, causal and in range, or where a block that holds keys lies in no
    slot of the pool."""
    selection.check()
    paged = kv.paged()
    blocks = -(-kv.length // paged.k.shape[2])
    if paged.block_table.shape[1] < blocks:
        raise SaccadeError(f"a block table of {paged.block_table.shape[1]} blocks for {kv.length} keys")
    slots = paged.block_table[:, :blocks]
    if slots.numel() and int(slots.max()) >= paged.k.shape[0]:
        raise SaccadeError(f"a block lies in slot {int(slots.max())}, but the pool has {paged.k.shape[0]}")
