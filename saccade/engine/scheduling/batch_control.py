"""How much a step takes on: decode rows whose working sets fit in memory together, and prefill rows that leave the
tokens of others on time (engine/scheduling/token_gap.py).

Over a tier (kv/tiers.py) admission goes by what memory and tier hold together, a batch by what one iteration of it
reads (PSA, section 3.4, takes what the GPU holds): requests that do not fit beside the others are held back for a turn.
Nothing of theirs is dropped; what they do not read leaves memory by itself, and comes back when it is their turn.

Turns. While some are held back, a request that has run ``quantum`` steps goes behind all others. The first in line
always runs. So with n decoding requests each runs again after at most (n - 1) * ``quantum`` steps, whatever the others
need.

Who joins. Requests that wait begin as soon as memory and tier hold them, and then take turns. With ``max_token_gap`` a
turn that does not come is a gap, too: a request begins once its working set fits beside those that run, or once
none runs. It is taken for what others of its policy read, apart from steps for which all of their keys were brought in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from saccade.engine.request import Request
from saccade.engine.rows.hosted import goes_to_host
from saccade.engine.scheduling.row_costs import FORGET
from saccade.engine.scheduling.token_gap import Suspended, TokenGap, Turn
from saccade.engine.steps.step import RequestResult, ScheduledRequest
from saccade.kv.blocks import BlockManager
from saccade.methods.policy import Policy

QUANTUM = 16  # steps of a turn
ROOM = 0.75  # of the slots, for what one iteration reads
MEASURED = 8  # iterations whose least working set counts: one that was brought in whole says little
UNKNOWN = 0.25  # of a sequence, what an iteration is taken to read before one was seen
POLICIES = 64  # whose shares are known


@dataclass
class BatchControl:
    """See the module. ``gap``: the bound between two tokens, if there is one."""

    pool: BlockManager
    gap: TokenGap | None = None
    _order: list[int] = field(default_factory=list)  # ids of decoding requests, who runs first first
    _turns: dict[int, int] = field(default_factory=dict)  # steps of the turn, by id
    _working: dict[int, deque[int]] = field(default_factory=dict)  # parts that iterations read, by id
    _runs: set[int] | None = None  # None: all
    _shares: dict[str, float] = field(default_factory=dict)  # of their sequences that iterations read, by policy

    def begin(self, running: Sequence[Request], waiting: Sequence[Request], suspended: Mapping[int, Suspended]) -> None:
        """A step is put together: who of ``running`` may decode in it. Of those that wait, ``waiting`` may join."""
        tiers = self.pool.tiers
        pressed = tiers is not None and self.pool.absent > 0
        if not pressed and self.gap is None:
            self._runs = None
            return
        decoding = {one.id: one for one in running if decodes(one)}
        if self.gap is not None:
            prefilling = [one for one in (*running, *waiting) if one.id not in decoding and not decodes(one)]
            self.gap.begin(prefilling, suspended, bool(decoding))
        for known in (self._turns, self._working):
            for gone in known.keys() - decoding.keys():
                del known[gone]
        self._runs = None
        if tiers is None or not pressed or len(decoding) < 2:
            self._order = list(decoding)
            self._turns.clear()
            return
        kept = [number for number in self._order if number in decoding]
        order = kept + [number for number in decoding if number not in set(kept)]
        over = [number for number in order if self._turns.get(number, 0) >= self._quantum(len(order))]
        for number in over:
            self._turns[number] = 0
        order = [number for number in order if number not in set(over)] + over
        room, runs = ROOM * tiers.parts, set[int]()
        for number in order:
            wanted = self.working_set(decoding[number])
            if not runs or wanted <= room:
                runs.add(number)
                room -= wanted
        self._order, self._runs = order, runs
        held = len(order) > len(runs)
        for number in order:
            if number in runs:
                self._turns[number] = self._turns.get(number, 0) + 1 if held else 0
            else:
                decoding[number].report.held_back += 1

    def lets(self, request: Request) -> bool:
        """Whether a running request takes part in the step."""
        return self._runs is None or request.id in self._runs or not decodes(request)

    def working_set(self, request: Request) -> float:
        """Parts of KV blocks that one iteration of a decoding request reads: the least of the last ones."""
        if goes_to_host(request.sequence.kv.pool, request.policy):
            return 0.0  # the CPU attends what lies behind memory
        measured = self._working.get(request.id)
        kv = request.sequence.kv
        return min(measured) if measured else UNKNOWN * kv.blocks * kv.pool.rows

    def admits(self, running: Sequence[Request], request: Request) -> bool:
        """Whether ``request`` may begin beside those that run, as far as one iteration's memory goes."""
        tiers, pool = self.pool.tiers, self.pool
        if tiers is None or self.gap is None or not running:
            return True
        whole = {one: one.sequence.kv.blocks * pool.rows for one in running}
        whole[request] = pool.slots_for(len(request.sequence.tokens)) * pool.rows
        wanted = sum(self._share_of(one.policy) * size for one, size in whole.items())
        if sum(whole.values()) <= tiers.parts:
            return True
        if any(not one.policy.decode.is_dense and one.policy.text not in self._shares for one in whole):
            return len(running) < 2  # two show what they read, where they do not fit whole
        return wanted <= ROOM * tiers.parts

    def turn(self, request: Request, chunk: int, joins: bool = False) -> Turn:
        """What of ``request``, whose chunks have at most ``chunk`` rows, the step may take on. ``joins``: it waited
        until now, and may go on from what another has computed."""
        if self.gap is None:
            return Turn(chunk)
        if joins and not decodes(request):
            self.gap.look_again(request)
        return self.gap.turn(request, chunk)

    def put_together(self, rows: Sequence[ScheduledRequest], suspended: Mapping[int, Suspended]) -> None:
        """A step has these ``rows``, and behind it the chunks that are ``suspended`` go on."""
        if self.gap is not None:
            self.gap.slice_out([one for one in rows if one.phase == "prefill"], suspended)

    def comes_first(self, request: Request) -> bool:
        """Whether a request is the first of those that prefill."""
        return self.gap is not None and self.gap.is_first(request)

    def ran(
        self, batch: Sequence[tuple[Request, ScheduledRequest]], seconds: float, results: Mapping[int, RequestResult]
    ) -> None:
        """Learn from a step that took so long."""
        prefills = [rows for _, rows in batch if rows.phase == "prefill"]
        if self.gap is not None and not prefills:
            self.gap.decoded(seconds)
        elif self.gap is not None and len(prefills) == 1:
            self.gap.prefilled(prefills[0], seconds - (self.gap.decode_seconds if len(batch) > 1 else 0.0))
        for request, rows in batch:
            tiers = results[request.id].tiers
            if tiers is not None and rows.phase == "decode" and tiers.hits + tiers.misses:
                asked = tiers.hits + tiers.misses
                if self.pool.layers_apart:  # the layer that reads most says who fits beside whom
                    asked = max(asked, results[request.id].widest * self.pool.layers)
                self._read(request, asked // max(1, rows.length), results[request.id].whole)

    def _share_of(self, policy: Policy) -> float:
        """What share of its sequence an iteration under ``policy`` is taken to read."""
        if goes_to_host(self.pool, policy):
            return 0.0
        return 1.0 if policy.decode.is_dense else self._shares.get(policy.text, UNKNOWN)

    def _read(self, request: Request, parts: int, whole: bool) -> None:
        """An iteration asked for so many parts; ``whole``: for all of them, whatever it was to read."""
        policy, kv = request.policy, request.sequence.kv
        every = kv.blocks * kv.pool.rows
        if whole and not policy.decode.is_dense:
            if policy.text not in self._shares:
                return
            parts = int(self._shares[policy.text] * every)
        else:
            share = min(1.0, parts / max(1, every))
            before = self._shares.pop(policy.text, share)  # the last one used is the last
            self._shares[policy.text] = FORGET * before + (1 - FORGET) * share
            if len(self._shares) > POLICIES:
                del self._shares[next(iter(self._shares))]
        self._working.setdefault(request.id, deque(maxlen=MEASURED)).append(parts)

    def _quantum(self, decoding: int) -> int:
        """Steps of a turn: fewer where others would wait longer than the gap for theirs."""
        if self.gap is None or not self.gap.decode_seconds:
            return QUANTUM
        return max(1, min(QUANTUM, int(self.gap.seconds / (self.gap.decode_seconds * (decoding - 1)))))


def decodes(request: Request) -> bool:
    """Whether the next row of a request is a decode step's."""
    rows = request.sequence.next_rows(1)
    return rows is not None and rows[2].phase == "decode"
