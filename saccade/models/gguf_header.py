"""What a GGUF file says of itself: metadata and where its tensors lie, checked before any of them is read.

The format: magic, version, counts, metadata pairs, tensor infos, then the tensors, each at a multiple of the alignment
(ggml's docs/gguf.md). Versions 2 and 3, little-endian. Every length is held against the file's end, so a broken file is
an error of one line and costs no memory.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.errors import ModelError, shown
from saccade.files import is_folder
from saccade.models.checkpoint import first_line

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class GgufTensor:
    """One tensor. ``shape`` in torch's order; ``kind``: ggml's name of its type, ``Q5_0`` say; ``offset`` and
    ``nbytes`` in the file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    path: Path
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]

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
    except (OSError, ValueError, RuntimeError):  # a folder, nothing, no permission, no path at all, the home of nobody
        return False


def read_header(path: Path) -> GgufHeader:
    """The header of a GGUF file. ModelError, in one line, for what is missing, is none, is cut off, or is a part."""
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


class _Cursor:
    """Reads values one behind the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 4

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise EOFError
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"a value of the unknown type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner in _NUMBERS:
            form = f"<{_NUMBERS[inner]}"
            return [one for (one,) in struct.iter_unpack(form, self.take(count * struct.calcsize(form)))]
        if inner != _STRING or count > len(self.data):  # arrays of arrays are in no file
            raise ValueError(f"an array of {count} values of type {inner}")
        return [self.string() for _ in range(count)]


def _parsed(path: Path, data: mmap.mmap) -> GgufHeader:
    cursor = _Cursor(data)
    try:
        version = cursor.number("I")
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise ModelError(f"{path} is GGUF of version {version}; versions {known} are read, little-endian")
        tensors, pairs = cursor.number("Q"), cursor.number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.number("I"))
        infos = []
        for _ in range(tensors):
            name, dims = cursor.string(), cursor.number("I")
            if dims > 8:
                raise ValueError(f"tensor {shown(name, 80)} of {dims} dimensions")
            shape = tuple(cursor.number("Q") for _ in range(dims))[::-1]
            infos.append((name, shape, cursor.number("I"), cursor.number("Q")))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment={shown(alignment)}")
    except EOFError as error:
        raise ModelError(f"{path} is cut off after {len(data)} bytes, within its header; download it again") from error
    except (ValueError, struct.error, MemoryError, OverflowError) as error:
        raise ModelError(f"{path} is no GGUF file that can be read: {first_line(error)}; download it again") from error
    _refuse_part(path, metadata)
    start = -(-cursor.at // alignment) * alignment
    found = tuple(_placed(path, info, start, len(data)) for info in infos)
    return GgufHeader(path, metadata, found)


def _placed(path: Path, info: tuple[str, tuple[int, ...], int, int], start: int, size: int) -> GgufTensor:
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
    return GgufTensor(name, shape, kind.name, start + offset, nbytes)


def _refuse_part(path: Path, metadata: dict[str, Any]) -> None:
    named, parts = _PART.search(path.name), metadata.get("split.count", 1)
    if named or (isinstance(parts, int) and parts > 1):
        part = int(named[1]) if named else int(metadata.get("split.no", 0)) + 1
        raise ModelError(
            f"{path} is part {part} of {int(named[2]) if named else parts} of a split GGUF file; join them with "
            "llama.cpp's llama-gguf-split --merge, and give the whole"
        )
