"""Recorded steps over KV of which a part lies in host memory: whether a row can be in one, what is made ready before,
and what is taken over after it (kv/offers.py)."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from saccade.engine.device_watch import PlacedRow
from saccade.kv.blocks import BlockManager
from saccade.kv.hold import Hold
from saccade.kv.host import HostTier
from saccade.kv.offers import Offers
from saccade.kv.sequence import SequenceKV
from saccade.kv.tier import TierCounts
from saccade.selection.plan import DevicePlan, Everything

MOST_PAUSE = 64  # steps that the host serves in a row, at most, after one for which slots ran short


class DeviceTiers:
    """What a device backend keeps of pools with a host tier."""

    def __init__(self) -> None:
        self._begun: Offers | None = None  # of a step that may run, and was not settled
        self._pauses: WeakKeyDictionary[SequenceKV, tuple[int, int]] = WeakKeyDictionary()  # left, and the last one

    def why_not(self, kv: SequenceKV, plan: DevicePlan | None) -> str | None:
        """Why a row of ``kv``, parts of whose pool are absent, cannot be in a recorded step; None where it can, or all
        of it is resident."""
        pool, tiers = kv.pool, kv.pool.tiers
        if plan is None:
            return None  # so it cannot, for another reason
        reason = "some of its KV blocks are not resident"
        if pool.layers_apart:
            return f"{reason}, and a device takes slots of any layer (kv_pool)"
        if tiers is None or not isinstance(tiers.tier, HostTier):
            return None if kv.resident else reason
        if not plan.listed:
            return None if kv.resident else f"{reason}, and '{plan.method}' chooses and reads in one go"
        if tiers.tier.compute.mode == "host":
            return f"{reason}, and what is not is attended where it lies (kv_compute)"
        if kv.damaged:
            return "some of its KV blocks were lost"
        whole = sum(isinstance(one, Everything) for one in plan.layers)
        if whole * kv.blocks // pool.layers > tiers.slots * 3 // 4:
            return f"{reason}, and all of them do not fit"
        left, last = self._pauses.get(kv, (0, 0))
        if left:
            self._pauses[kv] = left - 1, last
            return f"{reason}, and too many are wanted at once"
        return None

    @staticmethod
    def absent(pool: BlockManager) -> bool:
        """Whether steps must look for blocks that are not resident."""
        return pool.absent > 0 and pool.tiers is not None and isinstance(pool.tiers.tier, HostTier)

    @staticmethod
    def counts(rows: Sequence[PlacedRow]) -> TierCounts:
        """What has moved so far."""
        tiers = rows[0].kv.pool.tiers
        return TierCounts() if tiers is None else tiers.counts.copy()

    @staticmethod
    def open(pool: BlockManager, rows: Sequence[PlacedRow]) -> None:
        """A step that brings nothing in writes to the last blocks of ``rows``: what host memory has of them, from a
        list that another step of the same turn made, is the past."""
        if pool.tiers is not None:
            size = pool.format.block_size
            written = [row.kv.block_table[_written(row, size)].numpy() for row in rows]
            pool.tiers.opened(slice(None), np.unique(np.concatenate(written)))

    def prepare(self, pool: BlockManager, rows: Sequence[PlacedRow]) -> Offers:
        """Make a step of ``rows`` of ``pool``, of which parts are absent, ready. TierError where what it writes to
        cannot be resident."""
        tiers, size = pool.tiers, pool.format.block_size
        assert tiers is not None
        kept: list[np.ndarray] = []
        written: list[np.ndarray] = []
        for row in rows:
            stop, blocks = row.scheduled.stop, row.kv.block_table
            reach = size if row.plan.blocks is None else max(size, row.plan.blocks.size)
            last, first = (stop - 1) // size, row.scheduled.start // reach * reach // size
            kept.append(blocks[first : last + 1].numpy())  # the summary of a block that is filled reads all of it
            written.append(blocks[_written(row, size)].numpy())
        needed, opened = np.unique(np.concatenate(kept)), np.unique(np.concatenate(written))
        holds: list[Hold] = []
        offers = tiers.offer()
        try:
            if not offers.keeps(needed) and (pool.lookup(needed.tolist()) < 0).any():
                for layer in range(pool.layers):
                    holds.append(tiers.fetch(layer, needed))
                for hold in holds:
                    hold.wait()
            tiers.opened(slice(None), opened)  # a step before this one may have had them copied
            offers.prepare(needed, opened)
        finally:
            for hold in holds:
                hold.release()
        self._begun = offers
        return offers

    def give_up(self) -> None:
        """A step has failed: blocks that its kernels moved lie where they lie."""
        offers, self._begun = self._begun, None
        if offers is not None:
            offers.settle()

    def settle(self, offers: Offers, rows: Sequence[PlacedRow], before: TierCounts) -> str | None:
        """After a step: what moved counts for its rows, in equal parts. Why nothing of the step holds; None where it
        does."""
        came, self._begun = offers.settle(), None
        moved = self.counts(rows).since(before)
        for number, row in enumerate(rows):
            row.result.tiers = row.result.tiers or TierCounts()
            own = moved.share(number, len(rows))
            row.result.tiers.add(own)
            if came:
                row.result.asked_bytes += (own.hits + own.misses) * offers.cell_bytes
            _, last = self._pauses.pop(row.kv, (0, 0))
            if not came:
                pause = min(MOST_PAUSE, 2 * last + 1)
                self._pauses[row.kv] = pause - 1, pause
        return None if came else "more KV blocks were wanted at once than slots could be taken for"


def _written(row: PlacedRow, size: int) -> slice:
    """The blocks of its sequence that a row, or the rows of a verification, are stored in."""
    return slice(row.scheduled.start // size, (row.scheduled.stop - 1) // size + 1)
