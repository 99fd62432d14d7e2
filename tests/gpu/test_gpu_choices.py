"""What is chosen on a GPU, candidates and lines, against the host's choice; the same from run to run."""

from __future__ import annotations

import pytest
import torch
from gpu_helpers import data
from helpers import planted_heads

from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Query
from saccade.methods.loopserve import LoopServe, triton_rounds
from saccade.methods.loopserve.line_cover import cover_lines
from saccade.methods.loopserve.rounds import cover_rounds
from saccade.methods.loopserve.triton_line_cover import cover
from saccade.methods.minference import MInference
from saccade.methods.rocketkv import RocketKV
from saccade.ops import Call, run
from saccade.ops.candidates import choose
from saccade.ops.scores import row_weights
from saccade.ops.weights import selected_weights
from saccade.selection import Candidates, Shape


def on_host(q, view) -> tuple[torch.Tensor, KVView]:
    return q.cpu(), KVView.from_tensors(view.keys().cpu(), view.values().cpu())


def rising_lists(units: int, n: int, sinks: int, local: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(units)
    parts = [torch.randperm(n - sinks - local, generator=rng)[: 900 + u].sort().values + sinks for u in range(units)]
    counts = torch.tensor([len(part) for part in parts])
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)), torch.cat(parts).to(torch.int32)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("units", [8, 2, 1])
def test_the_best_candidates(units, head_dim):
    """float32 storage where it fits, so that both rank by the same numbers; equal keys but for ties of a last bit."""
    q, _, _, view, shape = data(8, 2, 1, 9000, head_dim, torch.float32 if head_dim <= 64 else torch.bfloat16)
    offsets, indices = rising_lists(units, 9000, 16, 64)
    listed = Candidates(shape, offsets, indices, torch.full((units,), 300), 16, 64)
    every = Candidates.all_keys(shape, units, 432, 16, 64)
    for selection in (listed, every):
        expected = choose(*on_host(q, view), selection, scale=head_dim**-0.5)
        ran = run(Call.of(q, view, selection.to(q.device), want_weights=True))
        out, lse = ran.out, ran.lse
        assert ran.backend == "triton"
        assert torch.isfinite(out).all()
        assert torch.equal(ran.used.offsets.cpu(), expected.offsets)
        differs = (ran.used.unit_mask().cpu() ^ expected.unit_mask()).sum()
        assert differs <= 0.02 * expected.indices.numel()
        weights = selected_weights(*on_host(q, view), ran.used.to("cpu"), lse.cpu(), scale=head_dim**-0.5)
        torch.testing.assert_close(ran.weights.cpu(), weights, atol=1e-3, rtol=2e-2)


@pytest.mark.parametrize(("n", "q_len"), [(700, 700), (6000, 900)])
def test_lines_cover_what_the_host_s_do(n, q_len):
    q, k, v = planted_heads(4, 2, n, 64, 0, noise=0.5)
    view, shape = KVView.from_tensors(k, v), Shape.suffix(4, 2, q_len, n)
    rows = torch.arange(0, q_len, 7)
    weights = torch.cat([row_weights(q[:, -q_len:], view, shape, g, rows, 0.125) for g in range(2)])
    positions, first = shape.q_start + rows, shape.q_start
    marks = [cover(weights.cuda(), positions.cuda(), first, 0.9) for _ in range(5)]
    for head in range(4):
        expected = cover_lines(weights[head], positions, first, 0.9)
        for kind, lines in enumerate((expected.columns, expected.distances)):
            assert all(torch.equal(one[kind], marks[0][kind]) for one in marks)
            found = marks[0][kind][head].cpu().bool()
            differs = found.index_put((lines,), ~found[lines])
            assert differs.sum() <= 0.02 * max(50, lines.numel())
    again = [triton_rounds.cover(weights.cuda(), positions.cuda(), first, 0.9).cpu() for _ in range(5)]
    for head in range(4):
        for kind, lines in enumerate(cover_rounds(weights[head].numpy(), positions.numpy(), first, 0.9)):
            assert all(one[kind, head].nonzero()[:, 0].tolist() == lines.tolist() for one in again)


@pytest.mark.parametrize("q_len", [3000, 700])
@pytest.mark.parametrize(
    "method",
    [
        MInference(vertical=200, slash=300),
        MInference(pattern="block_sparse", blocks=9),
        LoopServe(alpha=0.9, take="round", lines="token", samples=100),
        LoopServe(alpha=0.9, take="line", samples=100),
    ],
    ids=str,
)
def test_prefill_methods_choose_what_they_choose_on_the_host(method, q_len):
    q, k, v = planted_heads(8, 2, 3000, 64, 0, noise=0.6)
    on_host = method.select_prefill(Chunk.of(q[:, -q_len:], KVView.from_tensors(k, v)))
    chunk = Chunk.of(q[:, -q_len:].cuda(), KVView.from_tensors(k.cuda(), v.cuda()))
    found = method.select_prefill(chunk)
    mine, theirs = found.to("cpu").unit_mask(), on_host.unit_mask()
    assert torch.equal(mine, method.select_prefill(chunk).to("cpu").unit_mask())
    assert (mine ^ theirs).sum() <= 0.02 * theirs.sum()


def test_rocketkv_reads_what_it_reads_on_the_host():
    q, k, v = planted_heads(8, 2, 3000, 64, 0, noise=0.6)
    method = RocketKV(capacity=700, keys=120, channels=0.25)
    lists = []
    for device in ("cpu", "cuda"):
        mine, keys, values = (part.to(device) for part in (q, k, v))
        state = method.begin(Chunk.of(mine[:, 2900:2990], KVView.from_tensors(keys[:, :2990], values[:, :2990])))
        selection = method.select_decode(Query.of(mine[:, -1:], KVView.from_tensors(keys, values)), state)
        lists.append([set(one.tolist()) for one in selection.to("cpu").lists()])
    for on_host, on_device in zip(*lists, strict=True):
        assert len(on_device) == len(on_host) == 120
        assert len(on_device ^ on_host) <= 8  # a block of equal weight to the last bits
