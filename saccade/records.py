"""Records: named tensors and plain data in one piece, written whole, read with care.

A record is what a safetensors file holds, in a file of its own or as bytes that some store keeps. Its metadata has the
data as JSON and a checksum of every part, so that what was torn, flipped or written by another program is known before
it is used.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from saccade.errors import RequestError, shown, whole_number
from saccade.files import written_whole
from saccade.machine import no_room

VERSION = 2
READ = (1, 2)  # version 1 has checksums by BLAKE2b
_KEY = "saccade.record"
_LONGEST = 100 * 2**20  # bytes of a header, as safetensors has it
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass
class Record:
    """``tensors``, contiguous, on the CPU; ``data``, as JSON can hold it; ``damaged``: tensors that were stored, but
    cannot be read or are not what was written. ``seal``: a checksum of all of it, once it was written or read."""

    kind: str
    data: Any
    tensors: dict[str, Tensor] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    seal: str = ""


def write_record(path: Path, record: Record) -> None:
    """Write ``record`` to ``path``, readable by its owner alone, in place of what is there, whole or not at all.
    RequestError where the system refuses; of a full disk it says how much is to be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors, metadata = _described(record)
    try:
        with written_whole(path, record.kind) as aside:
            aside.touch(mode=0o600)
            try:
                save_file(tensors, aside, metadata)
            except SafetensorError as error:  # it tells the system's errors as text
                raise _system_error(error) from error
            descriptor = os.open(aside, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except RequestError as error:
        cause = error.__cause__
        size = sum(tensor.nbytes for tensor in tensors.values()) + len(metadata[_KEY])
        more = no_room(cause, path.absolute().parent, size) if isinstance(cause, OSError) else ""
        raise RequestError(f"{error}{more}") from cause


def _system_error(error: Exception) -> OSError:
    """The system's error that the text of ``error`` tells of."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    number = int(found[1]) if found else errno.EIO
    return OSError(number, os.strerror(number) if found else str(error).splitlines()[0])


def encode_record(record: Record) -> bytes:
    """What :func:`write_record` writes, as bytes for :func:`decode_record`."""
    from safetensors.torch import save

    return save(*_described(record))


def checksum(content: Any, about: str = "") -> str:
    """Of the bytes of a buffer, and of a text about them: 32 hexadecimal digits of XXH3. It finds what was torn or
    flipped; it is no seal against deliberate changes."""
    digest = xxhash.xxh3_128(content)
    digest.update(about.encode())
    return digest.hexdigest()


def read_record(path: Path, kind: str) -> Record:
    """What :func:`write_record` wrote. RequestError that says why where there is none of this kind, or its data is not
    what was written; tensors that are not are ``damaged`` and left out."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            body = _checked_body(str(path), kind, metadata)
            tensors: dict[str, Tensor] = {}
            damaged = []
            for name in body["checksums"]:
                try:
                    tensors[name] = file.get_tensor(name)
                except SafetensorError:
                    damaged.append(name)
    except FileNotFoundError as error:
        raise RequestError(f"{path} does not exist") from error
    except SafetensorError as error:
        raise RequestError(f"{path} is no {kind}, or is damaged: {str(error).splitlines()[0]}") from error
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}") from error
    return _whole_parts(kind, body, tensors, damaged, metadata["checksum"])


def decode_record(content: Any, kind: str, name: str) -> Record:
    """The record in a buffer, which its tensors share; ``name``: what errors call it. A torn end costs the tensors that
    lay there. Raises as :func:`read_record` does."""
    view = memoryview(content).cast("B")
    length = int.from_bytes(view[:8], "little")
    if len(view) < 8 or length > min(_LONGEST, len(view) - 8):
        raise RequestError(f"{name} is no {kind}, or is damaged: its header is not whole")
    try:
        header = json.loads(bytes(view[8 : 8 + length]))
        metadata = header.pop("__metadata__", {})
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise RequestError(f"{name} is no {kind}, or is damaged: its header is not JSON") from error
    body = _checked_body(name, kind, metadata)
    parts, tensors, damaged = view[8 + length :], {}, []
    for part in body["checksums"]:
        try:
            tensors[part] = _tensor(parts, header[part])
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError):
            damaged.append(part)
    _refuse_overlaps(name, kind, [header[part]["data_offsets"] for part in tensors])
    return _whole_parts(kind, body, tensors, damaged, metadata["checksum"])


def _tensor(parts: memoryview, described: Any) -> Tensor:
    """A tensor as a header describes it. KeyError, TypeError, ValueError or RuntimeError where it is not there."""
    (start, stop), shape, dtype = described["data_offsets"], described["shape"], _DTYPES[described["dtype"]]
    if not 0 <= start <= stop <= len(parts):
        raise ValueError("it lies behind the end")
    if start == stop:  # frombuffer takes no empty ones
        return torch.empty(0, dtype=dtype, device="cpu").reshape(shape)
    return torch.frombuffer(parts[start:stop], dtype=torch.uint8).view(dtype).reshape(shape)


def _refuse_overlaps(name: str, kind: str, spans: list[list[int]]) -> None:
    """RequestError where two tensors share bytes: one of them would change with the other."""
    held = sorted(span for span in spans if span[0] < span[1])
    if any(before[1] > after[0] for before, after in pairwise(held)):
        raise RequestError(f"{name} is no {kind}, or is damaged: parts of it overlap")


def _described(record: Record) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors as they are written, and the metadata."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in record.tensors.items()}
    body = {"version": VERSION, "kind": record.kind, "checksums": _checksums(tensors), "data": record.data}
    text = json.dumps(body)
    record.seal = _digest(text.encode())
    return tensors, {_KEY: text, "checksum": record.seal}


def _whole_parts(kind: str, body: dict[str, Any], tensors: dict[str, Tensor], damaged: list[str], seal: str) -> Record:
    found = _checksums(tensors, body["version"])
    damaged += [name for name in tensors if found[name] != body["checksums"][name] or not _is_sound(tensors[name])]
    whole = {name: tensor for name, tensor in tensors.items() if name not in damaged}
    return Record(kind, body["data"], whole, sorted(damaged), seal)


def _is_sound(tensor: Tensor) -> bool:
    """Whether truth values are 0 or 1, as every reader takes them to be."""
    return tensor.dtype != torch.bool or not tensor.numel() or int(tensor.view(torch.uint8).max()) <= 1


def _checked_body(name: str, kind: str, metadata: Any) -> dict[str, Any]:
    if not isinstance(metadata, Mapping) or not isinstance(text := metadata.get(_KEY), str):
        raise RequestError(f"{name} is no {kind}: it was not written by saccade")
    if _digest(text.encode()) != metadata.get("checksum"):
        raise RequestError(f"{name} is damaged: its description is not what was written")
    try:
        body: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} is malformed: its description is not JSON") from error
    if not isinstance(body, dict) or "data" not in body:
        raise RequestError(f"{name} is malformed: its description has no data")
    if not whole_number(version := body.get("version"), READ[0], READ[-1]):
        raise RequestError(
            f"{name} is a record of version {shown(version, 40)}; this build reads up to version {VERSION}"
        )
    if body.get("kind") != kind:
        raise RequestError(f"{name} is a {shown(body.get('kind'), 60).strip(chr(39))}, not a {kind}")
    sums = body.get("checksums")
    if not isinstance(sums, dict) or not all(isinstance(one, str) for one in sums.values()):
        raise RequestError(f"{name} is malformed: its description has no checksums")
    return body


def _checksums(tensors: Mapping[str, Tensor], version: int = VERSION) -> dict[str, str]:
    """Of each tensor's bytes, some at a time: hashing leaves other threads alone."""
    if sum(tensor.nbytes for tensor in tensors.values()) < 2**22:  # too little to be worth threads
        return {name: _of_tensor(tensor, version) for name, tensor in tensors.items()}
    with ThreadPoolExecutor(max_workers=max(1, min(8, torch.get_num_threads()))) as pool:
        return dict(zip(tensors, pool.map(lambda tensor: _of_tensor(tensor, version), tensors.values())))


def _of_tensor(tensor: Tensor, version: int) -> str:
    content = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    if version == 1:
        return _digest(content)  # type: ignore[arg-type]
    return checksum(content, f"{tensor.dtype} {list(tensor.shape)}")


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
