"""Twilight against its definition: Quest's pages, then the fewest of their keys by quantized logits."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import planted_heads

from saccade.errors import PolicyError
from saccade.kv.view import KVView
from saccade.methods import Chunk, Query
from saccade.methods.quest import Quest
from saccade.methods.twilight import Twilight
from saccade.selection import Dense


def problem(n: int = 330, seed: int = 4):
    q, k, v = planted_heads(6, 2, n, seed=seed)
    return q, k, KVView.from_tensors(k, v, shuffle_seed=seed)


def select(method: Twilight, q, view, steps: int = 3):
    """The last of a few steps after a prompt, whose keys the state has to take in one by one."""
    n = view.length
    state = method.begin(Chunk.of(q[:, : n - steps], view.upto(n - steps)))
    for length in range(n - steps + 1, n + 1):
        query = Query.of(q[:, length - 1 : length], view.upto(length))
        selection = method.select_decode(query, state)
    return query, selection


def quantized(keys: torch.Tensor, bits: int) -> torch.Tensor:
    """Every key [m, d] on a grid from its least to its greatest channel."""
    low, high = keys.amin(1, keepdim=True), keys.amax(1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    return low + step * ((keys - low) / step).round()


@pytest.mark.parametrize(
    ("p", "base", "bits", "unit"), [(0.8, 96, 4, "q_head"), (0.95, 0.5, 2, "kv_head"), (0.0, 64, 8, "q_head")]
)
def test_fewest_estimated_keys_of_quests_pages(p, base, bits, unit):
    q, k, view = problem()
    query, selection = select(Twilight(dense_upto=0, p=p, base=base, bits=bits, dense_layers=0, unit=unit), q, view)
    budget = base if base >= 1 else math.ceil(base * 330)
    pages = Quest(budget=budget, dense_layers=0).select_decode(Query.of(q[:, -1:], view), None)
    wanted = []
    for head in range(6):
        listed = pages.mask()[head, 0].nonzero()[:, 0]
        logits = quantized(k[head // 3].float(), bits)[listed] @ q[head, -1].float() / math.sqrt(q.shape[-1])
        weights = torch.softmax(logits.double(), 0)
        order = torch.sort(weights, descending=True, stable=True).indices
        count = int((weights[order].cumsum(0) < p).sum()) + 1
        wanted.append(set(listed[order[:count]].tolist()))
    if unit == "kv_head":
        wanted = [set().union(*wanted[head // 3 * 3 : head // 3 * 3 + 3]) for head in range(6)]
    mask = selection.mask()[:, 0]
    assert [set(row.nonzero()[:, 0].tolist()) for row in mask] == wanted
    assert selection.density() < pages.density()
    assert query.cost.estimated >= 330


def test_p_1_reads_the_pages_and_dense_layers_everything():
    q, _, view = problem()
    _, selection = select(Twilight(dense_upto=0, p=1.0, base=96, dense_layers=0), q, view)
    pages = Quest(budget=96, dense_layers=0).select_decode(Query.of(q[:, -1:], view), None)
    assert selection.mask().equal(pages.mask())
    assert isinstance(select(Twilight(), q, view)[1], Dense)
    everything = select(Twilight(dense_upto=0, p=0.9999999, base=1000, bits=8, dense_layers=0, unit="q_head"), q, view)[
        1
    ]
    assert everything.density() > 0.5


@pytest.mark.parametrize("options", [{"p": 1.5}, {"base": 0}, {"bits": 16}, {"block_size": 10}, {"unit": "layer"}])
def test_bad_options(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        Twilight(**options)
