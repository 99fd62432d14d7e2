"""What a GGUF file says of itself: metadata and where its tensors lie, checked before any of them is read.

The format: magic, version, counts, metadata pairs, tensor infos, then the tensors, each at a multiple of the alignment
(ggml's docs/gguf.md). Versions 2 and 3, little-endian. Every count and length is held against the file's end and
against what models have, so a broken file is an error of one line and costs no memory.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from saccade.errors import ModelError, shown
from saccade.files import is_folder
from saccade.models.checkpoint import first_line
from saccade.ops.block_weights import FORMATS

MAGIC = b"GGUF"
VERSIONS = (2, 3)
PLAIN = ("F32", "F16", "BF16")  # types of plain numbers that are read
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# More than any model has, and few enough to be read in a moment.
_MOST_PAIRS, _MOST_TENSORS, _MOST_VALUES, _MOST_BYTES = 1 << 16, 1 << 17, 1 << 23, 1 << 28
_MOST_DIMENSIONS, _MOST_ALIGNMENT = 4, 1 << 20


@dataclass(frozen=True)
class GgufTensor:
    """One tensor. ``shape`` in torch's order; ``kind``: ggml's name of its type, ``Q5_0`` say; ``offset`` and
    ``nbytes`` in ``file``."""

    name: str
    shape: tuple[int, ...]
    kind: str
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Of a whole model. ``path``: its file, or the first of its parts; ``stored``: the bytes of all headers."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]
    stored: bytes

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def weights(self) -> int:
        """Number of weights of all tensors together."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)


def is_gguf(path: Path) -> bool:
    """Whether ``path`` is named as a GGUF file, or is a file that begins as one. No folder is."""
    if path.suffix == ".gguf":
        return not is_folder(path)
    try:
        with path.expanduser().open("rb") as file:
            return file.read(4) == MAGIC
    except (
        OSError,
        ValueError,
        RuntimeError,
    ):  # no file, no permission, no path, no home
        return False


def read_file(path: Path) -> GgufHeader:
    """The header of one file, of a whole model or a part of it. ModelError, in one line, for what is missing, is none,
    or is cut off."""
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise ModelError(f"{path} is no GGUF file: it does not begin with GGUF; download it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parsed(path, data)
    except FileNotFoundError as error:
        raise ModelError(f"there is no file {path}; give a GGUF file, a checkpoint's folder or a hub name") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error


def refuse_unread(header: GgufHeader) -> None:
    """ModelError for a type of numbers that has no class."""
    odd = next((tensor for tensor in header.tensors if tensor.kind not in FORMATS and tensor.kind not in PLAIN), None)
    if odd is not None:
        raise ModelError(
            f"{odd.file}: {shown(odd.name, 80)} is stored as {odd.kind}, which is not read; give a file of "
            f"{', '.join((*FORMATS, *PLAIN))} (llama-quantize --allow-requantize FILE NEW Q4_K_M makes one)"
        )


class _Cursor:
    """Reads values one behind the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.values = data, len(MAGIC), 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise EOFError
        if self.at + count > _MOST_BYTES:
            raise ValueError(f"a header of more than {_MOST_BYTES} bytes")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def count(self, what: str, most: int) -> int:
        found = int(self.number("Q"))
        if found > most:
            raise ValueError(f"{found} {what}, more than {most}")
        return found

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"a value of the unknown type {kind}")
        inner = self.number("I")
        count = self.count("values", _MOST_VALUES - self.values)
        self.values += count
        if inner in _NUMBERS:
            form = f"<{_NUMBERS[inner]}"
            return [one for (one,) in struct.iter_unpack(form, self.take(count * struct.calcsize(form)))]
        if inner != _STRING:  # arrays of arrays are in no file
            raise ValueError(f"an array of {count} values of type {inner}")
        return self.strings(count)

    def strings(self, count: int) -> list[str]:
        """Vocabularies have hundreds of thousands, so this is :meth:`string` without its calls."""
        data, at, end = self.data, self.at, min(len(self.data), _MOST_BYTES)
        found = []
        for _ in range(count):
            if at + 8 > end:
                raise EOFError
            first = at + 8
            at = first + int.from_bytes(data[at:first], "little")
            if at > end:
                raise EOFError
            found.append(str(data[first:at], "utf-8", "replace"))
        self.at = at
        return found


def _parsed(path: Path, data: mmap.mmap) -> GgufHeader:
    cursor = _Cursor(data)
    try:
        version = cursor.number("I")
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise ModelError(f"{path} is GGUF of version {version}; versions {known} are read, little-endian")
        tensors, pairs = cursor.count("tensors", _MOST_TENSORS), cursor.count("pairs of metadata", _MOST_PAIRS)
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = cursor.string()
            if key in metadata:
                raise ValueError(f"{shown(key, 80)} is said twice")
            metadata[key] = cursor.value(cursor.number("I"))
        infos = []
        for _ in range(tensors):
            name, dims = cursor.string(), cursor.number("I")
            if dims > _MOST_DIMENSIONS:
                raise ValueError(f"tensor {shown(name, 80)} of {dims} dimensions")
            shape = tuple(cursor.number("Q") for _ in range(dims))[::-1]
            infos.append((name, shape, cursor.number("I"), cursor.number("Q")))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(f"general.alignment={shown(alignment, 80)}")
    except EOFError as error:
        raise ModelError(f"{path} is cut off after {len(data)} bytes, within its header; download it again") from error
    except (ValueError, struct.error, MemoryError, OverflowError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path} is no GGUF file that can be read: {first_line(error)}; download it again") from error
    start = -(-cursor.at // alignment) * alignment
    found = tuple(_placed(path, info, start, alignment, len(data)) for info in infos)
    refuse_overlaps(path, found)
    return GgufHeader(path, metadata, found, data[: cursor.at])


def _placed(
    path: Path, info: tuple[str, tuple[int, ...], int, int], start: int, alignment: int, size: int
) -> GgufTensor:
    """A tensor with the place of its bytes, which lie in the file."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name, shape, number, offset = info
    try:
        kind = GGMLQuantizationType(number)
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise ModelError(f"{path}: {shown(name, 80)} is stored as ggml's type {number}, which is not read") from error
    if not shape or min(shape) < 1 or shape[-1] % block:
        raise ModelError(f"{path}: {shown(name, 80)} has the shape {shown(shape, 80)}, no whole blocks of {kind.name}")
    nbytes = math.prod(shape) // block * block_bytes
    if start + offset + nbytes > size:
        raise ModelError(
            f"{path} is cut off: {shown(name, 80)} ends at byte {start + offset + nbytes}, the file at {size}; "
            "download it again"
        )
    if offset % alignment:
        raise ModelError(
            f"{path}: {shown(name, 80)} begins at byte {offset}, no multiple of the alignment {alignment}; "
            "download it again"
        )
    return GgufTensor(name, shape, kind.name, path, start + offset, nbytes)


def refuse_overlaps(path: Path, tensors: tuple[GgufTensor, ...]) -> None:
    """ModelError where two tensors have one name, or share bytes of a file."""
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            raise ModelError(f"{path} holds {shown(tensor.name, 80)} twice; download it again")
        names.add(tensor.name)
    for one, other in pairwise(sorted(tensors, key=lambda tensor: (tensor.file, tensor.offset))):
        if one.file == other.file and one.offset + one.nbytes > other.offset:
            raise ModelError(
                f"{path}: {shown(one.name, 80)} and {shown(other.name, 80)} share bytes; download it again"
            )
