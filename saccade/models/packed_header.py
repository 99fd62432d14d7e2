"""Which tensors of safetensors files make a quantised matrix together, found in the headers before any is read."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from saccade.errors import ModelError, SaccadeError
from saccade.models.packed_config import Scheme
from saccade.models.packed_format import PackedError, PackedFormat, Stored

# By one of these a module's weight is told from plain numbers; "weight" where its type is one of the others.
_CODES = "qweight", "weight_packed", "blocks"
_KINDS = "I8", "F8_E4M3"
# Of keys, values and attention, which are not quantised here.
_UNUSED = "k_scale", "v_scale", "q_scale", "prob_scale", "k_zero_point", "v_zero_point"
_EXPERT = re.compile(r"(.+\.experts)\.(\d{1,6})\.(gate|up|down)_proj\.weight$")
_STACKED = re.compile(r"(.+\.experts)\.(gate_up|down)_proj\.(weight|bias)$")
_MIXTRAL = re.compile(r"(.+)\.block_sparse_moe\.experts\.(\d{1,6})\.(w[123])\.(\w+)$")
_OPEN = re.compile(r"(.+\.experts\.(?:gate_up|down)_proj)_(blocks|scales|bias)$")
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}


@dataclass(frozen=True)
class PackedHeader:
    """``formats``: of the modules that are stored quantised, by their names. ``parts``: their tensors, by suffixes.
    ``shapes``: of all weights, theirs as ``.weight``. ``nbytes``: of weights, by how they are stored.
    ``experts``: the modules that make up the matrices of all experts together, by their name. ``stored_names``:
    what files call the tensors, by ours."""

    formats: dict[str, PackedFormat]
    parts: dict[str, tuple[str, ...]]
    shapes: dict[str, torch.Size]
    nbytes: dict[str, int]
    experts: dict[str, list[str]]
    stored_names: dict[str, str]

    @property
    def names(self) -> str:
        """Of the formats."""
        return ", ".join(sorted({one.name for one in self.formats.values()}))


def packed_header(
    scheme: Scheme, stored: Mapping[str, Stored], where: str, names: Mapping[str, str] = {}
) -> PackedHeader:
    """Of the tensors ``stored`` in files, which call some otherwise (``names``). ModelError for parts that are
    missing, left over, or of other shapes than the config says, and where it says of no tensor how it is stored."""
    tensors: defaultdict[str, dict[str, Stored]] = defaultdict(dict)
    called: dict[str, str] = {}  # modules as the config calls them
    for name, one in stored.items():
        module, _, part = renamed(name).rpartition(".")
        tensors[module][part] = one
        called[module] = names.get(name, name).rpartition(".")[0]
    formats: dict[str, PackedFormat] = {}
    parts: dict[str, tuple[str, ...]] = {}
    shapes: dict[str, torch.Size] = {}
    nbytes: Counter[str] = Counter()
    for module, held in tensors.items():
        rest = {part: one for part, one in held.items() if part not in _UNUSED}
        if any(part in held for part in _CODES) or ("weight" in held and held["weight"].kind in _KINDS):
            try:
                format = _whole(scheme.format(called[module]), held)
                shapes[f"{module}.weight"] = format.shape(held)
            except SaccadeError as error:
                raise ModelError(f"{where}: {module}: {error}") from error
            formats[module], own = format, {*format.parts, *format.more}
            parts[module] = tuple(part for part in held if part in own)
            nbytes[format.name] += sum(_nbytes(held[part]) for part in parts[module])
            rest = {part: one for part, one in rest.items() if part not in own}
        for part, one in rest.items():
            name = f"{module}.{part}" if module else part
            if one.kind not in ("F64", "F32", "F16", "BF16"):
                raise ModelError(
                    f"{where}: {name} is stored as {one.kind}, of which its quantization_config says nothing"
                )
            shapes[name] = torch.Size(one.shape)
            nbytes[one.kind] += _nbytes(one)
    if not formats:
        raise ModelError(
            f"{where}: config.json says that weights are quantised ({scheme.method}), but none is stored so; remove "
            "its quantization_config, or give the files that belong to it"
        )
    experts = _together(shapes, where)
    ours = {renamed(name): names.get(name, name) for name in stored}
    return PackedHeader(formats, parts, shapes, dict(nbytes.most_common()), experts, ours)


def renamed(name: str) -> str:
    """A tensor's name by a module of its own: Mixtral's experts have older names, gpt-oss has none."""
    if found := _MIXTRAL.match(name):
        return f"{found[1]}.mlp.experts.{found[2]}.{_PROJECTIONS[found[3]]}.{found[4]}"
    if found := _OPEN.match(name):
        return f"{found[1]}.{found[2]}"
    return name.replace(".block_sparse_moe.gate.", ".mlp.gate.")


def _together(shapes: dict[str, torch.Size], where: str) -> dict[str, list[str]]:
    """The modules of each matrix of all experts; ``shapes`` has those as one, too, in their place."""
    found: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for name in list(shapes):
        shape = shapes[name]
        if len(shape) > 1 and (one := _STACKED.match(name)):  # gpt-oss has gate and up in turns
            del shapes[name]
            parts = ["down"] if one[2] == "down" else ["gate", "up"]
            half = torch.Size((shape[0], shape[1] // len(parts), *shape[2:]))
            shapes.update({f"{one[1]}.{part}.{one[3]}": half for part in parts})
        if one := _EXPERT.match(name):
            found[f"{one[1]}.{one[3]}"][int(one[2])] = name
    for whole, each in found.items():
        sizes = {shapes.pop(name) for name in each.values()}
        if len(sizes) > 1 or sorted(each) != list(range(len(each))):
            raise ModelError(
                f"{where}: {whole}: experts are missing or of several shapes; download the checkpoint again"
            )
        shapes[f"{whole}.weight"] = torch.Size((len(each), *sizes.pop()))
    return {whole: [each[at].removesuffix(".weight") for at in range(len(each))] for whole, each in found.items()}


def _whole(format: PackedFormat, held: Mapping[str, Stored]) -> PackedFormat:
    absent = [part for part in format.parts if part not in held]
    if absent:
        raise PackedError(f"{absent[0]} is missing of a matrix in {format.name}; download the checkpoint again")
    return format


def _nbytes(one: Stored) -> int:
    return math.prod(one.shape) * _BYTES.get(one.kind, 1)
