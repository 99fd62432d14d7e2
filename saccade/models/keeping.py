"""Layers that keep a state: transformers' own modules, run for each sequence of a packed pass over the engine's states.

Such a module takes rows of one sequence, or a row of each of several, and a cache that it asks for its state. Here the
cache is a view of the engine's tensors (``interface.StateRows``), so what a module writes is there for the next pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from saccade.kv.states import StateFormat
from saccade.machine import sent
from saccade.models.families import Family, attending_layers, keeping_layers
from saccade.models.interface import Segment, StateRows
from saccade.models.keeping_cache import Parts, StateCache, StateShapes
from saccade.models.rebuilt import cache_argument, plain_forward, with_functions
from saccade.ops import slotted
from saccade.ops.slots import Slots


class _Pass(ABC):
    """What a module that keeps a state is given for its cache where a pass has packed rows."""

    def update(self, k: Tensor, v: Tensor, layer_idx: int, **beside: Any) -> tuple[Tensor, Tensor]:
        """What a layer that attends, too, asks of a cache: its new keys and values, which go to the attention
        context. ``beside``: of the pass, which newer versions of transformers hand on."""
        return k, v

    @abstractmethod
    def run(self, inner: Callable[..., Tensor], layer: int, hidden: Tensor, keyword: str) -> Tensor:
        """``inner`` of state layer ``layer`` over ``hidden`` [1, rows, channels]; ``keyword``: of its cache."""


@dataclass(frozen=True, eq=False)
class SlotRows(_Pass):
    """A row of each of many sequences, whose states are in the slots ``reads`` of ``parts`` [state layers, slots, ...],
    and then in ``writes``, int64 [rows] both."""

    parts: Mapping[str, Tensor]
    reads: Tensor
    writes: Tensor

    def run(self, inner: Callable[..., Tensor], layer: int, hidden: Tensor, keyword: str) -> Tensor:
        held = {name: Slots(part[layer], self.reads, self.writes) for name, part in self.parts.items()}
        return inner(hidden_states=hidden[0, :, None], **{keyword: StateCache(held)})[:, 0][None]


@dataclass(frozen=True, eq=False)
class _Pieces(_Pass):
    """One pass: the rows of sequences, ``spans`` as of StateRows, and their states. ``slotted``: kernels find them in
    their slots."""

    states: StateRows
    spans: Sequence[tuple[int, int]]
    slotted: bool
    singles: list[int] = field(init=False)  # sequences of one row, which share a call

    def __post_init__(self) -> None:
        journals = self.states.journals
        singles = [at for at, (_, count) in enumerate(self.spans) if count == 1 and at not in journals]
        object.__setattr__(self, "singles", singles)

    @cached_property
    def rows(self) -> Tensor:
        """int64 [singles], those of ``singles``; ``slots`` are theirs."""
        return self._index([self.spans[at][0] for at in self.singles])

    @cached_property
    def slots(self) -> Tensor:
        return self._index([self.states.slots[at] for at in self.singles])

    @cached_property
    def every(self) -> Tensor:
        """int64 [sequences]: the slots of all."""
        return self._index(list(self.states.slots))

    def _index(self, numbers: list[int]) -> Tensor:
        device = next(iter(self.states.parts.values())).device
        return sent(torch.tensor(numbers, dtype=torch.int64, device="cpu"), device)  # no wait

    def run(self, inner: Callable[..., Tensor], layer: int, hidden: Tensor, keyword: str) -> Tensor:
        parts = {name: part[layer] for name, part in self.states.parts.items()}
        out = torch.empty_like(hidden)
        together = self.singles if self.slotted or len(self.singles) > 1 else []
        if together:
            self._run_singles(inner, parts, hidden, out, keyword)
        for at, (first, count) in enumerate(self.spans):
            if at in together:
                continue
            slot = self.states.slots[at]
            rows, copied = self.states.inner.get(at, (0, 0))
            cache = {keyword: StateCache(self._own(parts, at))}
            for start, stop in ((first, first + rows), (first + rows, first + count)):
                if start < stop:
                    out[:, start:stop] = inner(hidden_states=hidden[:, start:stop], **cache)
                if rows and stop == first + rows:
                    for part in parts.values():
                        part[copied].copy_(part[slot])
            if not self.slotted and (notes := self.states.journals.get(at)) is not None:
                notes.append(partial(_again, inner, parts, hidden[:, first : first + count].clone(), keyword))
        return out

    def _run_singles(
        self, inner: Callable[..., Tensor], parts: Mapping[str, Tensor], hidden: Tensor, out: Tensor, keyword: str
    ) -> None:
        if self.slotted:
            held: dict[str, Tensor | Slots] = {
                name: Slots(part, self.slots, self.slots) for name, part in parts.items()
            }
        else:
            held = {name: part[self.slots] for name, part in parts.items()}
        out[0, self.rows] = inner(hidden_states=hidden[0, self.rows, None], **{keyword: StateCache(held)})[:, 0]
        for name, part in parts.items():
            if isinstance(changed := held[name], Tensor):
                part[self.slots] = changed

    def _own(self, parts: Mapping[str, Tensor], at: int) -> Parts:
        """Those of sequence ``at``."""
        slot = self.states.slots[at]
        if not self.slotted:
            return _only(parts, slot)
        where = self.every[at : at + 1]
        notes = self.states.journals.get(at)
        return {name: Slots(part, where, where, notes) for name, part in parts.items()}


def _only(parts: Mapping[str, Tensor], slot: int) -> dict[str, Tensor]:
    return {name: part[slot : slot + 1] for name, part in parts.items()}


def _again(
    inner: Callable[..., Tensor], parts: Mapping[str, Tensor], hidden: Tensor, keyword: str, slot: int, rows: int
) -> None:
    """Take the state in ``slot`` of a layer's ``parts`` through the first rows of ``hidden`` [1, rows, channels]: where
    no kernel of ours does what a module does with its states, by the whole module."""
    inner(hidden_states=hidden[:, :rows], **{keyword: StateCache(_only(parts, slot))})


class _Split:
    """Stands for ``inner``, the forward of a module that keeps a state, where a pass gives it packed rows."""

    def __init__(self, inner: Callable[..., Tensor], layer: int) -> None:
        self.inner, self.layer = inner, layer

    def __call__(self, hidden_states: Tensor, **asked: Any) -> Tensor:
        for name, given in asked.items():
            if isinstance(given, _Pass):
                return given.run(self.inner, self.layer, hidden_states, name)
        return self.inner(hidden_states, **asked)


def _with_kernels(module: Any) -> Callable[..., Tensor]:
    """The forward of ``module`` with our kernels for what it calls by name; others' modules keep their own."""
    forward = plain_forward(module)
    called = {name: forward.__globals__[name] for name in slotted.NAMES if name in forward.__code__.co_names}
    limits = getattr(module, "time_step_limit", None) or (0.0, float("inf"))
    found = {name: slotted.in_slots(name, one, limits) for name, one in called.items()}
    if not found:
        return module.forward
    return with_functions(module, found)


def _calls_kernels(module: Any) -> bool:
    """Whether all that a module does with its states it does by functions that ``ops.slotted`` has kernels for."""
    inner = module.forward.inner
    called = set(inner.__func__.__code__.co_names) if isinstance(inner, MethodType) else set()
    rules = called.intersection(slotted.NAMES)
    steps = rules & {"torch_recurrent_gated_delta_rule", "mamba2_selective_state_update"}
    chunks = rules & {"torch_chunk_gated_delta_rule", "mamba2_chunk_scan"}
    convolves = {"causal_conv1d_update", "causal_conv1d_fn"} <= rules
    known = getattr(module, "activation", None) in slotted.ACTIVATIONS
    recurs = any("recurrent_state" in name for name in called)
    return convolves and known and (not recurs or (bool(steps) and bool(chunks)))


class KeepingLayers:
    """Which of a decoder's ``layers`` keep a state, and what."""

    def __init__(self, layers: Any, family: Family, config: Any) -> None:
        assert family.keeping is not None, "its layers keep no state"
        self.places = keeping_layers(family, config)
        self._modules = [getattr(layers[place], family.keeping.module) for place in self.places]
        for number, module in enumerate(self._modules):
            if not isinstance(module.forward, _Split):
                module.forward = _Split(_with_kernels(module), number)
        for number, place in enumerate(attending_layers(family, config)):
            attention = getattr(layers[place], family.keeping.attention)
            attention.layer_idx = number  # by which the attention context knows it
        self._channels = config.hidden_size
        self._in_slots = all(map(_calls_kernels, self._modules))

    @cached_property
    def format(self) -> StateFormat:
        """What they keep of a sequence: found by a token through the first of them, which may be without memory."""
        seen = StateShapes()
        # Its convolution's, which all have in the model's dtype: others may be float32, or quantised.
        weight = next(one for one in self._modules[0].parameters() if one.dim() == 3)
        with torch.inference_mode():
            hidden = torch.zeros(1, 1, self._channels, dtype=weight.dtype, device=weight.device)
            split = self._modules[0].forward
            split.inner(hidden_states=hidden, **{cache_argument(split.inner): seen})
        return StateFormat(len(self.places), tuple(seen.parts))

    def pieces(self, states: StateRows | None, segments: Sequence[Segment], device: torch.device) -> _Pieces:
        """What the modules of a pass are given: over ``states``, or over fresh ones of whole sequences."""
        if states is None:
            parts = self.format.empty(len(segments), device)
            for part in parts.values():
                part.zero_()
            states = StateRows(parts, range(len(segments)))
        spans = states.spans or [(one.start, one.length) for one in segments]
        return _Pieces(states, spans, self.in_slots(device))

    def in_slots(self, device: torch.device) -> bool:
        """Whether kernels find the states of a pass in their slots on ``device``."""
        return self._in_slots and slotted.serves(device)
