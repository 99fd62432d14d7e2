"""A GGUF file as a checkpoint folder: its metadata as config and tokenizer, and a link to the file, whose weights run
as they lie. Fetched models of the catalogue are written as plain numbers instead."""

from __future__ import annotations

import json
import math
import os
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import xxhash

from saccade.errors import ModelError
from saccade.models.cached import cached
from saccade.models.checkpoint import GGUF_LINK, SINGLE_FILE, first_line
from saccade.models.gguf_config import config_of, ends_of
from saccade.models.gguf_header import GgufHeader, refuse_unread
from saccade.models.gguf_names import ROTARY, check_family, name_of
from saccade.models.gguf_parts import read_header
from saccade.models.gguf_tokenizer import write_tokenizer
from saccade.models.gguf_weights import GgufWeights, Mapped, weights_of

VERSION = 3  # of config and tokenizer beside a file that runs as it lies
_SAMPLE = 64  # bytes of either end of a tensor, by which files of equal headers are told apart
_HEADS = {".attn_q.": "num_attention_heads", ".attn_k.": "num_key_value_heads"}  # whose rows are whole heads
_STORED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def folder_of(path: str | Path) -> Path:
    """The folder of config and tokenizer of a GGUF file, with a link to it, made in the cache on first use (its key is
    what the file says of itself, and samples of its tensors). ModelError in one line for a file that is broken, or of a
    family or type that is not read."""
    try:
        file = Path(path).expanduser()
    except RuntimeError as error:  # a user without a home
        raise ModelError(f"{path} cannot be opened: {first_line(error)}") from error
    header = read_header(file)
    folder = cached(f"gguf-{_key(header)}-config-{VERSION}", lambda made: write_config(header, made), file.name)
    link, target = folder / GGUF_LINK, header.path.absolute()
    if not link.is_symlink() or link.readlink() != target:
        aside = folder / f".{GGUF_LINK}-{os.getpid()}"
        try:
            aside.unlink(missing_ok=True)
            aside.symlink_to(target)
            aside.replace(link)
        except OSError as error:
            raise ModelError(
                f"{link} cannot be made: {error.strerror}; set XDG_CACHE_HOME to a folder of yours"
            ) from error
    return folder


def _key(header: GgufHeader) -> str:
    sums, mapped = xxhash.xxh3_128(header.stored), Mapped()
    for tensor in header.tensors:
        stored = mapped.stored(tensor)
        whole = tensor.name in ROTARY  # which the config says
        for part in (stored,) if whole else (stored[:_SAMPLE], stored[-_SAMPLE:]):
            sums.update(part.numpy().data)
    return sums.hexdigest()


def stored_dtype(header: GgufHeader) -> torch.dtype:
    """What plain numbers run in: float32 or float16 where most of the file's are, else bfloat16."""
    kinds: Counter[str] = Counter()
    for tensor in header.tensors:
        kinds[tensor.kind] += math.prod(tensor.shape)
    most = kinds.most_common(1)[0][0] if kinds else ""
    return {"F32": torch.float32, "F16": torch.float16}.get(most, torch.bfloat16)


def described(header: GgufHeader) -> dict[str, Any]:
    """config.json of a GGUF file. ModelError for what is not read, or cannot be."""
    from saccade.models.refusals import refuse_unsupported

    where = str(header.path)
    check_family(header.architecture, where)
    refuse_unread(header)
    _refuse_no_place(header)
    mapped = Mapped()
    rotary = {one.name: mapped.numbers(one) for one in header.tensors if one.name in ROTARY}
    config = config_of(header.metadata, {tensor.name for tensor in header.tensors}, rotary, where)
    config["dtype"] = str(stored_dtype(header)).removeprefix("torch.")
    refuse_unsupported(config, where)
    for one in header.tensors:
        heads = next((config[key] for part, key in _HEADS.items() if part in one.name), None)
        if heads is not None and one.shape[0] % (2 * heads):
            raise ModelError(f"{header.path}: {one.name} has {one.shape[0]} rows, no whole heads; download it again")
    return config


def write_config(header: GgufHeader, folder: Path) -> dict[str, Any]:
    """Write config, generation config and tokenizer of a GGUF file into ``folder``, which is made; returns the
    config."""
    config = described(header)
    folder.mkdir(parents=True, exist_ok=True)
    ends = ends_of(header.metadata, config, str(header.path))
    for name, content in (("config.json", config), ("generation_config.json", ends)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if header.metadata.get("tokenizer.ggml.model"):
        write_tokenizer(header, folder)
    return config


def _refuse_no_place(header: GgufHeader) -> None:
    odd = [one.name for one in weights_of(header) if name_of(header.architecture, one.name) is None]
    if odd:
        some = odd[0] if len(odd) == 1 else f"{odd[0]} and {len(odd) - 1} more"
        raise ModelError(
            f"{header.path}: {some} has no place in a {header.architecture} model that is read from GGUF files; give "
            "the model's safetensors folder, or its hub name"
        )


def write_plain(header: GgufHeader, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write a GGUF file as a checkpoint of plain numbers in ``dtype`` (by default :func:`stored_dtype`) into
    ``folder``: a safetensors file is its header's length, the header, and the tensors one behind the other."""
    config = write_config(header, folder)
    dtype = dtype or stored_dtype(header)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    source = GgufWeights(header, *heads, torch.device("cpu"), dtype)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in source.shapes.items():
        size = shape.numel() * dtype.itemsize
        entries[name] = {"dtype": _STORED[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    said = json.dumps(entries).encode()
    said += b" " * (-len(said) % 8)
    with (folder / SINGLE_FILE).open("wb") as out:
        out.write(struct.pack("<Q", len(said)) + said)
        for name in source.shapes:
            out.write(source.plain(name).contiguous().view(torch.uint8).numpy().data)
