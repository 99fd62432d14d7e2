"""The plugin for vLLM on a GPU, but for vLLM itself: its kernels read vLLM's cache as it lies."""

from __future__ import annotations

import pytest
import torch
from test_vllm_plugin import HEADS, LAYERS, Prefill, Rows, cache, slots

from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.policy import Policy
from saccade.ops import attend


@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize(
    "policy",
    [
        "flexprefill(gamma=0.3, min_budget=128)",
        "flexprefill(gamma=0.3, min_budget=128, lines=block)",
        "flashprefill(alpha=1.0, sink_blocks=1, window_blocks=1, last_blocks=1)",
        "prefill=streaming(sinks=16, window=300), decode=dense",
    ],
)
def test_rows_read_what_the_policy_reads_over_our_own_pool(policy, block_size):
    length, rows = 1517, 803
    pages, tables, keys, values = cache([40, length], block_size, device="cuda", dtype=torch.bfloat16)
    mine = Prefill(Policy.parse(policy), LAYERS)
    q = torch.randn(rows, HEADS, keys[0].shape[2], generator=torch.Generator().manual_seed(1)).cuda().bfloat16()
    out = torch.empty_like(q)
    mine.attend(q, pages, Rows(0, rows, length, slots(tables)[1:2], True), 1, 0.2, None, out)
    ours = KVView.from_tensors(keys[1], values[1], block_size, shuffle_seed=3)
    chunk = Chunk.of(q.transpose(0, 1), ours, 0.2, layer=1, layers=LAYERS)
    selection = mine.policy.prefill.select_prefill(chunk)
    wanted, _ = attend(q.transpose(0, 1), ours, selection, scale=0.2)
    assert torch.allclose(out.float(), wanted.transpose(0, 1).float(), atol=2e-2, rtol=2e-2)
    assert not torch.isnan(out).any()
    assert mine.counts.density < 1
    assert "torch did" not in mine.text()
