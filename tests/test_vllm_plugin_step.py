"""How the plugin parts a step of vLLM's: with vLLM's own classes, whose kernels a plain loop stands in for. Needs an
environment with vLLM, for a CPU too (docs/from-vllm.md)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")
from test_vllm_plugin import DIM, HEADS, KV_HEADS, LAYERS, PLUGIN, cache

from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.policy import Policy
from saccade.ops import attend

POLICY = "prefill=streaming(sinks=8, window=64), decode=dense"
LENGTHS = [90, 700, 33, 512, 40, 300]
SIZES = [1, 300, 1, 512, 40, 1]  # rows of this step: decode, a later chunk, decode, a whole prompt, a short one, decode
PREFILLING = [False, True, False, True, True, False]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.setenv("SACCADE_POLICY", POLICY)
    monkeypatch.setenv("SACCADE_MIN_TOKENS", "256")
    from saccade_vllm import flash_attention
    from vllm.v1.attention.backends import flash_attn

    def build(self, common_prefix_len, common, fast_build=False):
        lengths = common.seq_lens
        assert int(lengths.max()) <= common.max_seq_len
        return flash_attn.FlashAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens, max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc, max_seq_len=common.max_seq_len, seq_lens=lengths,
            block_table=common.block_table_tensor, slot_mapping=common.slot_mapping, use_cascade=False,
            common_prefix_len=0, cu_prefix_query_lens=None, prefix_kv_lens=None, suffix_kv_lens=None,
        )  # fmt: skip

    def forward(self, layer, query, key, value, kv_cache, metadata, output, *more, **named):
        """Dense attention, row by row, over vLLM's shape of a cache: [blocks, 2, block_size, kv_heads, head_dim]."""
        starts = metadata.query_start_loc.tolist()
        assert starts[-1] == metadata.num_actual_tokens
        for number, length in enumerate(metadata.seq_lens.tolist()):
            blocks = metadata.block_table[number, : -(-length // kv_cache.shape[2])].long()
            k, v = (kv_cache[blocks, part].flatten(0, 1)[:length].transpose(0, 1).contiguous() for part in (0, 1))
            some = slice(starts[number], starts[number + 1])
            out, _ = attend(query[some].transpose(0, 1), (k, v), scale=self.scale, backend="reference")
            output[some] = out.transpose(0, 1)
        return output

    monkeypatch.setattr(flash_attn.FlashAttentionMetadataBuilder, "build", build)
    monkeypatch.setattr(flash_attn.FlashAttentionImpl, "forward", forward)
    return flash_attention


def step(order: list[int]):
    """(vLLM's metadata of the sequences in ``order``, its cache, keys, values by sequence)."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    pages, tables, keys, values = cache(LENGTHS, 32)
    sizes = torch.tensor([0, *(SIZES[one] for one in order)])
    starts = sizes.cumsum(0).to(torch.int32)
    lengths = torch.tensor([LENGTHS[one] for one in order], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=len(order),
        num_actual_tokens=int(starts[-1]), max_query_len=int(sizes.max()), max_seq_len=int(lengths.max()),
        block_table_tensor=tables[order], slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
        is_prefilling=torch.tensor([PREFILLING[one] for one in order]), seq_lens_cpu_upper_bound=lengths,
    )  # fmt: skip
    return common, pages, keys, values


def built(backend, common):
    builder = backend.Builder.__new__(backend.Builder)
    builder._settings, builder.device, builder._drafted = backend.Settings.read(), torch.device("cpu"), 2
    return builder.build(0, common)


def run(backend, metadata, q: Tensor, pages: Tensor, layer: int = 1) -> tuple[Tensor, object]:
    one = backend.Impl.__new__(backend.Impl)
    one.scale, one.logits_soft_cap, one._why, one._layer = 0.2, 0, None, layer
    one._settings, one._prefill = backend.Settings.read(), backend.Prefill(Policy.parse(POLICY), LAYERS)
    out = torch.full_like(q, float("nan"))
    theirs = pages.transpose(2, 3)  # as vLLM shows a cache that lies in HND
    one.forward(SimpleNamespace(), q, q, q, theirs, metadata, out)
    return out, one._prefill


@pytest.mark.parametrize("order", [[0, 2, 5, 4, 1, 3], [0, 1, 2, 3, 4, 5], [3, 1], [1, 0], [2, 0, 5, 4]])
def test_every_row_is_read_once_by_what_it_is_for(backend, order):
    common, pages, keys, values = step(order)
    q = torch.randn(common.num_actual_tokens, HEADS, DIM, generator=torch.Generator().manual_seed(2))
    out, prefill = run(backend, built(backend, common), q, pages)
    policy, at, chosen = Policy.parse(POLICY), 0, 0
    for one in order:
        rows = q[at : at + SIZES[one]].transpose(0, 1)
        view = KVView.from_tensors(keys[one], values[one])
        sparse = PREFILLING[one] and LENGTHS[one] >= 256
        selection = policy.prefill.select_prefill(Chunk.of(rows, view, 0.2)) if sparse else None
        wanted, _ = attend(rows, view, selection, scale=0.2, backend="reference")
        assert torch.allclose(out[at : at + SIZES[one]].transpose(0, 1), wanted, atol=1e-5), one
        at, chosen = at + SIZES[one], chosen + sparse
    assert prefill.counts.calls == chosen
    assert KV_HEADS < HEADS


@pytest.mark.parametrize("order", [[0, 2, 5, 4, 1, 3], [3, 1], [2, 0, 5, 4]])
def test_a_runner_that_does_not_say_which_rows_are_of_prompts_has_them_told_by_their_number(backend, order):
    """vLLM's second model runner, which runs dense models by default."""
    from dataclasses import replace

    common, pages, _, _ = step(order)
    silent = replace(common, is_prefilling=None)
    q = torch.randn(common.num_actual_tokens, HEADS, DIM, generator=torch.Generator().manual_seed(3))
    told, prefill = run(backend, built(backend, common), q, pages)
    out, other = run(backend, built(backend, silent), q, pages)
    assert torch.equal(out, told)
    assert prefill.counts.calls == other.counts.calls == len({1, 3} & set(order))


def test_drafts_of_a_decode_step_are_no_prompt(backend):
    from dataclasses import replace

    common, _, _, _ = step([1, 1])
    starts = torch.tensor([0, 3, 7], dtype=torch.int32)
    common = replace(
        common, is_prefilling=None, query_start_loc=starts, query_start_loc_cpu=starts, num_actual_tokens=7,
        max_query_len=4,
    )  # fmt: skip
    (chosen,) = built(backend, common).saccade.chosen
    assert (chosen.first, chosen.stop) == (3, 7)


def test_rows_of_padding_are_left_alone(backend):
    """Sequences of a padded step have no rows."""
    from dataclasses import replace

    common, pages, _, _ = step([0, 1])
    longer = replace(
        common, num_reqs=4, is_prefilling=torch.tensor([False, True, False, False]),
        query_start_loc=torch.tensor([0, 1, 301, 301, 301], dtype=torch.int32),
        query_start_loc_cpu=torch.tensor([0, 1, 301, 301, 301], dtype=torch.int32),
        seq_lens=torch.tensor([90, 700, 0, 0], dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor([90, 700, 0, 0], dtype=torch.int32),
        block_table_tensor=torch.cat([common.block_table_tensor] * 2),
    )  # fmt: skip
    q = torch.randn(310, HEADS, DIM)
    out, _ = run(backend, built(backend, longer), q, pages)
    assert not out[:301].isnan().any()
    assert out[301:].isnan().all()


def test_layers_that_the_policy_does_not_serve_are_vllms(backend):
    common, pages, _, _ = step([1, 0])
    metadata = built(backend, common)
    q = torch.randn(common.num_actual_tokens, HEADS, DIM)
    one = backend.Impl.__new__(backend.Impl)
    one.scale, one._why = 0.2, "a sliding window"
    out = torch.full_like(q, float("nan"))
    one.forward(SimpleNamespace(), q, q, q, pages.transpose(2, 3), metadata, out)
    view = KVView.from_tensors(*(part[1] for part in step([1, 0])[2:]))
    wanted, _ = attend(q[:300].transpose(0, 1), view, scale=0.2, backend="reference")
    assert torch.allclose(out[:300].transpose(0, 1), wanted, atol=1e-5)
    assert not out.isnan().any()
