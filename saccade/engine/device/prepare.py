"""Recording decode steps ahead of traffic: a step of a size that comes for the first time is otherwise compiled and
recorded while requests run, which holds all of them up for tenths of a second.

The steps run here consist of padding alone, so nothing is stored, read or counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from saccade.engine.device.attention import Group
from saccade.engine.device.graphs import SHORTEST, Key, StepKind, StepKinds, rounded_up
from saccade.engine.device.plans import DevicePlans
from saccade.engine.device.prefill import MOST_PIECES
from saccade.engine.device.rooms import EACH, RowRooms
from saccade.engine.device.rows import RowBuffers
from saccade.kv.blocks import BlockManager
from saccade.methods.policy import Policy
from saccade.ops.triton.common import clear_kept, pad

logger = logging.getLogger(__name__)
MOST = 60  # kinds that are recorded ahead, of the MOST_GRAPHS that are kept: up to 16,384 keys with 64 rows
PIECES = 64, 32, 16, 4, 1  # of short chunks, together, for which steps are recorded ahead; others take the next one
MOST_TABLES = 1 << 28  # bytes of block tables whose room is made at once: recordings are lost where it grows

Kind = Callable[[BlockManager, Key, tuple[Group, ...], RowBuffers], tuple[StepKind, Callable[[], None]]]


@dataclass(frozen=True)
class Prepared:
    """``recorded`` of the ``wanted`` kinds of step, up to the longest, in so many ``seconds``."""

    recorded: int
    wanted: int
    seconds: float


class Preparing:
    """For steps over ``pool`` whose ``kind`` says what launches them over buffers of ``rooms``."""

    def __init__(self, pool: BlockManager, plans: DevicePlans, rooms: RowRooms, kinds: StepKinds, kind: Kind) -> None:
        self._pool, self._plans, self._rooms, self._kinds, self._kind = pool, plans, rooms, kinds, kind

    def run(
        self,
        policy: Policy,
        requests: int,
        longest: int,
        seconds: float,
        most: int = MOST,
        tell: Callable[[int], None] = lambda number: None,
    ) -> Prepared:
        """Record the steps that up to ``requests`` requests under ``policy`` take, of up to ``longest`` keys each:
        shorter ones first, at most ``most``; none is begun after so many ``seconds`` but the first. ``tell`` is told
        the number of each before."""
        began, done = time.perf_counter(), 0
        keys = self._wanted(policy, requests, longest)
        for number, key in enumerate(keys[:most]):
            if done and time.perf_counter() - began > seconds:
                break
            tell(number)
            if not self._record(key):
                break
            done += 1
        return Prepared(done, len(keys), time.perf_counter() - began)

    def one(self, policy: Policy, requests: int, longest: int, number: int) -> bool:
        """Record one of them. False where it fails."""
        return self._record(self._wanted(policy, requests, longest)[number])

    def _wanted(self, policy: Policy, requests: int, longest: int) -> list[Key]:
        """The keys of those steps, for which there is room then."""
        rows, room = pad(requests, 1), pad(longest, SHORTEST)
        while room > SHORTEST and self._table_bytes(rows, room) > MOST_TABLES:
            room //= 2
        keys = list(self._keys(policy, rows, room))
        for count, verifies in ((rows, False), (MOST_PIECES, True)) if keys else ():
            self._rooms.room(self._pool, count, self._pool.format.blocks(room), verifies)
        return keys

    def _table_bytes(self, rows: int, keys: int) -> int:
        pool = self._pool
        return 4 * pool.layers * rows * pool.rows * pool.format.blocks(keys)

    def _keys(self, policy: Policy, most: int, longest: int) -> Iterator[Key]:
        """Of decode rows, and of pieces of short dense chunks: by length and number."""
        plans = self._plans
        pieces = plans.prefilling(EACH) if self._pool.states is None else None
        if not policy.prefill.is_dense or policy.decode.tail_rows or policy.decode.watches:
            pieces = None  # the host computes them, or the method learns from them
        keys, shorter = SHORTEST, 0
        while keys <= longest:
            halves = [most >> turn for turn in range(most.bit_length())]
            found = [one.plan for one in plans.among(policy, shorter + 1, keys)]
            for form in dict.fromkeys(one.form for one in found if one is not None):
                for rows in halves:
                    yield Key(((plans.forms.index(form), rows),), keys)
            for rows in PIECES if pieces is not None else ():
                if rows <= MOST_PIECES:
                    assert pieces is not None
                    yield Key(((plans.forms.index(pieces.form), rows),), keys, prefill=True)
            keys, shorter = rounded_up(keys + 1), keys

    @torch.inference_mode()
    def _record(self, key: Key) -> bool:
        """Run steps of padding alone until the kind is recorded, if any is. False where one fails."""
        ((form, rows),) = key.sizes
        group = Group(self._plans.forms[form], 0, rows)
        buffers = self._rooms.room(self._pool, rows, self._pool.format.blocks(key.longest), group.each > 1)
        try:
            buffers.load([(0, 0, 0)] * rows * group.each, [0] * rows)
            kind, forward = self._kind(self._pool, key, (group,), buffers)
            for _ in range(2):  # the first compiles, the second records
                self._kinds.launch(kind, forward, watched=False)
            kind.best.tolist()
        except Exception as error:
            logger.warning("steps are not recorded ahead of requests: %s: %s", type(error).__name__, error)
            clear_kept(self._rooms.device)
            return False
        return True
