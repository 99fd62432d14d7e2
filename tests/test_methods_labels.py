"""Labels against keys quantized one at a time, on every backend: torch, and each instruction set's kernels."""

from __future__ import annotations

import pytest
import torch
from covering import covered
from helpers import generator

from saccade.kv.view import KVView
from saccade.methods.labels import Labels, store
from saccade.ops import cpu

HEADS, KV_HEADS, DIM = 10, 2, 32


@pytest.fixture(params=["torch", *cpu.supported_isas()])
def backend(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(cpu, "available", lambda: False)
        yield "torch"
        return
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa(None)


def problem(n: int, channels: int, seed: int = 0):
    rng = generator(seed)
    k = torch.randn(KV_HEADS, n, DIM, generator=rng)
    q = torch.randn(HEADS, DIM, generator=rng)
    picked = torch.stack([torch.randperm(DIM, generator=rng)[:channels] for _ in range(KV_HEADS)])
    return q, k, KVView.from_tensors(k, torch.zeros_like(k), shuffle_seed=seed), picked


def expected(q, k, picked, bits: int, unit: str) -> torch.Tensor:
    """Each key's channels on an even grid of 2^bits levels from its least to its greatest, in float64."""
    rows = []
    group = HEADS // KV_HEADS
    for g in range(KV_HEADS):
        label = k[g][:, picked[g]].double()
        if bits < 16:
            low, high = label.amin(1, keepdim=True), label.amax(1, keepdim=True)
            step = (high - low) / (2**bits - 1)
            label = torch.where(high > low, low + step * ((label - low) / step).round(), low)
        heads = q[g * group : (g + 1) * group][:, picked[g]].double()
        rows.append((heads if unit == "q_head" else heads.mean(0, keepdim=True)) @ label.T)
    return torch.cat(rows)


@covered(
    {
        "unit": ["q_head", "kv_head"],
        "bits": [2, 4, 8, 16],
        ("n", "channels"): [(1, 8), (16, 7), (47, 1), (130, 32), (515, 9)],
    }
)
def test_scores_are_dot_products_with_quantized_channels(backend, unit, bits, n, channels):
    q, k, view, picked = problem(n, channels, seed=n)
    made = Labels(picked, bits)
    made.extend(view)
    want = expected(q, k, picked, bits, unit)
    torch.testing.assert_close(made.scores(q, unit).double(), want, atol=2e-5, rtol=1e-5)
    for first, last in ((0, n), (n // 3, n - n // 5)):
        for count in {0, 1, (last - first) // 2, last - first}:
            best = made.top(q, unit, count, first, last)
            assert best.shape == (len(want), count)
            for row, got in zip(want, best.tolist()):
                assert got == sorted(set(got))
                assert all(first <= i < last for i in got)
                least = float(row[first:last].sort(descending=True).values[count - 1]) if count else 0.0
                assert all(float(row[i]) > least - 1e-4 for i in got)


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_labels_that_grow_are_those_made_at_once(backend, bits, monkeypatch):
    q, _, view, picked = problem(140, 11)
    whole, grown = Labels(picked, bits), Labels(picked, bits)
    whole.extend(view)
    # Only the kernels add in one order whatever the length.
    same = {"atol": 1e-5, "rtol": 1e-5} if backend == "torch" or bits == 16 else {"atol": 0.0, "rtol": 0.0}
    monkeypatch.setattr(store, "STEP_KEYS", 32)  # in steps, then key by key over tiles' and buffers' ends
    for length in (3, 4, 70, 80, *range(81, 141)):
        grown.extend(view.upto(length))
        assert grown.length == length
        torch.testing.assert_close(grown.scores(q), whole.scores(q)[:, :length], **same)


@pytest.mark.parametrize("bits", [3, 8])
def test_kernels_are_told_of_labels_in_lines_of_sixteen_bytes(bits):
    """Wherever they lay before, as views of larger tensors, and they are the same."""
    q, _, view, picked = problem(70, 9)
    made, moved = Labels(picked, bits), Labels(picked, bits)
    for labels in (made, moved):
        labels.extend(view)
    for name in ("_codes", "_range"):
        part = getattr(moved, name)
        room = torch.zeros(part.numel() + 3, dtype=part.dtype)
        room[1:-2] = part.flatten()
        setattr(moved, name, room[1:-2].view(part.shape))
        assert getattr(moved, name).data_ptr() % 16 != 0
    words = moved.words()
    assert words.codes % 16 == words.ranges % 16 == 0
    assert (words.codes, words.ranges) == (moved._codes.data_ptr(), moved._range.data_ptr())
    torch.testing.assert_close(moved.scores(q), made.scores(q))


def test_ties_go_to_the_lower_key(backend):
    q, k, _, picked = problem(5, 8)
    keys = k[:, torch.arange(203) % 5]
    made = Labels(picked, 4)
    made.extend(KVView.from_tensors(keys, keys))
    scores = expected(q, k, picked, 4, "kv_head")
    for count in (1, 41, 42, 100):
        for row, got in zip(scores, made.top(q, "kv_head", count, 2, 203).tolist()):
            kinds = row.argsort(descending=True).tolist()
            assert got == sorted([i for kind in kinds for i in range(2, 203) if i % 5 == kind][:count])


@pytest.mark.parametrize("values", ["even", "tied", "crowded", "rising"])
def test_the_best_of_many_are_found_by_a_sample(backend, values):
    """One channel in 8 bits is a code of 0 or, where it is the only one, its value: 9000 keys, of any distribution."""
    n, rng = 9000, generator(3)
    x = {
        "even": torch.rand(n, generator=rng),
        "tied": torch.randint(0, 4, (n,), generator=rng).float(),  # a bound that nothing in the sample exceeds
        "crowded": torch.where(torch.arange(n) % 32 == 0, 0.0, torch.rand(n, generator=rng)),  # as sampled: all low
        "rising": torch.arange(n).float(),
    }[values]
    k = torch.zeros(1, n, DIM)
    k[0, :, 3] = x
    made = Labels(torch.tensor([[3]]), 8)
    made.extend(KVView.from_tensors(k, k))
    q = torch.zeros(1, DIM)
    q[0, 3] = 1.0
    for count in (1, 30, 563, 2250, 8000):
        for first, last in ((0, n), (17, 8990)):
            order = torch.sort(x[first:last], descending=True, stable=True).indices[:count] + first
            assert made.top(q, "q_head", count, first, last)[0].tolist() == sorted(order.tolist())


def test_channels_without_spread_are_their_value(backend):
    """A key whose channels are equal has step 0: its label is exact, and never NaN."""
    k = torch.full((KV_HEADS, 20, DIM), 1.5)
    q, _, _, picked = problem(1, 6)
    made = Labels(picked, 4)
    made.extend(KVView.from_tensors(k, k))
    want = 1.5 * q.unflatten(0, (KV_HEADS, -1)).gather(2, picked[:, None].expand(-1, 5, -1)).sum(-1)
    torch.testing.assert_close(made.scores(q), want.flatten()[:, None].expand(-1, 20), atol=1e-5, rtol=1e-5)


def test_more_threads_change_nothing():
    q, _, view, picked = problem(900, 8)
    made = Labels(picked, 4)
    made.extend(view)
    alone = made.scores(q), made.top(q, "q_head", 50, 3, 880)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert torch.equal(alone[0], made.scores(q))
        assert torch.equal(alone[1], made.top(q, "q_head", 50, 3, 880))
    finally:
        torch.set_num_threads(threads)
