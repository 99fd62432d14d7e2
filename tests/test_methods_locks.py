"""LOCKS: page records against float64 numpy that rounds by its own hand, and the pages that they choose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import planted_heads

from saccade.errors import PolicyError
from saccade.kv.low_rank import RANK, packed, record_rows, unpacked
from saccade.kv.view import KVView
from saccade.methods.base import Query
from saccade.methods.locks import Locks, combined, page_weights
from saccade.methods.quest import Quest
from saccade.selection import Blocks, Dense

HEADS, KV_HEADS = 4, 2


def rounded(values: np.ndarray, most: int) -> np.ndarray:
    """Numbers over the scale of their last axis, a float16, and back."""
    scale = np.maximum(np.abs(values).max(-1, keepdims=True) / most, 6.2e-5).astype(np.float16).astype(np.float64)
    return np.clip(np.round(values / scale), -most, most) * scale


def approximate(page: np.ndarray) -> np.ndarray:
    """The keys that a page's record stands for, by numpy's singular value decomposition: [size, d]."""
    mean = page.mean(0)
    left, singular, right = np.linalg.svd(page - mean, full_matrices=False)
    kept = slice(0, RANK)
    coefficients = rounded(left[:, kept] * singular[kept], 127)
    return coefficients @ rounded(right[kept], 7) + rounded(mean[None], 127)


def made(records: torch.Tensor, size: int) -> torch.Tensor:
    basis, coefficients, mean = unpacked(records, size)
    return coefficients @ basis + mean[..., None, :]


def keys(kv_heads: int, blocks: int, size: int, d: int, seed: int = 0) -> torch.Tensor:
    """Uneven: directions of unlike strength, a mean of its own, one page all alike, one of a single direction."""
    rng = torch.Generator().manual_seed(seed)
    k = (
        torch.randn(kv_heads, blocks, size, d, generator=rng)
        * torch.logspace(1, -2, d)[torch.randperm(d, generator=rng)]
    )
    k += 3 * torch.randn(kv_heads, blocks, 1, d, generator=rng)
    k[:, 0] = k[:, 0, :1]
    k[:, 1] = torch.randn(kv_heads, size, 1, generator=rng) * torch.randn(kv_heads, 1, d, generator=rng)
    return k


@pytest.mark.parametrize(("size", "d"), [(16, 64), (16, 128), (8, 16), (32, 48)])
def test_records_are_what_numpy_rounds(size, d):
    k = keys(2, 5, size, d)
    records = packed(k)
    assert records.dtype == torch.uint8
    assert records.shape == (record_rows(size, d), 2, 5, d)
    ours = made(records.permute(2, 0, 1, 3), size)
    for head in range(2):
        for block in range(5):
            page = k[head, block].double().numpy()
            theirs, own = approximate(page), ours[head, block].double().numpy()
            # The sign of a direction and ties of rounding are free: errors are compared, not numbers.
            off, wanted = np.linalg.norm(own - page), np.linalg.norm(theirs - page)
            assert off <= 1.05 * wanted + 2e-3 * np.linalg.norm(page)


def test_what_has_few_directions_is_kept_almost_whole():
    rng = torch.Generator().manual_seed(3)
    k = torch.randn(1, 3, 16, 4, generator=rng) @ torch.randn(1, 3, 4, 64, generator=rng)
    off = (made(packed(k).permute(2, 0, 1, 3), 16) - k).norm() / k.norm()
    assert off < 0.12  # what int4 rounds: a step is a seventh of the greatest


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e30])
def test_odd_keys_harm_their_own_page_alone(wrong):
    k = keys(1, 4, 16, 32)
    odd = k.clone()
    odd[0, 2, 5, 7] = wrong
    ours, theirs = (made(packed(one).permute(2, 0, 1, 3), 16) for one in (odd, k))
    assert torch.equal(ours[:, [0, 1, 3]], theirs[:, [0, 1, 3]])
    assert ours.isfinite().all()


def problem(n: int, seed: int = 1):
    q, k, v = planted_heads(HEADS, KV_HEADS, n, seed=seed)
    return q, k, KVView.from_tensors(k, v, shuffle_seed=seed)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_weights_are_the_log_sum_of_what_the_record_says(softcap):
    q, _k, view = problem(700)
    query = Query.of(q[:, -1:], view, softcap=softcap)
    records = view.summary("low_rank", 16)
    weights = page_weights(query, records, 16)
    stand_ins = made(records, 16).double()
    for head in range(HEADS):
        logits = stand_ins[head // 2] @ q[head, -1].double() * query.scale
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        assert torch.allclose(weights[head].double(), torch.logsumexp(logits, -1), atol=1e-4)


def test_heads_are_added_over_their_own_peaks_or_the_greatest_counts():
    weights = torch.tensor([[0.0, 5.0, 1.0], [100.0, 0.0, 99.9]])
    assert torch.allclose(combined(weights, "mass", 1), (weights - weights.amax(1, True)).exp().sum(0)[None])
    assert torch.equal(combined(weights, "max", 2), weights)
    assert torch.equal(combined(weights, "max", 1), weights.amax(0)[None])


@pytest.mark.parametrize("n", [700, 704, 705])
def test_it_reads_the_ends_and_the_heaviest_pages(n):
    q, _k, view = problem(n)
    method, pages = Locks(budget=128, sinks=1, window=1), -(-n // 16)
    query = Query.of(q[:, -1:], view)
    chosen = method.select_decode(query, None)
    assert isinstance(chosen, Blocks)
    weights = page_weights(query, view.summary("low_rank", 16), 16)
    for unit, part in enumerate(chosen.indices.tensor_split(chosen.offsets[1:-1])):
        own = weights[2 * unit : 2 * unit + 2, 1 : pages - 1]
        best = (own - own.amax(1, True)).exp().sum(0).topk(6).indices + 1
        assert part.tolist() == sorted([0, *best.tolist(), pages - 1])


def test_shorter_contexts_are_read_whole():
    q, _, view = problem(128)
    assert isinstance(Locks(budget=128).select_decode(Query.of(q[:, -1:], view), None), Dense)


def test_it_keeps_more_than_quest_at_equal_keys():
    """Trained keys of a page share directions; extremes of channels say little of where they lie together."""
    q, k, v = planted_heads(HEADS, KV_HEADS, 2048, seed=4)
    spread = torch.randn(k.shape[-1], k.shape[-1], generator=torch.Generator().manual_seed(5)) / 4
    q, k = q @ spread, k @ spread  # no channel stands for a direction
    view = KVView.from_tensors(k, v)
    kept = {}
    for method in (Locks(budget=256), Quest(budget=256, dense_layers=0)):
        read = method.select_decode(Query.of(q[:, -1:], view, scale=0.5), None).mask()
        weights = torch.softmax(torch.einsum("hd,hnd->hn", q[:, -1], k.repeat_interleave(2, 0)) * 0.5, -1)
        kept[method.name] = float((weights * read[:, -1]).sum(1).mean())
    assert kept["locks"] >= kept["quest"] - 1e-6


def test_kernels_that_make_summaries_leave_records_to_torch():
    pytest.importorskip("triton")
    from saccade.ops import cpu_pages
    from saccade.ops.triton.block_summaries import summarize

    assert summarize(None, "low_rank", 16, 0, 4) is None
    assert cpu_pages.filler(torch.float32, "low_rank", 16) is None


@pytest.mark.parametrize("options", [{"budget": 0}, {"block_size": 12}, {"window": 0}, {"combine": "mean"}])
def test_bad_options(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        Locks(**options)
