"""Labels: a few channels of every key in a few bits, scored instead of the keys themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops import cpu
from saccade.ops.scores import top_places

WHOLE_BITS = 16  # labels are then stored as they are
PACKED_BITS = 4  # up to which two channels share a byte
TILE = 16  # keys whose codes lie together, channel by channel
STEP_KEYS = 8192  # keys labelled at once


class Labels:
    """``channels`` int64 [kv_heads, r] of the keys of one sequence and layer, quantized by token over its channels,
    from the least to the greatest (Double Sparsity, HShare), or whole (InfiniGen's partial keys). ``basis`` fp32
    [kv_heads, head_dim, head_dim]: what queries and keys are multiplied by before channels are taken. Grows with the
    keys.

    Codes are uint8 [kv_heads, tiles, planes, 16], a plane being one channel or two in 4 bits each, beside fp32
    [kv_heads, tiles, 2, 16], the least value and the step of each key; whole labels are fp32 [kv_heads, keys, r].
    """

    def __init__(self, channels: Tensor, bits: int, basis: Tensor | None = None) -> None:
        self.channels, self.bits, self.basis, self.length = channels, bits, basis, 0
        self._codes = torch.empty(0)
        self._range = torch.empty(0)

    @property
    def whole(self) -> bool:
        return self.bits == WHOLE_BITS

    @property
    def packed(self) -> bool:
        return self.bits <= PACKED_BITS

    def extend(self, kv: KVView) -> None:
        """Take in the keys of ``kv`` that are new."""
        if kv.length == self.length:
            return
        if self._has_kernel(kv.k_pool) and self.basis is None and kv.dtype in cpu._STORAGE:
            self._extend(kv)
            return
        tile = 1 if self.whole else TILE
        for start in range(self.length // tile * tile, kv.length, STEP_KEYS):  # a tile begun is made anew
            stop = min(start + STEP_KEYS, kv.length)
            keys = kv.keys(start, stop).float()
            keys = keys if self.basis is None else keys @ self.basis
            labels = keys.gather(2, self.channels[:, None].expand(-1, keys.shape[1], -1))
            rows = slice(start // tile, -(-stop // tile))
            if self.whole:
                self._codes = self._with_room(self._codes, rows.stop, labels)
                self._codes[:, rows] = labels
            else:
                codes, extent = self._quantized(labels)
                self._make_room(rows.stop, codes, extent)
                self._codes[:, rows], self._range[:, rows] = codes, extent
            self.length = stop

    def scores(self, q: Tensor, unit: str = "q_head") -> Tensor:
        """``q`` [heads, head_dim] against every label: fp32 [units, length], unscaled; of a ``kv_head`` its group's
        mean."""
        picked = self._picked(q, unit)
        if self._has_kernel(self._codes):
            scores = torch.empty(picked.shape[0] * picked.shape[1], self.length)
            self._run(picked, scores=scores)
            return scores
        if self.whole:
            return (picked @ self._codes[:, : self.length].transpose(1, 2)).flatten(0, 1)
        codes = self._codes[:, : -(-self.length // TILE)]
        if self.packed:
            codes = torch.stack([codes & 15, codes >> 4], 3).flatten(2, 3)[:, :, : picked.shape[2]]
        low, step = self._range[:, None, : codes.shape[1]].unbind(3)  # [G, 1, tiles, 16]
        products = torch.einsum("ghr,gtrk->ghtk", picked, codes.float())
        products = products * step + picked.sum(-1)[..., None, None] * low
        return products.flatten(2)[..., : self.length].flatten(0, 1)

    def top(self, q: Tensor, unit: str, count: int, first: int, last: int) -> Tensor:
        """The ``count`` keys of highest score among ``first .. last - 1``, ties to the lower: int32 [units, count],
        rising."""
        if 0 < count < last - first and self._has_kernel(self._codes):
            picked = self._picked(q, unit)
            best = torch.empty(picked.shape[0] * picked.shape[1], count + 1, dtype=torch.int32)
            self._run(picked, first=first, last=last, best=best)
            return best[:, :count]
        scores = self.scores(q, unit)[:, first:last]
        return (top_places(scores, min(count, last - first)) + first).to(torch.int32)

    def _picked(self, q: Tensor, unit: str) -> Tensor:
        """The labels' channels of each unit's query, fp32 [kv_heads, rows, r]."""
        grouped = q.float().unflatten(0, (self.channels.shape[0], -1))
        if unit == "kv_head":  # the mean of dot products is that of the mean query
            grouped = grouped.mean(1, keepdim=True)
        grouped = grouped if self.basis is None else grouped @ self.basis
        return grouped.gather(2, self.channels[:, None].expand(-1, grouped.shape[1], -1))

    def _quantized(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """``labels`` [G, m, r] as whole tiles of codes and of (least, step)."""
        low, high = labels.amin(-1, keepdim=True), labels.amax(-1, keepdim=True)
        step = (high - low) / (2**self.bits - 1)
        codes = ((labels - low) / step.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.uint8)
        codes, extent = (_tiles(part) for part in (codes, torch.cat([low, step], -1)))
        if self.packed:
            codes = torch.nn.functional.pad(codes, (0, 0, 0, codes.shape[2] % 2))
            codes = codes[:, :, 0::2] | (codes[:, :, 1::2] << 4)
        return codes, extent

    def _make_room(self, tiles: int, codes: Tensor, extent: Tensor) -> None:
        self._codes = self._with_room(self._codes, tiles, codes)
        self._range = self._with_room(self._range, tiles, extent)

    def _with_room(self, buffer: Tensor, rows: int, like: Tensor) -> Tensor:
        """``buffer``, or a larger one like ``like`` [G, any, ...] with its content, for ``rows`` of the second axis."""
        if self.length and rows <= buffer.shape[1]:
            return buffer
        grown = like.new_empty(like.shape[0], max(rows, 2 * buffer.shape[1] if self.length else 0), *like.shape[2:])
        if self.length:
            grown[:, : buffer.shape[1]] = buffer
        return grown

    def _extend(self, kv: KVView) -> None:
        """``extend`` by the kernel."""
        kv_heads, count = self.channels.shape
        planes = (count + 1) // 2 if self.packed else count
        codes, extent = torch.empty(kv_heads, 0, planes, TILE, dtype=torch.uint8), torch.empty(kv_heads, 0, 2, TILE)
        self._make_room(-(-kv.length // TILE), codes, extent)
        channels, table = self.channels.contiguous(), kv.table.int().contiguous()
        cpu._kernels.label_keys(
            cpu._isa_index(),
            torch.get_num_threads(),
            cpu._STORAGE[kv.dtype],
            kv.k_pool.data_ptr(),
            table.data_ptr(),
            kv_heads,
            kv.head_dim,
            kv.block_size,
            channels.data_ptr(),
            count,
            self.bits,
            self._codes.shape[1],
            self.length // TILE * TILE,
            kv.length,
            self._codes.data_ptr(),
            self._range.data_ptr(),
        )
        self.length = kv.length

    def _has_kernel(self, of: Tensor) -> bool:
        return not self.whole and cpu.available() and of.device.type == "cpu" and of.is_contiguous()

    def _run(
        self, picked: Tensor, scores: Tensor | None = None, first: int = 0, last: int = 0, best: Tensor | None = None
    ) -> None:
        picked = picked.contiguous()
        cpu._kernels.label_scores(
            cpu._isa_index(),
            torch.get_num_threads(),
            picked.data_ptr(),
            *picked.shape,
            self._codes.shape[1],
            self.length,
            self.packed,
            self._codes.data_ptr(),
            self._range.data_ptr(),
            0 if scores is None else scores.data_ptr(),
            first,
            last,
            0 if best is None else best.shape[1] - 1,
            0 if best is None else best.data_ptr(),
        )


def _tiles(rows: Tensor) -> Tensor:
    """[G, m, r] -> [G, ceil(m / 16), r, 16]."""
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[1] % TILE))
    return padded.unflatten(1, (-1, TILE)).transpose(2, 3)
