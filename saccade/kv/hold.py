"""Parts that stay in their slots while somebody reads them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.kv.tier import LostKV

if TYPE_CHECKING:
    from saccade.kv.sequence import SequenceKV
    from saccade.kv.tiers import Tiers

Array = np.ndarray[Any, Any]


class Hold:
    """Parts of one layer that stay resident until :meth:`release`; :meth:`wait` before they are read."""

    def __init__(self, tiers: Tiers, layer: int, blocks: Array) -> None:
        self._tiers, self._layer, self._blocks = tiers, layer, blocks
        self._loading: Any = None
        self._missing: Array = blocks[:0]

    def wait(self) -> None:
        """Every part is in its slot when this returns. LostKV where one cannot be had back."""
        loading, self._loading = self._loading, None
        if loading is None:
            return
        failed = loading.wait()
        tiers, layer, missing = self._tiers, self._layer, self._missing
        if failed:
            tiers.lose(layer, missing[failed])
            raise LostKV(
                f"{len(failed)} KV blocks of layer {layer} cannot be read back from the {tiers.tier.name}: what was "
                "written there is damaged, or the device fails"
            )

    def _load(self, missing: Array) -> None:
        """Begin to read parts that have slots now."""
        if len(missing):
            tiers, layer = self._tiers, self._layer
            cells, slots = tiers._cell[layer, missing].tolist(), tiers.slots_of(layer, missing).tolist()
            self._missing, self._loading = missing, tiers.tier.read(tiers._parts(layer, missing), cells, slots)

    def release(self) -> None:
        """Let the parts go again, those that never came among them."""
        with suppress(LostKV):
            self.wait()
        self._tiers.pins.remove(self._layer, self._blocks)
        self._blocks = self._blocks[:0]

    def __enter__(self) -> Hold:
        try:
            self.wait()
        except BaseException:
            self.release()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class JointHold(Hold):
    """Holds that are waited for, and released, together."""

    def __init__(self, holds: list[Hold]) -> None:
        self._holds = holds

    def wait(self) -> None:
        for hold in self._holds:
            hold.wait()

    def release(self) -> None:
        for hold in self._holds:
            hold.release()
        self._holds = []


def hold_all(kv: SequenceKV) -> list[Hold]:
    """Bring in every part of a sequence whose pool has tiers, and keep them until all of these are released; rows that
    follow may be written. Raises what Tiers.fetch raises, holding nothing."""
    tiers, blocks, holds = kv.pool.tiers, kv.block_table.numpy(), list[Hold]()
    assert tiers is not None
    try:
        for layer in range(kv.layers):
            holds.append(tiers.fetch(layer, blocks))
        for hold in holds:
            hold.wait()
    except BaseException:
        for hold in holds:
            hold.release()
        raise
    tiers.opened(slice(None), blocks[kv.length // kv.pool.format.block_size :])
    return holds
