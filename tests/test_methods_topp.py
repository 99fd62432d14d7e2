"""Exact top-p against its definition: add keys by weight until they hold the share asked for."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import mass_of, planted_heads, run_method

from saccade.errors import PolicyError
from saccade.kv.view import KVView
from saccade.methods import Policy
from saccade.methods.base import Chunk
from saccade.methods.topk import TopK
from saccade.methods.topp import TopP
from saccade.selection import Dense


def problem(n: int = 150, seed: int = 1):
    q, k, v = planted_heads(4, 2, n, seed=seed)
    return q, k, KVView.from_tensors(k, v, shuffle_seed=seed)


def fewest(weights: list[float], p: float, forced: set[int]) -> list[int]:
    chosen, mass = set(forced), sum(weights[i] for i in forced)
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        if i not in chosen and (mass < p or not chosen):
            chosen.add(i)
            mass += weights[i]
    return sorted(chosen)


@pytest.mark.parametrize("unit", ["q_head", "kv_head"])
@pytest.mark.parametrize(("p", "sinks", "local"), [(0.0, 0, 0), (0.3, 0, 0), (0.9, 3, 7), (0.999, 0, 5), (0.0, 2, 1)])
def test_topp_is_the_shortest_list(unit, p, sinks, local):
    q, k, view = problem()
    method = TopP(dense_upto=0, p=p, sinks=sinks, local=local, unit=unit, prefill=True)
    for phase, rows in (("prefill", 150), ("prefill", 9), ("decode", 1)):
        mask = run_method(method, phase, q, view, rows)[2].mask()
        for head in range(4):
            for row in range(0, rows, 11):
                position = 150 - rows + row
                heads = [head] if unit == "q_head" else [head // 2 * 2, head // 2 * 2 + 1]
                logits = q[heads, position].double() @ k[head // 2, : position + 1].double().T / math.sqrt(32)
                weights = torch.softmax(logits, -1).mean(0).tolist()
                forced = {i for i in range(position + 1) if i < sinks or position - i < local}
                assert mask[head, row].nonzero()[:, 0].tolist() == fewest(weights, p, forced)


def test_what_is_read_holds_p_and_no_fewer_keys_would():
    q, k, view = problem(400, seed=2)
    mask = run_method(TopP(dense_upto=0, p=0.9), "decode", q, view, 1)[2].mask()
    assert (mass_of(q[:, -1:], k, mask) >= 0.9).all()
    for head in range(4):
        fewer = int(mask[head].sum()) - 1
        best = run_method(TopK(k=fewer), "decode", q, view, 1)[2].mask()
        assert float(mass_of(q[:, -1:], k, best)[head, 0]) < 0.9


def test_p_1_is_dense_and_every_logit_is_counted():
    q, _, view = problem()
    assert isinstance(TopP(dense_upto=0, p=1.0).select_decode(Chunk.of(q[:, -1:], view), None), Dense)
    chunk = Chunk.of(q[:, -9:], view)
    TopP(dense_upto=0, p=0.5, prefill=True).select_prefill(chunk)
    assert chunk.cost.scored == sum(range(142, 151))
    assert isinstance(TopP(dense_upto=0, p=0.5).select_prefill(chunk), Dense)
    assert Policy.parse("topp(p=0.5, prefill=true)").prefill == TopP(p=0.5, prefill=True)


@pytest.mark.parametrize(
    "options", [{"p": 1.2}, {"p": -0.1}, {"p": True}, {"sinks": -1}, {"local": 0.5}, {"unit": "layer"}, {"prefill": 1}]
)
def test_bad_options(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        TopP(**options)
