"""No C++ entry reads a tensor by assumed strides: slices of larger tensors give what contiguous ones give."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from helpers import generator, planted_heads, random_selection
from layout_helpers import LAYOUTS, agrees, laid, sliced, spread
from lfps_helpers import row_of

from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.methods.cis.anchors import Anchors
from saccade.methods.cis.sharing import keep, share
from saccade.methods.lfps import LFPS
from saccade.methods.lfps import cpu as lfps
from saccade.methods.lfps.tables import ScoreTables
from saccade.methods.loopserve.line_cover import cover_lines, cover_rows
from saccade.methods.psa.estimates import block_estimates, ranked_by_estimate
from saccade.ops import attend, cpu, cpu_rows, layer_rows, row_passes
from saccade.ops.block_scores import ranked_blocks, top_blocks
from saccade.ops.layer_weights import LayerWeights, Norm
from saccade.ops.matrices import DenseMatrix
from saccade.ops.scores import antidiagonal_shares, line_sums, needed_shares
from saccade.selection import Candidates, Cone, Dense, Sampled, Shape, Tokens, cut

pytestmark = pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable() or "-")
HEADS, KV_HEADS, N, D = 4, 2, 300, 32


def problem(q_len: int = 1, dtype: torch.dtype = torch.float32):
    q, k, v = (part.to(dtype) for part in planted_heads(HEADS, KV_HEADS, N, D, 0))
    return q[:, N - q_len :].contiguous(), KVView.from_tensors(k, v, shuffle_seed=0), Shape.suffix(4, 2, q_len, N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["dense", "band", "tri", "blocks", "lines", "mixed", "tokens", "ranking"])
@pytest.mark.parametrize("q_len", [1, 70])
def test_attention(kind, q_len, dtype):
    if kind in ("tokens", "ranking") and q_len > 1:
        pytest.skip("of one row only")
    q, view, shape = problem(q_len, dtype)
    selection = random_selection(kind, shape, 4, generator(1))
    agrees(lambda q, selection: attend(q, view, selection, backend="cpu"), q, selection)


def test_attention_within_a_window():
    q, view, shape = problem(70)
    left = cut(Dense(shape), Cone(0.4, 16, 16, 1))
    agrees(lambda q: attend(q, view, left, backend="cpu"), q)


def test_candidates_and_samples():
    q, view, shape = problem()
    listed = Tokens.from_lists(shape, [torch.arange(9, 250, step) for step in (3, 4, 5, 6)])
    idle, full = torch.tensor([False, True, False, False]), torch.tensor([False, False, True, False])
    k = torch.tensor([7, 9, 11, 13])
    rest = torch.randn(4), torch.randn(4, D)
    for chosen in (
        Candidates(shape, listed.offsets, listed.indices, k, 4, 6, None, idle, 4, rest),
        Candidates(shape, listed.offsets, listed.indices, k, 4, 6, full),
    ):
        agrees(lambda q, chosen: attend(q, view, chosen, backend="cpu"), q, chosen)
    sampled = Sampled(listed, torch.rand(listed.indices.numel(), generator=generator(2)))
    agrees(lambda q, sampled: attend(q, view, sampled, backend="cpu"), q, sampled)


def test_rows_of_several_sequences():
    q, view, shape = problem()
    rows = torch.cat([q, 2 * q], 1)
    blocks = random_selection("blocks", shape, 2, generator(3))

    def entry(rows, blocks):
        out = torch.empty(2, HEADS, D)
        return out, cpu_rows.attend(rows, [0, 1], [view, view], [blocks, Dense(shape)], out, scale=0.2)

    agrees(entry, rows, blocks, layouts=("sliced",))  # queries whose channels lie apart are refused: see serves
    assert cpu_rows.serves(spread(rows), view, "auto") is not None
    with pytest.raises(SaccadeError, match="out is written in place"):
        cpu_rows.attend(rows, [0], [view], [blocks], sliced(torch.empty(2, HEADS, D)), scale=0.2)
    pools = torch.zeros(2, 4, KV_HEADS, 16, D)
    k, v = torch.randn(2, KV_HEADS, 2, D)
    for k_part, v_part in ((spread(k), spread(v)), (k, sliced(v))):
        with pytest.raises(SaccadeError, match="equal strides"):
            cpu_rows.store(k_part, v_part, *pools, [(0, 1, 2)])
    with pytest.raises(SaccadeError, match="v_pool is written in place"):
        cpu_rows.store(k, v, pools[0], sliced(pools[1]), [(0, 1, 2)])


def test_sums_that_selections_rest_on():
    q, view, shape = problem(70)
    rows = torch.tensor([3, 20, 50, 69])
    agrees(lambda q: line_sums(q, view, shape, 33, 0.2), q)
    for products in (False, True):
        agrees(lambda q, fp8=products: antidiagonal_shares(q, view, shape, 8, 64, 0.2, fp8=fp8), q)
    agrees(needed_shares, torch.rand(3, 90, generator=generator(4)))
    agrees(lambda q, rows: cover_rows(q, view, shape, rows, 0.8, 0.2), q, rows)
    weights = torch.rand(4, 90, generator=generator(5)).tril(80)
    agrees(lambda weights, rows: tuple(cover_lines(weights, rows, 20, 0.8)[:2]), weights, rows + 20)


def test_blocks_by_their_summaries():
    q, view, _ = problem()
    for kind in ("cuboid", "stored_mean"):
        summary = view.summary(kind, 16)
        agrees(lambda q, summary: top_blocks(q, summary, 2, 5, 1, 17), q[:, 0], summary)
        agrees(lambda q, summary: ranked_blocks(q, summary, 2, 1, 17), q[:, 0], summary)
    moments = view.summary("moments", 16)
    agrees(lambda q: ranked_by_estimate(block_estimates(q, moments, 16, 0.2), 2), q[:, 0])
    apart = block_estimates(q[:, 0], sliced(moments), 16, 0.2)  # which torch reads, and rounds otherwise
    torch.testing.assert_close(apart, block_estimates(q[:, 0], moments, 16, 0.2), atol=1e-5, rtol=1e-5)
    agrees(lambda estimates: ranked_by_estimate(estimates, 2), torch.randn(4, 30, generator=generator(6)))


def tables() -> ScoreTables:
    vertical, slash = torch.rand(2, HEADS, N, generator=generator(7)) ** 8
    return ScoreTables.of(vertical, slash, 4, N - 1)


def test_what_lfps_asks_of_its_kernels():
    method = LFPS(k=16, blocks=3, block_size=16, epsilon=0.1)
    query, made = row_of(method, N)

    def entry(q, *means):
        query_of, state = replace(query, q=q), replace(made)
        state.mean_key, state.mean_value, state.spread = means
        return lfps.choose(method, query_of, state, N - 4, 6)

    assert entry(query.q, made.mean_key, made.mean_value, made.spread).idle is not None
    agrees(entry, query.q, made.mean_key, made.mean_value, made.spread)
    made.tables.vertical = sliced(made.tables.vertical)
    with pytest.raises(SaccadeError, match="score tables are written in place"):
        lfps.choose(method, query, made, N - 4, 6)


def test_what_lfps_learns():
    read = Tokens.from_lists(Shape.suffix(4, 2, 1, N), [torch.arange(9, 250, step) for step in (3, 4, 5, 6)])
    weights, idle = (
        torch.rand(1, read.indices.numel(), generator=generator(1)),
        torch.tensor([True, False, False, False]),
    )

    def entry(read, weights, idle):
        made = tables()
        lfps.learn(made, read, weights, idle, 0.9)
        return made.vertical, made.slash, made.sums, made.vertical_max, made.slash_max

    agrees(entry, read, weights, idle)
    made = tables()
    made.vertical = sliced(made.vertical)
    with pytest.raises(SaccadeError, match="score tables are written in place"):
        lfps.learn(made, read, weights, idle, 0.9)


def test_what_cis_shares():
    read = Tokens.from_lists(Shape.suffix(4, 2, 1, N), [torch.arange(9, 250, step) for step in (3, 4, 5, 6)])
    q, weights = torch.randn(4, D, generator=generator(1)), torch.rand(1, read.indices.numel(), generator=generator(2))
    searching = torch.tensor([True, False, True, True])

    def entry(q, read, weights, searching):
        anchors = Anchors.empty(4, D, 120, 5)
        first = share(anchors, q, 0.8, 20, N)
        keep(anchors, read, weights, searching, N - 1, (4, N - 20), 5, 1)
        return first, share(anchors, q, 0.8, 20, N + 3, moves=(1, 4)), anchors.keys, anchors.counts, anchors.moving

    agrees(entry, q, read, weights, searching)
    anchors = Anchors.empty(4, D, 120)
    anchors.keys = sliced(anchors.keys)
    with pytest.raises(SaccadeError, match="anchors are written in place"):
        share(anchors, q, 0.8, 20, N)


def test_passes_over_rows():
    x, y, weight = torch.randn(5, 64), torch.randn(5, 64), torch.randn(64)
    agrees(lambda x, weight: row_passes.add_norm(x, None, weight, 1e-6), x, weight, layouts=("sliced",))
    agrees(lambda x, y: row_passes.gated(deepcopy(x), y), x, y, layouts=("sliced",))
    cos, sin = torch.randn(2, 5, 32)

    def turned(x, cos, sin):
        x = sliced(x.clone())
        row_passes.rotate(x, None, cos, sin)
        return x.clone()

    agrees(turned, torch.randn(5, 3, 64), cos, sin)
    norm = row_passes.add_norm(x, None, weight, 1e-6)  # rows whose values lie apart are torch's
    torch.testing.assert_close(row_passes.add_norm(spread(x), None, spread(weight), 1e-6), norm)


def test_a_decoder_layer_on_a_few_rows():
    norm = Norm(torch.ones(64), 1e-6)

    def matrix(out: int, seed: int) -> DenseMatrix:
        return DenseMatrix(torch.randn(out, 64, generator=generator(seed)) / 8)

    many = [matrix(64, seed) for seed in range(7)]
    layer = layer_rows.RowLayer(LayerWeights(norm, *many[:4], norm, *many[4:], 16))
    hidden, cos, sin = torch.randn(3, 64), torch.randn(3, 16), torch.randn(3, 16)
    agrees(layer.project, hidden, cos, sin)
    agrees(lambda hidden: layer_rows.head(hidden, norm, many[0]), hidden)

    def finished(attended):
        out = hidden.clone()
        layer.finish(out, attended)
        return out

    agrees(finished, torch.randn(4, 3, 16))
    with pytest.raises(SaccadeError, match="hidden is written in place"):
        layer.finish(sliced(hidden), torch.randn(4, 3, 16))


def test_the_layouts_are_what_they_say():
    x = torch.arange(12).view(3, 4)
    for layout in LAYOUTS.values():
        assert torch.equal(layout(x), x)
        assert not layout(x).is_contiguous()
        assert layout(x).storage_offset() > 0
    assert laid((x, 3, "y"), sliced)[1:] == (3, "y")
