"""The weights that a step hands to methods that learn from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from engine_helpers import GREEDY, LAYERS
from helpers import KINDS, call, generator, random_selection

from saccade.errors import SaccadeError
from saccade.methods.base import Method
from saccade.methods.policy import Policy
from saccade.ops import Call, run
from saccade.ops.weights import selected_weights
from saccade.selection import Shape, Tokens

BACKENDS = ("auto", "reference")


def by_head(weights: torch.Tensor, used) -> torch.Tensor:
    """The documented layout spelt out: [heads, k_len]."""
    if not isinstance(used, Tokens):
        return weights
    spelt = torch.zeros(used.shape.heads, used.shape.k_len)
    per_unit = used.shape.heads // used.units
    for unit, positions in enumerate(used.lists()):
        first = int(used.offsets[unit])
        for at, position in enumerate(positions.tolist()):
            for row in range(per_unit):
                spelt[unit * per_unit + row, position] = weights[row, first + at]
    return spelt


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("units", [1, 2, 4])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_weights_are_the_softmax_over_what_was_read(backend, kind, units, softcap):
    q, k, _, view = call(4, 2, 1, 150, 32, seed=units)
    selection = random_selection(kind, Shape.suffix(4, 2, 1, 150), units, generator(units))
    ran = run(Call.of(q, view, selection, softcap=softcap, want_weights=True), backend)
    mask = ran.used.mask()[:, 0]
    scores = (q.double() @ k.double().repeat_interleave(2, 0).transpose(1, 2))[:, 0] / math.sqrt(32)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    expected = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1).nan_to_num(0.0)
    torch.testing.assert_close(by_head(ran.weights, ran.used).double(), expected, atol=1e-5, rtol=1e-4)


def test_nobody_who_does_not_ask_pays():
    q, _, _, view = call(4, 2, 1, 150, 32, seed=0)
    ran = run(Call.of(q, view))
    assert ran.weights is None


def test_more_rows_than_one_are_refused():
    q, _, _, view = call(4, 2, 5, 150, 32, seed=0)
    with pytest.raises(SaccadeError, match="q_len=5"):
        run(Call.of(q, view, want_weights=True))
    with pytest.raises(SaccadeError, match="q_len=5"):
        selected_weights(q, view, random_selection("dense", Shape.suffix(4, 2, 5, 150), 1, generator(0)), q, scale=1.0)


@dataclass(frozen=True)
class Listener(Method):
    """Reads every second key and its own, and keeps the weights it is told."""

    name: ClassVar[str] = "listener"
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    wants_weights: ClassVar[bool] = True
    heard: list = field(default_factory=list, compare=False)

    def select_decode(self, query, state):
        return Tokens.from_lists(
            query.shape, [torch.cat([torch.arange(0, query.shape.k_len - 1, 2), query.shape.rows])]
        )

    def observe(self, query, selection, weights, state):
        self.heard.append((query.layer, selection, weights))


def test_the_engine_gives_them_to_methods_that_ask(llm, prompts):
    listener = Listener()
    llm.generate(prompts[0], GREEDY, policy=Policy(decode=listener))
    assert len(listener.heard) == LAYERS * (GREEDY.max_tokens - 1)
    for _, selection, weights in listener.heard:
        assert weights.shape == (selection.shape.heads, selection.indices.numel())
        torch.testing.assert_close(weights.sum(1), torch.ones(selection.shape.heads), atol=1e-4, rtol=0)
