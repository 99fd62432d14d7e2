"""LOCKS's kernels against its torch reference: records of pages that rows fill, and what pages weigh."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from test_triton_batched import DIM, KV_HEADS, Rows, Spec, readings

from saccade.kv.low_rank import packed, record_bytes, unpacked
from saccade.methods.base import Query
from saccade.methods.locks import Locks, combined, page_weights
from saccade.ops.triton.batched_choice import choose_blocks
from saccade.ops.triton.batched_decode import append_rows
from saccade.ops.triton.batched_reading import why_not
from saccade.ops.triton.low_rank import score_records
from saccade.selection import Blocks

LENGTHS = [1, 0, 64, 65, 320, 336]


def rebuilt(records, size):
    """The keys that records say: float32 [G, pages, size, d]."""
    basis, coefficients, mean = unpacked(records, size)
    return coefficients @ basis + mean[..., None, :]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [8, 16, 32])
def test_a_page_that_a_row_fills_gets_the_record_that_torch_makes(size, dtype):
    """Not byte for byte: equal singular values have no order, and vectors no sign. What the record says is the same to
    the rounding of its codes, and its distance from the keys is."""
    rows = Rows(LENGTHS, size, "low_rank", dtype)
    append_rows(rows.k, rows.v, rows.pages, rows.summaries)
    seen = 0
    for row, kv in enumerate(rows.kvs):
        length = rows.lengths[row]
        if not length or length % size:
            continue
        kv.appended(1)
        (buffer,) = kv.summary_buffers("low_rank", size, length // size)
        made = buffer[length // size - 1 : length // size].clone()
        keys = kv.view(0).keys(length - size, length).float()  # [G, size, d]
        wanted = packed(keys[:, None]).permute(2, 0, 1, 3)  # [1, rows, G, d]
        assert made.shape == wanted.shape
        flat = made.permute(2, 0, 1, 3).flatten(1)
        assert not flat[:, record_bytes(size, DIM) :].any()
        own, theirs = rebuilt(made, size)[:, 0], rebuilt(wanted, size)[:, 0]
        far = (theirs - keys).norm(dim=(-2, -1)) / keys.norm(dim=(-2, -1))
        assert ((own - keys).norm(dim=(-2, -1)) / keys.norm(dim=(-2, -1)) <= 1.03 * far + 2e-3).all()
        assert ((own - theirs).norm(dim=(-2, -1)) <= 0.1 * keys.norm(dim=(-2, -1))).all()
        seen += 1
    assert seen >= 2


def test_pages_of_few_directions_of_huge_values_and_of_none():
    """Keys that are all alike, of one direction, zero, not finite, or so large that their squares overflow."""
    for number, keys in enumerate(
        (
            torch.ones(KV_HEADS, 16, DIM),
            torch.outer(torch.arange(16.0), torch.linspace(-1, 1, DIM)).expand(KV_HEADS, -1, -1),
            torch.zeros(KV_HEADS, 16, DIM),
            torch.full((KV_HEADS, 16, DIM), torch.nan),
            1e25 * torch.randn(KV_HEADS, 16, DIM, generator=torch.Generator().manual_seed(2)),
        )
    ):
        rows = Rows([16], 16, "low_rank")
        rows.kvs[0].truncate(0)
        rows.kvs[0].reserve(16)
        rows.kvs[0].append(0, keys[:, :15], keys[:, :15])
        append_rows(keys[:, 15][None], keys[:, 15][None], rows.pages, rows.summaries)
        rows.kvs[0].appended(1)
        (buffer,) = rows.kvs[0].summary_buffers("low_rank", 16, 1)
        own = rebuilt(buffer[:1].clone(), 16)[:, 0]
        theirs = rebuilt(packed(keys[:, None]).permute(2, 0, 1, 3), 16)[:, 0]
        assert own.isfinite().all()
        scale = keys.nan_to_num(0.0).abs().max() + 1e-6
        assert ((own - theirs).abs().max() / scale) < (0.01 if number < 4 else 0.25)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("size", "dtype"), [(16, torch.float32), (8, torch.float16), (32, torch.float32)])
def test_pages_weigh_what_the_reference_says_and_the_same_are_read(size, dtype, softcap):
    methods = (Locks(budget=128, block_size=size), Locks(budget=100, block_size=size))
    choice = methods[0].device_plan(Spec).layers[0]
    rows = Rows(LENGTHS, size, "low_rank", dtype)
    form, take, upto, _ = readings(methods, rows)
    append_rows(rows.k, rows.v, rows.pages)
    scores = score_records(rows.q, rows.pages, rows.summaries.pointers, form, 0.3, softcap)
    lists = choose_blocks(scores, rows.pages, form, take, upto)
    compared = 0
    for row, q, view in rows.views():
        stop = max(-(-view.length // size) - choice.last, choice.first)
        assert torch.isneginf(scores[row, :, : choice.first]).all()
        assert torch.isneginf(scores[row, :, stop:]).all()
        query = Query.of(q, view, scale=0.3, softcap=softcap)
        records = view.summary("low_rank", size)[choice.first : stop]
        if len(records):
            wanted = combined(page_weights(query, records, size), "mass", KV_HEADS)
            close = {"atol": 2e-3, "rtol": 1e-2} if dtype == torch.float16 else {"atol": 1e-5, "rtol": 1e-4}
            torch.testing.assert_close(scores[row, :, choice.first : stop], wanted, **close)
        selection = methods[row % 2].select_decode(query, None)
        if isinstance(selection, Blocks) and dtype == torch.float32:
            mask = selection.block_mask()[:, 0]
            for unit in range(KV_HEADS):
                entry = row * KV_HEADS + unit
                read = lists.indices[entry, : lists.counts[entry]].tolist()
                assert sorted(read) == mask[unit].nonzero()[:, 0].tolist()
                compared += 1
    assert compared >= 4 or dtype == torch.float16


def test_what_no_kernel_does_stays_on_the_host():
    assert Locks(combine="max").device_plan(Spec) is None
    reading = Locks().device_plan(Spec).layers[0]
    sizes = {"layers": 1, "head_dim": DIM, "windows": (None,)}
    for heads, value_dim, says in ((4, None, None), (66, None, "at most 32 query heads"), (4, 16, "not latents")):
        spec = SimpleNamespace(heads=heads, kv_heads=2, value_dim=value_dim, **sizes)
        why = why_not(reading, spec)
        assert why is None if says is None else says in why
