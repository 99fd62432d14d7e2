"""The row path over KV that does not all lie in memory: whose keys stay there for a step, what moved for whom."""

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
        """What was kept may leave."""
        for hold in self._holds:
            hold.release()
        self._holds.clear()


def tier_counts(rows: RequestRows) -> TierCounts | None:
    """What the tier has counted so far; None without one, or while all is resident."""
    pool = rows.memory.kv.pool
    return pool.tiers.counts.copy() if pool.tiers is not None and pool.absent else None


def count_tiers(rows: RequestRows, before: TierCounts, layers: int = 1) -> None:
    """What was counted since ``before`` was for these rows, at so many layers alike."""
    tiers, result = rows.memory.kv.pool.tiers, rows.result
    assert tiers is not None
    result.tiers = result.tiers or TierCounts()
    moved = tiers.counts.since(before)
    result.tiers.add(moved)
    result.widest = max(result.widest, (moved.hits + moved.misses) // layers)
    result.asked_bytes += (moved.hits + moved.misses) * tiers.tier.cell_bytes
