"""The kernels of a batched decode step against the methods' own selections and the reference, under Triton's
interpreter."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from tiny_models import make_checkpoint

from saccade.kv.pool import BlockPool
from saccade.kv.sequence import SequenceKV
from saccade.methods.arkvale import ArkVale
from saccade.methods.base import Query
from saccade.methods.psa import PSA
from saccade.methods.quest import Quest
from saccade.models.decode_step import DecodeStep
from saccade.models.interface import Segment
from saccade.models.loader import load_model
from saccade.ops import Trace, attend
from saccade.ops.triton.batched_decode import PageChoice, Summaries, append_rows, band_lists, choose_best, score_blocks
from saccade.ops.triton.batched_rank import choose_ranked, rank_blocks, ranked_keys
from saccade.ops.triton.decode import Pages, attend_decode
from saccade.ops.triton.progressive import Rule, attend_progressive
from saccade.selection import Band, Blocks, Dense, Ranking

HEADS, KV_HEADS, DIM = 4, 2, 32


class Rows:
    """Sequences of one layer with ``lengths`` keys each, the last not stored yet; a length of 0 is padding."""

    def __init__(self, lengths, size=32, kind="cuboid", dtype=torch.float32, seed=0):
        rng = torch.Generator().manual_seed(seed)
        self.lengths, self.kind, self.size = lengths, kind, size
        pool = BlockPool(400, KV_HEADS, DIM, block_size=32, dtype=dtype)
        pool.k.fill_(float("nan"))
        pool.v.fill_(float("nan"))
        self.kvs, tables, pointers = [], torch.zeros(len(lengths), 64, dtype=torch.int32), []
        for row, length in enumerate(lengths):
            kv = SequenceKV(pool, 1)
            self.kvs.append(kv)
            pointers.append(0)
            if length:
                kv.reserve(length)
                kv.append(0, *torch.randn(2, KV_HEADS, length - 1, DIM, generator=rng).to(dtype))
                tables[row, : len(kv._slots[0])] = torch.tensor(kv._slots[0], dtype=torch.int32)
                (buffer,) = kv.summary_buffers(kind, size, length // size)
                pointers[-1] = buffer.data_ptr()
        self.pages = Pages(pool.k, pool.v, tables, torch.tensor(lengths, dtype=torch.int32), 1024)
        self.summaries = Summaries(torch.tensor(pointers), size, kind)
        # Rows reach the kernels as transformers leaves them: heads outermost.
        self.q, self.k, self.v = (
            torch.randn(heads, len(lengths), DIM, generator=rng).to(dtype).transpose(0, 1)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )

    def views(self):
        """(row, query, view) of every row that is none of padding, its last key stored by the sequence itself."""
        for row, (length, kv) in enumerate(zip(self.lengths, self.kvs)):
            if length:
                if kv.length < length:
                    kv.append(0, self.k[row][:, None], self.v[row][:, None])
                yield row, self.q[row][:, None], kv.view(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("size", "kind"), [(32, "cuboid"), (16, "minmax"), (64, "cuboid")])
def test_rows_are_appended_and_full_blocks_summarized(size, kind, dtype):
    rows = Rows([1, 0, 64, 65, 320], size, kind, dtype)
    append_rows(rows.k, rows.v, rows.pages, rows.summaries)
    stored = {}
    for row, kv in enumerate(rows.kvs):
        if rows.lengths[row]:
            kv.appended(1)
            at = rows.lengths[row] - 1
            stored[row] = (kv.view(0).keys(at), kv.view(0).values(at))
            full = rows.lengths[row] // size
            (buffer,) = kv.summary_buffers(kind, size, full)
            stored[row] += (buffer[:full].clone(),)
            kv.truncate(0)
    fresh = Rows([1, 0, 64, 65, 320], size, kind, dtype)
    for row, _, view in fresh.views():
        at = fresh.lengths[row] - 1
        assert torch.equal(stored[row][0], view.keys(at))
        assert torch.equal(stored[row][1], view.values(at))
        torch.testing.assert_close(stored[row][2], view.summary(kind, size), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dense_rows_of_unequal_length(dtype):
    rows = Rows([1, 0, 64, 333], dtype=dtype)
    append_rows(rows.k, rows.v, rows.pages)
    out, _ = attend_decode(rows.q, rows.pages, None, scale=0.2)
    assert torch.equal(out[1], torch.zeros(HEADS, DIM, dtype=dtype))
    for row, q, view in rows.views():
        expected, _ = attend(q, view, Dense(Query.of(q, view).shape), scale=0.2, backend="reference")
        torch.testing.assert_close(out[row][:, None], expected, atol=2e-3 if dtype == torch.float16 else 1e-5, rtol=0)


METHODS = [
    (ArkVale(budget=128), PageChoice(32, "cuboid", 1, 2, 2, 0, 128)),
    (ArkVale(budget=224, unit="kv_head"), PageChoice(32, "cuboid", 2, 2, 2, 3, 224)),
    (ArkVale(budget=200, block_size=16, sinks=0, window=1), PageChoice(16, "cuboid", 1, 0, 1, 11, 200)),
    (Quest(budget=96, dense_layers=0), PageChoice(16, "minmax", 2, 0, 1, 5, 96)),
    (Quest(budget=64, block_size=64, dense_layers=0), PageChoice(64, "minmax", 2, 0, 1, 0, 64)),
]


@pytest.mark.parametrize("choose", [choose_best, choose_ranked])
@pytest.mark.parametrize(("method", "choice"), METHODS, ids=lambda part: getattr(part, "text", ""))
def test_rows_choose_the_pages_that_the_method_chooses(method, choice, choose):
    rows = Rows([20, 0, 96, 200, 225, 352, 640], choice.size, choice.kind)
    append_rows(rows.k, rows.v, rows.pages, rows.summaries)
    lists = choose(score_blocks(rows.q, rows.pages, rows.summaries, choice), rows.pages, choice)
    out, _ = attend_decode(rows.q, rows.pages, lists, scale=0.2)
    counts = lists.counts.view(-1, choice.units)
    for row, q, view in rows.views():
        query = Query.of(q, view)
        selection = method.select_decode(query, None)
        if isinstance(selection, Dense):
            expected = torch.ones(choice.units, -(-view.length // choice.size), dtype=torch.bool)
        else:
            assert isinstance(selection, Blocks)
            expected = selection.block_mask()[:, 0]
        for unit in range(choice.units):
            chosen = lists.indices[row * choice.units + unit, : counts[row, unit]]
            assert sorted(chosen.tolist()) == expected[unit].nonzero()[:, 0].tolist()
        wanted, _ = attend(q, view, selection, scale=0.2, backend="reference")
        torch.testing.assert_close(out[row][:, None], wanted, atol=1e-5, rtol=1e-5)


def test_bands():
    rows = Rows([3, 0, 40, 41, 500])
    append_rows(rows.k, rows.v, rows.pages)
    out, _ = attend_decode(rows.q, rows.pages, band_lists(rows.pages, 4, 37), scale=0.2)
    for row, q, view in rows.views():
        band = Band(Query.of(q, view).shape, window=37, sinks=4)
        expected, _ = attend(q, view, band, scale=0.2, backend="reference")
        torch.testing.assert_close(out[row][:, None], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("choose", [choose_best, choose_ranked])
def test_equal_scores_go_to_the_lower_block(choose):
    scores = torch.tensor([[[-torch.inf, 2.0, -0.0, 0.0, 2.0, -3.0, 0.0, -torch.inf]]])
    pages = Pages(torch.empty(1, 1, 16, 16), torch.empty(1, 1, 16, 16), torch.zeros(1, 8), torch.tensor([128]), 128)
    for take, wanted in ((1, [1]), (3, [1, 2, 4]), (4, [1, 2, 3, 4]), (6, [1, 2, 3, 4, 5, 6])):
        lists = choose(scores, pages, PageChoice(16, "minmax", 1, 1, 1, take, 64))
        assert sorted(lists.indices[0, : lists.counts[0]].tolist()) == [0, *wanted, 7]


@pytest.mark.parametrize("size", [16, 32])
def test_rows_rank_the_blocks_that_psa_ranks(size):
    method = PSA(block_size=size, microbatch=2)
    choice = PageChoice(size, "cuboid", KV_HEADS, 2, 1, 0, 6 * size - 1, after_full=True)
    rows = Rows([20, 0, 6 * size - 1, 6 * size, 225, 640], size)
    append_rows(rows.k, rows.v, rows.pages, rows.summaries)
    always, order, counts = rank_blocks(score_blocks(rows.q, rows.pages, rows.summaries, choice), rows.pages, choice)
    assert counts[:, KV_HEADS : 2 * KV_HEADS].tolist() == [[0, 0], [0, 0]]  # padding
    for row, q, view in rows.views():
        selection = method.select_decode(Query.of(q, view), None)
        for unit in range(KV_HEADS):
            at = row * KV_HEADS + unit
            forced, ranked = always[at, : counts[0, at]], order[at, : counts[1, at]]
            if isinstance(selection, Dense):
                assert forced.tolist() == list(range(-(-view.length // size)))
                assert ranked.numel() == 0
            else:
                assert isinstance(selection, Ranking)
                assert forced.tolist() == selection.always[unit].tolist()
                assert ranked.tolist() == selection.order[unit].tolist()


def test_equal_scores_rank_by_block():
    scores = torch.tensor([[[-torch.inf, 2.0, -0.0, 0.0, 2.0, -3.0, 0.0, -torch.inf]]])
    pages = Pages(torch.empty(1, 1, 16, 16), torch.empty(1, 1, 16, 16), torch.zeros(1, 8), torch.tensor([128]), 128)
    always, order, counts = rank_blocks(scores, pages, PageChoice(16, "cuboid", 1, 1, 1, 0, 64, after_full=True))
    assert counts.tolist() == [[2], [6]]
    assert always[0, :2].tolist() == [0, 7]
    assert order[0, :6].tolist() == [1, 4, 2, 3, 6, 5]


@pytest.mark.slow
@pytest.mark.parametrize(("rest", "stop"), [("last_max", "all"), ("min", "mean")])
def test_rows_of_unequal_length_stop_where_the_loop_stops(rest, stop):
    method = PSA(epsilon=0.6, block_size=16, microbatch=2, rest=rest, stop=stop)
    choice = PageChoice(16, "cuboid", KV_HEADS, 2, 1, 0, 95, after_full=True)
    rows = Rows([20, 0, 96, 225, 640], 16)
    append_rows(rows.k, rows.v, rows.pages, rows.summaries)
    always, order, counts = rank_blocks(score_blocks(rows.q, rows.pages, rows.summaries, choice), rows.pages, choice)
    rule = Rule(method.epsilon, method.microbatch, rest, stop)
    out, _, used, _ = attend_progressive(
        rows.q, rows.pages, always, order, 16, rule, scale=0.8, counts=counts, readers=2
    )
    read = ranked_keys(used, counts, 16, 2).view(-1, KV_HEADS)
    assert torch.equal(out[1], torch.zeros(HEADS, DIM))
    stopped = 0
    for row, q, view in rows.views():
        selection = method.select_decode(Query.of(q, view), None)
        trace = Trace()
        expected, _ = attend(q, view, selection, scale=0.8, backend="reference", trace=trace)
        torch.testing.assert_close(out[row][:, None], expected, atol=1e-5, rtol=1e-5)
        pairs = trace.used.unit_pairs().expand(KV_HEADS) if trace.used is not None else torch.tensor([view.length] * 2)
        forced = selection.always.shape[1] * 16 - (-view.length % 16) if isinstance(selection, Ranking) else view.length
        assert (read[row] + forced).tolist() == pairs.tolist()
        stopped += int((pairs < view.length).sum())
    assert stopped  # the rule held somewhere


class Mean:
    """An attention context in which a row reads itself alone."""

    def attend(self, layer, q, k, v, spec):
        return v.repeat_interleave(q.shape[0] // v.shape[0], 0)


@pytest.mark.parametrize(("family", "join"), [("llama", False), ("llama", True), ("qwen2", True), ("gemma2", False)])
def test_a_steps_layers_give_what_the_module_loop_gives(tmp_path, family, join):
    runner = load_model(make_checkpoint(family, tmp_path)).runner
    ids, positions = torch.tensor([5, 77, 5]), torch.tensor([0, 9, 300])
    segments = [Segment(row, 1, 301) for row in range(3)]
    expected = runner.run(ids, positions, Mean(), segments=segments, logit_rows=torch.arange(3))
    step = DecodeStep(runner, join)
    assert step.lean == (family != "gemma2")
    torch.testing.assert_close(step.run(ids, positions, Mean()), expected, atol=1e-4, rtol=1e-4)
    again = runner.run(ids, positions, Mean(), segments=segments, logit_rows=torch.arange(3))
    assert torch.equal(again, expected)  # the modules' weights are what they were
