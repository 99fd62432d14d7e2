"""Plain weights rounded to integers of 4 or 8 bits by groups of 32 channels as they are loaded: ``quantize="int4"``
and ``"int8"``. Each weight becomes the nearest of its group's values; nothing is fitted to data.

Codes lie between a group's least and greatest weight, and 0, which is the nearest code. Scales are float16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.ops import cpu, fp8
from saccade.ops.group_weights import FORMATS, packed_codes
from saccade.ops.matrices import Matrix
from saccade.ops.planes import FORMATS as PLANES
from saccade.ops.planes import GROUP as ROWS

BITS = {"int4": 4, "int8": 8}
QUANTIZATIONS = *BITS, *fp8.QUANTIZATIONS
CHANNELS = 32  # of a group
PIECE = 1 << 20  # weights that are rounded at once


def rounded(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [n, channels], scales float16 and zeros uint8 [n, groups] of ``weight`` [n, channels], of a multiple
    of 32 channels. SaccadeError where a group's scale is too large for float16."""
    groups = weight.to(torch.float32, copy=True, memory_format=torch.contiguous_format).unflatten(1, (-1, CHANNELS))
    low, high = groups.aminmax(dim=-1)
    low, high = low.clamp_(max=0), high.clamp_(min=0)
    last = (1 << bits) - 1
    scales = ((high - low) / last).half()
    zeros = (-low * _inverse(scales)).round_().clamp_(0, last)
    if bool(scales.isinf().any()):
        raise SaccadeError(f"weights as large as {float(weight.abs().max()):.3g} cannot be rounded to {bits} bits")
    codes = groups.mul_(_inverse(scales)[..., None]).round_().add_(zeros[..., None]).clamp_(0, last)
    return codes.to(torch.uint8).flatten(1), scales, zeros.to(torch.uint8)


def _inverse(scales: Tensor) -> Tensor:
    """float32, 0 where a scale is 0: all weights of the group are 0 then, or too small for float16."""
    wide = scales.float()
    return torch.where(wide == 0, wide, 1 / wide)


def rounded_matrix(
    weight: Tensor, bits: int, bias: Tensor | None = None, read: Callable[[Tensor], None] = lambda part: None
) -> Matrix:
    """``weight`` [outputs, channels] of any float type in integers, on its device; on a CPU whose kernels read planes,
    in these. A piece of rows is rounded at a time; ``read`` is given it then."""
    outputs, channels = weight.shape
    name = f"INT{bits}_{CHANNELS}"

    def pieces() -> Iterator[Sequence[Tensor]]:
        for part in weight.split(max(ROWS, PIECE // channels // ROWS * ROWS)):
            yield rounded(part, bits)
            read(part)

    if weight.device.type == "cpu" and cpu.available():
        return PLANES[name].of_pieces(outputs, channels, pieces(), bias)
    made = [(packed_codes(codes, bits), scales, zeros) for codes, scales, zeros in pieces()]
    whole, scales, zeros = (torch.cat(same) for same in zip(*made))
    return FORMATS[name](whole, scales, zeros, bias)
