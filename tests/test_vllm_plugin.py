"""The plugin for vLLM but for vLLM itself: over its layout of keys a policy reads what it reads over ours."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from saccade.errors import PolicyError, SaccadeError
from saccade.kv import rows as by_torch
from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.policy import Policy
from saccade.ops import attend
from saccade.selection import cut

PLUGIN = Path(__file__).resolve().parent.parent / "plugins" / "vllm"
sys.path.insert(0, str(PLUGIN))
from saccade_vllm.prefill import Prefill  # noqa: E402
from saccade_vllm.rows import Rows, packed, slots, split, view  # noqa: E402
from saccade_vllm.settings import SHORTEST, Settings  # noqa: E402

sys.path.remove(str(PLUGIN))
HEADS, KV_HEADS, DIM, LAYERS = 6, 2, 32, 3


def cache(lengths: list[int], block_size: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32):
    """(pages, block tables, keys, values): sequences scattered over vLLM's cache, other places NaN."""
    draw = torch.Generator().manual_seed(seed)
    blocks = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(blocks) + 5, generator=draw)
    pages = torch.full((len(order), 2, KV_HEADS, block_size, DIM), float("nan"))
    tables = torch.zeros(len(lengths), max(blocks) + 1, dtype=torch.int32)
    keys, values, at = [], [], 0
    for number, (length, count) in enumerate(zip(lengths, blocks)):
        tables[number, :count] = order[at : at + count]
        at += count
        k, v = (torch.randn(KV_HEADS, length, DIM, generator=draw) * 2 for _ in range(2))
        for position in range(length):
            block, offset = tables[number, position // block_size], position % block_size
            pages[block, 0, :, offset], pages[block, 1, :, offset] = k[:, position], v[:, position]
        keys.append(k.to(device, dtype))
        values.append(v.to(device, dtype))
    return pages.to(device, dtype), tables.to(device), keys, values


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_a_sequence_is_seen_in_vllms_cache_without_a_copy(block_size):
    pages, tables, keys, values = cache([300, 33, 1], block_size)
    for number, (k, v) in enumerate(zip(keys, values)):
        seen = view(pages, slots(tables)[number : number + 1], k.shape[1], by_torch)
        assert torch.equal(seen.keys(), k)
        assert torch.equal(seen.values(), v)
        assert seen.paged().k.data_ptr() == pages.data_ptr()


def test_a_cache_that_lies_otherwise_is_refused():
    pages, tables, _, _ = cache([20], 16)
    for other in (pages.transpose(2, 3), pages[:, :1], torch.zeros(3, 2, 2, 24, 32)):
        with pytest.raises(ValueError, match="contiguous, with a block_size of 16, 32, 64, 128"):
            view(other, slots(tables), 20, by_torch)


@pytest.mark.parametrize(
    "policy",
    [
        "flexprefill(gamma=0.1, min_budget=64, block_size=64)",
        "flashprefill(alpha=0.9, sink_blocks=1, window_blocks=1, last_blocks=1, block_size=32)",
        "psaw(phi=0.3, start_layer=1, local=32, block_size=32)",
    ],
)
def test_rows_read_what_the_policy_reads_over_our_own_pool(policy):
    """Chunks that begin and end anywhere, at several layers; and rows of decode, which read everything."""
    length, rows = 517, 203
    pages, tables, keys, values = cache([40, length], 32)
    mine = Prefill(Policy.parse(policy), LAYERS)
    q = torch.randn(rows, HEADS, DIM, generator=torch.Generator().manual_seed(1))
    table = slots(tables)[1:2]
    for layer in range(LAYERS):
        for prefill in (True, False):
            out = torch.empty_like(q)
            mine.attend(q, pages, Rows(0, rows, length, table, prefill), layer, 0.2, None, out)
            ours = KVView.from_tensors(keys[1], values[1], 32, shuffle_seed=layer)
            chunk = Chunk.of(q.transpose(0, 1), ours, 0.2, layer=layer, layers=LAYERS)
            selection = mine.policy.prefill.select_prefill(chunk) if prefill else None
            window = mine.policy.window.at(layer, LAYERS) if mine.policy.window else None
            if prefill and window is not None:
                selection = cut(selection, window)
            wanted, _ = attend(q.transpose(0, 1), ours, selection, scale=0.2, backend="reference")
            assert torch.allclose(out, wanted.transpose(0, 1), atol=1e-5), (layer, prefill)
    assert mine.counts.calls == LAYERS
    assert 0 < mine.counts.density < 1


def test_what_was_read_is_counted_and_said():
    pages, tables, _, _ = cache([256], 16)
    mine = Prefill(Policy.parse("prefill=streaming(sinks=16, window=32), decode=dense"), 1)
    q = torch.randn(256, HEADS, DIM)
    mine.attend(q, pages, Rows(0, 256, 256, slots(tables), True), 0, 0.2, None, torch.empty_like(q))
    causal = 256 * 257 // 2
    read = sum(min(row + 1, 32) + min(max(row + 1 - 32, 0), 16) for row in range(256))
    assert mine.counts.density == read / causal
    assert f"read {100 * read / causal:.1f} % of the keys of 256 prompt tokens in 1 layers" in mine.text()
    assert mine.line() is None, "at most every few seconds"


def test_rows_of_long_prompts_are_chosen_for_and_others_are_not():
    starts, lengths = [0, 1, 401, 402, 402, 600], [9000, 5000, 9000, 0, 4095]
    assert split(starts, lengths, [False, True, True, False, True], 4096) == ([1], [0, 2, 4])
    device = torch.device("cpu")
    assert packed(starts, [0], device) == slice(0, 1)
    assert packed(starts, [1, 2], device) == slice(1, 402)
    assert packed(starts, [0, 2, 4], device).tolist() == [0, 401, *range(402, 600)]


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("dense", "'dense' changes nothing"),
        ("auto", "is settled by an engine"),
        ("flexprefill+lfps", "'lfps' chooses in decode"),
        ("streaming", "write 'prefill=streaming, decode=dense'"),
        ("flexprefil", "unknown"),
        ("etf", "has rows skip layers"),
        ("psaw", "needs a calibration of the model"),
    ],
)
def test_a_policy_that_vllm_cannot_run_is_refused_by_name(policy, why):
    with pytest.raises(PolicyError, match=why):
        Settings.read({"SACCADE_POLICY": policy})


def test_settings_come_from_the_environment():
    assert Settings.read({}) is None
    assert Settings.read({"SACCADE_POLICY": " "}) is None
    given = Settings.read({"SACCADE_POLICY": "flexprefill"})
    assert given is not None
    assert (given.policy.text, given.least) == ("flexprefill", SHORTEST)
    with pytest.raises(SaccadeError, match="SACCADE_MIN_TOKENS='no' is no number of tokens"):
        Settings.read({"SACCADE_POLICY": "flexprefill", "SACCADE_MIN_TOKENS": "no"})
