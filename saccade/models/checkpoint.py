"""What is in a checkpoint folder: its config as written and its safetensors headers, checked before loading.

Everything here fails with a one-line ModelError that names the file and the way out.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from saccade.errors import ModelError, shown, whole_number
from saccade.models.families import FAMILIES
from saccade.models.packed_config import READ, scheme_of
from saccade.models.packed_format import Stored
from saccade.models.packed_header import PackedHeader, packed_header
from saccade.models.text_part import text_names, text_of

if TYPE_CHECKING:
    from saccade.models.gguf_header import GgufHeader

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
GGUF_LINK = "model.gguf"  # to the file whose weights run as they lie in it (gguf_folder)

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")  # in the name of a tensor

# Storage types that hold weights as plain numbers.
_FLOAT_STORAGE = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True)
class Checkpoint:
    """A checked folder: ``config`` is config.json as written, of a multimodal checkpoint that of its language model
    (``models.text_part``), ``stored_dtype`` what most parameters are stored in, ``shapes`` those of all weights by
    name, ``names`` what files call the tensors, ``whole`` config.json as it is. ``gguf``: what the GGUF file that
    holds the weights in place of safetensors files says of itself. ``packed``: how those of a quantization_config are
    stored."""

    path: Path
    config: dict[str, Any]
    stored_dtype: torch.dtype
    shapes: dict[str, torch.Size]
    gguf: GgufHeader | None = None
    packed: PackedHeader | None = None
    names: dict[str, str] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Check the folder's files and read its config; raises ModelError for anything missing or broken."""
    folder = check_folder(path)
    whole = read_config(folder)
    config = text_of(whole)
    check_generation_config(folder)
    if (folder / GGUF_LINK).is_symlink() and not (folder / SINGLE_FILE).exists():
        from saccade.models.gguf_parts import read_header
        from saccade.models.gguf_weights import stored_shapes

        file = (folder / GGUF_LINK).readlink()
        if not file.exists():
            raise ModelError(
                f"{file}, whose config and tokenizer {folder} holds, has gone; give the GGUF file where it is now"
            )
        header = read_header(file)
        return Checkpoint(folder, config, torch.bfloat16, stored_shapes(header), header, whole=whole)
    scheme = scheme_of(config, f"{folder} ({config['model_type']})")
    headers = read_headers(weight_files(folder))
    names = text_names(whole, headers)
    stored = {own: headers[name] for own, name in names.items()}
    if scheme is not None:
        packed = packed_header(scheme, stored, str(folder), names)
        plain = {name: one for name, one in stored.items() if name in packed.shapes and one.kind in _FLOAT_STORAGE}
        return Checkpoint(folder, config, _most(plain), packed.shapes, None, packed, names, whole)
    for name, one in stored.items():
        if one.kind not in _FLOAT_STORAGE:
            raise ModelError(
                f"{folder}: {name} is stored as {one.kind}, but config.json has no quantization_config that says what "
                f"that means; give a checkpoint with its own config.json, in {READ} or of plain numbers"
            )
    shapes = {name: torch.Size(one.shape) for name, one in stored.items()}
    return Checkpoint(folder, config, _most(stored), shapes, names=names, whole=whole)


def of_first_layers(checkpoint: Checkpoint, layers: int) -> Checkpoint:
    """The checkpoint as if it ended behind its first ``layers`` layers. ModelError where it has no more anyway."""
    config = {**checkpoint.config, "num_hidden_layers": layers}
    there = checkpoint.config.get("num_hidden_layers")
    family = FAMILIES.get(checkpoint.config["model_type"])
    if family is not None and (family.shares_keys or family.embeds_by_layer):
        raise ModelError(
            f"{checkpoint.path}: layers={shown(layers)}: layers of {family.model_type} share keys, and a table of what "
            "each is told of a token; leave layers out"
        )
    if not isinstance(there, int) or not 1 <= layers <= there:
        raise ModelError(f"{checkpoint.path}: layers={shown(layers)} must be from 1 to {there}, which the model has")

    def kept(name: str) -> bool:
        number = _LAYER.search(name)
        return number is None or int(number[1]) < layers

    shapes = {name: shape for name, shape in checkpoint.shapes.items() if kept(name)}
    names = {name: own for name, own in checkpoint.names.items() if kept(name)}
    return replace(checkpoint, config=config, shapes=shapes, names=names)


def open_config(path: str | Path) -> Checkpoint:
    """What config.json alone says of a checkpoint whose weights may not be there; raises as :func:`open_checkpoint`."""
    folder = check_folder(path)
    whole = read_config(folder)
    return Checkpoint(folder, text_of(whole), torch.bfloat16, {}, whole=whole)


def check_folder(path: str | Path) -> Path:
    """``path`` as a folder that looks like a checkpoint, or a ModelError."""
    try:
        folder = Path(path).expanduser()
        exists = folder.exists()
    except (OSError, RuntimeError) as error:  # a name too long, no permission, an unknown ~user
        raise ModelError(f"model folder {str(path)[:100]} cannot be opened: {first_line(error)}") from error
    if not exists:
        raise ModelError(
            f"model folder {folder} does not exist; give a folder holding config.json and safetensors, "
            "or a hub name such as Qwen/Qwen3-8B"
        )
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is a file; give the folder that holds config.json and the safetensors files, or a GGUF file"
        )
    if (folder / "adapter_config.json").exists():
        raise ModelError(f"{folder} holds a PEFT adapter; give its base model here, and the adapter as --lora or lora=")
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as a dict with a ``model_type``, or a ModelError."""
    file = folder / "config.json"
    if not file.is_file():
        gguf = next(iter(sorted(folder.glob("*.gguf"))), None)
        way_out = (
            "give the folder of a Hugging Face checkpoint" if gguf is None else f"give the GGUF file itself, {gguf}"
        )
        raise ModelError(f"{folder} has no config.json; {way_out}")
    config = _read_json(file)
    if not isinstance(config, dict):
        raise ModelError(f"{file} is not a JSON object")
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise ModelError(f"{file} names no model_type, so the model's family is unknown")
    _check_ends(file, config)
    return config


def check_generation_config(folder: Path) -> None:
    """ModelError if generation_config.json is there but broken: transformers would quietly go on without it."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return
    config = _read_json(file)
    if not isinstance(config, dict):
        raise ModelError(f"{file} is not a JSON object")
    _check_ends(file, config)


def _check_ends(file: Path, config: dict[str, Any]) -> None:
    eos = config.get("eos_token_id")
    if eos is not None and not all(whole_number(token, -1) for token in (eos if isinstance(eos, list) else [eos])):
        raise ModelError(f"{file}: eos_token_id must be a token id or a list of them, got {shown(eos, 80)}")


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Sampling settings of the folder's generation_config.json, by the names of SamplingParams, as vLLM reads them;
    empty without that file. ModelError if it is broken."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    check_generation_config(folder)
    config = _read_json(file)
    names = {name: name for name in ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")}
    names["max_new_tokens"] = "max_tokens"
    return {ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files to load, in transformers' order of preference; ModelError if one or all are absent."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if index.is_file():
        shards = _shards(index)
        absent = [name for name in shards if not (folder / name).is_file()]
        if absent:
            raise ModelError(f"{index} lists {_some(absent)}, not found in the folder; download the checkpoint again")
        return [folder / name for name in shards]
    other = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5") for p in folder.glob(pattern))
    if other:
        raise ModelError(
            f"{folder} has no {SINGLE_FILE}, only {_some(other)}; only safetensors are loaded: convert it with "
            "save_pretrained (safe_serialization is the default)"
        )
    raise ModelError(f"{folder} has no {SINGLE_FILE} and no {INDEX_FILE}; there are no weights to load")


def read_headers(files: list[Path]) -> dict[str, Stored]:
    """Types and shapes of all tensors by name. ModelError for an unreadable file, or without any tensor."""
    stored: dict[str, Stored] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    part = tensors.get_slice(name)
                    stored[name] = Stored(part.get_dtype(), tuple(part.get_shape()))
        except Exception as error:  # safetensors raises its own type, OSError or ValueError
            raise ModelError(
                f"{file} cannot be read: {first_line(error)}; it is truncated or corrupt, download it again"
            ) from error
    if not stored:
        raise ModelError(f"{files[0].parent} holds no tensors")
    return stored


def _most(stored: Mapping[str, Stored]) -> torch.dtype:
    """What most numbers are stored in."""
    sizes: Counter[torch.dtype] = Counter({torch.bfloat16: 0})
    for one in stored.values():
        sizes[_FLOAT_STORAGE[one.kind]] += math.prod(one.shape)
    return sizes.most_common(1)[0][0]


def first_line(error: BaseException) -> str:
    """An error's message as one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _shards(index: Path) -> list[str]:
    table = _read_json(index)
    weights = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(weights, dict) or not weights or not all(isinstance(name, str) for name in weights.values()):
        raise ModelError(f"{index} has no weight_map")
    outside = sorted(name for name in set(weights.values()) if not _is_inside(name))
    if outside:
        raise ModelError(f"{index} lists {shown(outside[0], 80)}, which is no file name inside the folder")
    return sorted(set(weights.values()))


def _is_inside(name: str) -> bool:
    """Whether a file's name stays in its folder. What the file is a link to is the user's own affair."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and name.isprintable()


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ModelError(f"{file} cannot be read as JSON: it is nested too deeply") from None
    except (OSError, ValueError) as error:  # ValueError covers broken JSON and broken UTF-8
        raise ModelError(f"{file} cannot be read as JSON: {first_line(error)}") from error


def _some(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
