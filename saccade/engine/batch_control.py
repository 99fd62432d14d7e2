"""How much a step takes on: decode rows whose working sets fit in memory together, and prefill rows that leave the
tokens of others on time.

Over a tier (kv/tiers.py) admission goes by what memory and tier hold together, a batch by what one iteration of it
reads (PSA, section 3.4, takes what the GPU holds): requests that do not fit beside the others are held back for a turn.
Nothing of theirs is dropped; what they do not read leaves memory by itself, and comes back when it is their turn.

Turns. While some are held back, whoever has run ``quantum`` steps goes behind all others. The first in line always
runs. So with n decoding requests each runs again after at most (n - 1) * ``quantum`` steps, whatever the others need.

Who joins. Requests that wait begin as soon as memory and tier hold them, and then take turns. With ``max_token_gap`` a
turn that does not come is a gap, too: a request begins once its working set fits beside those that run, or nobody
runs. It is taken for what others of its policy read, apart from steps for which all of their keys were brought in.

The gap between tokens. A step lasts as long as its prefill rows take. With ``max_token_gap`` a dense prefill beside
decoding requests is cut into as many rows as leave the step within the gap, by what earlier steps took: 16 at least, so
that it always goes on. A sparse prefill, and every one under ``exact``, keeps the borders of its chunks, which decide
what it selects or its last bit; where one takes longer than the gap, its report says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from saccade.engine.hosted import goes_to_host
from saccade.engine.request import Request
from saccade.engine.step import RequestResult, ScheduledRequest
from saccade.kv.blocks import BlockManager
from saccade.methods.policy import Policy

QUANTUM = 16  # steps of a turn
ROOM = 0.75  # of the slots, for what one iteration reads
MEASURED = 8  # iterations whose least working set counts: one that was brought in whole says little
UNKNOWN = 0.25  # of a sequence, what an iteration is taken to read before one was seen
LEAST_ROWS = 16  # of a prefill that is cut
FIRST_ROWS = 64  # before it is known what rows take
FORGET = 0.9  # weight of what was known, at each measurement
POLICIES = 64  # whose costs are known
MARGIN = 0.8  # of the gap, that is planned for


@dataclass
class RowCosts:
    """Seconds that the rows of a prefill take, as ``a * rows + b * rows * keys`` with the keys that they see on
    average: least squares over what was measured, older steps counting less."""

    rows2: float = 0.0
    both: float = 0.0
    pairs2: float = 0.0
    rows_y: float = 0.0
    pairs_y: float = 0.0

    def learn(self, rows: int, keys: float, seconds: float) -> None:
        pairs = rows * keys
        for name, value in (
            ("rows2", rows * rows),
            ("both", rows * pairs),
            ("pairs2", pairs * pairs),
            ("rows_y", rows * seconds),
            ("pairs_y", pairs * seconds),
        ):
            setattr(self, name, FORGET * getattr(self, name) + value)

    def seconds(self, rows: int, keys: float) -> float | None:
        """None before something was measured."""
        if not self.rows2:
            return None
        determinant = self.rows2 * self.pairs2 - self.both * self.both
        if determinant > 1e-6 * self.rows2 * self.pairs2:
            a = (self.rows_y * self.pairs2 - self.pairs_y * self.both) / determinant
            b = (self.pairs_y * self.rows2 - self.rows_y * self.both) / determinant
            if a >= 0 and b >= 0:
                return rows * (a + b * keys)
        return rows * max(self.rows_y / self.rows2, self.pairs_y / self.pairs2 * keys if self.pairs2 else 0.0)


@dataclass
class BatchControl:
    """See the module. ``exact`` as in EngineConfig, decided; ``max_token_gap`` in seconds, None for no bound."""

    pool: BlockManager
    exact: bool = True
    max_token_gap: float | None = None
    decode_seconds: float = 0.0  # of a step without prefill rows
    _order: list[int] = field(default_factory=list)  # ids of decoding requests, who runs first first
    _turns: dict[int, int] = field(default_factory=dict)  # steps of the turn, by id
    _working: dict[int, deque[int]] = field(default_factory=dict)  # parts that iterations read, by id
    _runs: set[int] | None = None  # None: all
    _costs: dict[str, RowCosts] = field(default_factory=dict)  # by policy
    _shares: dict[str, float] = field(default_factory=dict)  # of their sequences that iterations read, by policy
    _left: float = 0.0  # seconds of the step at hand that prefill rows may still take
    _beside: bool = False  # whether requests decode in it

    def begin(self, running: Sequence[Request]) -> None:
        """A step is put together: who of ``running`` may decode in it."""
        tiers = self.pool.tiers
        pressed = tiers is not None and self.pool.absent > 0
        if not pressed and self.max_token_gap is None:
            self._runs = None
            return
        decoding = {one.id: one for one in running if _decodes(one)}
        self._beside = bool(decoding)
        self._left = MARGIN * (self.max_token_gap or 0.0) - self.decode_seconds
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
        return self._runs is None or request.id in self._runs or not _decodes(request)

    def working_set(self, request: Request) -> float:
        """Parts of KV blocks that one iteration of a decoding request reads: the least of the last ones."""
        if goes_to_host(request.sequence.memory.kv.pool, request.policy):
            return 0.0  # the CPU attends what lies behind memory
        measured = self._working.get(request.id)
        kv = request.sequence.memory.kv
        return min(measured) if measured else UNKNOWN * kv.blocks * kv.pool.rows

    def admits(self, running: Sequence[Request], request: Request) -> bool:
        """Whether ``request`` may begin beside those that run, as far as one iteration's memory goes."""
        tiers, pool = self.pool.tiers, self.pool
        if tiers is None or self.max_token_gap is None or not running:
            return True
        whole = {one: one.sequence.memory.kv.blocks * pool.rows for one in running}
        whole[request] = pool.slots_for(len(request.sequence.tokens)) * pool.rows
        wanted = sum(self._share_of(one.policy) * size for one, size in whole.items())
        if sum(whole.values()) <= tiers.parts:
            return True
        if any(not one.policy.decode.is_dense and one.policy.text not in self._shares for one in whole):
            return len(running) < 2  # two show what they read, where they do not fit whole
        return wanted <= ROOM * tiers.parts

    def chunk(self, request: Request, chunk: int) -> int:
        """Most prefill rows of ``request`` in the step, of a ``chunk`` of them."""
        if self.max_token_gap is None or not self._beside or _decodes(request):
            return chunk
        rows = request.sequence.next_rows(chunk)
        if rows is None:
            return chunk
        start, stop, span = rows
        costs, count = self._costs.get(span.policy.text), stop - start
        if not self._cuts(span.policy):
            taken = None if costs is None else costs.seconds(count, (start + stop) / 2)
            if taken is not None and taken > self._left:
                request.report.note(
                    f"max_token_gap={self.max_token_gap:g}: chunks of {chunk} rows, which a sparse or exact prefill "
                    "keeps whole, take longer; lower prefill_chunk"
                )
            self._left -= taken or 0.0
            return chunk
        if costs is None:
            return min(chunk, FIRST_ROWS)
        while count > LEAST_ROWS and (costs.seconds(count, start + count / 2) or 0.0) > self._left:
            count = max(LEAST_ROWS, count // 2)
        self._left -= costs.seconds(count, start + count / 2) or 0.0
        return count

    def ran(
        self, batch: Sequence[tuple[Request, ScheduledRequest]], seconds: float, results: Mapping[int, RequestResult]
    ) -> None:
        """Learn from a step that took so long."""
        prefills = [(request, rows) for request, rows in batch if rows.phase == "prefill"]
        if not prefills:
            before = self.decode_seconds or seconds
            self.decode_seconds = FORGET * before + (1 - FORGET) * seconds
        elif len(prefills) == 1 and self.max_token_gap is not None:
            request, rows = prefills[0]
            beside = self.decode_seconds if len(batch) > 1 else 0.0
            costs = self._costs.pop(rows.policy.text, None) or RowCosts()
            self._costs[rows.policy.text] = costs  # the last one used is the last
            if len(self._costs) > POLICIES:
                del self._costs[next(iter(self._costs))]
            costs.learn(rows.length, (rows.start + rows.stop) / 2, max(0.0, seconds - beside))
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
        policy, kv = request.policy, request.sequence.memory.kv
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
        if self.max_token_gap is None or not self.decode_seconds:
            return QUANTUM
        return max(1, min(QUANTUM, int(self.max_token_gap / (self.decode_seconds * (decoding - 1)))))

    def _cuts(self, policy: Policy) -> bool:
        """Whether the chunks of a prefill may end anywhere."""
        return not self.exact and not policy.selects_by_chunk


def _decodes(request: Request) -> bool:
    rows = request.sequence.next_rows(1)
    return rows is not None and rows[2].phase == "decode"
