"""FlexPrefill's choice of blocks on a GPU: what the host chooses, the same from run to run, in a handful of kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import planted_heads
from torch.profiler import ProfilerActivity, profile

from saccade.kv.kept_summaries import KeptSummaries
from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.flexprefill import FlexPrefill, triton_threshold
from saccade.methods.flexprefill.triton_threshold import mass_threshold
from saccade.ops.pairs import pairs
from saccade.ops.triton import pages
from saccade.selection import Corrected

METHODS = [
    FlexPrefill(lines="block", min_budget=256, max_budget=1024, gamma=0.9, tau=0.0),
    FlexPrefill(lines="block", min_budget=128, gamma=0.8, tau=1.0),
    FlexPrefill(lines="block", min_budget=0, gamma=0.8, tau=1.0, flatten=False),
    FlexPrefill(lines="block", block_size=64, min_budget=0, max_budget=512, gamma=0.95),
]


def chunk_of(heads, kv_heads, q_len, n, head_dim, dtype) -> tuple[Chunk, Chunk]:
    """On the GPU, its summaries kept, and of the same numbers in float32 on the host."""
    q, k, v = (part.to(dtype) for part in planted_heads(heads, kv_heads, n, head_dim, 0, noise=0.6))
    q = q[:, -q_len:]
    plain = KVView.from_tensors(k.cuda(), v.cuda(), shuffle_seed=1)

    def kept(kind, size):
        made = summaries.setdefault((kind, size), KeptSummaries(kind, size))
        made.upto(KVView(plain.paged(), None, pages))
        return made

    summaries: dict[tuple[str, int], KeptSummaries] = {}
    return Chunk.of(q.cuda(), KVView(plain.paged(), kept)), Chunk.of(
        q.float(), KVView.from_tensors(k.float(), v.float())
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("q_len", "n", "head_dim", "dtype"),
    [(4096, 8192, 128, torch.bfloat16), (3001, 7999, 96, torch.float16), (100, 3000, 64, torch.float32)],
)
def test_the_choice_is_the_host_s_and_does_not_change(method, q_len, n, head_dim, dtype):
    """A race would show as bits that differ: no sum here depends on an order of arrival."""
    chunk, on_host = chunk_of(8, 2, q_len, n, head_dim, dtype)
    found = method.select_prefill(chunk)
    mask, expected = found.block_mask(), method.select_prefill(on_host).block_mask()
    assert (mask.cpu() ^ expected).sum() <= 0.01 * expected.sum()
    for _ in range(20):
        assert torch.equal(method.select_prefill(chunk).block_mask(), mask)


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_rows_of_8192_key_blocks(tau):
    """As many as a million tokens have in blocks of 128."""
    method = FlexPrefill(lines="block", block_size=64, min_budget=0, max_budget=8192, gamma=0.9, tau=tau)
    chunk, on_host = chunk_of(2, 1, 200, 64 * 8192 - 5, 32, torch.bfloat16)
    found, expected = method.select_prefill(chunk).block_mask().cpu(), method.select_prefill(on_host).block_mask()
    assert (found ^ expected).sum() <= 0.02 * expected.sum()


@pytest.mark.parametrize("m", [1000, 131072])
def test_one_program_finds_the_threshold_of_many(m, monkeypatch):
    mass = torch.rand(8, m, device="cuda", generator=torch.Generator("cuda").manual_seed(m)) ** 8
    active = torch.arange(8, device="cuda") % 3 > 0
    found = mass_threshold(mass, 0.9, active)
    monkeypatch.setattr(triton_threshold, "ONE_PROGRAM", 1)
    torch.testing.assert_close(mass_threshold(mass, 0.9, active), found, atol=0, rtol=1e-4)
    assert (found > 0).tolist() == active.tolist()


@pytest.mark.parametrize(("q_len", "n"), [(4096, 8192), (4000, 8100)])
def test_a_choice_is_a_handful_of_kernels(q_len, n):
    """Seven of its own; its time at long contexts goes to reading the keys once."""
    chunk, _ = chunk_of(8, 2, q_len, n, 128, torch.bfloat16)
    method = replace(METHODS[0], tau=0.1)
    for _ in range(2):
        method.select_prefill(chunk)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        method.select_prefill(chunk)
        torch.cuda.synchronize()
    kernels = [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [name for name in kernels if "FillFunctor" not in name]  # those that poison fresh tensors (conftest.py)
    assert 0 < len(kernels) <= 8, kernels


def test_pairs_are_counted_as_in_torch():
    chunk, _ = chunk_of(8, 2, 3001, 7999, 64, torch.bfloat16)
    found = METHODS[0].select_prefill(chunk)
    for selection in (found, Corrected(found, 128)):
        assert torch.equal(pairs(selection), found.pairs())
