"""The KV of one sequence outside any storage: saved whole or as rows, and taken in again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.errors import SaccadeError, shown, whole_number
from saccade.kv.blocks import BlockManager
from saccade.kv.format import VERSION, KVFormat
from saccade.kv.grouped_sequence import open_kv
from saccade.kv.row_formats import AUTO, CODED
from saccade.kv.sequence import SequenceKV
from saccade.kv.summaries import KINDS, kept_dtype, parts_of
from saccade.kv.view import KVView


@dataclass(frozen=True)
class SavedKV:
    """``tensors``: ``k`` and ``v`` [layers, kv_heads, length, head_dim] (``k`` alone where values are channels of keys,
    and ``value_dim`` among the numbers), and kept summaries under
    ``summary/<layer>/<kind>/<block size>``. ``metadata``: version, layers, kv_heads, head_dim and length, numbers, and
    dtype, a name; a SavedKV can be written as any format of named tensors."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]

    def check(self, pool: BlockManager) -> None:
        """Raise SaccadeError unless ``pool`` can take this in. Block sizes may differ."""
        # where nothing is written of them
        plain: dict[str, Any] = {"k_rows": AUTO.name, "v_rows": AUTO.name, "value_dim": None, "others": []}
        plain |= {"turned": False, "balanced": False}
        stored, own = plain | self.metadata, plain | described(pool)
        others = own.pop("others")  # last: what differs in the first group as well is better said by its name
        for name, here in [*own.items(), ("others", others)]:
            if stored.get(name) != here:
                raise SaccadeError(
                    f"saved KV has {name}={stored.get(name)!r}, but this storage has {here!r}{_way_out(name, stored)}"
                )


def described(pool: BlockManager) -> dict[str, Any]:
    """What two stores must have in common for KV to go from one to the other."""
    first, *others = (_described(one.format, one.layers) for one in pool.groups)
    return first | ({"others": others} if others else {})


def _described(format: KVFormat, layers: int) -> dict[str, Any]:
    return {
        "version": VERSION,
        "layers": layers,
        "kv_heads": format.kv_heads,
        "head_dim": format.head_dim,
        "dtype": str(format.dtype).removeprefix("torch."),
        **{name: rows.name for name, rows in (("k_rows", format.k), ("v_rows", format.v)) if rows is not AUTO},
        **({"row_width": format.k.width(format.head_dim)} if format.k.coded else {}),
        **{name: True for name in ("turned", "balanced") if getattr(format, name)},
        **({"value_dim": format.value_dim} if format.joined else {}),
    }


def _way_out(name: str, stored: Mapping[str, Any]) -> str:
    """Which settings of an engine read what is ``stored``, where ``name`` is what differs; nothing for a name that no
    setting is."""
    rows, turned, dtype = (shown(stored.get(one), 40) for one in ("k_rows", "turned", "dtype"))
    if name in ("k_rows", "v_rows", "turned"):
        return f"; kv_dtype={rows} with kv_rotate={turned} reads it"
    return f"; dtype={dtype} reads it" if name == "dtype" else ""


def save_kv(kv: SequenceKV) -> SavedKV:
    """All that is stored, as copies on the storage's device. SaccadeError within a step, or where a block is not
    resident."""
    length, tensors = kv.between_steps("saved"), dict[str, Tensor]()
    for number, part in enumerate(kv.parts):
        rows = {name: torch.stack(own) for name, own in _parts(_views(part), 0, length)}
        tensors |= _of_group(number, rows | part.known.save())
    return SavedKV(tensors, described(kv.pool) | {"length": length})


def load_kv(pool: BlockManager, saved: SavedKV) -> SequenceKV:
    """A sequence of ``pool`` with what was saved. Raises SaccadeError where it does not fit the pool's format or
    layers, CapacityError, taking nothing, where the pool is short."""
    saved.check(pool)
    length: Any = saved.metadata.get("length")
    if not whole_number(length, 0):
        raise SaccadeError(f"saved KV has length={shown(length, 40)}, which is no number of tokens")
    given = [_in_group(number, saved.tensors) for number in range(len(pool.groups))]
    rows = [_rows(one, group.format, group.layers, length) for one, group in zip(given, pool.groups)]
    for one, group in zip(given, pool.groups):
        check_summaries(one, group.format, group.layers, length)
    kv = open_kv(pool)
    kv.reserve(length)
    device = pool.storage.device
    for part, (keys, values), one in zip(kv.parts, rows, given):
        for layer, (k, v) in enumerate(zip(keys, values)):
            part.append(layer, *_sent(k, v, device))
        part.known.load(one, device)
    return kv


def copy_rows(kv: SequenceKV, start: int, stop: int) -> dict[str, Tensor]:
    """Tokens ``start .. stop - 1`` as copies on the host: ``k`` and ``v`` [layers, kv_heads, stop - start, head_dim],
    and under ``summary/<kind>/<block size>`` what is known of the full blocks that lie there [layers, blocks, parts,
    kv_heads, head_dim]; those of another group of layers than the first under its number, as ``1/k``."""
    tensors: dict[str, Tensor] = {}
    for number, part in enumerate(kv.parts):
        rows = {name: torch.stack(own).cpu() for name, own in _parts(_views(part), start, stop)}
        tensors |= _of_group(number, rows | part.known.rows(start, stop))
    return tensors


def _of_group(number: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As they are called among those of all groups."""
    return {f"{number}/{name}" if number else name: one for name, one in tensors.items()}


def _in_group(number: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The other way round."""
    if not number:
        return {name: one for name, one in tensors.items() if not name[0].isdigit()}
    start = f"{number}/"
    return {name.removeprefix(start): one for name, one in tensors.items() if name.startswith(start)}


def _views(kv: SequenceKV) -> list[KVView]:
    return [kv.view(layer) for layer in range(kv.layers)]


def _parts(views: Sequence[KVView], start: int, stop: int) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """What is stored of tokens ``start .. stop - 1``, by name, of all layers."""
    return zip("kv", zip(*(view.format.stored(*view.stored(start, stop)) for view in views)))


def append_rows(kv: SequenceKV, tensors: Mapping[str, Tensor], count: int | None = None) -> None:
    """Append what :func:`copy_rows` gave of the tokens that follow, ``count`` of them where it is known. CapacityError,
    changing nothing, where the pool is short; SaccadeError for rows of another shape or type."""
    start, found = kv.length, list[tuple[SequenceKV, dict[str, Tensor], tuple[Tensor, Tensor]]]()
    for number, part in enumerate(kv.parts):
        given, format = _in_group(number, tensors), part.pool.format
        rows = _rows(given, format, part.layers, count)
        count = rows[0].shape[2]
        check_summaries(given, format, part.layers, count, by_layer=False)
        found.append((part, given, rows))
    kv.reserve(start + (count or 0))
    device = kv.pool.storage.device
    for part, given, (k, v) in found:
        for layer in range(part.layers):
            part.append(layer, *_sent(k[layer], v[layer], device))
        part.known.append_rows(given, start, device)


def _rows(tensors: Mapping[str, Tensor], format: KVFormat, layers: int, count: int | None) -> tuple[Tensor, Tensor]:
    """Keys and values of ``count`` tokens, of any number for None. SaccadeError where they are none of this format."""
    k = tensors.get("k")
    v = k if format.joined else tensors.get("v")
    if k is None or v is None or k.dim() != 4:
        raise SaccadeError("stored rows have no keys and values [layers, kv_heads, tokens, head_dim]")
    for part, rows in zip((k, v), format.parts):
        expected = (layers, format.kv_heads, k.shape[2] if count is None else count, rows.width(format.head_dim))
        if part.dtype != rows.dtype(format.dtype):
            named = CODED[part.dtype].name if part.dtype in CODED else "auto' or 'bf16"
            raise SaccadeError(
                f"stored rows are {part.dtype}, not {rows.dtype(format.dtype)}: this engine has "
                f"kv_dtype={rows.name!r}; kv_dtype='{named}' would read them"
            )
        if part.shape != expected:
            raise SaccadeError(f"stored rows have the shape {list(part.shape)}, not {list(expected)}")
    return k, v


def _sent(k: Tensor, v: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    there = k.to(device)
    return there, there if v.data_ptr() == k.data_ptr() else v.to(device)


def check_summaries(
    tensors: Mapping[str, Tensor], format: KVFormat, layers: int, tokens: int, by_layer: bool = True
) -> None:
    """SaccadeError where a summary among ``tensors`` is none of so many tokens. ``by_layer``: one a layer, as
    :func:`save_kv` has them, or of all layers."""
    for name, made in tensors.items():
        if not name.startswith("summary/"):
            continue
        parts = name.split("/")[1:]
        layer = parts.pop(0) if by_layer and parts else "0"
        kind, size = parts if len(parts) == 2 else ("", "")
        named = kind in KINDS and all(one.isascii() and one.isdecimal() and len(one) < 10 for one in (layer, size))
        if not named or int(layer) >= layers or int(size) < 1:
            raise SaccadeError(f"stored summaries have an unknown name: {shown(name, 80)}")
        shape = list(made.shape if by_layer else made.shape[1:])
        wanted = [parts_of(kind, int(size), format.head_dim), format.kv_heads, format.head_dim]
        right = made.dim() == (4 if by_layer else 5) and shape[1:] == wanted
        if not right or shape[0] > tokens // int(size) or (not by_layer and made.shape[0] != layers):
            raise SaccadeError(f"stored summaries {name} of {tokens} tokens have the shape {list(made.shape)}")
        if made.dtype != kept_dtype(kind, format.dtype):
            raise SaccadeError(f"stored summaries {name} are {made.dtype}, not {kept_dtype(kind, format.dtype)}")
