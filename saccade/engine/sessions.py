"""The sequences of an engine that stay between two turns: opened, saved, restored, forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from saccade.engine.memory.memories import Memories
from saccade.engine.memory.saved import SavedSession, restore_sequence, save_sequence
from saccade.engine.memory.sequence import Sequence
from saccade.engine.request import Request
from saccade.engine.scheduling.settling import Settling
from saccade.errors import RequestError
from saccade.kv.blocks import BlockManager

if TYPE_CHECKING:
    from saccade.models.identity import ModelIdentity
    from saccade.models.loader import LoadedModel


class Sessions(Mapping[int, Sequence]):
    """Sequences of ``pool`` by the ids of their sessions, for the one thread that drives the engine. ``chunk``: of
    prefills."""

    def __init__(
        self, model: LoadedModel, pool: BlockManager, memories: Memories, chunk: int, settling: Settling
    ) -> None:
        self.model, self.pool, self.memories, self.chunk = model, pool, memories, chunk
        self._settling = settling
        self._sequences: dict[int, Sequence] = {}

    def __getitem__(self, session: int) -> Sequence:
        return self._sequences[session]

    def __iter__(self) -> Iterator[int]:
        return iter(self._sequences)

    def __len__(self) -> int:
        return len(self._sequences)

    def require(self, session: int) -> Sequence:
        """The sequence of a session. RequestError where there is none."""
        sequence = self._sequences.get(session)
        if sequence is None:
            raise RequestError(f"there is no session {session}; it was closed")
        return sequence

    @property
    def identity(self) -> ModelIdentity:
        """Of the model: sessions of another one are refused. A caller that is to save or restore asks for it on a
        thread of its own, since the first who does waits for all weights to be read."""
        return self.model.identity

    def new_sequence(self) -> Sequence:
        """A sequence of no session yet, that the worker remembers until it is dropped."""
        return Sequence(self.pool, self.memories, self.model.runner.rope_regime)

    def open(self) -> int:
        """A new session's id."""
        sequence = self.new_sequence()
        self._sequences[sequence.id] = sequence
        return sequence.id

    def save(self, session: int) -> SavedSession:
        """A copy of a session between two turns. RequestError where there is none, or while a turn runs."""
        return save_sequence(self.require(session), self.identity.data, self.chunk)

    def restore(self, saved: SavedSession, damaged: list[str], recompute: bool) -> tuple[int, str | None]:
        """A new session of what was saved: its id, and what is to be said. See memory.saved.restore_sequence."""
        with self.coming_back() as sequence:
            note = restore_sequence(sequence, saved, self.model, self.chunk, damaged, recompute)
        return sequence.id, note

    @contextmanager
    def coming_back(self) -> Iterator[Sequence]:
        """A sequence that is to be given its tokens meanwhile, and then is a session; a request that needs its blocks
        gets them. Where that raises, nothing is left of it."""
        sequence = self.new_sequence()
        try:
            yield sequence
        except BaseException:
            sequence.close()
            raise
        self._sequences[sequence.id] = sequence
        self._settling.scheduler.park(sequence)

    def forget(self, session: int) -> Request | None:
        """Drop a session and give its blocks back. Returns the turn that still ran, which is cancelled. Nothing happens
        where there is no such session."""
        sequence, settling = self._sequences.get(session), self._settling
        if sequence is None:
            return None
        turn = cast("Request | None", sequence.turn)
        if turn is not None:
            settling.cancel(turn)
        settling.scheduler.idle.pop(id(sequence), None)
        if settling.prefixes is not None:
            settling.prefixes.leave(sequence, keep=True)
        sequence.truncate(0)
        sequence.drop_kv()  # what methods knew, too: the session object may live for long
        sequence.turn_start = None
        del self._sequences[session]
        sequence.close()
        return turn
