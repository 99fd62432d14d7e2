"""GPTQ (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2023) as
AutoGPTQ and GPTQModel store it: codes of 4 or 8 bits, 8 or 4 channels a word."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.errors import shown
from saccade.models.packed_format import (
    FLOATS,
    PackedError,
    PackedFormat,
    Stored,
    demand,
    group_size,
    groups,
    number,
    sizes,
    unpacked,
)
from saccade.ops.group_weights import by_groups
from saccade.ops.matrices import Matrix

VERSIONS = {"gptq": 1, "gptq_v2": 2}


def formats(config: Mapping[str, Any]) -> Callable[[str], PackedFormat]:
    """See ``packed_config.READERS``. GPTQModel's ``dynamic`` has numbers of its own for modules by name."""
    kind = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    kind = "marlin" if config.get("is_marlin_format") else kind
    if kind not in VERSIONS:
        raise PackedError(
            f"checkpoint_format={shown(kind, 40)} is not read, {' and '.join(VERSIONS)} are: convert it with GPTQModel"
        )
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(isinstance(one, Mapping) for one in dynamic.values()):
        raise PackedError("dynamic gives no numbers by names of modules")
    for pattern in dynamic:
        _compiled(pattern)

    def read(own: Mapping[str, Any]) -> Gptq:
        symmetric = bool(own.get("sym", False))
        return Gptq(number(own, "bits", None, (4, 8)), group_size(own), VERSIONS[kind], symmetric)

    def of(module: str) -> PackedFormat:
        for pattern, own in dynamic.items():
            if not pattern.startswith("-:") and _compiled(pattern).match(module):
                return read({**config, **own})
        return whole

    whole = read(config)
    return of


def _compiled(pattern: Any) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix("+:").removeprefix("-:"))
    except (re.error, AttributeError) as error:
        raise PackedError(f"dynamic: {shown(pattern, 40)} is no pattern of names") from error


@dataclass(frozen=True)
class Gptq(PackedFormat):
    """``qweight`` int32 [channels * bits / 32, outputs], ``qzeros`` int32 [groups, outputs * bits / 32], less 1 in
    ``version`` 1, ``scales`` [groups, outputs], and ``g_idx`` int32 [channels], each one's group, where channels were
    quantised in another order (desc_act)."""

    bits: int
    group: int
    version: int
    symmetric: bool
    name = "GPTQ"
    parts = "qweight", "qzeros", "scales"
    more = ("g_idx",)

    @property
    def laid(self) -> dict[str, tuple[int, int]]:
        """See :class:`PackedFormat`."""
        return {"qweight": (1, 1), "qzeros": (1, 32 // self.bits), "scales": (1, 1)}

    @property
    def meaning(self) -> str:
        """See :class:`PackedFormat`."""
        return f"gptq {self.bits} {self.version}"

    def shape(self, stored: Mapping[str, Stored]) -> torch.Size:
        """See :class:`PackedFormat`."""
        rows, outputs = sizes(stored, "qweight", "I32")
        channels = rows * 32 // self.bits
        count = groups(channels, self.group)
        demand(stored, "qzeros", ("I32",), (count, outputs * self.bits // 32))
        demand(stored, "scales", FLOATS, (count, outputs))
        if outputs * self.bits % 32:
            raise PackedError(f"{outputs} outputs do not fill words of 32 bits")
        if "g_idx" in stored:
            demand(stored, "g_idx", ("I32",), (channels,))
        return torch.Size((outputs, channels))

    def matrix(self, tensors: Mapping[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> Matrix:
        """See :class:`PackedFormat`."""
        weight = tensors["qweight"].t().contiguous().view(torch.uint8)
        words = tensors["qzeros"]
        if self.version == 1:  # a whole word at once, as GPTQModel, which reads and writes both, takes them
            words = words + (0x11111111 if self.bits == 4 else 0x01010101)
        zeros = unpacked(words, self.bits).t().contiguous()
        if self.symmetric and bool((zeros != 1 << self.bits - 1).any()):
            raise PackedError(
                "qzeros are not those of sym=true; correct sym, or checkpoint_format, in quantization_config"
            )
        scales = tensors["scales"].t().contiguous()
        return by_groups(weight, scales, zeros, self.bits, bias, self.group, tensors.get("g_idx"))
