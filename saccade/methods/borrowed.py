"""What a decode step reads by another query than its own."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Borrowed(NamedTuple):
    """``queries`` fp32 [heads, head_dim]: for each head one whose ``keys`` best keys it reads, beside the first
    ``sinks`` and the last ``local`` ones; its own where it looked for itself. Of all queries with the same best keys
    (the multiples of one) it is the nearest to the head's own."""

    queries: Tensor
    keys: int
    sinks: int
    local: int
