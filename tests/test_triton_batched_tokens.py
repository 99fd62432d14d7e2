"""The kernels that choose and weigh keys for the rows of a batched step, against the row path's functions, under
Triton's interpreter. Queries and tables are slices and transposed, as an engine leaves them."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from test_triton_batched import DIM, HEADS, KV_HEADS, Rows

from saccade.methods.base import Query
from saccade.ops import candidates, run
from saccade.ops.call import Call
from saccade.ops.triton.batch import KeyLists, Pages
from saccade.ops.triton.batched_decode import append_rows
from saccade.ops.triton.batched_lists import choose_keys, kept_lists, new_lists, seen_lists
from saccade.ops.triton.batched_rows import LayerRows, hidden_keys, listed
from saccade.ops.triton.batched_tokens import score_keys
from saccade.ops.triton.batched_weights import weigh_lists
from saccade.ops.weights import selected_weights
from saccade.selection import Band, Candidates, Cone, Dense, Tokens, cut

LENGTHS = [30, 0, 97, 200, 333]


def layer_rows(heads_apart=False, dtype=torch.float32, seed=3) -> tuple[Rows, LayerRows]:
    rows = Rows(LENGTHS, dtype=dtype, seed=seed, heads_apart=heads_apart)
    append_rows(rows.k, rows.v, rows.pages)
    pages = rows.pages
    tables = torch.zeros(len(LENGTHS) + 2, *pages.tables.shape[1:], dtype=torch.int32)  # rows of a larger buffer
    tables[1:-1] = pages.tables
    pages = Pages(pages.k, pages.v, tables[1:-1], pages.lengths, pages.longest)
    words = torch.zeros(2, len(LENGTHS), 9, dtype=torch.int64)[1, :, :7]
    none = torch.zeros(len(LENGTHS), dtype=torch.int32)
    cones, reals = torch.zeros(2, len(LENGTHS), 4, dtype=torch.float64)
    assert not rows.q.is_contiguous()
    return rows, LayerRows(0, rows.q, pages, words, reals, cones, none, none.clone(), 0.3)


def bounds_of(lengths, sinks, local, take, hidden):
    lines = []
    for length, (low, high) in zip(lengths.tolist(), hidden.tolist()):
        first = min(sinks, length)
        lines.append([first, max(first, length - local), low, high, take])
    return torch.tensor(lines, dtype=torch.int32)


@pytest.mark.parametrize("heads_apart", [False, True])
@pytest.mark.parametrize("units", [HEADS, KV_HEADS])
def test_rows_choose_the_keys_that_the_reference_chooses(units, heads_apart):
    rows, layer = layer_rows(heads_apart)
    lengths, share = layer.pages.lengths, torch.tensor([0.0, 0.0, 0.0, 0.4, 0.3], dtype=torch.float64)
    share *= units == HEADS  # a group's mean would be over what a window leaves
    layer.cones[:, 0], layer.cones[:, 1:] = share, torch.tensor([3.0, 20.0, 1.0])
    hidden = layer.hidden()
    scores = score_keys(layer, units)
    room = new_lists(layer, units, 64)
    lists = choose_keys(scores, bounds_of(lengths, 2, 5, 21, hidden), lengths, *room)
    assert lists.counts.view(-1, units)[1].tolist() == [0] * units  # padding
    for row, q, view in rows.views():
        selection = Candidates.all_keys(Query.of(q, view).shape, units, 21, 2, 5)
        low, high = hidden[row].tolist()
        assert (high > 0) == bool(share[row] and Cone(float(share[row]), 3, 20).start(LENGTHS[row] - 1) > 3)
        if high:
            selection = cut(selection, Cone(float(share[row]), 3, 20))
            assert selection.hidden == (low, high)
        expected = candidates.choose(q, view, selection, scale=0.3)
        for unit, wanted in enumerate(expected.lists()):
            entry = row * units + unit
            assert lists.indices[entry, : lists.counts[entry]].tolist() == wanted.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("units", [HEADS, KV_HEADS])
def test_weights_over_lists_are_those_of_the_reference(units, dtype):
    rows, layer = layer_rows(dtype=dtype, seed=5)
    rng = torch.Generator().manual_seed(1)
    counts, indices = new_lists(layer, units, 40)
    counts.zero_()
    for entry in range(len(counts)):
        length = LENGTHS[entry // units]
        chosen = torch.randperm(length, generator=rng)[: min(length, 17 + entry % 5)].sort().values
        counts[entry], indices[entry, : len(chosen)] = len(chosen), chosen.to(torch.int32)
    lists = KeyLists(None, counts, indices, units, 1, indices.shape[1])
    out, lse = layer.attend(lists)
    meaned = torch.full((len(counts), 44), float("nan"))
    weigh_lists(layer, lists, lse, meaned, torch.arange(len(counts)) * 44 + 3)
    assert meaned[:, :3].isnan().all()
    for row, q, view in rows.views():
        own = [indices[row * units + unit, : counts[row * units + unit]] for unit in range(units)]
        tokens = Tokens.from_lists(Query.of(q, view).shape, own)
        ran = run(Call.of(q, view, tokens, scale=0.3), "reference")
        tolerance = 1e-5 if dtype == torch.float32 else 5e-3
        torch.testing.assert_close(out[row][:, None], ran.out, atol=tolerance, rtol=0)
        wanted = selected_weights(q, view, tokens, ran.lse, scale=0.3)
        start = 0
        for unit, part in enumerate(own):
            expected, entry = wanted[:, start : start + len(part)], row * units + unit
            start += len(part)
            found = meaned[entry, 3 : 3 + len(part)]
            torch.testing.assert_close(found, expected.mean(0), atol=tolerance, rtol=0)


def test_lists_that_lie_in_the_rows_states():
    """Anywhere in memory, each row's own; they gain an entry with each key."""
    rows, layer = layer_rows()
    rng, kept, counts = torch.Generator().manual_seed(2), [], []
    for row, length in enumerate(LENGTHS):
        lists = torch.zeros(KV_HEADS, 400 + row, dtype=torch.int32)
        sizes = torch.tensor([7 + row, 3], dtype=torch.int64)
        for unit, size in enumerate(sizes.tolist()):
            old = torch.randperm(max(size, length - 4), generator=rng)[:size].sort().values
            lists[unit, : size + 4] = torch.cat([old, torch.arange(length - 4, length)]).to(torch.int32)
        kept.append(lists)
        counts.append(sizes)
        numbers = [lists.data_ptr(), lists.shape[1], sizes.data_ptr(), length - 4]
        layer.words[row, :4] = torch.tensor(numbers if length else [1, 2, 3, 4])
    lists = kept_lists(layer, KV_HEADS)
    out, lse = layer.attend(lists)
    assert torch.equal(out[1], torch.zeros(HEADS, DIM))
    for row, q, view in rows.views():
        own = [kept[row][unit, : int(counts[row][unit]) + 4] for unit in range(KV_HEADS)]
        for unit in range(KV_HEADS):
            assert listed(lists, row * KV_HEADS + unit).tolist() == own[unit].tolist()
        selection = Tokens.from_lists(Query.of(q, view).shape, own)
        ran = run(Call.of(q, view, selection, scale=0.3), "reference")
        torch.testing.assert_close(out[row][:, None], ran.out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[row], ran.lse[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("grid", [1, 16])
def test_what_a_window_shows_of_both_ends(grid):
    rows, layer = layer_rows()
    ends = [(0, 2**30), (1, 1), (4, 60), (0, 500), (50, 40)]
    layer.first.copy_(torch.tensor([one for one, _ in ends]))
    layer.second.copy_(torch.tensor([two for _, two in ends]))
    cones = [Cone(0.2 * row, 5, 10, grid) for row in range(5)]
    layer.cones.copy_(torch.tensor([[one.share, one.sink_keys, one.local, one.block_size] for one in cones]))
    lists = seen_lists(layer)
    assert hidden_keys(layer.cones, layer.pages.lengths)[0].tolist() == [0, 0]
    for row, q, view in rows.views():
        shape, (sinks, window) = Query.of(q, view).shape, ends[row]
        inner = Dense(shape) if sinks + window >= shape.k_len else Band(shape, window=window, sinks=sinks)
        expected = cut(inner, cones[row]).mask()[0, 0].nonzero()[:, 0]
        assert lists.indices[row, : lists.counts[row]].tolist() == expected.tolist()
