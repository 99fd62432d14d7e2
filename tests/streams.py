"""A sequence that decodes with one method over real KV, token by token or with rows that may be rejected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from helpers import planted_heads
from torch import Tensor

from saccade.kv import BlockManager, KVFormat, KVStorage
from saccade.kv.sequence import SequenceKV
from saccade.kv.view import KVView
from saccade.methods import state as states_of
from saccade.methods.base import Chunk, Method, Query
from saccade.methods.history import StateHistory
from saccade.ops import Call, Result, run

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 32
PROMPT = 330
ROOM = PROMPT + 30  # tokens of a text


def pool() -> BlockManager:
    """Room for one sequence."""
    storage = KVStorage(KVFormat(torch.float32, KV_HEADS, HEAD_DIM, 32), LAYERS * (ROOM // 32 + 2))
    return BlockManager(storage, LAYERS)


@cache
def text(seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values of ``ROOM`` tokens in every layer."""
    return [planted_heads(HEADS, KV_HEADS, ROOM, HEAD_DIM, seed=100 * seed + layer) for layer in range(LAYERS)]


@dataclass
class Step:
    """What one row read in each layer, and what came of it."""

    masks: list[Tensor] = field(default_factory=list)
    outs: list[Tensor] = field(default_factory=list)
    lses: list[Tensor] = field(default_factory=list)

    def add(self, ran: Result) -> None:
        self.masks.append(ran.used.mask())
        self.outs.append(ran.out)
        self.lses.append(ran.lse)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Step)
        mine, theirs = (one.masks + one.outs + one.lses for one in (self, other))
        return len(mine) == len(theirs) and all(torch.equal(a, b) for a, b in zip(mine, theirs))


class Stream:
    """Tokens come from a text by its seed and their place in the sequence."""

    def __init__(self, method: Method, prompt: int = 0) -> None:
        """After a prefill of the text ``prompt``."""
        self.method = method
        self.kv = SequenceKV(pool())
        self.kv.reserve(ROOM)
        self.states: list[Any] = []
        self.watched: list[Any] = []
        for layer in range(LAYERS):
            q, k, v = (part[:, :PROMPT] for part in text(prompt)[layer])
            self.kv.append(layer, k, v)
            chunk = self._at(layer, q, Chunk)
            if method.watches:
                chunk = replace(chunk, past=method.watch(chunk))
            self.watched.append(chunk.past)
            tail = q[:, -max(1, method.tail_rows) :]
            self.states.append(method.begin(self._at(layer, tail, Chunk, past=chunk.past)))

    @property
    def length(self) -> int:
        return self.kv.length

    def step(self, source: int) -> Step:
        """Decode the next token, of the text ``source``."""
        step = Step()
        for layer in range(LAYERS):
            self._store(layer, source, self.kv.view(layer).length, 1)
            step.add(self._row(layer, source, self.kv.view(layer).length, self.states))
        return step

    def draft(self, source: int, count: int, history: StateHistory) -> list[Step]:
        """Decode ``count`` tokens as a step with several rows does: all rows of a layer before the next layer. The
        states are marked after every row."""
        start, steps = self.length, [Step() for _ in range(count)]
        for layer in range(LAYERS):
            self._store(layer, source, start, count)
            for length, step in enumerate(steps, start=start + 1):
                seen = history.at(length, LAYERS)
                seen[layer] = self.states[layer]
                step.add(self._row(layer, source, length, seen))
                history.mark_layer(length, layer, self.states[layer])
        return steps

    def rollback(self, length: int, history: StateHistory) -> None:
        self.states = history.rollback(length, LAYERS)
        self.kv.truncate(length)
        self.kv.reserve(ROOM)

    def copied(self, how: Callable[[Any], Any]) -> Stream:
        """Another sequence with the same tokens, its states made of these by ``how``."""
        other = object.__new__(Stream)
        other.method, other.watched = self.method, self.watched
        other.kv = SequenceKV(pool())
        other.kv.reserve(ROOM)
        for layer in range(LAYERS):
            view = self.kv.view(layer)
            other.kv.append(layer, view.keys(), view.values())
        other.states = how(self.states)
        return other

    def _store(self, layer: int, source: int, start: int, count: int) -> None:
        self.kv.append(layer, *(part[:, start : start + count] for part in text(source)[layer][1:]))

    def _row(self, layer: int, source: int, length: int, states: list[Any]) -> Result:
        """Select, attend and observe for the row that sees ``length`` keys."""
        q = text(source)[layer][0][:, length - 1 : length]
        query = self._at(layer, q, Query, self.kv.view(layer).upto(length), step=length - PROMPT - 1, states=states)
        state = states[layer]
        selection = self.method.select_decode(query, state)
        ran = run(Call.of(q, query.kv, selection, want_weights=self.method.wants_weights))
        self.method.observe(query, ran.used, ran.weights, state)
        return ran

    def _at(self, layer: int, q: Tensor, kind: type[Chunk], view: KVView | None = None, **rest: Any) -> Any:
        rest.setdefault("states", self.states)
        view = self.kv.view(layer) if view is None else view
        return kind.of(q, view, layer=layer, layers=LAYERS, **rest)


def same(one: Any, other: Any) -> bool:
    """Whether two states, or lists of them, are saved alike, bit for bit."""
    (tensors, data), (others, theirs) = states_of.save(one), states_of.save(other)
    return (
        data == theirs
        and tensors.keys() == others.keys()
        and all(part.dtype == others[name].dtype and torch.equal(part, others[name]) for name, part in tensors.items())
    )
