"""A model of one GGUF file, or of several that llama.cpp's ``llama-gguf-split`` made of it."""

from __future__ import annotations

import re
from pathlib import Path

from saccade.errors import ModelError, shown
from saccade.models.gguf_header import GgufHeader, GgufTensor, read_file, refuse_overlaps

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def read_header(path: Path) -> GgufHeader:
    """The header of the model in the GGUF file ``path``, which may be any of its parts. ModelError, in one line, for a
    file that is broken and for a part that is missing or is not what its name says."""
    named = _PART.fullmatch(path.name)
    if named is None or int(named[3]) < 2:
        header = read_file(path)
        parts = header.metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise ModelError(
                f"{path} is one of {shown(parts, 40)} parts of a model; name them as llama-gguf-split does, "
                "NAME-00001-of-00003.gguf, side by side, and give one of them"
            )
        return header
    read_file(path)  # so that what is wrong with the file that was given is said first
    count = int(named[3])
    if (absent := next((one for one in _names(path, named[1], count) if not one.is_file()), None)) is not None:
        raise ModelError(f"{path} is a part of a model, and {absent.name} is not beside it; download that part, too")
    headers = []
    for at, file in enumerate(_names(path, named[1], count)):
        header = read_file(file)
        said = header.metadata.get("split.no"), header.metadata.get("split.count")
        if said != (at, count):
            raise ModelError(
                f"{file} is no part {at + 1} of {count}: it says split.no={shown(said[0], 40)}, "
                f"split.count={shown(said[1], 40)}; give the parts the names that they had"
            )
        headers.append(header)
    first = headers[0]
    tensors: tuple[GgufTensor, ...] = tuple(tensor for header in headers for tensor in header.tensors)
    wanted = first.metadata.get("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise ModelError(
            f"the parts of {first.path} hold {len(tensors)} tensors, not the {shown(wanted, 40)} that they had; give "
            "the parts of one model"
        )
    refuse_overlaps(first.path, tensors)
    return GgufHeader(first.path, first.metadata, tensors, b"".join(header.stored for header in headers))


def _names(path: Path, stem: str, count: int) -> list[Path]:
    return [path.with_name(f"{stem}-{at:05d}-of-{count:05d}.gguf") for at in range(1, count + 1)]
