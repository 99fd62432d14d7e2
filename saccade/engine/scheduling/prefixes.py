"""Prefixes shared: a sequence that begins as another one does goes on from that one's keys and values.

What is shared is what a run of its own would have stored. That hangs on the tokens, and on how they were computed (an
`Origin`). Dense prefills, and dense decode steps after them, share whole blocks. What a sparse prefill selected
for a row may hang on the later rows of its chunk, so it shares whole chunks.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from saccade.engine.memory.memories import Memories
from saccade.engine.memory.sequence import common, new_sequence_id
from saccade.engine.scheduling.prefix_events import KeptBlocks, PrefixListener
from saccade.engine.scheduling.prefix_hashes import Origin
from saccade.engine.scheduling.prefix_index import Donor, PrefixIndex
from saccade.kv.blocks import BlockManager

if TYPE_CHECKING:
    from saccade.engine.memory.sequence import Sequence, Span
    from saccade.engine.request import Request

MOST_KEPT = 1024  # prefixes of ended requests


class Found(NamedTuple):
    """``length`` tokens can be had of ``donor`` now; ``later``, if more, once a request that runs has computed them."""

    donor: Donor | None
    length: int
    later: int


class PrefixCache:
    """Finds and keeps prefixes in the blocks of ``pool``. ``chunk``: rows of a prefill step. The least recently used is
    given up first, as soon as its blocks are needed.

    ``queries``: prompt tokens that were looked up; ``hits``: those of them that did not have to be computed.
    """

    def __init__(self, pool: BlockManager, memories: Memories, chunk: int, rope_regime: Callable[[int], int]) -> None:
        self.pool, self.memories, self.chunk, self.rope_regime = pool, memories, chunk, rope_regime
        self.queries = self.hits = 0
        if pool.states is not None:
            pool.states.block = pool.format.block_size
        self._size = pool.format.block_size
        self._index = PrefixIndex(self._size)
        self._held = KeptBlocks(self._size)
        self._kept: OrderedDict[int, Donor] = OrderedDict()
        self._live: dict[Sequence, Donor] = {}  # until they leave

    def __len__(self) -> int:
        return len(self._kept)

    def lend(self, request: Request, running: Collection[Request]) -> bool:
        """Let a request that has computed nothing go on from the longest prefix that is stored. False where it had
        better wait: one of those ``running`` is about to have a whole chunk of what it would compute, or half of it."""
        sequence = request.sequence
        self.tidy()
        most = self._most(request)
        if most == 0:
            return True
        if sequence.computed:
            if sequence not in self._live:  # a restored session lends from now on
                self._enter(sequence)
            return True
        request.report.kept_tokens = self._whole(sequence.spans[0], sequence.spans[0].stop)
        own = self._enter(sequence)
        found, stop = self._find(own, most, running), sequence.spans[0].stop
        if found.later - found.length >= min(self.chunk, -(-(stop - found.length) // 2)):
            return False
        if not own.counted:
            own.counted = True
            self.queries += stop
        if sequence.reached == 0:  # else it has been here before, and gave its blocks up
            self.hits += found.length
            request.report.cached_tokens = found.length
        if found.donor is not None:
            sequence.go_on_from(found.donor.id, found.length)
            self._used(found.donor)
        return True

    def leave(self, sequence: Sequence, keep: bool = False) -> None:
        """A sequence ends; with ``keep``, what others can go on from stays. Its memory is the caller's to drop."""
        donor = self._live.pop(sequence, None)
        if donor is None:
            return
        self._index.remove(donor)
        length = self._usable(donor)
        if length:
            length = self._going_on(donor, sequence.spans[0], length)
        if keep and length:
            number = new_sequence_id()
            blocks = self.memories.fork(sequence.id, number, length)
            kept = Donor(donor.origin, sequence.tokens[:length], number, None, blocks)
            kept.step = self._step(sequence.spans[0])
            self._index.add(kept, length)
            self._kept[id(kept)] = kept
            blocks.keep()
            self._held.hold(kept.hashes, kept.tokens)
            while len(self._kept) > MOST_KEPT:
                self.evict()

    @property
    def listener(self) -> PrefixListener | None:
        """Is told of what is kept."""
        return self._held.listener

    @listener.setter
    def listener(self, listener: PrefixListener | None) -> None:
        self._held.listener = listener

    @property
    def kept_slots(self) -> int:
        """Slots that hold nothing but what ended requests left: a request that needs them gets them. For any thread."""
        return self.pool.kept_slots

    def evict(self) -> bool:
        """Give up what can no longer be continued, or the prefix of an ended request that was used least recently;
        False where there is none."""
        if self.tidy():
            return True
        if not self._kept:
            return False
        self._end(next(iter(self._kept.values())))
        return True

    def tidy(self) -> bool:
        """Where the states of layers that keep one went for others, no sequence goes on from keys behind the last one
        that is left: give these up. Whether there were any."""
        states = self.pool.states
        if states is None or not states.losers:
            return False
        losers, before, kept = set(states.losers), states.orphaned, {one.id: one for one in self._kept.values()}
        states.losers.clear()
        for number in self.memories.losing(kept, losers):
            donor = kept[number]
            length = len(donor.tokens)
            left = self.memories.state_before(donor.id, length, partial(_is_multiple, donor.step))
            states.orphaned += length - left
            if not left:
                self._end(donor)
            elif left < length:
                self._held.release(donor.hashes[left // self._size :])
                self._index.remove(donor, left)
                donor.tokens = donor.tokens[:left]
                self.memories.truncate(donor.id, left)
        return states.orphaned > before

    def _end(self, donor: Donor) -> None:
        """A kept prefix is given up."""
        del self._kept[id(donor)]
        self._held.release(donor.hashes)
        self._index.remove(donor)
        self.memories.free(donor.id, closes=True)
        self.pool.keepers.end(donor.kv.id)

    def clear(self) -> None:
        """Give up all that is kept of ended requests."""
        while self.evict():
            pass

    def _most(self, request: Request) -> int:
        """How many tokens a request may take over: its prefill computes at least the last one, and what its decode
        method wants to see. 0 for a method that follows the whole prefill, and where the prompt's log-probabilities are
        wanted."""
        first, method = request.sequence.spans[0], request.policy.decode
        if not _shares(first) or method.watches or request.sequence.private:
            return 0
        if request.params.prompt_logprobs is not None or request.maps:
            return 0
        whole, prefill = self._whole(first, first.stop - max(1, method.tail_rows)), first.policy.prefill
        if not whole and not prefill.is_dense:
            request.report.note(
                f"prefix cache: '{prefill.name}' chooses for {self.chunk} tokens of a prompt at once and shares "
                f"no fewer; this prompt has {first.stop}. A smaller prefill_chunk shares more"
            )
        return whole

    def _whole(self, span: Span, length: int) -> int:
        """The part of ``length`` tokens of a prefill that is shared whole."""
        step = self._step(span)
        return max(0, length) // step * step

    def _step(self, span: Span) -> int:
        return self._size if span.policy.prefill.is_dense else math.lcm(self.chunk, self._size)

    def _usable(self, donor: Donor) -> int:
        """Tokens that others can go on from."""
        sequence = donor.sequence
        if donor.kv.damaged:
            return 0
        if sequence is None:
            return len(donor.tokens)
        if not sequence.spans or sequence.private or not _shares(sequence.spans[0]):
            return 0
        first, stop = sequence.spans[0], 0
        for span in sequence.spans:
            if span is not first and not _goes_on(first, span):
                break
            if self.rope_regime(span.stop) != donor.origin.regime:
                break
            stop = span.stop
        return self._whole(first, min(stop, sequence.computed))

    def _going_on(self, donor: Donor, span: Span, length: int) -> int:
        """Of ``length`` tokens of a donor, as many as one that computes ``span`` can go on from: where layers keep a
        state, there has to be a snapshot."""
        return self.memories.state_before(donor.id, length, lambda at: self._whole(span, at) == at)

    def _enter(self, sequence: Sequence) -> Donor:
        """The sequence as one that lends, too, from now on."""
        donor = self._live.get(sequence)
        first = sequence.spans[0]
        origin = Origin(
            first.policy.prefill.text,
            "" if first.policy.window is None else first.policy.window.text,
            self.rope_regime(first.stop),
            sequence.salt or "",
        )
        if donor is None or donor.origin != origin:
            if donor is not None:
                self._index.remove(donor)
            donor = self._live[sequence] = Donor(origin, sequence.tokens, sequence.id, sequence)
            self._index.add(donor, first.stop)
        return donor

    def _find(self, asking: Donor, most: int, running: Collection[Request]) -> Found:
        assert asking.sequence is not None
        own, span = asking.hashes[: most // self._size], asking.sequence.spans[0]
        donor, length, later = None, 0, 0
        known = {id(asking)}
        while True:
            depth = self._index.depth(own, len(known))
            reach = self._whole(span, depth * self._size)
            if reach <= length:
                return Found(donor, length, later)
            for other in self._index.holders(own[depth - 1]):
                if id(other) in known:
                    continue
                known.add(id(other))
                if other.origin != asking.origin:
                    continue
                alike = self._whole(span, _alike(other.tokens, asking.tokens, reach))
                can = self._going_on(other, span, min(alike, self._whole(span, self._usable(other))))
                if can > length:
                    donor, length = other, can
                if can == reach:
                    return Found(donor, length, later)
                turn = other.sequence if other.sequence is not None and other.sequence.turn in running else None
                if turn is not None and self.pool.states is not None and other.kv.length >= turn.spans[0].stop:
                    turn = None  # what a prompt leaves is there by its end
                if alike > later and turn is not None:
                    later = max(later, min(alike, self._whole(span, turn.spans[0].stop)))

    def _used(self, donor: Donor) -> None:
        if id(donor) in self._kept:
            self._kept.move_to_end(id(donor))


def _alike(theirs: list[int], ours: list[int], most: int) -> int:
    """How many of the first ``most`` tokens are equal."""
    return most if theirs[:most] == ours[:most] else common(theirs[:most], ours[:most])


def _is_multiple(step: int, length: int) -> bool:
    return length % step == 0


def _shares(span: Span) -> bool:
    """Whether a sequence that begins with this span has keys and values that others would have. A freeze counts from
    the prompt's end."""
    return span.start == 0 and span.phase == "prefill" and span.policy.freeze is None


def _goes_on(first: Span, span: Span) -> bool:
    """Whether a later span stores what a longer first one, a dense prefill, would have stored."""
    same = span.policy.window == first.policy.window and span.policy.freeze is None
    method = span.policy.prefill if span.phase == "prefill" else span.policy.decode
    return same and first.policy.prefill.is_dense and method.is_dense
