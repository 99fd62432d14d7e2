"""What the rows of a group read at a layer: chosen on the device, and brought in where it lies in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from saccade.kv.blocks import BlockManager
from saccade.kv.offers import Offers
from saccade.models.interface import LayerAttention
from saccade.ops.triton.batched_decode import Summaries, band_lists, score_blocks
from saccade.ops.triton.batched_moments import score_moments
from saccade.ops.triton.batched_rank import choose_blocks, rank_blocks
from saccade.ops.triton.decode import KeyLists, Pages
from saccade.ops.triton.residency import bring_in, bring_in_ranked
from saccade.selection.plan import BestBlocks, Ends, Everything, RankedBlocks, Reading


@dataclass(frozen=True)
class Group:
    """Rows ``first .. first + rows - 1`` of a step decode under plans of one form, ``each`` tokens a row."""

    form: tuple[Reading, ...]
    first: int
    rows: int

    @property
    def each(self) -> int:
        reading = self.form[0]
        return reading.rows if isinstance(reading, Everything) else 1

    @property
    def tokens(self) -> slice:
        """Of a step whose rows have as many tokens each."""
        return slice(self.first * self.each, (self.first + self.rows) * self.each)

    @property
    def slice(self) -> slice:
        return slice(self.first, self.first + self.rows)


class Chosen(NamedTuple):
    """``lists`` of what is read, or a ``ranking`` (batched_rank.rank_blocks) that a rule follows; neither where all
    keys are read."""

    lists: KeyLists | None
    ranking: tuple[Tensor, Tensor, Tensor] | None


def choose(
    reading: Reading,
    q: Tensor,
    pages: Pages,
    summaries: Summaries | None,
    first: Tensor,
    second: Tensor,
    spec: LayerAttention,
) -> Chosen:
    """What queries ``q`` [rows, heads, head_dim] read of ``pages``. ``first``, ``second`` int32 [rows]: the rows'
    numbers of ``reading``."""
    if isinstance(reading, Ends):
        return Chosen(band_lists(pages, first, second, reading.longest), None)
    if not isinstance(reading, BestBlocks | RankedBlocks):
        return Chosen(None, None)
    assert summaries is not None
    if isinstance(reading, RankedBlocks) and reading.summary == "moments":
        scores = score_moments(q, pages, summaries, reading, spec.scale, spec.softcap)
    else:
        scores = score_blocks(q, pages, summaries, reading)
    if isinstance(reading, BestBlocks):
        return Chosen(choose_blocks(scores, pages, reading, first, second), None)
    return Chosen(None, rank_blocks(scores, pages, reading, second))


def bring(
    pool: BlockManager,
    offers: Offers,
    layer: int,
    logical: Tensor,
    pages: Pages,
    reading: Reading,
    chosen: Chosen,
    most: int = 0,
) -> None:
    """Have it in slots: see residency.bring_in."""
    if chosen.ranking is None:
        bring_in(pool, offers, layer, logical, pages, chosen.lists, most=most)
    elif isinstance(reading, RankedBlocks):
        bring_in_ranked(pool, offers, layer, logical, pages, chosen.ranking, reading.size, most=most)
