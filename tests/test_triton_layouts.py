"""No Triton entry reads a tensor by assumed strides: slices of larger tensors give what contiguous ones give. Under
Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from helpers import generator, planted_heads, random_selection
from layout_helpers import agrees, laid, sliced, spread

from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.methods.flexprefill import triton_blocks, triton_pooled, triton_shares
from saccade.methods.flexprefill.triton_threshold import mass_threshold
from saccade.methods.loopserve.triton_line_cover import cover
from saccade.ops import attend
from saccade.ops.triton import batched_decode, batched_rank, block_pairs, block_sums, choose, line_sums, rows
from saccade.ops.triton.batch import KeyLists
from saccade.ops.triton.decode import attend_decode
from saccade.ops.triton.dispatch import pages_of
from saccade.ops.triton.lines import attend_lines
from saccade.ops.triton.prefill import attend_prefill
from saccade.ops.triton.progressive import attend_progressive
from saccade.selection import Shape, Tokens
from saccade.selection.forms import Rule, Summarized
from saccade.selection.readings import Choice

HEADS, KV_HEADS, N, D = 4, 2, 150, 16


def problem(q_len: int = 1):
    q, k, v = planted_heads(HEADS, KV_HEADS, N, D, 0)
    view = KVView.from_tensors(k, v, 16, shuffle_seed=0)
    return q[:, N - q_len :].contiguous(), view, Shape.suffix(HEADS, KV_HEADS, q_len, N)


def listed(shape: Shape) -> Tokens:
    """Lists of different lengths."""
    return Tokens.from_lists(shape, [torch.arange(9, 100, step) for step in (3, 4, 5, 6)])


@pytest.mark.parametrize(
    ("kind", "q_len"),
    [("dense", 40), ("band", 40), ("blocks", 70), ("lines", 40), ("mixed", 40), ("blocks", 1), ("tokens", 1)],
)
def test_attention(kind, q_len):
    q, view, shape = problem(q_len)
    selection = random_selection(kind, shape, 4, generator(1), block_size=64 if q_len > 1 else 16)
    agrees(lambda selection: attend(q, view, selection, backend="triton"), selection)
    agrees(lambda q: attend(q, view, selection, backend="triton"), q, layouts=("sliced",))
    if kind in ("dense", "band", "blocks") and q_len > 1:
        agrees(lambda q: attend_prefill(q, view, selection, scale=0.2), q)
    if kind == "blocks":
        agrees(block_pairs.pairs, selection)
    if kind == "lines":
        agrees(lambda q, lines: attend_lines(q, view, lines, scale=0.2), q, selection)


def test_a_block_mask_that_is_a_slice():
    """What once gave wrong attention without a word."""
    q, view, shape = problem(70)
    mask = torch.rand(4, 2, 3, generator=generator(2)) < 0.5
    mask[:, 0, 2], mask[..., 0] = False, True
    for taken in (mask, mask.to(torch.int8), mask.long()):
        agrees(lambda taken: choose.compact(shape, 64, taken), taken)
        agrees(lambda taken: attend(q, view, choose.compact(shape, 64, taken), backend="triton"), taken)
    lines = torch.rand(2, 4, N, generator=generator(3)) < 0.1
    agrees(lambda *lines: choose.compact_lines(shape, *lines), *lines)


def test_batched_decode():
    q, view, _ = problem()
    pages, row = pages_of([view, view.upto(90)]), q[:, 0]
    batch = torch.stack([row, 2 * row])
    agrees(lambda batch: attend_decode(batch, pages, None, scale=0.2), batch)
    with pytest.raises(SaccadeError, match="contiguous rows"):
        replace(pages, tables=spread(pages.tables))
    with pytest.raises(SaccadeError, match="must be contiguous"):
        replace(pages, k=sliced(pages.k))
    starts, counts = torch.tensor([0, 5, 9, 20]), torch.tensor([5, 3, 10, 1], dtype=torch.int32)
    indices = torch.cat([torch.arange(30, dtype=torch.int32), torch.arange(30, dtype=torch.int32)])

    def lists(batch, starts, counts, indices):
        return attend_decode(batch, pages, KeyLists(starts, counts, indices, 2, 1, 10), scale=0.2, splits=2)

    agrees(lists, batch, starts, counts, indices)
    always, order = torch.tensor([[0, 9]] * 4, dtype=torch.int32), torch.arange(1, 5, dtype=torch.int32).expand(4, -1)
    amounts = torch.tensor([[2, 2, 1, 1], [4, 3, 2, 4]], dtype=torch.int32)

    def progressive(batch, always, order, amounts):
        rule = Rule(0.7, 1, "last_max", "all")
        return attend_progressive(batch, pages, always, order, 16, rule, scale=0.2, counts=amounts)[:3]

    agrees(progressive, batch, always, order, amounts)


def test_batched_choices():
    q, view, _ = problem()
    pages, summary = pages_of([view, view.upto(90)]), view.summary("cuboid", 16)
    pointers = torch.full((2,), summary.data_ptr())
    choice, two = Choice(Summarized(16, "cuboid"), 2, 1, 1, 64, take=2), torch.full((2,), 2, dtype=torch.int32)
    ranked = Choice(Summarized(16, "cuboid"), 2, 1, 1, 64, rule=Rule(0.5, 2, "min", "all"))
    batch = torch.stack([q[:, 0], 2 * q[:, 0]])
    summaries = batched_decode.Summaries(pointers, 16, "cuboid")
    agrees(lambda batch: batched_decode.score_blocks(batch, pages, summaries, choice), batch)
    scores = batched_decode.score_blocks(batch, pages, summaries, choice)

    def best(scores):
        found = batched_decode.choose_best(scores, pages, choice, two, 32 * two)
        return found.counts, found.indices

    agrees(best, scores)
    agrees(lambda scores: batched_rank.rank_blocks(scores, pages, ranked, 32 * two)[2], scores)

    def appended(k, v):
        own = KVView.from_tensors(*torch.randn(2, KV_HEADS, 33, D, generator=generator(4)), 16)
        batched_decode.append_rows(k, v, pages_of([own]))
        return own.keys(), own.values()

    agrees(appended, *torch.randn(2, 1, KV_HEADS, D, generator=generator(5)))


def test_sums_over_rows():
    q, view, shape = problem(70)
    agrees(lambda q: line_sums.token_sums(q, view, shape, 9, 0.2), q)
    agrees(lambda q: block_sums.line_sums(q, view, shape, 64, 0.2), q)


def test_what_flexprefill_decides_by():
    q, view, shape = problem(128)
    rng, k_blocks = generator(7), -(-view.length // 64)
    columns, slashes, vertical, groups = torch.rand(4, 4, k_blocks, generator=rng)
    by_pooled, means = torch.tensor([True, False, True, False]), view.summary("mean", 64)
    agrees(lambda q, *sums: triton_shares.decide(q, view, means, 64, 0.2, 0.3, *sums), q, columns, slashes)
    agrees(lambda q, means: triton_shares.decide(q, view, means, 64, 0.2, 0.3, columns)[0], q, means)
    agrees(
        lambda q, means, on: triton_pooled.pooled_shares(q, view, means, shape, 64, 0.2, on)[on], q, means, by_pooled
    )
    pooled = torch.rand(4, -(-(shape.q_start + 128) // 64) - shape.q_start // 64, k_blocks, generator=rng)
    lines = vertical, groups, pooled, by_pooled, columns

    def chosen(vertical, groups, pooled, by_pooled, columns, threshold=None):
        at = shape, 64, vertical, groups, pooled, by_pooled, threshold, columns, 1
        return triton_blocks.choose_blocks(*at, 0.7, 1, None)

    agrees(chosen, *lines)
    agrees(chosen, *lines, torch.rand(4, generator=rng))
    agrees(lambda mass, active: mass_threshold(mass, 0.6, active), torch.rand(4, 30, generator=rng), by_pooled)
    agrees(lambda mass: choose.kept_lines(mass, 0.6, 4, 8, 20), torch.rand(2, 4, 30, generator=rng))


def test_what_loopserve_covers():
    positions = torch.tensor([20, 33, 61, 79])
    weights = torch.rand(3, 4, 80, generator=generator(8)).masked_fill(torch.arange(80) > positions[:, None], 0.0)
    agrees(lambda positions: cover(weights.clone(), positions, 10, 0.7), positions)
    with pytest.raises(SaccadeError, match="weights is written in place"):
        cover(sliced(weights), positions, 10, 0.7)


def test_passes_over_rows():
    rng = generator(12)
    x, y, weight = torch.randn(5, 64, generator=rng), torch.randn(5, 64, generator=rng), torch.randn(64, generator=rng)
    agrees(lambda delta, weight: rows.add_norm(x.clone(), delta, weight, 1e-6), y, weight)
    agrees(lambda gate, up: rows.gated(gate.clone(), up), x, y)
    assert torch.equal(rows.gated(spread(x), y), rows.gated(x.clone(), y))
    cos, sin = torch.randn(2, 5, D, generator=rng)

    def turned(cos, sin):
        q, k = sliced(torch.ones(5, 4, D)), torch.ones(5, 2, D)
        rows.rotate(q, k, cos, sin)
        return q.clone(), k

    agrees(turned, cos, sin)
    for call in (
        lambda: rows.add_norm(spread(x), None, weight, 1e-6),
        lambda: rows.rotate(spread(x[:, None]), None, cos, sin),
    ):
        with pytest.raises(SaccadeError, match="written in place"):
            call()
    assert laid(x, sliced).stride(-1) == 1
