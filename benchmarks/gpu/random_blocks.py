"""Random weights in blocks of a format, about as large as a trained model's: mean 0, a standard deviation of some 0.02.

Codes, and the factors of scales, are random bytes. Scales are powers of two, what is taken off a weight is the middle
of its codes times its scale: weights of random minima have a mean as large as their deviation, by which a layer's
outputs grow with its channels instead of their root, and logits of a deep model are no numbers.
"""

from __future__ import annotations

import torch

from saccade.ops.block_weights import FORMATS, BlockMatrix

# By format: at which byte of a block a float16 begins, and what it is.
SCALES = {
    "Q4_0": {0: 2**-8},
    "Q4_1": {0: 2**-8, 2: -7.5 * 2**-8},
    "Q5_0": {0: 2**-9},
    "Q5_1": {0: 2**-9, 2: -15.5 * 2**-9},
    "Q8_0": {0: 2**-12},
    "Q4_K": {0: 2**-13, 2: 7.5 * 2**-13},
    "Q5_K": {0: 2**-14, 2: 15.5 * 2**-14},
    "Q6_K": {208: 2**-16},
}


def random_blocks(
    name: str,
    outputs: int,
    channels: int,
    device: torch.device | str = "cuda",
    generator: torch.Generator | None = None,
) -> BlockMatrix:
    """A matrix as a file would hold it, ``channels`` whole blocks; drawn by ``generator``, which is of ``device``, or
    torch's own. KeyError for a format without scales here."""
    source, scales = FORMATS[name], SCALES[name]
    size = outputs, channels // source.block, source.block_bytes
    blocks = torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=generator)
    for at, value in scales.items():
        blocks[:, :, at : at + 2] = torch.tensor([value], dtype=torch.float16, device=device).view(torch.uint8)
    if name in ("Q4_K", "Q5_K"):  # 6 bits of each group's minimum: those of its scale
        blocks[:, :, 8:12] = blocks[:, :, 4:8]
        low = blocks[:, :, 12:16] & 15
        blocks[:, :, 12:16] = low | low << 4
    return source(blocks.flatten(1))
