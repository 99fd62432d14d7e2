"""LFPS's decode steps on a GPU against the same steps on the host, and the same from run to run."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from helpers import planted_heads

from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Query
from saccade.methods.lfps import LFPS
from saccade.methods.lfps import triton_tables as kernels
from saccade.ops import Call, run
from saccade.selection import Candidates

N, PROMPT = 3000, 2985


def steps(method: LFPS, q, k, v, device: str):
    """(candidates, what was read, out, who rested) of every step, and the state behind the last."""
    q, k, v = (part.to(device) for part in (q, k, v))
    done = []
    whole = KVView.from_tensors(k, v, shuffle_seed=1)
    state = method.begin(Chunk.of(q[:, PROMPT - method.tail_rows : PROMPT], whole.upto(PROMPT)))
    for position in range(PROMPT, N):
        query = Query.of(q[:, position : position + 1], whole.upto(position + 1), step=position - PROMPT)
        selection = method.select_decode(query, state)
        ran = run(Call.of(query.q, query.kv, selection, want_weights=True))
        out = ran.out
        method.observe(query, ran.used, ran.weights, state)
        done.append((selection, ran, out, state.idle))
    return done, state


@pytest.mark.parametrize("options", [{}, {"unit": "kv_head", "rest": None}, {"epsilon": 1.0, "blocks": 0}], ids=str)
def test_steps_are_those_of_the_host(options):
    """Keys at the edge of the best may change places, for the logits that rank them are rounded otherwise."""
    method = LFPS(**{"k": 200, "epsilon": 0.02, **options})
    q, k, v = planted_heads(8, 2, N, 64, 0)
    on_host, _ = steps(method, q, k, v, "cpu")
    on_device, state = steps(method, q, k, v, "cuda")
    for (expected, host, wanted, _), (found, device, out, idle) in zip(on_host, on_device):
        assert device.backend == "triton"
        assert isinstance(found, Candidates)
        moved = found.to(torch.device("cpu"))
        moved.check()
        awake = (~idle.cpu() if idle is not None else torch.ones(8, dtype=torch.bool)).view(found.units, -1)
        for unit in awake.any(1).nonzero()[:, 0].tolist():
            own, theirs = set(moved.listed(unit).tolist()), set(expected.listed(unit).tolist())
            assert len(own ^ theirs) <= 0.03 * len(theirs) + 2
        used, read = device.used.to(torch.device("cpu")).mask(), host.used.mask()
        assert (used ^ read).sum() <= 0.03 * read.sum()
        error = (out.cpu().double() - wanted.double()).norm() / wanted.double().norm()
        assert float(error) < 2e-2
    assert state.tables.vertical.is_cuda
    assert torch.isfinite(state.tables.sums).all()


def test_long_tables_scan_and_learn_the_same_from_run_to_run():
    method = LFPS()
    q, k, v = planted_heads(8, 2, N, 128, 0)
    q, k, v = (part.bfloat16() for part in (q, k, v))
    done, state = steps(method, q, k, v, "cuda")
    _, ran, _, idle = done[-1]
    scans = [kernels.candidates(state.tables, N - 20, N - 30, 0.2, 0, (1, 2), idle) for _ in range(5)]
    assert all(torch.equal(one[2], scans[0][2]) and torch.equal(one[0], scans[0][0]) for one in scans)
    made = []
    for _ in range(5):
        made.append(deepcopy(state.tables))
        kernels.learn(made[-1], ran.used, ran.weights, idle, 0.95)
    assert all(torch.equal(one.slash, made[0].slash) and torch.equal(one.sums, made[0].sums) for one in made)
