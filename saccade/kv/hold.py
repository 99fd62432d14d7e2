"""Holds: parts of KV blocks that stay in their slots while they are read."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from saccade.kv.disk import DiskTier
from saccade.kv.tier import LostKV

if TYPE_CHECKING:
    from saccade.kv.sequence import SequenceKV
    from saccade.kv.tiers import Tiers

Array = np.ndarray[Any, Any]


class Gate(Protocol):
    """A reader of parts that begins before all have been loaded, and waits before each that has not."""

    def shut(self, blocks: Array) -> None:
        """``blocks`` (int ids) are not in their slots yet: a reader waits for :meth:`open`."""
        ...

    def open(self, blocks: Array) -> None:
        """``blocks`` are in their slots, or their loads have failed. Callable from any thread."""
        ...


class Hold:
    """Parts of one layer that stay resident until :meth:`release`; :meth:`wait` before they are read."""

    def __init__(self, tiers: Tiers, layer: int, blocks: Array, gate: Gate | None = None) -> None:
        self._tiers, self._layer, self._blocks, self._gate = tiers, layer, blocks, gate
        self._loading: Any = None
        self._missing: Array = blocks[:0]

    def wait(self) -> None:
        """Every part is in its slot when this returns. LostKV where one cannot be had back."""
        loading, self._loading = self._loading, None
        if loading is None:
            return
        failed = loading.wait()
        tiers, layer, missing = self._tiers, self._layer, self._missing
        if self._gate is not None and loading.skipped:
            tiers.passed_over(layer, missing[loading.skipped])
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
            parts, gate, self._missing = tiers._parts(layer, missing), self._gate, missing
            if gate is None:
                self._loading = tiers.tier.read(parts, cells, slots)
            else:
                assert isinstance(tiers.tier, DiskTier)
                gate.shut(missing)
                self._loading = tiers.tier.read_in_turn(parts, cells, slots, lambda some: gate.open(missing[some]))

    def stop(self) -> None:
        """Cancel the loads that have not begun. (Only behind a gate.)"""
        if self._gate is not None and self._loading is not None:
            self._loading.stop()

    def release(self) -> None:
        """Let all parts leave their slots again, also those that were never loaded."""
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
