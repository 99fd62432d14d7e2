"""Records: named tensors and plain data in one file, written whole, read with care.

A record is a safetensors file. Its metadata holds the data as JSON and a checksum of every part, so that what was torn,
flipped or written by somebody else is known before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.errors import RequestError
from saccade.files import written_whole

VERSION = 1
_KEY = "saccade.record"


@dataclass
class Record:
    """``tensors``, contiguous, on the CPU; ``data``, as JSON can hold it; ``damaged``: tensors that were stored, but
    cannot be read or are not what was written."""

    kind: str
    data: Any
    tensors: dict[str, Tensor] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)


def write_record(path: Path, record: Record) -> None:
    """Write ``record`` to ``path``, readable by its owner alone, in place of what is there. RequestError where the
    system refuses."""
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in record.tensors.items()}
    body = {"version": VERSION, "kind": record.kind, "checksums": _checksums(tensors), "data": record.data}
    text = json.dumps(body)
    with written_whole(path, record.kind) as aside:
        aside.touch(mode=0o600)
        save_file(tensors, aside, {_KEY: text, "checksum": _digest(text.encode())})
        descriptor = os.open(aside, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_record(path: Path, kind: str) -> Record:
    """What :func:`write_record` wrote. RequestError that says why where there is none of this kind, or its data is not
    what was written; tensors that are not are ``damaged`` and left out."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            if _KEY not in metadata:
                raise RequestError(f"{path} is no {kind}: it was not written by saccade")
            body = _checked_body(path, kind, metadata)
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
    found = _checksums(tensors)
    damaged += [name for name in tensors if found[name] != body["checksums"][name]]
    whole = {name: tensor for name, tensor in tensors.items() if name not in damaged}
    return Record(kind, body["data"], whole, sorted(damaged))


def _checked_body(path: Path, kind: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    text = metadata[_KEY]
    if _digest(text.encode()) != metadata.get("checksum"):
        raise RequestError(f"{path} is damaged: its description is not what was written")
    body: dict[str, Any] = json.loads(text)
    if body["version"] != VERSION:
        raise RequestError(f"{path} is a record of version {body['version']}; this build reads version {VERSION}")
    if body["kind"] != kind:
        raise RequestError(f"{path} is a {body['kind']}, not a {kind}")
    return body


def _checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Of each tensor's bytes, some at a time: hashing leaves other threads alone."""
    with ThreadPoolExecutor(max_workers=max(1, min(8, torch.get_num_threads()))) as pool:
        return dict(zip(tensors, pool.map(_tensor_digest, tensors.values())))


def _tensor_digest(tensor: Tensor) -> str:
    return _digest(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
