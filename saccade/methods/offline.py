"""What is learnt of a model offline: the statistics of a layer's queries and keys over a calibration text."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from saccade.errors import RequestError
from saccade.methods import minference, prehoc
from saccade.methods.base import Chunk
from saccade.methods.minference import A_SHAPE, BLOCKS, LINES, SIZES, MInference
from saccade.ops import Call, run
from saccade.ops.scores import row_logits
from saccade.selection import Dense

KEYS = 512  # a row, where nothing else is asked for
VERTICAL = (1 / 8, 1 / 4, 1 / 2, 7 / 8)  # shares of the keys that columns get; the rest are distances
SINKS = 1 / 5  # of an a-shape's keys, as the paper's 1024 and 4096


class Calibration:
    """Base of what is learnt of one layer, made without arguments. It sees each prefill chunk, in float32, and ends in
    fp32 tensors by name. A method from outside the package brings its kinds as ``calibrations``."""

    of_layers: ClassVar[bool] = False  # whether a reader wants all heads of a layer, where processes share them out
    of_channels: ClassVar[bool] = False  # whether it says something of single channels of keys

    @staticmethod
    def shapes(heads: int, kv_heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Of the result's tensors, by name."""
        raise NotImplementedError

    def add(self, chunk: Chunk) -> None:
        """Look at a chunk of the text, whose keys and those before are there."""
        raise NotImplementedError

    def result(self) -> dict[str, Tensor]:
        """The layer's tensors. RequestError where too little was seen."""
        raise NotImplementedError


def candidates(keys: int, block_size: int) -> list[tuple[int, int, int, int]]:
    """(kind, columns, distances, blocks) of patterns that read ``keys`` keys a row."""
    sinks = round(SINKS * keys)
    lines = [(LINES, round(share * keys), keys - round(share * keys), 0) for share in VERTICAL]
    return [(A_SHAPE, sinks, keys - sinks, 0), *lines, (BLOCKS, 0, 0, max(1, keys // block_size))]


class PatternSearch(Calibration):
    """The pattern of each query head whose output has the least squared error, summed over the prompt's rows, ties to
    the earlier candidate: fp32 [heads, 4] as ``candidates`` has them. Those read equally many keys a row, so that they
    cost alike, and each is run as it would run in use (MInference, Alg. 1 and 3.2)."""

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


class Locality(Calibration):
    """The mean weight of each query head on keys behind the first ``SINKS`` that lie in the first share of the context,
    for every share of ``prehoc.HIDDEN``: fp32 [heads, shares]. Of ``ROWS`` rows of a chunk, spread over the last
    quarter of what is there by then, where a text that says things twice looks far back."""

    ROWS = 64
    of_layers: ClassVar[bool] = True

    def __init__(self) -> None:
        self.rows = 0
        self.sums: Tensor | float = 0.0

    @staticmethod
    def shapes(heads: int, kv_heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        return {prehoc.LOCALITY: (heads, len(prehoc.HIDDEN))}

    def add(self, chunk: Chunk) -> None:
        shape = chunk.shape
        first = min(shape.q_len - 1, max(0, 3 * shape.k_len // 4 - shape.q_start))
        rows = torch.linspace(first, shape.q_len - 1, self.ROWS, device="cpu").long().unique().tolist()
        for row in rows:
            seen = shape.q_start + row + 1
            ask = (row, row + 1, chunk.scale, chunk.softcap)
            scores = [row_logits(chunk.q, chunk.kv, shape, head, *ask)[:, 0, :seen] for head in range(shape.kv_heads)]
            weights = torch.softmax(torch.cat(scores).double(), -1)
            far = [weights[:, prehoc.SINKS : int(share * seen)].sum(-1) for share in prehoc.HIDDEN]
            self.sums = self.sums + torch.stack(far, 1)
        self.rows += len(rows)

    def result(self) -> dict[str, Tensor]:
        return {prehoc.LOCALITY: (torch.as_tensor(self.sums) / self.rows).float()}


# By the name that ``saccade calibrate`` takes; outside.register adds those of methods from outside the package.
KINDS: dict[str, type[Calibration]] = {minference.CALIBRATION: PatternSearch, prehoc.LOCALITY: Locality}
