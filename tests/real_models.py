"""Pretrained models for tests that are marked ``real``, where they are on this machine."""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import struct
from itertools import accumulate
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from saccade.models.cached import is_whole
from saccade.models.catalogue import ENTRIES

FOLDER = Path(os.environ.get("SACCADE_REAL", Path(__file__).parent.parent / "build" / "real"))


def real_model(name: str) -> Path:
    """Its checkpoint folder: of ``make real`` (``$SACCADE_REAL``), or of the cache. The test is skipped without one."""
    made = FOLDER / name
    folder = made if is_whole(made, sums=False) else ENTRIES[name].folder
    if folder is None:
        pytest.skip(f"needs {name}: make real MODELS={name}, or saccade fetch {name}")
    return folder


def real_gguf(name: str) -> Path:
    """Its GGUF file, which ``make real`` keeps. The test is skipped without it."""
    if not (file := FOLDER / f"{name}.gguf").is_file():
        pytest.skip(f"needs {file}: make real MODELS={name}")
    return file


def _beyond(name: str, layers: int) -> bool:
    """Whether a tensor is of a later layer than the first ``layers``."""
    number = re.search(r"(?:^blk|layers)\.(\d+)\.", name)
    return number is not None and int(number[1]) >= layers


def first_layers(folder: Path, to: Path, layers: int) -> Path:
    """The checkpoint's first ``layers`` layers with all that is around them: real numbers in a fraction of the time."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors*"))
    said = json.loads((to / "config.json").read_text())
    said |= {"num_hidden_layers": layers} | {key: said[key][:layers] for key in ("layer_types",) if key in said}
    (to / "config.json").write_text(json.dumps(said))
    stored = {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}
    kept = {name: one for name, one in stored.items() if not _beyond(name, layers)}
    save_file(kept, to / "model.safetensors", {"format": "pt"})
    return to


_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of GGUF's types of numbers
_TEXT, _LIST, _ALIGNMENT = 8, 9, 32


def _end(data: mmap.mmap, kind: int, at: int) -> int:
    """Where a value of a GGUF file's header ends."""
    if kind in _BYTES:
        return at + _BYTES[kind]
    if kind == _TEXT:
        return at + 8 + int.from_bytes(data[at : at + 8], "little")
    kind, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if kind in _BYTES:
        return at + count * _BYTES[kind]
    for _ in range(count):
        at = _end(data, kind, at)
    return at


def first_layers_gguf(file: Path, to: Path, layers: int | None, words: bool = True) -> Path:
    """The same of a GGUF file, whose tensors stay as they are. Without ``words`` it has no tokenizer, of which the gguf
    package's reader takes seconds. None: all layers."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        tensors, keys = struct.unpack_from("<QQ", data, 8)
        at, said, infos = 24, [], []
        for _ in range(keys):
            name_end = _end(data, _TEXT, at)
            name, kind = data[at + 8 : name_end].decode(), int.from_bytes(data[name_end : name_end + 4], "little")
            end = _end(data, kind, name_end + 4)
            assert name != "general.alignment"
            if layers is not None and name.endswith(".block_count"):
                said.append(data[at : end - 4] + struct.pack("<I", layers))
            elif words or not name.startswith("tokenizer."):
                said.append(data[at:end])
            at = end
        for _ in range(tensors):
            name_end = _end(data, _TEXT, at)
            end = name_end + 4 + 8 * int.from_bytes(data[name_end : name_end + 4], "little") + 4
            offset = int.from_bytes(data[end : end + 8], "little")
            infos.append((offset, data[at + 8 : name_end].decode(), data[at:end]))
            at = end + 8
        start = -(-at // _ALIGNMENT) * _ALIGNMENT
        ends = sorted([*(offset for offset, *_ in infos), len(data) - start])
        spans = {offset: ends[ends.index(offset) + 1] - offset for offset, *_ in infos}
        infos = [one for one in infos if layers is None or not _beyond(one[1], layers)]
        places = [0, *accumulate(-(-spans[offset] // _ALIGNMENT) * _ALIGNMENT for offset, *_ in infos)]
        head = data[:8] + struct.pack("<QQ", len(infos), len(said)) + b"".join(said)
        head += b"".join(info + struct.pack("<Q", place) for (*_, info), place in zip(infos, places))
        with to.open("wb") as out:
            out.write(head + bytes(-len(head) % _ALIGNMENT))
            for offset, *_ in infos:
                out.write(data[start + offset : start + offset + spans[offset]] + bytes(-spans[offset] % _ALIGNMENT))
    return to
