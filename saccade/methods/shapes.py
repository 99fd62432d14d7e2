"""Fixed shapes of prefill attention: A-shape (a band with sinks) and tri-shape (the same with dense last rows).

Baselines that look at no score. Decode is dense; ``streaming`` is the A-shape of both phases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from saccade.methods.base import Chunk, Method
from saccade.methods.options import require_whole
from saccade.selection import Band, Dense, Selection, Tri


@dataclass(frozen=True)
class AShape(Method):
    """Row p reads key i iff i < ``sinks`` or p - i < ``window``, prefill only; the defaults are MInference's."""

    name: ClassVar[str] = "a_shape"
    paper: ClassVar[str] = "A-shape, a baseline of MInference, arXiv:2407.02490"
    phases: ClassVar[tuple[str, ...]] = ("prefill",)

    sinks: int = 128
    window: int = 3968

    def __post_init__(self) -> None:
        require_whole("sinks", self.sinks, 0)
        require_whole("window", self.window, 1)

    def reads_all(self, start: int, stop: int) -> bool:
        return stop <= self.sinks + self.window

    def select_prefill(self, chunk: Chunk) -> Selection:
        shape = chunk.shape
        if self.reads_all(shape.q_start, shape.q_start + shape.q_len):
            return Dense(shape)
        return Band(shape, window=self.window, sinks=self.sinks)


@dataclass(frozen=True)
class TriShape(AShape):
    """A-shape whose ``last`` rows read everything, for the question at a prompt's end. TriangleMix uses ``sinks=8,
    window=512, last=128``.

    A chunk does not know what follows it, so with chunked prefill the last rows of every chunk are dense: more work
    than on the whole prompt, never less."""

    name: ClassVar[str] = "tri_shape"
    paper: ClassVar[str] = "Tri-shape, SCBench, arXiv:2412.10319"

    last: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("last", self.last, 0)

    def reads_all(self, start: int, stop: int) -> bool:
        return self.last >= stop - start or super().reads_all(start, stop)

    def select_prefill(self, chunk: Chunk) -> Selection:
        shape = chunk.shape
        if self.reads_all(shape.q_start, shape.q_start + shape.q_len):
            return Dense(shape)
        return Tri(shape, window=self.window, sinks=self.sinks, dense_rows=self.last)
