"""The state of one sequence's state layers: where it stands, and the snapshots that it can go back to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.state_journal import StateJournal
from saccade.kv.states import StatePool, check_parts

EVERY = 4096  # tokens between two snapshots, at most


def spaced(there: Sequence[int], length: int, last: int = 0) -> list[int]:
    """Of snapshots after ``there`` tokens, rising, the fewest with which none of the first ``length`` tokens is more
    than ``EVERY`` behind one, as far as that can be; there is one after ``last``."""
    made: list[int] = []
    while length - last > EVERY:
        near = [one for one in there if last < one <= last + EVERY] or [one for one in there if one > last][:1]
        if not near or near[-1] >= length:
            break
        last = near[-1]
        made.append(last)
    return made


class SequenceStates:
    """The states of one sequence in slots of ``pool``. Before the first token there is always one, which takes no slot.

    ``slot``: where the state is that steps go on from, once they do (:meth:`begin` to :meth:`rest`); it is no
    other sequence's while a step runs. All others are snapshots, which the pool may give up for others. ``spare``: a
    second slot, where a device puts the next state and leaves this one as it was: a step of its that fails, or is not
    asked for, has done nothing. ``spoilt``: the step after this one, which writes to ``slot``, was launched while this
    one might still fail. ``journal``: what layers do with rows of which the last may be taken back, from
    :meth:`set_aside` to :meth:`settled`.
    """

    def __init__(self, pool: StatePool) -> None:
        self.pool = pool
        self.slot: int | None = None
        self.spare: int | None = None
        self.spoilt = False
        self.journal: StateJournal | None = None
        self._base: tuple[int, int | None] | None = None  # what was set aside: after how many tokens, and its slot
        self._rows = 0  # of the last step
        self._more = 0  # tokens of this step beside those that it was scheduled for
        self._stands: int | None = None  # tokens that ``slot`` stands after; None within a step
        self._kept: dict[int, int] = {}  # snapshots: slots by the tokens that they stand after
        self.inner: tuple[int, int] | None = None  # of this step: after how many tokens layers leave a copy, and where

    def __contains__(self, length: int) -> bool:
        """Whether a state stands after so many tokens."""
        return not length or length in self._kept or length == self._stands

    def stands(self, length: int) -> bool:
        """Whether the next step would go on after so many tokens."""
        return self._stands == length

    @property
    def snapshots(self) -> tuple[int, ...]:
        """The tokens after which states stand that it can go back to, rising."""
        return tuple(sorted(self._kept))

    def before(self, length: int, good: Callable[[int], bool] = lambda _: True) -> int:
        """The most tokens, at most ``length``, after which a state stands that is ``good``; 0 where none does."""
        there = {*self._kept, *(() if self._stands is None else (self._stands,))}
        return max((one for one in there if one <= length and good(one)), default=0)

    def gap(self, length: int) -> int:
        """Tokens that would be computed again if there were no snapshot after ``length`` tokens."""
        return length - max((one for one in self._kept if one < length), default=0)

    def pin(self, start: int) -> None:
        """The next step goes on at token ``start``: the state is not taken away until then. SaccadeError where none
        stands there."""
        if self._stands == start:
            return
        if start not in self:
            raise SaccadeError(f"no state of its layers stands after {start} tokens")
        self._leave()
        if start:
            self.slot, self._stands = self._kept[start], start
            self.pool.pin(self.slot)
            self.pool.touch(self.slot)

    def set_aside(self, start: int) -> None:
        """Rows from ``start`` on may be taken back: until they are :meth:`settled`, or all of them cut off, the state
        there stays in a second slot, which there must be room for."""
        if self._base is None:
            self.pin(start)
            self._base = start, self.slot
            if self.slot is not None:
                self.pool.pin(self.slot)

    def begin(self, start: int, keep: bool = False) -> None:
        """Rows from ``start`` on, which was pinned, are about to be computed, and change ``slot``; with ``keep`` where
        it stood is a snapshot from now on."""
        pool = self.pool
        if keep and self.slot is not None:
            self._keep(start, self.slot)
        if self.slot is None:
            self.slot = pool.take()
            pool.clear(self.slot)
        elif pool.is_shared(self.slot):
            own = self.slot
            fresh = pool.take(own)
            if fresh != own:
                pool.copy(own, fresh)
                pool.unpin(own)
                self.slot = fresh
        self._stands, self._more, self.spoilt = None, 0, False

    def double(self) -> None:
        """Have a spare slot, if there is room for one beside what sequences compute with."""
        if self.spare is None:
            self.spare = self.pool.take_spare(self)

    def drop_spare(self) -> None:
        """Others need the room more."""
        if self.spare is not None:
            spare, self.spare = self.spare, None
            self.pool.drop_spare(spare)

    def moved(self, times: int) -> None:
        """The step has put the state into the spare slot, ``times`` tokens later."""
        assert self.slot is not None, "a step begins before it moves its state"
        assert self.spare is not None, "it has a slot to move it to"
        self.pool.swap_spare(self.spare, self.slot)
        self.slot, self.spare, self._more, self.spoilt = self.spare, self.slot, times - 1, False

    def leave(self, inner: int) -> None:
        """Layers are to leave a snapshot after ``inner`` tokens, in the midst of the step that began, if there is room
        for one beside what sequences compute with."""
        if self.pool.pinned < self.pool.slots:
            self.inner = inner, self.pool.take()

    def end(self, length: int, rows: int, keep: bool) -> None:
        """The step ended well after ``length`` tokens, of which it computed ``rows``. A snapshot is due with ``keep``,
        or where one more such step would leave more than ``EVERY`` tokens without any."""
        assert self.slot is not None, "a step begins before it ends"
        self._stands, self._rows = length + self._more, rows + self._more
        if self.inner is not None:
            (at, slot), self.inner = self.inner, None
            self._keep(at, slot)
            self.pool.unpin(slot)
        if self._base is None:  # else not all of these tokens may stay
            self._keep_if_due(keep)

    def settled(self) -> None:
        """Rows of the last step can no longer be taken back."""
        self._drop_base()
        if self._stands is not None:
            self._keep_if_due(False)

    def _keep_if_due(self, anyway: bool) -> None:
        assert self.slot is not None, "a state stands somewhere"
        assert self._stands is not None, "a state stands somewhere"
        if anyway or self._stands + self._rows - max(self._kept, default=0) > EVERY:
            self._keep(self._stands, self.slot)

    def rest(self) -> None:
        """No step follows for now: where it stands is a snapshot like any other."""
        if self.slot is not None and self._stands:
            self._keep(self._stands, self.slot)
        self._leave()

    def truncate(self, length: int) -> None:
        """Forget the states after more than ``length`` tokens, and that of a step that broke. Of rows that came after a
        state was set aside the first ones may stay: they are done again to it, as they were."""
        if self._base is not None and self._base[0] <= length:
            self._go_back(length)
        elif self._stands is None or self._stands > length:
            self._leave()
        for one in [one for one in self._kept if one > length]:
            self.pool.release(self._kept.pop(one), self)

    def _go_back(self, length: int) -> None:
        """To ``length`` tokens, no fewer than were set aside."""
        assert self._base is not None, "a state was set aside"
        start, base = self._base
        if start == length:
            if self._stands == start:  # no row has been computed
                self._drop_base()
                return
            self._base = None  # whose pin is the state's own from now on
            self._leave()
            self.slot, self._stands = base, start if base is not None else None
        elif self.journal is None or self.slot is None:
            self._leave()
        elif self._stands != length:  # or a row after these broke
            self._stands = None
            if base is None:
                self.pool.clear(self.slot)
            else:
                self.pool.copy(base, self.slot)
            self.journal.run(self.slot, length - start)
            self._stands = length

    def _drop_base(self) -> None:
        base, self._base, self.journal = self._base, None, None
        if base is not None and base[1] is not None:
            self.pool.unpin(base[1])

    def fork(self, length: int | None = None) -> SequenceStates:
        """Another sequence's states after the same tokens, or the first ``length`` of them: slots are shared."""
        made = SequenceStates(self.pool)
        there = dict(self._kept)
        if self.slot is not None and self._stands:
            there[self._stands] = self.slot
        for one, slot in there.items():
            if length is None or one <= length:
                made._keep(one, slot)
        return made

    def save(self, length: int) -> dict[str, Tensor] | None:
        """The state after ``length`` tokens, as copies on the host, [layers, ...] by part; None where there is none."""
        slot = self.slot if length == self._stands else self._kept.get(length)
        return None if slot is None else self.pool.read(slot)

    def load(self, length: int, parts: Mapping[str, Tensor], anyway: bool = True) -> None:
        """Take in the state after ``length`` tokens; unless ``anyway``, only where no snapshot that is worth more has
        to go for it. SaccadeError for parts of another shape or type; CapacityError where all slots are in use."""
        why = check_parts(self.pool.format, parts)
        if why is not None:
            raise SaccadeError(f"saved: {why}")
        slot = self.pool.take() if anyway else self.pool.take_for(self.gap(length))
        if slot is None:
            return
        self.pool.write(slot, parts)
        self._keep(length, slot)
        self.pool.unpin(slot)

    def put_back(self, length: int, parts: Mapping[str, Tensor] | None) -> None:
        """What steps from ``length`` tokens on have done to the state is undone: it was ``parts``."""
        self.truncate(length)
        if parts is None:
            return
        if self.slot is None:
            self.slot = self.pool.take()
        self.pool.write(self.slot, parts)
        self._stands = length

    def lose(self, slot: int) -> None:
        """The pool gives a snapshot's slot to another sequence."""
        length = next(one for one, held in self._kept.items() if held == slot)
        del self._kept[length]
        self.pool.release(slot, self)

    def _keep(self, length: int, slot: int) -> None:
        before = self._kept.get(length)
        if before == slot:
            self.pool.touch(slot)
            return
        if before is not None:
            self.pool.release(before, self)
        self._kept[length] = slot
        self.pool.hold(slot, self, length)

    def _leave(self) -> None:
        if self.slot is not None:
            self.pool.unpin(self.slot)
        if self.inner is not None:
            self.pool.unpin(self.inner[1])
        self.drop_spare()
        self._drop_base()
        self.slot = self._stands = self.inner = None
