"""Sessions saved and restored piece by piece, so that no step waits for long: what each message does."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from torch import Tensor

from saccade.engine.memory.saved import SavedSession, begin_restore, finish_restore, save_sequence, under
from saccade.errors import SaccadeError
from saccade.kv.saved import SavedKV

if TYPE_CHECKING:
    from saccade.engine.memory.sequence import Sequence
    from saccade.engine.sessions import Sessions

_marks = count(1)


@dataclass(frozen=True)
class CaptureSession:
    """Copy a session between two turns, but for its model's identity and the keys and values of its whole segments of
    ``segment`` tokens. The answer is a :class:`Captured`."""

    session: int
    segment: int


@dataclass(frozen=True)
class CopyRows:
    """Copy the keys and values of tokens ``start .. stop - 1`` as they were captured under ``mark``; the answer is
    None where they are gone: the session was closed, cut or lost its blocks since."""

    session: int
    mark: int
    start: int
    stop: int


@dataclass(frozen=True)
class CopyState:
    """Copy the state of layers that keep one after ``length`` tokens, as it was captured under ``mark``; the answer is
    None where it is gone."""

    session: int
    mark: int
    length: int


@dataclass(frozen=True)
class BeginRestore:
    """Open a session with the tokens of a captured one; the answer is its id."""

    saved: SavedSession
    damaged: list[str] = field(default_factory=list)
    recompute: bool = False


@dataclass(frozen=True)
class LoadRows:
    """Give a session that is being restored the keys and values of the tokens ``start ..``; the answer is None, or the
    error for which they cannot be had."""

    session: int
    start: int
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class LoadState:
    """Give a session that is being restored a state after ``length`` tokens to go back to, if there is room for it; the
    answer is None, or the error for which it cannot be had."""

    session: int
    length: int
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class FinishRestore:
    """All segments are loaded, or ``lost`` says why not. The answer is the new mark, 0 where keys and values are to be
    computed again, and what is to be said of it."""

    session: int
    saved: SavedSession
    lost: str | None = None


@dataclass(frozen=True)
class Captured:
    """``stood``: by earlier marks, the tokens that are as they were then; ``mark``: the one that was set now;
    ``snapshots``: the tokens after which layers have a state to go back to, rising."""

    saved: SavedSession
    mark: int
    stood: dict[int, int]
    snapshots: tuple[int, ...] = ()


Piece = CaptureSession | CopyRows | CopyState | BeginRestore | LoadRows | LoadState | FinishRestore


def act(sessions: Sessions, piece: Piece) -> Any:
    """Do what a message asks for, between two steps."""
    if isinstance(piece, BeginRestore):
        return _begin(sessions, piece)
    if isinstance(piece, (CopyRows, CopyState)):
        return _copy(sessions.get(piece.session), piece)
    sequence = sessions.require(piece.session)
    if isinstance(piece, CaptureSession):
        kv = sequence.kv
        saved = save_sequence(sequence, None, sessions.chunk, piece.segment)
        stood, mark = dict(kv.stood), next(_marks)
        kv.mark(mark)
        return Captured(saved, mark, stood, sequence.snapshots(sessions.chunk))
    if isinstance(piece, LoadRows):
        return _load(sequence, piece)
    if isinstance(piece, LoadState):
        try:
            sequence.memories.load_snapshot(sequence.id, piece.length, piece.tensors)
        except SaccadeError as error:
            return error
        return None
    return _finish(sessions, sequence, piece)


def _begin(sessions: Sessions, piece: BeginRestore) -> int:
    with sessions.coming_back() as sequence:
        begin_restore(sequence, piece.saved, sessions.model, sessions.chunk, piece.damaged, piece.recompute)
    return sequence.id


def _copy(sequence: Sequence | None, piece: CopyRows | CopyState) -> dict[str, Tensor] | None:
    stop = piece.stop if isinstance(piece, CopyRows) else piece.length
    if sequence is None or sequence.kv.stood.get(piece.mark, 0) < stop:
        return None
    if isinstance(piece, CopyState):
        return sequence.memories.save_snapshot(sequence.id, piece.length)
    try:
        return sequence.memories.save_rows(sequence.id, piece.start, piece.stop)
    except SaccadeError:  # a block that is not resident, mostly
        return None


def _load(sequence: Sequence, piece: LoadRows) -> Exception | None:
    kv = sequence.kv
    if kv.length != piece.start:
        return SaccadeError("its blocks went to other requests while it was restored")
    try:
        if piece.start == 0 and kv.pool.free_blocks >= kv.missing_blocks(sequence.reached):
            kv.reserve(sequence.reached)  # at once: the block table grows in steps of its whole length
        sequence.memories.load_rows(sequence.id, piece.tensors)
    except SaccadeError as error:
        return error
    sequence.filled(kv.length)
    return None


def _finish(sessions: Sessions, sequence: Sequence, piece: FinishRestore) -> tuple[int, str | None]:
    saved, kv = piece.saved, sequence.kv
    lost: Exception | None = None if piece.lost is None else SaccadeError(piece.lost)
    stored = saved.data["kv"]
    if stored is not None and lost is None:
        try:
            sequence.memories.check_kv(sequence.id, SavedKV({}, stored))
            if stored["sealed"] != kv.length:
                raise SaccadeError("its blocks went to other requests while it was restored")
            rows = under("kv", saved.tensors)
            sequence.memories.load_rows(sequence.id, rows, saved.data["computed"] - kv.length)
        except SaccadeError as error:
            lost = error
    finish_restore(sequence, saved, sessions.model, sessions.chunk, lost)
    mark = next(_marks)
    kv.mark(mark)
    return mark, sequence.note
