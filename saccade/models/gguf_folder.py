"""A GGUF file as a checkpoint folder: its metadata as config and tokenizer, and its weights as a link to the file where
they run as they lie in it, else as plain numbers.

Other blocks are dequantised by the ``gguf`` package, which llama.cpp's authors keep beside the format: it knows all
types that files have (transformers' own reader for some families lacks Q5_0 and Q5_1). Tensors are written one by one,
so that a conversion needs memory for the largest alone.
"""

from __future__ import annotations

import json
import math
import os
import struct
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.errors import ModelError
from saccade.models.cached import cached, digest, find
from saccade.models.checkpoint import GGUF_LINK, SINGLE_FILE, first_line
from saccade.models.families import FAMILIES as SERVED
from saccade.models.gguf_header import GgufHeader, GgufTensor, read_header
from saccade.models.gguf_names import FREQUENCIES, MODEL_TYPES, check_family, config_of, name_of, undone
from saccade.models.quiet import quiet_transformers
from saccade.ops.block_weights import FORMATS

VERSION = 1  # of what this makes of a file
CHUNK = 1 << 24  # weights that are dequantised at once
_HEADS = {".attn_q.": "num_attention_heads", ".attn_k.": "num_key_value_heads"}  # whose rows are whole heads
_STORED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# Vocabularies whose merges were learned on single digits (tokenizer.ggml.pre); transformers cuts them as GPT-2's.
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_PLAIN = (*_DIGITS, "default", "gpt-2")


def folder_name(sha256: str) -> str:
    """Of the folder in the cache that a GGUF file of this SHA-256 becomes as plain numbers."""
    return f"gguf-{sha256[:20]}-{VERSION}"


def runs_as_it_lies(header: GgufHeader) -> bool:
    """Whether a file's model is of the Llama shape and all its matrices are of formats that have a class
    (``ops.block_weights``), one at least in blocks."""
    family = SERVED.get(MODEL_TYPES.get(header.architecture, header.architecture))
    if family is None or family.llama_shape is None:
        return False
    matrices = {tensor.kind for tensor in header.tensors if len(tensor.shape) > 1}
    others = {tensor.kind for tensor in header.tensors if len(tensor.shape) == 1}
    plain = set(_STORED.values())
    return bool(matrices & FORMATS.keys()) and matrices <= plain | FORMATS.keys() and others <= plain


def folder_of(path: str | Path) -> Path:
    """The checkpoint folder of a GGUF file, made in the cache on first use (its key is the file's content). ModelError
    in one line for a file that is broken, in parts, or of a family or type that is not read."""
    try:
        file = Path(path).expanduser()
    except RuntimeError as error:  # the home of nobody
        raise ModelError(f"{path} cannot be opened: {first_line(error)}") from error
    header = read_header(file)
    check_family(header.architecture, str(file))
    sha256 = digest(file)
    if runs_as_it_lies(header):
        return _linked(header, f"{folder_name(sha256)}-config")
    found = find(folder_name(sha256), sums=False)
    return _converted(header, sha256) if found is None else found


def _linked(header: GgufHeader, name: str) -> Path:
    """The folder of config and tokenizer, with a link to the file as it is called now."""
    folder = cached(name, lambda made: write_folder(header, made, weights=False), header.path.name)
    link, file = folder / GGUF_LINK, header.path.absolute()
    if not link.is_symlink() or link.readlink() != file:
        aside = folder / f".{GGUF_LINK}-{os.getpid()}"
        try:
            aside.unlink(missing_ok=True)
            aside.symlink_to(file)
            aside.replace(link)
        except OSError as error:
            raise ModelError(
                f"{link} cannot be made: {error.strerror}; set XDG_CACHE_HOME to a folder of yours"
            ) from error
    return folder


def _converted(header: GgufHeader, sha256: str) -> Path:
    dtype, size = stored_dtype(header), folder_bytes(header)
    warnings.warn(
        f"{header.path.name} holds {header.weights / 1e6:.0f}M weights in {header.path.stat().st_size / 1e6:.0f} MB; "
        f"they are written to the cache as {str(dtype).removeprefix('torch.')}, once: {size / 1e6:.0f} MB there, "
        "and as much memory when they run",
        stacklevel=4,
    )
    return cached(
        folder_name(sha256), lambda folder: write_folder(header, folder), header.path.name, sums=False, need=size
    )


def folder_bytes(header: GgufHeader) -> int:
    """What the folder takes on a disk, about: the weights, and some MB of vocabulary."""
    tokens = len(header.metadata.get("tokenizer.ggml.tokens") or ())
    return header.weights * stored_dtype(header).itemsize + 128 * tokens


def stored_dtype(header: GgufHeader) -> torch.dtype:
    """What weights are stored in: float32 or float16 where most of the file's are, else bfloat16."""
    kinds: Counter[str] = Counter()
    for tensor in header.tensors:
        kinds[tensor.kind] += math.prod(tensor.shape)
    most = kinds.most_common(1)[0][0] if kinds else ""
    return {"F32": torch.float32, "F16": torch.float16}.get(most, torch.bfloat16)


def write_folder(header: GgufHeader, folder: Path, dtype: torch.dtype | None = None, weights: bool = True) -> None:
    """Write config, generation config, tokenizer and ``weights`` (in ``dtype``, by default :func:`stored_dtype`) of a
    GGUF file into ``folder``, which is made."""
    from saccade.models.refusals import refuse_unsupported

    where = str(header.path)
    check_family(header.architecture, where)
    _refuse_no_place(header)
    names = {tensor.name for tensor in header.tensors}
    found = next((tensor for tensor in header.tensors if tensor.name == FREQUENCIES), None)
    config = config_of(header.metadata, names, None if found is None else _whole(header.path, found), where)
    dtype = dtype or stored_dtype(header)
    config["dtype"] = str(dtype).removeprefix("torch.")
    refuse_unsupported(config, where)
    folder.mkdir(parents=True, exist_ok=True)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    for name, content in (("config.json", config), ("generation_config.json", ends)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if header.metadata.get("tokenizer.ggml.model"):
        _write_tokenizer(header, folder)
    _refuse_cut_heads(header, config)
    if weights:
        _write_weights(header, config, dtype, folder / SINGLE_FILE)


def _refuse_cut_heads(header: GgufHeader, config: dict[str, Any]) -> None:
    for one in header.tensors:
        heads = next((config[key] for part, key in _HEADS.items() if part in one.name), None)
        if heads is not None and one.shape[0] % (2 * heads):
            raise ModelError(f"{header.path}: {one.name} has {one.shape[0]} rows, no whole heads; download it again")


def _refuse_no_place(header: GgufHeader) -> None:
    odd = [one.name for one in header.tensors if _target(header, one) is None and one.name != FREQUENCIES]
    if odd:
        some = odd[0] if len(odd) == 1 else f"{odd[0]} and {len(odd) - 1} more"
        raise ModelError(
            f"{header.path}: {some} has no place in a {header.architecture} model that is read from GGUF files; give "
            "the model's safetensors folder, or its hub name"
        )


def _target(header: GgufHeader, tensor: GgufTensor) -> str | None:
    return name_of(header.architecture, tensor.name)


def _write_weights(header: GgufHeader, config: dict[str, Any], dtype: torch.dtype, file: Path) -> None:
    """A safetensors file: the header's length, the header, and the tensors one behind the other."""
    placed = [(_target(header, one), one) for one in header.tensors if one.name != FREQUENCIES]
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, one in placed:
        size = math.prod(one.shape) * dtype.itemsize
        entries[str(name)] = {"dtype": _STORED[dtype], "shape": list(one.shape), "data_offsets": [end, end + size]}
        end += size
    said = json.dumps(entries).encode()
    said += b" " * (-len(said) % 8)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(said)) + said)
        for _, one in placed:
            permuted = any(part in one.name for part in _HEADS)
            parts: Iterable[Tensor] = [_whole(header.path, one)] if permuted else plain(header.path, one)
            for part in parts:
                values = undone(header.architecture, one.name, part, heads, kv_heads).to(dtype).contiguous()
                out.write(values.view(torch.uint8).numpy().data)


def _whole(path: Path, tensor: GgufTensor) -> Tensor:
    return torch.cat(list(plain(path, tensor)))


def plain(path: Path, tensor: GgufTensor) -> Iterator[Tensor]:
    """A tensor's numbers in float32, ``tensor.shape`` in pieces of some rows each."""
    from gguf import GGMLQuantizationType, dequantize

    rows = tensor.shape[0]
    across = math.prod(tensor.shape[1:])
    if tensor.shape[1:] and tensor.nbytes % rows == 0:
        step = max(1, CHUNK // max(1, across))
    else:
        step = rows
    kind, row_bytes = GGMLQuantizationType[tensor.kind], tensor.nbytes // rows
    for first in range(0, rows, step):
        count = min(step, rows - first)
        with path.open("rb") as file:
            file.seek(tensor.offset + first * row_bytes)
            raw = np.fromfile(file, dtype=np.uint8, count=count * row_bytes)
        try:
            values = dequantize(raw.reshape(count, -1) if tensor.shape[1:] else raw, kind)
        except NotImplementedError as error:
            raise ModelError(f"{path}: {tensor.name} is stored as {tensor.kind}, which is not read") from error
        yield torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(count, *tensor.shape[1:])


def _write_tokenizer(header: GgufHeader, folder: Path) -> None:
    """The tokenizer as transformers makes it, its rule for cutting words set right where the file names another."""
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    try:
        with quiet_transformers():
            made: Any = PreTrainedTokenizerFast.from_pretrained(
                header.path.absolute().parent, gguf_file=header.path.name, local_files_only=True
            )
            cut = header.metadata.get("tokenizer.ggml.pre", "default")
            if cut in _DIGITS:
                made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                    [
                        pre_tokenizers.Digits(individual_digits=True),
                        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                    ]
                )
            made.save_pretrained(folder)
    except Exception as error:  # tokenizers and transformers raise many kinds
        raise ModelError(f"the tokenizer of {header.path} cannot be read: {first_line(error)}") from error
