"""The block summaries of one sequence: of every kind that was asked for, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.kv.block_codes import BlockCodes
from saccade.kv.kept_summaries import KeptSummaries
from saccade.kv.storage import KVStorage
from saccade.kv.summaries import kept_dtype, parts_of
from saccade.kv.view import KVView

View = Callable[[int], KVView]


class SequenceSummaries:
    """Of one sequence of ``layers`` layers. A kind and a block size name summaries; ``view(layer)`` shows the keys that
    they are made of. ``version`` grows when a buffer takes another's place."""

    def __init__(self, layers: int) -> None:
        self.version = 0
        self._layers = layers
        self._kinds: dict[tuple[str, int], list[KeptSummaries]] = {}

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for kept in self._kinds.values() for one in kept)

    def of(self, view: View, layer: int, kind: str, block_size: int) -> KeptSummaries:
        """One layer's, brought up to date."""
        summary = self._kept(kind, block_size)[layer]
        before = summary.buffer
        summary.upto(view(layer))
        self.version += summary.buffer is not before
        return summary

    def full(
        self, view: View, kind: str, block_size: int, length: int, storage: KVStorage | None = None, tables: Any = None
    ) -> list[Tensor]:
        """Each layer's summaries of the full blocks of ``length`` tokens: [>= blocks, parts, kv_heads, head_dim]. Of
        keys that lie in ``storage`` on the host, where ``tables`` int32 [layers, kv_heads or 1, >= blocks] says, what
        is wanting is made in all layers at once, if its mover has a kernel for that."""
        kept, full = self._kept(kind, block_size), length // block_size
        if kept[0].buffer.dim() > 1 and min([one.filled for one in kept]) >= full:
            return [one.buffer for one in kept]
        fill = None if storage is None else storage.mover.filler(storage.format.dtype, kind, block_size)
        if storage is None or fill is None or len({one.filled for one in kept}) > 1:
            return [self.of(view, layer, kind, block_size).buffer for layer in range(self._layers)]
        before, layout = kept[0].buffer, storage.format
        shape, dtype = (
            (0, parts_of(kind, block_size, layout.head_dim), layout.kv_heads, layout.head_dim),
            kept_dtype(kind, layout.dtype),
        )
        for one in kept:
            one.reserve(full, torch.empty(shape, dtype=dtype, device="cpu"))
        buffers = [one.buffer for one in kept]
        fill((storage.k, storage.v), layout.dtype, tables, kind, block_size, kept[0].filled, full, buffers)
        for one in kept:
            one.filled = full
        self.version += kept[0].buffer is not before
        return buffers

    def codes(self, kind: str, block_size: int) -> list[BlockCodes]:
        """What is known of each layer's summaries in 4 bits (see block_codes.py), once :meth:`full` was asked for;
        empty where they are too few."""
        codes = [one.codes() for one in self._kept(kind, block_size)]
        return [one for one in codes if one is not None] if None not in codes else []

    def buffers(self, view: View, kind: str, block_size: int, length: int, blocks: int) -> list[Tensor]:
        """Each layer's summaries of the full blocks of ``length`` tokens, brought up to date, with room for ``blocks``:
        [>= blocks, parts, kv_heads, head_dim]. What lies beyond the full blocks is not filled."""
        kept = self._kept(kind, block_size)
        if self.made(kind, block_size) >= length // block_size and len(kept[0].buffer) >= blocks:
            return [one.buffer for one in kept]
        self.version += 1
        return [one.room(blocks, view(layer)) for layer, one in enumerate(kept)]

    def made(self, kind: str, block_size: int) -> int:
        """How many blocks have a summary in every layer; -1 where there is no room for any."""
        return min([one.filled if one.buffer.dim() > 1 else -1 for one in self._kept(kind, block_size)])

    def written(self, kind: str, block_size: int, lengths: Sequence[int]) -> None:
        """Take the summaries of all full blocks of ``lengths`` tokens, of each layer, for written: a kernel did so in
        :meth:`buffers`."""
        for length, one in zip(lengths, self._kept(kind, block_size)):
            one.filled = length // block_size

    def grown(self, view: View, layer: int, start: int, stop: int) -> None:
        """A layer got rows ``start .. stop - 1``: what was up to date is brought up to date, while the keys are at
        hand."""
        for (kind, size), kept in self._kinds.items():
            if kept[layer].buffer.dim() > 1 and start // size <= kept[layer].filled < stop // size:
                self.of(view, layer, kind, size)

    def give(self, kind: str, block_size: int, made: Sequence[Tensor]) -> None:
        """Take each layer's summaries of the first blocks for known: [blocks, parts, kv_heads, head_dim]."""
        self._kinds[kind, block_size] = [KeptSummaries(kind, block_size, one, len(one)) for one in made]

    def forget(self, kind: str, block_size: int) -> None:
        """Forget those of one kind."""
        self._kinds.pop((kind, block_size), None)

    def truncate(self, length: int) -> None:
        """Forget what is known of tokens from ``length`` on."""
        for kept in self._kinds.values():
            for one in kept:
                one.truncate(length)

    def clear(self) -> None:
        """Forget everything."""
        self._kinds.clear()

    def copy_to(self, other: SequenceSummaries, length: int) -> None:
        """Give a sequence that has the first ``length`` tokens what is known of them."""
        other._kinds = {key: [one.fork(length) for one in kept] for key, kept in self._kinds.items()}

    def save(self) -> dict[str, Tensor]:
        """As copies, under ``summary/<layer>/<kind>/<block size>``: [blocks, parts, kv_heads, head_dim]."""
        return {
            f"summary/{layer}/{kind}/{size}": one.made.clone()
            for (kind, size), kept in self._kinds.items()
            for layer, one in enumerate(kept)
            if one.buffer.dim() > 1
        }

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Take what :meth:`save` gave, among other tensors."""
        for name, made in tensors.items():
            if name.startswith("summary/"):
                _, layer, kind, size = name.split("/")
                one = KeptSummaries(kind, int(size), made.to(device, copy=True), len(made))
                self._kept(kind, int(size))[int(layer)] = one

    def rows(self, start: int, stop: int) -> dict[str, Tensor]:
        """As copies on the host what is known of the full blocks among tokens ``start .. stop - 1``, under
        ``summary/<kind>/<block size>``: [layers, blocks, parts, kv_heads, head_dim]."""
        tensors = {}
        for (kind, size), kept in self._kinds.items():
            first, last = start // size, stop // size
            if start % size == 0 and last > first and all(one.filled >= last for one in kept):
                tensors[f"summary/{kind}/{size}"] = torch.stack([one.buffer[first:last] for one in kept]).cpu()
        return tensors

    def append_rows(self, tensors: Mapping[str, Tensor], start: int, device: torch.device) -> None:
        """Take what :meth:`rows` gave of the tokens from ``start`` on, among other tensors."""
        for name, made in tensors.items():
            if name.startswith("summary/"):
                _, kind, size = name.split("/")
                for one, part in zip(self._kept(kind, int(size)), made):
                    if start % int(size) == 0 and one.filled == start // int(size):  # else they are made anew
                        one.extend(part.to(device))

    def _kept(self, kind: str, block_size: int) -> list[KeptSummaries]:
        """Each layer's, as far as they are made."""
        key = (kind, block_size)
        if key not in self._kinds:
            self._kinds[key] = [KeptSummaries(kind, block_size) for _ in range(self._layers)]
        return self._kinds[key]
