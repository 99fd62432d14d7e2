"""Recorded steps over KV of which a part lies in host memory: whether a row can be in such a step, what is prepared
before it, and what the host takes over after it (kv/offers.py). The following step may be launched ahead while it
writes to blocks that this one brought in and the host has moved nothing since."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from saccade.engine.device.watch import PlacedRow
from saccade.kv.blocks import BlockManager
from saccade.kv.hold import Hold
from saccade.kv.host import HostTier
from saccade.kv.offers import Flight, Offers
from saccade.kv.sequence import SequenceKV
from saccade.kv.tier import TierCounts
from saccade.selection.plan import DevicePlan

MOST_PAUSE = 64  # steps that the host serves in a row, at most, after one for which slots ran short


class DeviceTiers:
    """What a device backend keeps of pools with a host tier."""

    def __init__(self) -> None:
        self._begun: tuple[Offers, Flight] | None = None  # of a step that may run, and was not settled
        self._ahead: tuple[Offers, Flight] | None = None  # of one launched behind it, or that was not asked for
        self._before = TierCounts()  # as the step began
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
        whole = sum(one.ends == (0, None) for one in plan.layers)
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
    def open(pool: BlockManager, rows: Sequence[PlacedRow]) -> None:
        """A step that brings nothing in writes to the last blocks of ``rows``: what host memory has of them, from a
        list that another step of the same turn made, is the past."""
        if pool.tiers is not None:
            pool.tiers.opened(slice(None), _blocks(rows)[1])

    def prepare(self, pool: BlockManager, rows: Sequence[PlacedRow]) -> Offers:
        """Make a step of ``rows`` of ``pool``, of which parts are absent, ready. TierError where what it writes to
        cannot be resident."""
        tiers = pool.tiers
        assert tiers is not None
        self._before = tiers.counts.copy()
        needed, opened = _blocks(rows)
        holds: list[Hold] = []
        offers = tiers.offer()
        try:
            if not offers.keeps(needed) and (pool.lookup(needed.tolist()) < 0).any():
                for layer in range(pool.layers):
                    holds.append(tiers.fetch(layer, needed))
                for hold in holds:
                    hold.wait()
            tiers.opened(slice(None), opened)  # a step before this one may have had them copied
            self._begun = offers, offers.prepare(needed, opened)
        finally:
            for hold in holds:
                hold.release()
        return offers

    def lets_follow(self, rows: Sequence[PlacedRow]) -> bool:
        """Whether the step of ``rows`` that runs may have the next one launched behind it, each row with one key
        more: what that writes to lies where this one's does, and there are slots for both."""
        assert self._begun is not None
        tiers, (offers, _) = rows[0].kv.pool.tiers, self._begun
        needed, opened = _blocks(rows, 1)
        if tiers is None or not offers.keeps(needed):
            return False
        tiers.opened(slice(None), opened)
        return offers.lasts

    def go_ahead(self) -> None:
        """Right before that step is launched."""
        if self._begun is not None:
            offers, _ = self._begun
            self._ahead = offers, offers.go_ahead()

    def asked(self, rows: Sequence[PlacedRow]) -> None:
        """The step that was launched ahead of its turn is the one of ``rows``, which comes now."""
        self._begun, self._ahead = self._ahead, None
        tiers = rows[0].kv.pool.tiers
        if self._begun is not None and tiers is not None:
            self._begun[0].asked()
            self._before = tiers.counts.copy()

    def come_back(self) -> None:
        """It is not asked for: blocks that it moved lie where they lie, and count for no request."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead[0].land()

    def give_up(self) -> None:
        """A step has failed: so do its own, and those of the one behind it."""
        begun, self._begun, self._ahead = self._begun or self._ahead, None, None
        if begun is not None:
            begun[0].land()

    def settle(self, rows: Sequence[PlacedRow]) -> str | None:
        """After a step, that this waits for: what moved counts for its rows, in equal parts. Why nothing of the step
        holds; None where it does, or looked for no absent blocks."""
        if self._begun is None:
            return None
        (offers, flight), tiers = self._begun, rows[0].kv.pool.tiers
        assert tiers is not None
        moved = tiers.counts.since(self._before)  # by the host
        came = offers.settle(flight)
        self._begun = None
        moved.add(flight.moved)
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


def _blocks(rows: Sequence[PlacedRow], later: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The blocks that a step of ``rows``, or one of ``later`` keys more, needs throughout, and those of them that it
    writes to: ids that rise."""
    kept: list[np.ndarray] = []
    written: list[np.ndarray] = []
    for row in rows:
        size, blocks, one = row.kv.pool.format.block_size, row.kv.block_table, row.scheduled
        reach = size if row.plan.blocks is None else max(size, row.plan.blocks.size)
        first, last = (one.start + later) // reach * reach // size, (one.stop + later - 1) // size
        kept.append(blocks[first : last + 1].numpy())  # the summary of a block that is filled reads all of it
        written.append(blocks[(one.start + later) // size : last + 1].numpy())
    return np.unique(np.concatenate(kept)), np.unique(np.concatenate(written))
