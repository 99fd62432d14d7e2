"""The KV of one sequence: a block table of logical blocks, where they lie in each layer, and its block summaries."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.block_codes import BlockCodes
from saccade.kv.blocks import BlockManager
from saccade.kv.paged import Paged
from saccade.kv.sequence_summaries import SequenceSummaries
from saccade.kv.table import BlockTable
from saccade.kv.tiered import TieredView
from saccade.kv.view import KVView

MARKS = 256  # of a sequence that are kept


class SequenceKV:
    """Holds logical blocks of ``pool``. Rows are appended layer by layer; nothing stored ever moves.

    Blocks may be shared with other sequences; one that is, is copied before it is written to. ``version`` grows when
    tables, or rows that no kernel stored, or buffers of summaries change. ``known``: the summaries of its blocks.

    Where layers read what others store (``pool.reads``), who reads gives the number of the layer that attends; lengths,
    slots and bytes are of the layers that store.
    """

    def __init__(self, pool: BlockManager) -> None:
        self.pool = pool
        self.id = pool.new_owner()
        self._own: tuple[SequenceKV, ...] = (self,)
        self._version = 0
        self._format = pool.format
        self._size = pool.format.block_size
        self._table = BlockTable(pool, self.id)
        self._lengths = [0] * pool.layers
        self.known = SequenceSummaries(pool.layers)
        self.stood: dict[int, int] = {}  # by mark: the tokens stored then that were never cut off since
        self._hints: dict[int, int] = {}  # of tiered views
        self._charged = 0  # bytes of summaries that the pool's tiers know of

    @property
    def parts(self) -> tuple[SequenceKV, ...]:
        """One for each of the pool's groups."""
        return self._own

    @property
    def version(self) -> int:
        return self._version + self._table.version + self.known.version

    @property
    def layers(self) -> int:
        """That store."""
        return len(self._lengths)

    @property
    def readers(self) -> int:
        """Layers that attend."""
        return len(self.pool.reads)

    @property
    def length(self) -> int:
        """Tokens stored in every layer."""
        return min(self._lengths)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return self.layers * self._format.block_bytes // self._size

    @property
    def blocks(self) -> int:
        """Slots that its blocks take when resident, all layers together, shared blocks among them."""
        return self.layers * len(self._table.ids)

    @property
    def block_table(self) -> Tensor:
        """Logical block ids: int64 [blocks], on the host. Token i is in block ``block_table[i // block_size]``, in
        every layer, wherever that block lies. Good until the sequence changes; not to be written to."""
        return self._table.blocks

    @property
    def resident(self) -> bool:
        """Whether every part of every block has a slot."""
        return self._table.resident

    @property
    def damaged(self) -> bool:
        """Whether a tier has lost a part of it: it must be computed again."""
        return any(one.damaged(self._table.numbers) for one in self.pool.tier_rows)

    def logical_slots(self, start: int, stop: int) -> list[int]:
        """Where the rows of tokens ``start .. stop - 1`` go in every layer: logical block * block_size + offset each.
        Room for them must be reserved: SaccadeError otherwise."""
        return self._table.logical_slots(start, stop)

    @property
    def tables(self) -> Tensor:
        """int32 [readers, kv_heads or 1, >= blocks] on the storage's device: the slots of every block, -1 where one is
        not resident."""
        return self._table.read_tables

    @property
    def hints(self) -> dict[int, int]:
        """See TieredView."""
        return self._hints

    def missing_blocks(self, tokens: int) -> int:
        """Slots that must still be allocated before ``tokens`` tokens fit: for new blocks, and for the copy of a shared
        block that would be written to."""
        wanted = max(0, -(-tokens // self._size) - len(self._table.ids))
        return self.layers * (wanted + self._shared_tail(tokens, self.length))

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens in every layer, in blocks that may be written to. Raises CapacityError,
        taking nothing, when the pool is short."""
        length = self.length
        copied, tail = self._shared_tail(tokens, length), length // self._size
        wanted = max(0, -(-tokens // self._size) - len(self._table.ids))
        if copied:
            self.pool.require_resident(self._table.ids[tail])
        if wanted or copied:
            fresh = self.pool.allocate(wanted + copied, self.id)
            if copied:
                self._table.replace(tail, fresh)
                fresh.pop()
            self._table.extend(fresh)
        if self.pool.tiers is not None:
            self.pool.tiers.opened(slice(None), self._table.numbers[tail:])
        self._charge()

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store new rows ``k``, ``v`` [kv_heads, t, head_dim] of one layer after those it has. SaccadeError for a layer
        that stores none."""
        if layer >= self.layers:
            raise SaccadeError(f"layer {layer} reads the keys of layer {self.pool.reads[layer]} and stores none")
        start, count = self._lengths[layer], k.shape[1]
        if self.pool.tiers is not None:  # which may have had them copied since reserve()
            opened = self._table.numbers[start // self._size : -(-(start + count) // self._size)]
            self.pool.tiers.opened(slice(layer, layer + 1), opened)
        if (
            count == 1 and self.pool.rows == 1 and not self.pool.absent
        ):  # a decode step: the host knows its slot, and a device needs no index
            slot, offset = self.place(layer)
            storage = self.pool.storage
            for pool, rows, row in zip(storage.parts, self._format.parts, self._format.stored(k, v)):
                pool.select(0, slot).select(1, offset).copy_(rows.encode(row.select(1, 0), pool.dtype))
            self._sealed(range(layer, layer + 1), start, start + 1)
            return
        self._make_writable(layer, count)
        self._plain_view(layer, start).write(start, k, v)
        self._lengths[layer] = start + count
        self._version += 1
        self.written(layer, start, start + count)

    def written(self, layer: int, start: int, stop: int) -> None:
        """Rows ``start .. stop - 1`` of a layer, which count as stored, have been."""
        if self.pool.tiers is not None and self.pool.absent:
            self.known.grown(self._plain_view, layer, start, stop)
        self._sealed(range(layer, layer + 1), start, stop)

    def place(self, layer: int) -> tuple[int, int]:
        """Where the next row of one layer goes, slot and offset in it. It counts as stored: the caller writes it.
        SaccadeError where KV heads do not share slots, or the block is not resident."""
        start = self._lengths[layer]
        block, offset = divmod(start, self._size)
        if block >= len(self._table.ids) or (offset and self.pool.references(self._table.ids[block]) > 1):
            self._make_writable(layer, 1)
        slot = self._table.slot(layer, block) if self.pool.rows == 1 else -1
        if slot < 0:
            raise SaccadeError(
                f"the next row of layer {layer} has no single slot: its block is not resident, or KV heads lie apart"
            )
        self._lengths[layer] = start + 1
        self._version += 1
        return slot, offset

    def appended(self, count: int) -> None:
        """Count ``count`` rows that a kernel has stored in every layer, and the blocks that it summarized."""
        start = self._lengths[0]
        self._lengths = [length + count for length in self._lengths]
        if count > 0:
            self._sealed(range(self.layers), start, start + count)
        elif self.pool.tiers is not None:  # taken back: what filled a block is not its content
            self.pool.tiers.opened(slice(None), self._table.numbers[(start + count) // self._size :])

    def stored(self, count: int) -> None:
        """Count ``count`` rows that the host stores in every layer of this step, past the sequence itself."""
        self._lengths = [length + count for length in self._lengths]
        self._version += 1

    def summaries(self, kind: str, block_size: int) -> list[Tensor]:
        """Each reader's summaries of the blocks that are full in all layers: [>= full blocks, parts, kv_heads,
        head_dim]."""
        storage, given = self.pool.storage, (self._plain_view, kind, block_size, self.length)
        there = storage.k.is_cpu and not self.pool.absent
        own = self.known.full(*given, storage, self._table.tables) if there else self.known.full(*given)
        return self.pool.of_readers(own)

    def hand_over(self, kind: str, block_size: int) -> list[Tensor]:
        """The summaries of full blocks of each layer that stores on the host, [blocks, parts, kv_heads, head_dim]; here
        they are forgotten."""
        made = [one[: self.length // block_size].cpu() for one in self.summaries(kind, block_size)[: self.layers]]
        self.known.forget(kind, block_size)
        self._charge()
        return made

    def summary_codes(self, kind: str, block_size: int) -> list[BlockCodes]:
        """See SequenceSummaries.codes; one of each reader."""
        codes = self.known.codes(kind, block_size)
        return self.pool.of_readers(codes) if codes else codes

    def summary_buffers(self, kind: str, block_size: int, blocks: int) -> list[Tensor]:
        """Each reader's summaries of full blocks, brought up to date, with room for ``blocks``: [>= blocks, parts,
        kv_heads, head_dim]. What lies beyond the full blocks is not filled."""
        return self.pool.of_readers(self.known.buffers(self._plain_view, kind, block_size, self.length, blocks))

    def summarized_blocks(self, kind: str, block_size: int) -> int:
        """How many blocks have a summary in every layer; -1 where there is no room for any."""
        return self.known.made(kind, block_size)

    def summarized(self, kind: str, block_size: int) -> None:
        """Take the summaries of all full blocks for written: a kernel did so in ``summary_buffers``."""
        self.known.written(kind, block_size, self._lengths)

    def view(self, layer: int) -> KVView:
        """What ops and methods see of one layer that attends."""
        layer = self.pool.reads[layer]
        if self.pool.absent and self.pool.tiers is not None:
            summaries = partial(self.known.of, self._plain_view, layer)
            length = self._lengths[layer]
            return TieredView(self.pool, layer, self._table.numbers, length, summaries, self._hints)
        paged, pool = self._paged(layer, self._lengths[layer]), self.pool
        return KVView(paged, partial(self.known.of, self._plain_view, layer), pool.storage.mover, pool.absent > 0)

    def truncate(self, length: int, holds: bool = False) -> None:
        """Forget tokens from ``length`` on and let go of their blocks, unless it ``holds`` them for those to come. What
        is appended then is as in a new sequence."""
        if length < 0:
            raise SaccadeError(f"a sequence cannot be cut to {length} tokens; give 0 or more")
        self.stood = {mark: min(stood, length) for mark, stood in self.stood.items()}
        self._lengths = [min(own, length) for own in self._lengths]
        if not holds:
            self._table.cut(-(-length // self._size))
        self.known.truncate(length)

    def free(self) -> None:
        """Let go of every block, and of what is known of them."""
        self.truncate(0)
        self.known.clear()
        self._charge()

    def keep(self) -> None:
        """Nothing runs on it from now on: it keeps its blocks for others, until it is freed."""
        self.pool.keepers.begin(self.id, self._table.ids)

    def fork(self, length: int | None = None) -> SequenceKV:
        """A second sequence with the same tokens, or the first ``length`` of them: full blocks are shared, a partial
        last one and the summaries are copied. Raises CapacityError, taking nothing, when there is no room for the copy;
        SaccadeError for more tokens than there are, and within a step, when layers are of unequal length."""
        stored = self.between_steps("forked")
        length = stored if length is None else length
        if not 0 <= length <= stored:
            raise SaccadeError(f"{length} tokens cannot be shared: {stored} are stored")
        other = SequenceKV(self.pool)
        ids, (full, rest) = self._table.ids, divmod(length, self._size)
        last: list[int] = []
        if rest:
            self.pool.require_resident(ids[full])
            last = self.pool.allocate(1, other.id)
            other._table.copy(ids[full], last)
        self.pool.share(ids[:full], other.id)
        other._lengths = [length] * self.layers
        other._table.extend(ids[:full] + last)
        self.known.copy_to(other.known, length)
        other._charge()
        return other

    def mark(self, number: int) -> None:
        """Note from now on in ``stood[number]`` how much of what is stored stays as it is. The last marks are kept."""
        self.stood[number] = self.between_steps("marked")
        while len(self.stood) > MARKS:
            del self.stood[min(self.stood)]

    def between_steps(self, done: str) -> int:
        """Tokens stored. SaccadeError, naming what cannot be ``done``, within a step, when layers are of unequal
        length."""
        if len(set(self._lengths)) > 1:
            raise SaccadeError(f"KV cannot be {done} within a step: its layers have {self._lengths} tokens")
        return self.length

    def _shared_tail(self, tokens: int, length: int) -> bool:
        """Whether a block that growing from ``length`` to ``tokens`` tokens writes to is another sequence's too: only a
        cut into a full block leaves one so."""
        block, offset = divmod(length, self._size)
        return offset > 0 and tokens > length and self.pool.references(self._table.ids[block]) > 1

    def _sealed(self, layers: range, start: int, stop: int) -> None:
        """Rows ``start .. stop - 1`` were stored: tell the tier of blocks that they filled."""
        first, last = start // self._size, stop // self._size
        for one in self.pool.tier_rows if last > first else ():
            one.sealed(layers, self._table.numbers[first:last])

    def _make_writable(self, layer: int, count: int) -> None:
        """Check that ``count`` more rows of a layer have room, and copy a shared block that they begin in."""
        start = self._lengths[layer]
        if start + count > self._table.room:
            raise SaccadeError(f"layer {layer} has no room for {count} tokens after {start}: reserve() first")
        block, offset = divmod(start, self._size)
        if offset and count and self.pool.references(self._table.ids[block]) > 1:
            self.pool.require_resident(self._table.ids[block])
            self._table.replace(block, self.pool.allocate(1, self.id))

    def _charge(self) -> None:
        """Have summaries counted where memory is bounded."""
        if self.pool.tiers is not None:
            now = self.known.nbytes
            for one in self.pool.tiers.each:
                one.charge(now - self._charged)
            self._charged = now

    def _plain_view(self, layer: int, length: int | None = None) -> KVView:
        length = self._lengths[layer] if length is None else length
        if self.pool.absent and self.pool.tiers is not None:
            return TieredView(self.pool, layer, self._table.numbers, length)
        paged = self._paged(layer, length)
        return KVView(paged, None, self.pool.storage.mover, self.pool.absent > 0)

    def _paged(self, layer: int, length: int) -> Paged:
        storage = self.pool.storage
        return Paged(storage.k, storage.v, self._table.of(layer), length, self._format)
