"""Lists that are usually short, searched by one program each, against a stable sort, under Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from best_cases import best_by_sorting, scores_of

from saccade.ops.triton import batched_best, best_alone
from saccade.ops.triton.batched_best import find_best


@pytest.mark.parametrize("sizes", [{}, {"FEW": 16}, {"SLACK": -0.5}, {"FEW": 8, "ROOM": 32}], ids=str)
@pytest.mark.parametrize("kind", ["plain", "ties", "equal", "one heavy", "infinite"])
def test_short_lists_are_searched_by_a_program_each(kind, sizes, monkeypatch):
    """Scores put aside that fit the smaller room, the larger one and none, and a sample that misleads."""
    for name, size in {"SAMPLE": 64, **sizes}.items():
        monkeypatch.setattr(best_alone, name, size)
    monkeypatch.setattr(batched_best, "SPAN", 128)
    monkeypatch.setattr(batched_best, "SHORT", 0)
    monkeypatch.setattr(batched_best, "parts_of", lambda *_: 2)
    scores = scores_of(kind, 2, 500)
    bounds = [[3, 390, 0, 0, 77], [0, 500, 65, 220, 100], [128, 170, 0, 0, 41], [1, 130, 0, 0, 1]]
    best = find_best(scores, torch.tensor(bounds, dtype=torch.int32), usual=400)
    for entry, (first, last, *others) in enumerate(bounds):
        line = scores[entry // 2, entry % 2]
        taken = best_by_sorting(line, first, last, *others)
        least = line[taken].min()
        bound, spare = best.words[entry, 2182:].tolist()
        bits = (least + 0.0).view(torch.int32)
        assert bound == bits ^ (-1 if bits < 0 else -(2**31))
        assert spare == int((line[taken] == least).sum())
        span = math.ceil(math.ceil((last - first) / 128) / 2) * 128  # of a part
        free = torch.tensor([key for key in range(first, last) if not others[0] <= key < others[1]])
        for part in range(-(-(last - first) // span)):
            own = line[free[(free >= first + part * span) & (free < first + (part + 1) * span)]]
            assert best.taken[entry, part].tolist() == [int((own > least).sum()), int((own == least).sum())]
