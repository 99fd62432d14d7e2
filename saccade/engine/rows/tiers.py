"""The row path over KV of which a part lies in a tier: which blocks stay in memory for a step, and counts of the blocks
moved for each request."""

from __future__ import annotations

from saccade.engine.rows.calls import RequestRows
from saccade.kv.hold import Hold, hold_all
from saccade.kv.host import HostTier
from saccade.kv.tier import TierCounts, TierError
from saccade.kv.tiers import LEAST_SLOTS

SPARE = 8  # at least one in so many slots is left to rows that are served one request at a time


class HeldRows:
    """Decode rows whose keys are all brought in and kept for a step, so that they can be attended together."""

    def __init__(self) -> None:
        self._holds: list[Hold] = []

    def gather(self, rows: list[RequestRows], others: list[RequestRows]) -> list[RequestRows]:
        """Those of ``rows`` that can share calls: all while nothing is absent, else those whose keys memory has room
        for beside a layer's of each of ``others``, in their order. The others are served by themselves, and read what
        they choose."""
        pool = rows[0].memory.kv.pool
        if pool.tiers is None or not pool.absent:
            return rows
        if isinstance(pool.tiers.tier, HostTier) and pool.tiers.tier.compute.mode != "device":
            return []  # what is absent may be attended where it lies
        least = LEAST_SLOTS * pool.layers if pool.layers_apart else LEAST_SLOTS
        spare = max([least, pool.tiers.slots // SPARE, *(len(one.memory.kv.block_table) for one in others)])
        together = []
        for one in rows:
            kv, before = one.memory.kv, tier_counts(one)
            if one.drafted or kv.blocks > pool.tiers.room - spare:
                continue
            try:
                self._holds += hold_all(kv)
            except TierError:  # it meets the same alone, and says so
                continue
            finally:
                if before is not None:
                    count_tiers(one, before, pool.layers)
            one.result.whole = True
            together.append(one)
        return together

    def release(self) -> None:
        """Let the parts that were kept leave their slots."""
        for hold in self._holds:
            hold.release()
        self._holds.clear()


def tier_counts(rows: RequestRows) -> list[TierCounts] | None:
    """What the tiers of each group of layers have counted so far; None without any, or while all is resident."""
    tiers = [one.tiers for one in rows.memory.kv.pool.groups if one.tiers is not None]
    absent = any(one.absent for one in rows.memory.kv.pool.groups)
    return [one.counts.copy() for one in tiers] if tiers and absent else None


def count_tiers(rows: RequestRows, before: list[TierCounts], layers: int = 1) -> None:
    """What was counted since ``before`` was for these rows, at so many layers alike."""
    result = rows.result
    result.tiers = result.tiers or TierCounts()
    for own, counted in zip(rows.memory.kv.pool.groups, before):
        tiers = own.tiers
        assert tiers is not None
        moved = tiers.counts.since(counted)
        result.tiers.add(moved)
        result.widest = max(result.widest, (moved.hits + moved.misses) // layers)
        result.asked_bytes += (moved.hits + moved.misses) * tiers.tier.cell_bytes
