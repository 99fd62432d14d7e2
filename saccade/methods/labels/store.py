"""Labels: a few channels of every key in a few bits, scored instead of the keys themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.methods.fitting import Fitting, Sizes
from saccade.methods.state import MethodState
from saccade.ops import cpu
from saccade.ops.cpu_structs import STORAGE, address, native, pool_of, table_of
from saccade.ops.reference import soft_capped
from saccade.ops.row_words import KeyWords
from saccade.ops.scores import top_places

WHOLE_BITS = 16  # labels are then stored as they are
PACKED_BITS = 4  # up to which two channels share a byte
TILE = 16  # keys whose codes lie together, channel by channel
ALIGNED = 16  # bytes, to a multiple of which kernels take codes and ranges to lie
STEP_KEYS = 8192  # keys labelled at once


@dataclass(eq=False)
class Labels(MethodState):
    """``channels`` int64 [kv_heads, r] of the keys of one sequence and layer, quantized by token over its channels,
    from the least to the greatest, or whole. ``basis`` fp32
    [kv_heads, head_dim, head_dim]: what queries and keys are multiplied by before channels are taken. ``frame`` fp32
    [2, kv_heads, r]: what is taken from each channel of a key, and what it is divided by, before it is quantized. Grows
    with the keys.

    Codes are uint8 [kv_heads, tiles, planes, 16], a plane being one channel or two in 4 bits each, beside fp32
    [kv_heads, tiles, 2, 16], the least value and the step of each key; whole labels are fp32 [kv_heads, keys, r].
    """

    replaced: ClassVar[frozenset[str]] = frozenset({"channels", "basis", "frame"})
    grown: ClassVar[frozenset[str]] = frozenset({"_codes", "_range"})

    channels: Tensor
    bits: int
    basis: Tensor | None = None
    frame: Tensor | None = None
    length: int = 0
    begun: int = 0  # keys that were there when labelling began: those of the prompt that chose the channels
    _codes: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    _range: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))

    def fit(self, sizes: Sizes, fitting: Fitting) -> None:
        """See MethodState."""
        heads, width = sizes.kv_heads, sizes.head_dim
        channels = fitting.tensor("channels", self.channels, torch.int64, heads, None)
        fitting.within("channels", channels, 0, width - 1)
        fitting.within("the number of channels", channels.shape[1], 1, width)
        fitting.within("bits", self.bits, 1, WHOLE_BITS)
        fitting.within("length", self.length, 0, sizes.length)
        fitting.within("begun", self.begun, 0, sizes.length)
        if self.basis is not None:
            fitting.tensor("basis", self.basis, torch.float32, heads, width, width)
        if self.frame is not None:
            fitting.tensor("frame", self.frame, torch.float32, 2, heads, channels.shape[1])
        if not self.length:
            return
        count, tiles = channels.shape[1], -(-self.length // TILE)
        if self.whole:
            fitting.tensor("codes", self._codes, torch.float32, heads, self.length, count)
            return
        planes = (count + 1) // 2 if self.packed else count
        fitting.tensor("codes", self._codes, torch.uint8, heads, tiles, planes, TILE)
        fitting.tensor("ranges", self._range, torch.float32, heads, tiles, 2, TILE)

    def holds(self, length: int) -> bool:
        return length >= self.begun

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self.length = min(self.length, length)

    def saved_fields(self) -> dict[str, Any]:
        """Without the room to grow, and with zeros for the rest of the last tile."""
        tiles, rest = divmod(self.length, 1 if self.whole else TILE)
        parts = super().saved_fields()
        for name in ("_codes", "_range"):
            if parts[name].dim() > 1:  # there are some
                parts[name] = parts[name][:, : tiles + bool(rest)].clone()
                if rest:
                    parts[name][:, -1, :, rest:] = 0
        return parts

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
        self.begun = self.begun or kv.length
        paged = kv.layout()
        readable = kv.dtype in STORAGE and kv.head_dim % 16 == 0 and not kv.in_pieces
        tile, (heads, count) = 1 if self.whole else TILE, self.channels.shape
        if self._serves(paged.k) is None and self.basis is None and readable:
            planes = (count + 1) // 2 if self.packed else count
            codes = torch.empty(heads, 0, planes, TILE, dtype=torch.uint8, device="cpu")
            self._make_room(-(-kv.length // TILE), codes, torch.empty(heads, 0, 2, TILE, device="cpu"))
            paged = kv.paged(self.length // TILE * TILE)
            pool, table = pool_of(paged.k, paged.v, paged.format.dtype), table_of(paged.block_table)
            cpu.kernels().label_keys(pool, table, self.known(kv.length))
            self.length = kv.length
            return
        for start in range(self.length // tile * tile, kv.length, STEP_KEYS):  # a tile begun is made anew
            stop = min(start + STEP_KEYS, kv.length)
            keys = kv.keys(start, stop).float()
            keys = keys if self.basis is None else keys @ self.basis
            labels = keys.gather(2, self.channels[:, None].expand(-1, keys.shape[1], -1))
            if self.frame is not None:
                mean, deviation = self.frame[:, :, None]
                labels = (labels - mean) / deviation
            rows = slice(start // tile, -(-stop // tile))
            if self.whole:
                self._make_room(kv.length, labels)
                self._codes[:, rows] = labels
            else:
                codes, extent = self._quantized(labels)
                self._make_room(-(-kv.length // tile), codes, extent)
                self._codes[:, rows], self._range[:, rows] = codes, extent
            self.length = stop

    def reserve(self, length: int) -> None:
        """Make room for labels of ``length`` keys, some of which there are, and for no more."""
        if self.whole:
            self._make_room(length, self._codes, spare=False)
        else:
            self._make_room(-(-length // TILE), self._codes, self._range, spare=False)

    def words(self) -> KeyWords:
        """For kernels: where the labels lie."""
        self._in_order()
        return KeyWords(
            channels=self.channels.data_ptr(),
            codes=self._codes.data_ptr(),
            ranges=0 if self.whole else self._range.data_ptr(),
            room=self._codes.shape[1],
            frame=0 if self.frame is None else self.frame.data_ptr(),
        )

    def known(self, length: int = 0) -> Any:
        """The same for those of a CPU, a struct LabelKeys: of ``length`` keys they label the last ones, from the tile
        begun on."""
        self._in_order()
        return native.LabelKeys(
            threads=torch.get_num_threads(),
            channel=self.channels.data_ptr(),
            channels=self.channels.shape[1],
            bits=self.bits,
            tiles=self._codes.shape[1],
            first=min(self.length, length) // TILE * TILE,
            last=length,
            codes=address(self._codes),
            range=address(self._range),
            frame=address(self.frame),
        )

    def scores(self, q: Tensor, unit: str = "q_head", query_bits: int = WHOLE_BITS) -> Tensor:
        """``q`` [heads, head_dim], each in ``query_bits`` bits, against every label: fp32 [units, length], unscaled; of
        a ``kv_head`` its group's mean."""
        picked, added = self._framed(self._picked(q, unit, query_bits))
        if self._serves(self._codes) is None:
            scores = torch.empty(picked.shape[0] * picked.shape[1], self.length, device="cpu")
            self._run(picked, scores=scores, added=added)
            return scores
        products = self._products(picked)
        return products if added is None else products.add_(added)

    def block_weights(self, q: Tensor, size: int, scale: float, softcap: float | None, first: int, last: int) -> Tensor:
        """The log of what each of the full blocks ``first .. last - 1`` of ``size`` keys (8 to 1024, a power of two)
        weighs by its labels for each query head: ``q`` [heads, head_dim] -> fp32 [heads, last - first]."""
        if self._serves(self._codes) is None and first < last:
            picked, added = self._framed(self._picked(q, "q_head", WHOLE_BITS))
            out, cap = torch.empty(q.shape[0], last - first, device="cpu"), softcap or 0.0
            self._run(picked, added=added, weights=out, block=size, first=first, last=last, scale=scale, cap=cap)
            return out
        scores = soft_capped(self.scores(q)[:, first * size : last * size] * scale, softcap)
        return torch.logsumexp(scores.unflatten(1, (last - first, size)), -1)

    def _framed(self, picked: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows for labels in a frame, and what is added to all their products [kv_heads * rows, 1]: the means'."""
        if self.frame is None:
            return picked, None
        return picked * self.frame[1, :, None], (picked @ self.frame[0, :, :, None]).flatten(0, 1)

    def _products(self, picked: Tensor) -> Tensor:
        """Of rows [kv_heads, rows, r] with what the labels hold: fp32 [kv_heads * rows, length]."""
        if self.whole:
            return (picked @ self._codes[:, : self.length].transpose(1, 2)).flatten(0, 1)
        codes = self._codes[:, : -(-self.length // TILE)]
        if self.packed:
            codes = torch.stack([codes & 15, codes >> 4], 3).flatten(2, 3)[:, :, : picked.shape[2]]
        low, step = self._range[:, None, : codes.shape[1]].unbind(3)  # [G, 1, tiles, 16]
        products = torch.einsum("ghr,gtrk->ghtk", picked, codes.float())
        products = products * step + picked.sum(-1)[..., None, None] * low
        return products.flatten(2)[..., : self.length].flatten(0, 1)

    def top(self, q: Tensor, unit: str, count: int, first: int, last: int, query_bits: int = WHOLE_BITS) -> Tensor:
        """The ``count`` keys of highest ``scores`` among ``first .. last - 1``, ties to the lower: int32 [units,
        count], rising."""
        if 0 < count < last - first and self._serves(self._codes) is None:
            picked, _ = self._framed(self._picked(q, unit, query_bits))
            best = torch.empty(picked.shape[0] * picked.shape[1], count + 1, dtype=torch.int32, device="cpu")
            self._run(picked, first=first, last=last, best=best)
            return best[:, :count]
        scores = self.scores(q, unit, query_bits)[:, first:last]
        return (top_places(scores, min(count, last - first)) + first).to(torch.int32)

    def _picked(self, q: Tensor, unit: str, bits: int) -> Tensor:
        """The labels' channels of each unit's query, fp32 [kv_heads, rows, r]."""
        grouped = q.float().unflatten(0, (self.channels.shape[0], -1))
        if unit == "kv_head" and bits == WHOLE_BITS:  # the mean of dot products is that of the mean query
            grouped = grouped.mean(1, keepdim=True)
        grouped = grouped if self.basis is None else grouped @ self.basis
        picked = grouped.gather(2, self.channels[:, None].expand(-1, grouped.shape[1], -1))
        if bits == WHOLE_BITS:
            return picked
        low, high = picked.amin(-1, keepdim=True), picked.amax(-1, keepdim=True)
        step = ((high - low) / (2**bits - 1)).clamp(min=torch.finfo(torch.float32).tiny)
        picked = low + step * ((picked - low) / step).round()
        return picked.mean(1, keepdim=True) if unit == "kv_head" else picked

    def _quantized(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """``labels`` [G, m, r] as whole tiles of codes and of (least, step)."""
        low, high = labels.amin(-1, keepdim=True), labels.amax(-1, keepdim=True)
        step = (high - low) / torch.full_like(
            high, 2**self.bits - 1
        )  # by a number torch would round otherwise on a GPU
        codes = ((labels - low) / step.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.uint8)
        codes, extent = (_tiles(part) for part in (codes, torch.cat([low, step], -1)))
        if self.packed:
            codes = torch.nn.functional.pad(codes, (0, 0, 0, codes.shape[2] % 2))
            codes = codes[:, :, 0::2] | (codes[:, :, 1::2] << 4)
        return codes, extent

    def _make_room(self, rows: int, *like: Tensor, spare: bool = True) -> None:
        """Have codes, and ranges if there are any, ``like`` these [G, any, ...] with room for ``rows`` of the second
        axis; ``spare``: and for as many again as there are, as who makes room key by key needs."""
        for name, one in zip(("_codes", "_range"), like):
            buffer = getattr(self, name)
            if self.length and rows <= buffer.shape[1]:
                continue
            twice = 2 * buffer.shape[1] if self.length and spare else 0
            grown = one.new_empty(one.shape[0], max(rows, twice), *one.shape[2:])
            if self.length:
                grown[:, : buffer.shape[1]] = buffer
            setattr(self, name, grown)

    def _in_order(self) -> None:
        """Have what kernels read by address lie as they take it for granted: codes and ranges in lines of 16 bytes."""
        self.channels = self.channels.contiguous()
        self.frame = None if self.frame is None else self.frame.contiguous()
        for name in ("_codes", "_range"):
            part = getattr(self, name)
            if part.data_ptr() % ALIGNED or not part.is_contiguous():
                setattr(self, name, part.clone(memory_format=torch.contiguous_format))

    def _serves(self, of: Tensor) -> str | None:
        """Why the kernels cannot work on ``of``, the keys or the codes; None where they can."""
        if self.whole:
            return "labels that are whole are a plain product"
        if not cpu.available():
            return cpu.why_unavailable()
        if of.device.type != "cpu" or not of.is_contiguous():
            return f"keys and codes must be contiguous and lie on the CPU, not on {of.device}"
        return None

    def _run(self, picked: Tensor, *, added: Tensor | None = None, best: Tensor | None = None, **wanted: Any) -> None:
        """Score ``picked`` by the kernel. ``wanted``: the other fields of its call, tensors by their addresses."""
        picked = picked.contiguous()
        kv_heads, rows, channels = picked.shape
        cpu.kernels().label_scores(
            native.LabelScores(
                threads=torch.get_num_threads(),
                q=picked.data_ptr(),
                kv_heads=kv_heads,
                rows=rows,
                channels=channels,
                tiles=self._codes.shape[1],
                length=self.length,
                packed=self.packed,
                codes=address(self._codes),
                range=address(self._range),
                added=address(added),
                count=0 if best is None else best.shape[1] - 1,
                best=address(best),
                **{name: address(value) if isinstance(value, Tensor) else value for name, value in wanted.items()},
            )
        )


def labels_note(bits: int) -> str:
    """What labels of every channel take (Method.extra_memory)."""
    return f"labels take {bits} bits for each channel of each key, and 8 bytes a key, beside kv_memory"


def _tiles(rows: Tensor) -> Tensor:
    """[G, m, r] -> [G, ceil(m / 16), r, 16]."""
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[1] % TILE))
    return padded.unflatten(1, (-1, TILE)).transpose(2, 3)
