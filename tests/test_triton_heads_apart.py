"""Every Triton kernel that reads or writes keys, over block tables with a row for each KV head: what it does is to the
bit what it does over one row for all of them, and attention is the reference's."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from helpers import planted_heads, random_selection
from kv_helpers import view_with_heads_apart
from test_triton_batched import Rows

from saccade.kv.view import KVView
from saccade.ops import Call, attend, run
from saccade.ops.triton.batch import KeyLists, Pages
from saccade.ops.triton.batched_decode import append_rows, score_blocks
from saccade.ops.triton.batched_rank import rank_blocks
from saccade.ops.triton.block_sums import line_sums
from saccade.ops.triton.decode import attend_decode
from saccade.ops.triton.dispatch import pages_of
from saccade.ops.triton.line_sums import token_sums
from saccade.ops.triton.prefill import Config, attend_prefill
from saccade.ops.triton.progressive import attend_progressive
from saccade.selection import Cone, Dense, Shape, Windowed
from saccade.selection.forms import Rule, Summarized
from saccade.selection.readings import Choice

HEADS, KV_HEADS, N, DIM = 4, 2, 150, 32


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def views(q_len: int, n: int = N, **options):
    q, k, v = planted_heads(HEADS, KV_HEADS, n, DIM, seed=n)
    shape = Shape.suffix(HEADS, KV_HEADS, q_len, n)
    shared = KVView.from_tensors(k, v, shuffle_seed=1, **options)
    apart = view_with_heads_apart(k, v, shuffle_seed=2, **options)
    tables = apart.paged().block_table
    assert not set(tables[0].tolist()) & set(tables[1].tolist())
    return q[:, -q_len:], shared, apart, shape


def equal(found, expected) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("kind", "q_len", "units"),
    [
        ("dense", 40, 1), ("band", 40, 1), ("tri", 40, 1), ("blocks", 70, 4), ("lines", 40, 2), ("mixed", 40, 4),
        ("dense", 1, 1), ("blocks", 1, 4), ("blocks", 1, 1), ("tokens", 1, 2), ("tokens", 1, 1), ("ranking", 1, 2),
    ],
)  # fmt: skip
def test_attention(kind, q_len, units):
    q, shared, apart, shape = views(q_len)
    size = 64 if q_len > 1 else 16
    selection = random_selection(kind, shape, units, torch.Generator().manual_seed(0), block_size=size)
    ran = run(Call.of(q, apart, selection), "triton")
    assert ran.backend == "triton"
    found = ran.out, ran.lse
    equal(found, attend(q, shared, selection, backend="triton"))
    expected = attend(q, apart, selection, backend="reference")
    equal(expected, attend(q, shared, selection, backend="reference"))
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_attention_inside_a_window():
    q, shared, apart, shape = views(40)
    cone = Cone(0.4, sinks=16, local=16, block_size=16)
    selection = Windowed(Dense(shape), cone)
    found = attend(q, apart, selection, backend="triton")
    equal(found, attend(q, shared, selection, backend="triton"))
    expected = attend(q, apart, selection, backend="reference")
    torch.testing.assert_close(found[0], expected[0], atol=2e-5, rtol=1e-5)


def test_prefill_from_a_copy_in_one_piece():
    q, shared, apart, shape = views(64)
    config = Config(64, 32, 4, 2, copy=True)
    equal(*(attend_prefill(q, view, Dense(shape), scale=0.2, config=config) for view in (apart, shared)))


def test_sequences_of_either_kind_in_one_batch():
    _, one, apart, _ = views(1)
    parts = [one.paged(), apart.paged()]
    joined = tuple(torch.cat([getattr(part, name) for part in parts]) for name in ("k", "v"))
    shifted = [parts[0].block_table, parts[1].block_table + parts[0].k.shape[0]]
    both = [KVView(part._replace(k=joined[0], v=joined[1], block_table=table)) for part, table in zip(parts, shifted)]
    pages = pages_of([both[0].upto(70), both[1]])
    assert pages.tables.shape == (2, KV_HEADS, both[1].blocks)
    q = torch.randn(2, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    out, _ = attend_decode(q, pages, None, scale=0.2)
    for row, view in enumerate((both[0].upto(70), both[1])):
        expected, _ = attend(q[row][:, None], view, scale=0.2, backend="reference")
        torch.testing.assert_close(out[row][:, None], expected, atol=2e-5, rtol=1e-5)


def test_sums_of_lines():
    q, shared, apart, shape = views(64)
    equal(*(token_sums(q, view, shape, 20, 0.2) for view in (apart, shared)))
    equal(*(line_sums(q, view, shape, 64, 0.2) for view in (apart, shared)))


def test_batched_rows():
    """Stored, summarized, ranked and attended, a row for each of several sequences."""
    results = []
    for heads_apart in (True, False):
        rows = Rows([1, 0, 64, 97, 320], heads_apart=heads_apart)
        if heads_apart:
            assert not torch.equal(rows.pages.tables[4, 0], rows.pages.tables[4, 1])
        append_rows(rows.k, rows.v, rows.pages, rows.summaries)
        made = []
        for length, kv in zip(rows.lengths, rows.kvs):
            if length:
                kv.appended(1)
                (buffer,) = kv.summary_buffers("cuboid", 32, length // 32)
                made += [kv.view(0).keys(), kv.view(0).values(), buffer[: length // 32].clone()]
        choice = Choice(Summarized(32, "cuboid"), KV_HEADS, 1, 1, 95, rule=Rule(0.7, 1, "last_max", "all"))
        scores = score_blocks(rows.q, rows.pages, rows.summaries, choice)
        always, order, counts = rank_blocks(
            scores, rows.pages, choice, torch.full((len(rows.q),), 95, dtype=torch.int32)
        )
        done = attend_progressive(
            rows.q, rows.pages, always, order, 32, Rule(0.7, 1, "max", "all"), scale=0.2, counts=counts
        )
        results.append([*made, scores, *done[:3], *attend_decode(rows.q, rows.pages, None, scale=0.2)])
    equal(*results)


def test_lists_of_several_units_a_head():
    """More units than KV heads: a program of either reads its KV head's own slots."""
    q, shared, apart, _ = views(1)
    indices = torch.stack([torch.randperm(N)[:20] for _ in range(HEADS)]).int()
    lists = KeyLists(None, torch.full((HEADS,), 20, dtype=torch.int32), indices, HEADS, 1, 20)
    made: list[Pages] = [pages_of([view]) for view in (apart, shared)]
    equal(*(attend_decode(q[:, 0][None], pages, lists, scale=0.2, splits=2) for pages in made))
