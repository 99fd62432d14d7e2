"""Selection on a GPU: the same as on the host, and the same from run to run."""

from __future__ import annotations

import pytest
import torch
from gpu_helpers import data, random_blocks
from helpers import planted_heads

from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.flashprefill import FlashPrefill
from saccade.methods.flexprefill import FlexPrefill
from saccade.ops import attend
from saccade.ops.triton.block_energies import energies
from saccade.ops.triton.block_sums import line_sums
from saccade.ops.triton.prefill import Config, attend_prefill
from saccade.selection import Dense


def test_results_do_not_change_from_run_to_run():
    """A race would show as bits that differ: no sum here depends on an order of arrival."""
    q, _, _, view, shape = data(8, 2, 777, 3000, 128, structured=True)
    lists = random_blocks(shape, 128, 8).to(q.device)
    one, _, _, one_view, one_shape = data(8, 2, 1, 3000, 128)
    few = random_blocks(one_shape, 32, 2)
    method = FlexPrefill(lines="block", min_budget=128, gamma=0.8)
    calls = [
        lambda: attend(q, view, Dense(shape))[0],
        lambda: attend(q, view, lists)[0],
        lambda: attend_prefill(q, view, lists, scale=0.1, config=Config(128, 64, 8, 3, copy=True))[0],
        lambda: attend(one, one_view, few)[0],
        lambda: line_sums(q, view, shape, 128, 0.1)[1],
        lambda: method.select_prefill(Chunk.of(q, view)).block_mask(),
    ]
    for call in calls:
        first = call()
        for _ in range(20):
            assert torch.equal(call(), first)


@pytest.mark.parametrize("q_len", [2048, 600])
def test_flexprefill_selects_what_it_selects_on_the_host(q_len):
    q, k, v = planted_heads(8, 2, 2048, 64, 0, noise=0.6)
    for method in (
        FlexPrefill(lines="block", min_budget=256, gamma=0.8),
        FlexPrefill(lines="block", min_budget=128, gamma=0.8, tau=1.0),
    ):
        on_host = method.select_prefill(Chunk.of(q[:, -q_len:], KVView.from_tensors(k, v)))
        chunk = Chunk.of(q[:, -q_len:].cuda(), KVView.from_tensors(k.cuda(), v.cuda()))
        found = method.select_prefill(chunk)
        differs = found.block_mask().cpu() ^ on_host.block_mask()
        assert differs.sum() <= 0.01 * on_host.block_mask().sum()


@pytest.mark.parametrize(("q_len", "unit"), [(2048, "q_head"), (600, "kv_head")])
@pytest.mark.parametrize("size", [64, 128])
def test_flashprefill_selects_what_it_selects_on_the_host(q_len, unit, size):
    q, k, v = planted_heads(8, 2, 2048, 64, 0, noise=0.6)
    method = FlashPrefill(alpha=0.3, block_size=size, sink_blocks=1, window_blocks=1, last_blocks=1, unit=unit)
    on_host = method.select_prefill(Chunk.of(q[:, -q_len:], KVView.from_tensors(k, v)))
    chunk = Chunk.of(q[:, -q_len:].cuda(), KVView.from_tensors(k.cuda(), v.cuda()))
    found = method.select_prefill(chunk)
    assert torch.equal(found.block_mask(), method.select_prefill(chunk).block_mask())
    differs = found.block_mask().cpu() ^ on_host.block_mask()
    assert differs.sum() <= 0.01 * on_host.block_mask().sum()


def test_energies_in_bf16_agree_with_float64():
    seed = int(torch.randint(2**31, ()))
    torch.manual_seed(seed)
    q, k, v = (torch.randn(h, 1500, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    chunk = Chunk.of(q[:, 333:], KVView.from_tensors(k, v))
    found = energies(chunk.q, chunk.kv, chunk.shape, 128, chunk.scale)
    means = k[:, : 11 * 128].double().unflatten(1, (11, 128)).mean(2).repeat_interleave(4, 0)
    scores = chunk.q.double() @ means.transpose(1, 2) * chunk.scale
    position = torch.arange(333, 1500, device="cuda")
    scores.masked_fill_(position[:, None] < torch.arange(1, 12, device="cuda") * 128 - 1, -torch.inf)
    scores = torch.nn.functional.pad(scores, (0, 1, 333 % 128, -1500 % 128), value=-torch.inf)
    expected = scores.unflatten(1, (-1, 128)).logsumexp(2)
    torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=2e-2, msg=lambda text: f"{text} (seed {seed})")
