"""The memory of a worker's sequences, and the messages by which an engine reaches it.

An engine keeps lengths and block tables (``HeldBlocks``) and reserves blocks. Keys, values and method states are the
worker's. They change by steps (``StepInput``) and by four messages, which name sequences by their ids: ``fork``,
``truncate``, ``free`` and ``save``, with ``load`` to restore what was saved. The other methods concern method states
alone: whether a sequence has any, and the states that a turn or a draft began with.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from torch import Tensor

from saccade.engine.memory.saved_memory import SavedMemory, save_memory
from saccade.engine.memory.sequence_memory import Cut, SequenceMemory
from saccade.engine.steps.carried import Carried
from saccade.errors import SaccadeError
from saccade.kv.blocks import BlockManager
from saccade.kv.held import HeldBlocks
from saccade.kv.saved import SavedKV, append_rows, copy_rows, load_kv
from saccade.kv.sequence_states import SequenceStates
from saccade.methods import state as states
from saccade.methods.policy import Policy


class Memories(dict[int, SequenceMemory]):
    """The memories of sequences, by their ids; backends read them while a step runs."""

    def open(self, sequence: int, pool: BlockManager) -> HeldBlocks:
        """An empty memory for a new sequence whose blocks are of ``pool``."""
        memory = self[sequence] = SequenceMemory(pool)
        return memory.kv

    def fork(self, source: int, target: int, length: int | None = None) -> HeldBlocks:
        """Let ``target``, which has stored nothing, share the blocks of ``source`` and have a copy of its states; with
        ``length``, the keys and values of its first tokens alone. CapacityError, changing nothing, where no block is
        left for the copy of a partly filled one."""
        before = self.get(target)
        made = self[source].fork(length, None if before is None else before.mark)
        if before is not None:
            before.drop()
        self[target] = made
        return made.kv

    def truncate(
        self,
        sequence: int,
        length: int,
        cut: Cut = Cut.UNSEEN,
        *,
        stored: int | None = None,
        learns: bool = False,
        holds: bool = False,
    ) -> bool:
        """Forget the tokens from ``length`` on, and what method states know of them as ``cut`` says. ``stored``: the
        tokens that the engine counts as computed; ``learns``: the rows of a broken step teach a decode method;
        ``holds``: their blocks stay for those to come. False where states cannot go back: the sequence has nothing
        left then, as after :meth:`free`."""
        memory = self[sequence]
        stood = memory.truncate(length, cut, memory.kv.length if stored is None else stored, learns, holds)
        if not stood:
            self.free(sequence)
        return stood

    def resume(self, sequence: int, stored: int, good: Callable[[int], bool]) -> int:
        """Let the next step go on after ``stored`` tokens: as many, or where the state of layers that keep one is gone,
        as stood before it at a ``good`` place. What comes after is forgotten, and what decode methods know."""
        memory = self[sequence]
        if memory.kept is None or stored in memory.kept:
            return stored
        left = memory.kept.before(stored, good)
        memory.truncate(left, Cut.RESUMED, stored, False, False)
        return left

    def pin(self, sequence: int, stored: int) -> None:
        """The next step goes on after ``stored`` tokens: whatever runs until then, the state there is not taken away.
        SaccadeError where layers keep states and none stands there."""
        kept = self[sequence].kept
        if kept is not None:
            kept.pin(stored)

    def state_before(self, sequence: int, length: int, good: Callable[[int], bool]) -> int:
        """The most tokens, at most ``length``, that others can go on from at a ``good`` place: all ``length`` unless
        layers keep a state."""
        kept = self[sequence].kept
        return length if kept is None else kept.before(length, good)

    def losing(self, sequences: Iterable[int], losers: Container[SequenceStates]) -> list[int]:
        """Those of ``sequences`` whose layers' states are among ``losers``."""
        return [one for one in sequences if self[one].kept in losers]

    def rest(self, sequence: int) -> None:
        """No step of a sequence follows for now."""
        if (memory := self.get(sequence)) is not None and memory.kept is not None:
            memory.kept.rest()

    def free(self, sequence: int, closes: bool = False) -> None:
        """Give all blocks back and forget everything; with ``closes``, the sequence too."""
        self[sequence].drop()
        if closes:
            del self[sequence]

    def save(self, sequence: int, segment: int | None = None, older: Iterable[int] = ()) -> SavedMemory:
        """A copy of all that there is, on the host, with the snapshots after ``older`` tokens. With ``segment``, keys
        and values of whole segments of so many tokens are left out, which :meth:`save_rows` copies. LostKV where a tier
        has lost some."""
        return save_memory(self[sequence], segment, older)

    def save_rows(self, sequence: int, start: int, stop: int) -> dict[str, Tensor]:
        """Keys and values of some tokens, as copies on the host. SaccadeError for a block that is not resident."""
        return copy_rows(self[sequence].kv, start, stop)

    def check_policies(self, policies: Iterable[Policy]) -> None:
        """PolicyError for one that steps here cannot run under."""

    def check_kv(self, sequence: int, saved: SavedKV) -> None:
        """SaccadeError unless keys and values so described can be taken in."""
        kv = self[sequence].kv
        saved.check(kv.pool)

    def load(self, sequence: int, saved: SavedKV) -> HeldBlocks:
        """Keys and values of an empty sequence. CapacityError and SaccadeError as of ``load_kv``."""
        memory = self[sequence]
        memory.kv = load_kv(memory.kv.pool, saved)
        return memory.kv

    def load_rows(self, sequence: int, tensors: Mapping[str, Tensor], count: int | None = None) -> None:
        """Keys and values of the tokens that follow. Errors as of ``append_rows``."""
        append_rows(self[sequence].kv, tensors, count)

    def check_known(self) -> None:
        """SaccadeError where what a method knew of all heads cannot be loaded."""

    def load_states(self, sequence: int, known: Mapping[str, list[Any]]) -> None:
        """What the method knew, by the names of ``saved_memory.LISTS``."""
        memory = self[sequence]
        for name, loaded in known.items():
            setattr(memory, name, states.to(loaded, memory.kv.pool.storage.device))

    def load_kept(self, sequence: int, length: int, parts: Mapping[str, Tensor]) -> None:
        """The states of the model's own layers after ``length`` tokens, if any was stored. SaccadeError for what is
        none of these layers; CapacityError where all room for states is in use."""
        kept = self[sequence].kept
        if kept is not None and parts:
            kept.load(length, parts)

    def snapshots(self, sequence: int) -> tuple[int, ...]:
        """The tokens after which layers have a state to go back to, rising; none where no layer keeps one."""
        kept = self[sequence].kept
        return () if kept is None else kept.snapshots

    def save_snapshot(self, sequence: int, length: int) -> dict[str, Tensor] | None:
        """The state after ``length`` tokens as copies on the host; None where there is none."""
        kept = self[sequence].kept
        return None if kept is None else kept.save(length)

    def load_snapshot(self, sequence: int, length: int, parts: Mapping[str, Tensor]) -> None:
        """Take one in again, where there is room for it. SaccadeError for what is none of these layers."""
        kept = self[sequence].kept
        if kept is None:
            raise SaccadeError("the saved session has a layer state, but no layer of this model keeps one")
        kept.load(length, parts, anyway=False)

    def filled(self, sequence: int, length: int) -> None:
        """The states that go with ``length`` tokens stored by no step are there."""
        self[sequence].stands = length

    def begin_turn(self, sequence: int, reached: int, keeps: bool) -> None:
        """Mark where a turn begins, after ``reached`` tokens; ``keeps``: the states there are those of that place."""
        self[sequence].begin_turn(reached, keeps)

    def begin_drafts(self, sequence: int, carried: Carried | None) -> None:
        """Set states aside until a cut of drafted rows: steps go on with copies, and read what is ``carried``."""
        self[sequence].begin_drafts(carried)

    def settled(self, sequence: int) -> None:
        """No row of the last step is gone back to."""
        memory = self[sequence]
        memory.history.clear()
        if memory.kept is not None:
            memory.kept.settled()

    def forget_states(self, sequence: int) -> None:
        """Drop what the decode method has learnt, and nothing else."""
        self[sequence].states = [None] * self[sequence].kv.readers

    def has_state(self, sequence: int) -> bool:
        """Whether a decode method knows anything."""
        return self[sequence].has_state

    def stands(self, sequence: int) -> int | None:
        """The tokens after which states stand; None where a step broke on the way."""
        return self[sequence].stands

    def can_copy(self, sequence: int) -> bool:
        """Whether all states can be copied, and so taken back."""
        return all(states.can_copy(state) for state in self[sequence].states)
