"""Which part of each tensor of a model a rank has, where several share it out, by the rules of ``models.part_rules``.

Matrices that make heads, or inner channels of an MLP, are cut by their outputs; those that take them in by their
channels, and what the ranks' products make is added up. Where an MLP's width does not divide evenly each rank has all
of it. Matrices in groups of channels are not cut across them: of one that takes parts in a rank has outputs, which
multiply the channels of all ranks. Embedding and head are cut by tokens.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from saccade.errors import ModelError
from saccade.models.families import Family, attending_layers
from saccade.models.head_order import gains, orders_of
from saccade.models.part_matrices import GatheredMatrix, SummedMatrix, VocabularyMatrix
from saccade.models.part_rules import (
    ALIGNED,
    CHANNELS,
    CHANNELS_FIRST,
    EXPERTS,
    HEAD_NORMS,
    INNER,
    OUTPUTS,
    WHOLE,
    Cut,
    Unit,
)
from saccade.models.shards import Share, check_family, check_ranks
from saccade.models.state_parts import SharedStates
from saccade.ops.matrices import Matrix
from saccade.selection.head_part import WHOLE as ALL_HEADS
from saccade.selection.head_part import HeadPart

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
_EXPERT_MATRIX = re.compile(r"\.experts\.(gate|up|down)\.(weight|bias)$")  # as quantised sources call them


class Parts:
    """What the rank of ``share`` has of ``model``, whose modules are whole and may hold nothing. ``grouped``: whether
    the matrix of a name, with so many channels, is stored in groups of them. ModelError for a model that cannot be
    shared out among so many, and for one with a tensor of which nothing says how."""

    def __init__(self, model: Any, family: Family, share: Share, grouped: Callable[[str, int], bool]) -> None:
        check_family(family, share.ranks)
        self.share, self._grouped = share, grouped
        config, decoder = model.config, model.get_decoder()
        self._modules = list(model.named_modules())
        self._shapes = {name: tuple(one.shape) for name, one in model.state_dict().items()}
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(getattr(config, "num_key_value_heads", None) or self.heads)
        named = {id(one): name for name, one in self._modules}
        self.states = SharedStates(decoder, family, config, named, share)
        output = next(one for name, one in self._shapes.items() if self._ends_attention(name))
        self._head_dim = output[1] // self.heads
        check_ranks(share.ranks, self.heads, self.kv_heads, self._head_dim)
        attending = attending_layers(family, config)
        self._attending = {place: layer for layer, place in enumerate(attending)}
        own = HeadPart.of(self.kv_heads, share.rank, share.ranks)
        orders = orders_of(share.densities, len(attending), self.kv_heads, own.parts)
        self.head = replace(own, orders=orders)
        if orders and share.rank == 0:
            self._say_gain(share)
        ends = model.get_output_embeddings(), decoder.get_input_embeddings()
        self._ends = {name for name, one in self._modules if any(one is end for end in ends)}
        for name in self._shapes:
            self._check(name)
        if self.head.copies > 1 and share.rank == 0:
            logger.warning(
                "%d KV heads for tensor_parallel_size=%d: each is stored by %d processes, which attend for all query "
                "heads that read it",
                *(self.kv_heads, share.ranks, self.head.copies),
            )

    @staticmethod
    def _say_gain(share: Share) -> None:
        assert share.densities is not None
        plain, best = gains(share.densities)[share.ranks]
        logger.info(
            "%d processes share KV heads out by what they read under '%s' (saccade tune, %s): the busiest reads %.2f "
            "of their mean, %.2f in the model's order",
            *(share.ranks, share.densities.policy, share.densities.made, best, plain),
        )

    def tensor(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of the tensor ``name``: numbers, or rows of blocks."""
        cut = self.cut(name, tuple(whole.shape))
        return whole if cut is None else cut.of(whole)

    def cut(self, name: str, shape: tuple[int, ...] | None = None) -> Cut | None:
        """What this rank has of the tensor ``name``, of ``shape`` as it is stored; None for all of it."""
        shape = shape or self._shapes[name]
        module, _, kind = name.rpartition(".")
        if _ONE_EXPERT.search(name):  # of which a rank has all
            return None
        if module in self._ends:
            each = -(-shape[0] // self.share.ranks)
            first = self.share.rank * each
            grouped = self.grouped(module)
            return None if grouped else Cut(0, ((min(first, shape[0]), min(first + each, shape[0])),), each)
        if (state := self.states.place_of(name)) is not None:
            return self.states.cut(*state, shape, self.grouped)
        if _EXPERT_MATRIX.search(name):
            own = self.own_experts(self._experts(name))
            rows = shape[0] // self._experts(name)  # of each, where those of all lie below one another
            return Cut(0, ((own.start * rows, own.stop * rows),))
        if module.endswith(".experts"):
            return self._experts_cut(module, kind, shape)
        own_name = module.rpartition(".")[2]
        if kind == "sinks":
            return Cut(0, self._spans(shape[0], ("query",), name))
        if own_name in HEAD_NORMS:
            return Cut(0, self._spans(shape[0], (HEAD_NORMS[own_name],), name)) if len(shape) > 1 else None
        if own_name in OUTPUTS:
            spans = self._spans(shape[0], OUTPUTS[own_name], name)
            return Cut(0, spans) if spans else None
        if own_name in CHANNELS and self._divides(module):
            if self.grouped(module):
                return Cut(0, (self.share.run(shape[0]),))
            if kind != "weight":
                return None
            if CHANNELS[own_name] == "query" and self.head.copies == 1:
                return Cut(1, self._spans(shape[1], ("query",), name))
            return Cut(1, (self.share.run(shape[1]),))
        return None

    def head_at(self, name: str) -> HeadPart:
        """Which heads this rank has in the layer that a module or tensor is of."""
        found = _LAYER.search(name)
        assert found is not None
        return self.head.at(self._attending[int(found[1])])

    def split(self, module: str, whole: Matrix) -> Matrix:
        """This rank's outputs of a matrix in groups that was made whole."""
        cut = self.cut(f"{module}.weight", (whole.outputs, whole.channels))
        if cut is None:
            return whole
        edges = sorted({0, whole.outputs, *(edge for span in cut.spans for edge in span)})
        pieces = dict(zip(edges, whole.split([stop - start for start, stop in pairwise(edges)])))
        runs = [pieces[start] for start, _ in cut.spans]
        return runs[0] if len(runs) == 1 else runs[0].join(runs)

    def matrix(self, module: str, own: Matrix) -> Matrix:
        """What stands for the matrix of ``module``, of which this rank has ``own``."""
        join, rank = self.share.join, self.share.rank
        if _ONE_EXPERT.search(module):
            return own
        if module in self._ends:
            if self.grouped(module):
                return own
            tokens = self._shapes[f"{module}.weight"][0]
            return VocabularyMatrix(own, rank * own.outputs, tokens, join)
        name, copy = module.rpartition(".")[2], (0, 1)
        if (state := self.states.place_of(module)) is not None:
            parts = self.states.by_module[state[0]]
            if parts is None or name not in parts.channels:
                return own
        elif name not in CHANNELS or not self._divides(module):
            return own
        elif CHANNELS[name] == "query":
            copy = rank % self.head.copies, self.head.copies
        if self.grouped(module):
            heads = CHANNELS.get(name) == "query" and state is None
            channels = self.head_at(module) if heads and self.head.orders else ALL_HEADS
            return GatheredMatrix(own, self._shapes[f"{module}.weight"][0], join, copy, channels)
        return SummedMatrix(own if rank == 0 else own.like(own.stored, None), join, copy)

    def grouped(self, module: str) -> bool:
        """Whether the matrix is stored in groups of channels."""
        return self._grouped(module, self._shapes[f"{module}.weight"][-1])

    def own_experts(self, count: int) -> range:
        """Which of ``count`` experts this rank has, where they are matrices of their own."""
        return range(*self.share.run(count, even=False))

    def cuts_experts(self, module: str) -> bool:
        """Whether this rank has a part of experts that lie together."""
        return self._experts_cut(module, "down_proj", self._shapes[f"{module}.down_proj"]) is not None

    def joins_norm(self, module: str) -> bool:
        """Whether a norm is of all heads together."""
        unit = HEAD_NORMS.get(module.rpartition(".")[2])
        if unit is None:
            return False
        heads, (size, *more) = (self.heads if unit == "query" else self.kv_heads), self._shapes[f"{module}.weight"]
        return not more and heads > 1 and size == heads * self._head_dim

    def _experts_cut(self, module: str, kind: str, shape: tuple[int, ...]) -> Cut | None:
        first = f"{module}.down_proj_bias" in self._shapes
        axis, blocks = (CHANNELS_FIRST if first else EXPERTS).get(kind, (0, 0))
        inner = self._shapes[f"{module}.down_proj"][1 if first else 2]
        if not blocks or inner % (ALIGNED * self.share.ranks):
            return None
        return Cut(axis, self._blocks(shape[axis], INNER[:blocks], module))

    def _experts(self, name: str) -> int:
        """How many of the module there are."""
        module = name[: name.rindex(".experts.") + len(".experts")]
        return self._shapes[f"{module}.down_proj"][0]

    def _divides(self, module: str) -> bool:
        unit = CHANNELS[module.rpartition(".")[2]]
        return unit == "query" or self._shapes[f"{module}.weight"][1] % self.share.ranks == 0

    def _spans(self, size: int, units: tuple[Unit, ...], name: str) -> tuple[tuple[int, int], ...]:
        """Of blocks that make up ``size`` outputs of the tensor ``name``; none of an MLP's that does not divide."""
        if units[0] == "inner" and size // len(units) % self.share.ranks:
            return ()
        return self._blocks(size, units, name)

    def _blocks(self, size: int, units: tuple[Unit, ...], name: str) -> tuple[tuple[int, int], ...]:
        counts = {"query": self.heads, "kv": self.kv_heads, "inner": 1}
        each = size // sum(counts[unit] for unit in units)
        spans, start = list[tuple[int, int]](), 0
        for unit in units:
            block = counts[unit] * each
            runs = [self.share.run(block)] if unit == "inner" else self._runs(block, name)
            spans += [(start + first, start + stop) for first, stop in runs]
            start += block
        return tuple(spans)

    def _runs(self, size: int, name: str) -> Iterator[tuple[int, int]]:
        """Of ``size`` outputs, or channels, of all heads those of this rank's: heads that lie side by side are one."""
        own, each = list(self.head_at(name).units(self.kv_heads // self.head.parts)), size // self.kv_heads
        starts = [head for head in own if head - 1 not in own]
        stops = [head + 1 for head in own if head + 1 not in own]
        for start, stop in zip(starts, stops, strict=True):
            yield start * each, stop * each

    def _check(self, name: str) -> None:
        """ModelError for a tensor of a layer of which nothing says what ranks have."""
        found, shape = _LAYER.search(name), self._shapes[name]
        if found is None or len(shape) < 2:
            return
        module, _, kind = found[2].rpartition(".")
        own = module.rpartition(".")[2]
        if (state := self.states.place_of(name)) is not None:
            parts = self.states.by_module[state[0]]
            if parts is None or own in parts.channels or (state[1].rpartition(".")[0] or kind) in parts.outputs:
                return
        known = own in OUTPUTS or own in CHANNELS or own in HEAD_NORMS or own in WHOLE
        if known or (own == "experts" and (kind in EXPERTS or kind in ("gate_up_proj_bias", "down_proj_bias"))):
            return
        raise ModelError(
            f"tensor_parallel_size={self.share.ranks}: nothing says how ranks share {name} out; use "
            "tensor_parallel_size=1"
        )

    def _ends_attention(self, name: str) -> bool:
        module, _, kind = name.rpartition(".")
        unit = CHANNELS.get(module.rpartition(".")[2])
        return kind == "weight" and unit == "query" and self.states.place_of(name) is None
