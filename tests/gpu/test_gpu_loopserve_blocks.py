"""LoopServe's lines of blocks on a GPU: float32's sums, the host's choice, and nothing that waits for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import planted_heads

from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.loopserve import LoopServe
from saccade.methods.loopserve.blocks import on_lines, query_blocks
from saccade.methods.loopserve.rounds import cover_rounds
from saccade.methods.loopserve.triton_blocks import _listed
from saccade.methods.loopserve.triton_rounds import cover
from saccade.ops.row_shares import row_sums
from saccade.ops.triton import row_shares as on_device
from saccade.selection import Blocks, Lines


def chunks(q_len: int, n: int, head_dim: int, dtype: torch.dtype) -> tuple[Chunk, Chunk]:
    """The same chunk on the GPU, in ``dtype``, with queries that lie apart, and on the CPU in float32."""
    q, k, v = (part.to("cuda", dtype) for part in planted_heads(8, 2, n, head_dim, n + head_dim, noise=0.6))
    given = torch.cat([q, q], -1)[:, -q_len:, head_dim:]
    exact = (part.float().cpu() for part in (k, v))
    on_host = Chunk.of(q[:, -q_len:].float().cpu(), KVView.from_tensors(*exact))
    return Chunk.of(given, KVView.from_tensors(k, v, block_size=32, shuffle_seed=1)), on_host


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.float16, 96), (torch.float32, 64)])
@pytest.mark.parametrize(("q_len", "n", "size"), [(3000, 3000, 128), (1000, 5013, 64), (77, 2000, 32)])
@pytest.mark.parametrize("copied", [False, True])
def test_sums_and_lists(q_len, n, size, dtype, head_dim, copied, monkeypatch):
    if copied:
        monkeypatch.setattr(on_device, "LONG", 1)
    chunk, exact = chunks(q_len, n, head_dim, dtype)
    method = LoopServe(alpha=0.9, lines="block", block_size=size, samples=300)
    rows = method.sample(exact)
    blocks, places = query_blocks(exact.shape, rows, size)
    listed = _listed(chunk.shape, rows, size, chunk.q.device)
    found = on_device.sums(chunk.q, chunk.kv, chunk.shape, *listed, size, chunk.scale)
    expected = row_sums(exact.q, exact.kv, exact.shape, rows, places, size, exact.scale)
    most = torch.bincount(places)[:, None]  # rows of a query block: what its sums may be at most
    assert ((found.cpu() - expected).abs() / most).max() < (2e-2 if dtype == torch.bfloat16 else 3e-3)
    first = chunk.shape.q_start // size
    marks = cover(found.clone(), listed[2], first, 0.9, method.window_blocks).cpu().bool()
    for head in range(8):
        lines = cover_rounds(found[head].cpu().numpy(), blocks.numpy(), first, 0.9, method.window_blocks)
        for kind in (0, 1):
            assert np.array_equal(marks[kind, head].nonzero()[:, 0].numpy(), lines[kind])
    chosen = method.select_prefill(chunk)
    want = Blocks.from_block_mask(chunk.shape, size, on_lines(chunk.shape, size, marks))
    assert torch.equal(chosen.offsets.cpu(), want.offsets)
    assert torch.equal(chosen.indices[: int(want.offsets[-1])].cpu(), want.indices)
    for _ in range(5):
        assert torch.equal(method.select_prefill(chunk).offsets, chosen.offsets)


@pytest.mark.parametrize(("q_len", "n"), [(3000, 3000), (700, 3000), (1100, 20_000)])
@pytest.mark.parametrize(("alpha", "size"), [(0.9, 128), (0.97, 64)])
def test_the_choice_is_the_host_s(q_len, n, alpha, size):
    chunk, exact = chunks(q_len, n, 64, torch.float32)
    method = LoopServe(alpha=alpha, lines="block", block_size=size, samples=100)
    want = method.select_prefill(exact).block_mask()
    differs = method.select_prefill(chunk).block_mask().cpu() ^ want
    assert differs.sum() <= 0.02 * want.sum()


def test_lines_are_tokens_on_a_gpu_too_unless_blocks_are_asked_for():
    chunk, _ = chunks(2048, 2048, 64, torch.bfloat16)
    lines, one_by_one = (LoopServe(alpha=0.9, take=take).select_prefill(chunk) for take in ("auto", "line"))
    assert isinstance(lines, Lines)
    assert torch.equal(lines.mask(), one_by_one.mask())
    assert isinstance(LoopServe(alpha=0.9, lines="block").select_prefill(chunk), Blocks)


def test_a_head_with_a_key_that_is_no_number_reads_everything():
    chunk, _ = chunks(1000, 1500, 64, torch.bfloat16)
    keys = chunk.kv.keys().clone()
    keys[1, 3] = torch.nan
    spoilt = Chunk.of(chunk.q, KVView.from_tensors(keys, chunk.kv.values()))
    mask = LoopServe(alpha=0.5, lines="block").select_prefill(spoilt).block_mask()
    whole = on_lines(chunk.shape, 128, torch.ones(2, 8, mask.shape[2], dtype=torch.bool, device="cuda"))
    assert torch.equal(mask[4:], whole[4:])
    assert not torch.equal(mask[:4], whole[:4])


def test_nothing_waits_for_the_device():
    chunk, _ = chunks(3000, 3000, 64, torch.bfloat16)
    method = LoopServe(alpha=0.9, lines="block")
    method.select_prefill(chunk)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        method.select_prefill(chunk)
    finally:
        torch.cuda.set_sync_debug_mode("default")
