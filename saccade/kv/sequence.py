"""The KV of one sequence: a block table of logical blocks, where they lie in each layer, and its block summaries."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.blocks import BlockManager
from saccade.kv.kept_summaries import KeptSummaries
from saccade.kv.paged import Paged
from saccade.kv.saved import SavedKV, described
from saccade.kv.view import KVView

ALIGNED = 4  # table entries: kernels are compiled anew for a table that does not begin at 16 bytes


class SequenceKV:
    """Holds logical blocks of ``pool``. Rows are appended layer by layer; nothing stored ever moves.

    Blocks may be shared with other sequences; one that is, is copied before it is written to. ``version`` grows when
    tables, or rows that no kernel stored, or buffers of summaries change.
    """

    def __init__(self, pool: BlockManager) -> None:
        self.pool = pool
        self.id = pool.new_owner()
        self.version = 0
        self._format = pool.format
        self._size = pool.format.block_size
        self._ids: list[int] = []
        self._numbers = np.zeros(0, dtype=np.int64)  # the same
        self._lengths = [0] * pool.layers
        self._summaries: dict[tuple[int, str, int], KeptSummaries] = {}
        self._kept: dict[tuple[str, int], list[KeptSummaries]] = {}  # the same, by layer
        self._residency = pool.version
        self._tables = torch.zeros(pool.layers, pool.rows, 16, dtype=torch.int32, device="cpu")
        self._publish()

    @property
    def layers(self) -> int:
        return len(self._lengths)

    @property
    def length(self) -> int:
        """Tokens stored in every layer."""
        return min(self._lengths)

    @property
    def blocks(self) -> int:
        """Slots that its blocks take when resident, all layers together, shared blocks among them."""
        return self.layers * len(self._ids)

    @property
    def block_table(self) -> Tensor:
        """Logical block ids: int64 [blocks], on the host. Token i is in block ``block_table[i // block_size]``, in
        every layer, wherever that block lies. Good until the sequence changes; not to be written to."""
        return torch.from_numpy(self._numbers)

    def logical_slots(self, start: int, stop: int) -> list[int]:
        """Where the rows of tokens ``start .. stop - 1`` go in every layer: logical block * block_size + offset each.
        Room for them must be reserved: SaccadeError otherwise."""
        self._require_room(start, stop)
        size, ids = self._size, self._ids
        if stop - start == 1:
            return [ids[start // size] * size + start % size]
        positions = np.arange(start, stop)
        return (self._numbers[positions // size] * size + positions % size).tolist()

    @property
    def tables(self) -> Tensor:
        """int32 [layers, kv_heads or 1, >= blocks] on the storage's device: the slots of every block, -1 where one is
        not resident."""
        if self._residency != self.pool.version:
            self._refresh()
        return self._stored_tables

    def slot_mapping(self, start: int, stop: int) -> Tensor:
        """Where the rows of tokens ``start .. stop - 1`` go: int64 [layers, kv_heads or 1, stop - start] on the
        storage's device, each slot * block_size + offset, -1 where the block is not resident. Room for them must be
        reserved: SaccadeError otherwise."""
        self._require_room(start, stop)
        tables = self.tables
        positions = torch.arange(start, stop, device=tables.device)
        slots = tables[:, :, positions // self._size].long()
        return torch.where(slots < 0, -1, slots * self._size + positions % self._size)

    def _require_room(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= len(self._ids) * self._size:
            raise SaccadeError(
                f"no slots for tokens {start}..{stop}: room is reserved for {len(self._ids) * self._size}"
            )

    def missing_blocks(self, tokens: int) -> int:
        """Slots that must still be allocated before ``tokens`` tokens fit: for new blocks, and for the copy of a shared
        block that would be written to."""
        wanted = max(0, -(-tokens // self._size) - len(self._ids))
        return self.layers * (wanted + self._shared_tail(tokens))

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens in every layer, in blocks that may be written to, and note the use of all
        blocks in this step. Raises CapacityError, taking nothing, when the pool is short."""
        have, copied = len(self._ids), self._shared_tail(tokens)
        wanted = max(0, -(-tokens // self._size) - have)
        tail = self.length // self._size
        if copied:
            self.pool.require_resident(self._ids[tail])
        if wanted or copied:
            fresh = self.pool.allocate(wanted + copied, self.id)
            if copied:
                self._copy_of(self._ids[tail], fresh)
                self._replace(tail, fresh.pop())
            self._ids += fresh
            self._derive(tail if copied else have)
        self.pool.touch(self._numbers)

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store new rows ``k``, ``v`` [kv_heads, t, head_dim] of one layer after those it has."""
        start, count = self._lengths[layer], k.shape[1]
        if count == 1 and self.pool.rows == 1:  # a decode step: the host knows its slot, and a device needs no index
            slot, offset = self.place(layer)
            for pool, row in ((self.pool.storage.k, k), (self.pool.storage.v, v)):
                pool.select(0, slot).select(1, offset).copy_(row.select(1, 0))
            return
        self._make_writable(layer, count)
        self._plain_view(layer, start).write(start, k, v)
        self._lengths[layer] = start + count
        self.version += 1

    def place(self, layer: int) -> tuple[int, int]:
        """Where the next row of one layer goes, slot and offset in it. It counts as stored: the caller writes it.
        SaccadeError where KV heads do not share slots, or the block is not resident."""
        start = self._lengths[layer]
        block, offset = divmod(start, self._size)
        if block >= len(self._ids) or (offset and self.pool.references(self._ids[block]) > 1):
            self._make_writable(layer, 1)
        if self._residency != self.pool.version:
            self._refresh()
        slot = self._host[layer].item(block) if self.pool.rows == 1 else -1
        if slot < 0:
            raise SaccadeError(
                f"the next row of layer {layer} has no one slot: its block is not resident, or KV heads lie apart"
            )
        self._lengths[layer] = start + 1
        self.version += 1
        return slot, offset

    def appended(self, count: int) -> None:
        """Count ``count`` rows that a kernel has stored in every layer, and the blocks that it summarized."""
        self._lengths = [length + count for length in self._lengths]

    def stored(self, count: int) -> None:
        """Count ``count`` rows that the host stores in every layer of this step, past the sequence itself."""
        self.appended(count)
        self.version += 1

    def summaries(self, kind: str, block_size: int) -> list[Tensor]:
        """Each layer's summaries of the blocks that are full in all layers: [>= full blocks, parts, kv_heads,
        head_dim]."""
        kept = self._kept.get((kind, block_size))
        if kept is None or min([one.filled for one in kept]) < self.length // block_size:
            for layer in range(self.layers):
                self._summaries_of(layer, kind, block_size)
            kept = [self._summary(layer, kind, block_size) for layer in range(self.layers)]
            self._kept[kind, block_size] = kept
        return [one.buffer for one in kept]

    def summary_buffers(self, kind: str, block_size: int, blocks: int) -> list[Tensor]:
        """Each layer's summaries of its full blocks, brought up to date, with room for ``blocks``: [>= blocks,
        parts, kv_heads, head_dim]. What lies beyond the full blocks is not filled."""
        self.version += 1
        return [
            self._summary(layer, kind, block_size).room(blocks, self._plain_view(layer)) for layer in range(self.layers)
        ]

    def summarized(self, kind: str, block_size: int) -> None:
        """Take the summaries of all full blocks for written: a kernel did so in ``summary_buffers``."""
        for layer in range(self.layers):
            self._summary(layer, kind, block_size).filled = self._lengths[layer] // block_size

    def view(self, layer: int) -> KVView:
        """What ops and methods see of one layer."""
        paged, pool = self._paged(layer, self._lengths[layer]), self.pool
        return KVView(paged, partial(self._summaries_of, layer), pool.storage.mover, pool.absent > 0)

    def truncate(self, length: int) -> None:
        """Forget tokens from ``length`` on and let go of their blocks. What is appended then is as in a new
        sequence."""
        if length < 0:
            raise SaccadeError(f"a sequence cannot be cut to {length} tokens; give 0 or more")
        keep = -(-length // self._size)
        self.version += 1
        self._lengths = [min(own, length) for own in self._lengths]
        self.pool.release(self._ids[keep:], self.id)
        del self._ids[keep:]
        self._numbers = self._numbers[:keep]
        for summary in self._summaries.values():
            summary.truncate(length)

    def free(self) -> None:
        """Let go of every block."""
        self.truncate(0)

    def fork(self) -> SequenceKV:
        """A second sequence with the same tokens: full blocks are shared, a partial last one and the summaries are
        copied. Raises CapacityError, taking nothing, when there is no room for the copy; SaccadeError within a step,
        when layers are of unequal length."""
        length = self._between_steps("forked")
        other = SequenceKV(self.pool)
        full, rest = divmod(length, self._size)
        last = []
        if rest:
            self.pool.require_resident(self._ids[full])
            last = self.pool.allocate(1, other.id)
            other._copy_of(self._ids[full], last)
        self.pool.share(self._ids[:full], other.id)
        other._ids, other._lengths = self._ids[:full] + last, [length] * self.layers
        other._derive(0)
        other._summaries = {key: summary.fork() for key, summary in self._summaries.items()}
        return other

    def save(self) -> SavedKV:
        """All that is stored, as copies on the storage's device. SaccadeError within a step, or where a block is not
        resident."""
        length = self._between_steps("saved")
        views = [self._plain_view(layer) for layer in range(self.layers)]
        tensors = {
            "k": torch.stack([view.keys() for view in views]),
            "v": torch.stack([view.values() for view in views]),
        }
        for (layer, kind, block_size), summary in self._summaries.items():
            if summary.buffer.dim() > 1:
                tensors[f"summary/{layer}/{kind}/{block_size}"] = summary.made.clone()
        return SavedKV(tensors, described(self._format, self.layers) | {"length": length})

    @classmethod
    def load(cls, pool: BlockManager, saved: SavedKV) -> SequenceKV:
        """A sequence of ``pool`` with what was saved. Raises SaccadeError where it does not fit the pool's format or
        layers, CapacityError, taking nothing, where the pool is short."""
        saved.check(pool.format, pool.layers)
        own = cls(pool)
        own.reserve(saved.metadata["length"])
        device = pool.storage.device
        for layer, (k, v) in enumerate(zip(saved.tensors["k"], saved.tensors["v"])):
            own.append(layer, k.to(device), v.to(device))
        for name, made in saved.tensors.items():
            if name.startswith("summary/"):
                _, of, kind, block_size = name.split("/")
                kept = KeptSummaries(kind, int(block_size), made.to(device, copy=True), len(made))
                own._summaries[int(of), kind, int(block_size)] = kept
        return own

    def to(self, pool: BlockManager) -> SequenceKV:
        """This sequence in another pool, on its device; here it is freed. Errors as for ``load``, this sequence then
        being as before."""
        other = SequenceKV.load(pool, self.save())
        self.free()
        return other

    def _between_steps(self, done: str) -> int:
        if len(set(self._lengths)) > 1:
            raise SaccadeError(f"KV cannot be {done} within a step: its layers have {self._lengths} tokens")
        return self.length

    def _shared_tail(self, tokens: int) -> bool:
        """Whether a block that growing to ``tokens`` tokens writes to is another sequence's too: only a cut into a full
        block leaves one so."""
        block, offset = divmod(self.length, self._size)
        return bool(offset) and tokens > self.length and self.pool.references(self._ids[block]) > 1

    def _make_writable(self, layer: int, count: int) -> None:
        """Check that ``count`` more rows of a layer have room, and copy a shared block that they begin in."""
        start = self._lengths[layer]
        if start + count > len(self._ids) * self._size:
            raise SaccadeError(f"layer {layer} has no room for {count} tokens after {start}: reserve() first")
        block, offset = divmod(start, self._size)
        if offset and count and self.pool.references(self._ids[block]) > 1:
            self.pool.require_resident(self._ids[block])
            fresh = self.pool.allocate(1, self.id)
            self._copy_of(self._ids[block], fresh)
            self._replace(block, fresh[0])
            self._derive(block)

    def _copy_of(self, source: int, fresh: list[int]) -> None:
        """Copy block ``source`` to the last of ``fresh``, which were just allocated: all of them go back if that
        fails."""
        try:
            self.pool.copy(source, fresh[-1])
        except BaseException:
            self.pool.release(fresh, self.id)
            raise

    def _replace(self, block: int, new: int) -> None:
        """Let ``new``, a copy, stand for a shared block of the table."""
        self.pool.release([self._ids[block]], self.id)
        self._ids[block] = new

    def _derive(self, first: int) -> None:
        """Look up the slots of the blocks from ``first`` on."""
        blocks = len(self._ids)
        if blocks > self._tables.shape[2]:
            width = max(-(-blocks // ALIGNED) * ALIGNED, 2 * self._tables.shape[2])
            grown = torch.zeros(*self._tables.shape[:2], width, dtype=torch.int32, device="cpu")
            grown[:, :, : self._tables.shape[2]] = self._tables
            self._tables = grown
        self._tables.numpy()[:, :, first:blocks] = self.pool.lookup(self._ids[first:])
        self._publish()
        self.version += 1

    def _publish(self) -> None:
        self._numbers = np.array(self._ids, dtype=np.int64)
        self._host = list(self._tables.numpy()[:, 0])
        self._stored_tables = self._tables.to(self.pool.storage.device)  # the same tensor on a CPU
        self._layer_tables = self._stored_tables.unbind()

    def _refresh(self) -> None:
        """Look up all slots anew where some block has moved."""
        if self._residency != self.pool.version:
            self._residency = self.pool.version
            self._derive(0)

    def _summary(self, layer: int, kind: str, block_size: int) -> KeptSummaries:
        key = (layer, kind, block_size)
        if key not in self._summaries:
            self._summaries[key] = KeptSummaries(kind, block_size)
        return self._summaries[key]

    def _summaries_of(self, layer: int, kind: str, block_size: int) -> Tensor:
        summary = self._summary(layer, kind, block_size)
        before, kept = summary.buffer, summary.upto(self._plain_view(layer))
        self.version += summary.buffer is not before
        return kept

    def _plain_view(self, layer: int, length: int | None = None) -> KVView:
        paged = self._paged(layer, self._lengths[layer] if length is None else length)
        return KVView(paged, None, self.pool.storage.mover, self.pool.absent > 0)

    def _paged(self, layer: int, length: int) -> Paged:
        if self._residency != self.pool.version:
            self._refresh()
        storage = self.pool.storage
        return Paged(storage.k, storage.v, self._layer_tables[layer], length, self._format)
