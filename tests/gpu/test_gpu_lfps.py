"""LFPS's rows on a GPU that recorded steps do not take (audited, drafted) against the same rows on the host."""

from __future__ import annotations

import pytest
import torch
from helpers import planted_heads

from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Query
from saccade.methods.lfps import LFPS
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


@pytest.mark.parametrize(
    "options",
    [{}, {"unit": "kv_head", "rest": None}, {"epsilon": 1.0, "blocks": 0}, {"bypass": "mean", "read_local": False}],
    ids=str,
)
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
