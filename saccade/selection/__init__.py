"""The vocabulary between methods and ops: which keys each query row may read.

A selection holds indices only. Positions and block ids are absolute; lists are sorted, unique and causal. Query rows
are contiguous: row ``r`` of a call stands at position ``q_start + r``, and keys are positions ``0 .. k_len - 1``.

Lists are kept per *unit*. ``units`` divides the number of query heads: ``heads`` units mean one list per query head,
``kv_heads`` one per KV head, 1 one per layer. Query head ``h`` reads unit ``h // (heads // units)``.

Ragged lists are stored flat (CSR): list ``j`` is ``indices[offsets[j] : offsets[j + 1]]`` with ``offsets`` int64 and
``indices`` int32.
"""

from saccade.selection.base import Band, Dense, Selection, Shape, Tokens
from saccade.selection.blocks import Blocks, Ranking
from saccade.selection.candidates import Candidates
from saccade.selection.corrected import Corrected
from saccade.selection.evicted import Without, gone_for, without
from saccade.selection.lines import Lines
from saccade.selection.mixed import Mixed
from saccade.selection.sampled import Sampled
from saccade.selection.tri import Tri
from saccade.selection.window import Cone, Windowed, cut

__all__ = [
    "Band",
    "Blocks",
    "Candidates",
    "Cone",
    "Corrected",
    "Dense",
    "Lines",
    "Mixed",
    "Ranking",
    "Sampled",
    "Selection",
    "Shape",
    "Tokens",
    "Tri",
    "Windowed",
    "Without",
    "cut",
    "gone_for",
    "without",
]
