"""MInference's offline search: which pattern, of which size, suits a head best (Jiang et al., 2024, Alg. 1 and 3.2).

Candidates read equally many keys a row, so that they cost alike. Each is run over a calibration prompt as it would run
in use, and the one whose attention output is nearest dense attention's is the head's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.errors import RequestError
from saccade.methods.base import Chunk
from saccade.methods.minference import A_SHAPE, BLOCKS, LINES, SIZES, MInference
from saccade.ops import Call, run
from saccade.selection import Dense

KEYS = 512  # a row, where nothing else is asked for
VERTICAL = (1 / 8, 1 / 4, 1 / 2, 7 / 8)  # shares of the keys that columns get; the rest are distances
SINKS = 1 / 5  # of an a-shape's keys, as the paper's 1024 and 4096


def candidates(keys: int, block_size: int) -> list[tuple[int, int, int, int]]:
    """(kind, columns, distances, blocks) of patterns that read ``keys`` keys a row."""
    sinks = round(SINKS * keys)
    lines = [(LINES, round(share * keys), keys - round(share * keys), 0) for share in VERTICAL]
    return [(A_SHAPE, sinks, keys - sinks, 0), *lines, (BLOCKS, 0, 0, max(1, keys // block_size))]


class PatternSearch:
    """The pattern of each query head whose output has the least squared error, summed over the prompt's rows, ties to
    the earlier candidate: fp32 [heads, 4] as ``candidates`` has them."""

    def __init__(self, keys: int = KEYS) -> None:
        self.method = MInference(pattern="searched")
        self.candidates = torch.tensor(candidates(keys, self.method.block_size), dtype=torch.float32, device="cpu")
        self.keys, self.longest = keys, 0
        self.errors: Tensor | float = 0.0

    @staticmethod
    def shapes(heads: int, kv_heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        return {SIZES: (heads, 4)}

    def add(self, chunk: Chunk) -> None:
        self.longest = max(self.longest, chunk.shape.k_len)
        outputs = []
        for one in self.candidates:
            selection = self.method.of_sizes(chunk, one.expand(chunk.shape.heads, -1))
            outputs.append(run(Call(chunk.q, chunk.kv, selection, chunk.scale, chunk.softcap)).out.double())
        dense = run(Call(chunk.q, chunk.kv, Dense(chunk.shape), chunk.scale, chunk.softcap)).out.double()
        self.errors = self.errors + torch.stack([(out - dense).square().sum((1, 2)) for out in outputs])

    def result(self) -> dict[str, Tensor]:
        if self.longest <= 2 * self.keys:
            raise RequestError(
                f"keys={self.keys} must be below half of the {self.longest} tokens looked at, or no pattern differs "
                "much from reading everything; give a longer text, more --tokens or fewer --keys"
            )
        return {SIZES: self.candidates[torch.as_tensor(self.errors).argmin(0)]}
