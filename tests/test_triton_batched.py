"""The kernels of a batched decode step against the methods' own selections and the reference, under Triton's
interpreter."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from kv_helpers import poisoned_pool
from module_oracle import with_modules
from tiny_models import make_checkpoint

from saccade.kv.sequence import SequenceKV
from saccade.kv.summaries import summarize_view
from saccade.kv.view import KVView
from saccade.methods.arkvale import ArkVale
from saccade.methods.base import Query
from saccade.methods.psa import PSA
from saccade.methods.quest import Quest
from saccade.methods.streaming import Streaming
from saccade.models.decode_step import DecodeStep
from saccade.models.interface import Segment
from saccade.models.llama import LlamaDecoder
from saccade.models.llama_weights import NamedTensors, read_weights
from saccade.models.loader import load_model
from saccade.ops import Call, attend, run
from saccade.ops.triton.batch import Pages
from saccade.ops.triton.batched_choice import choose_in_parts
from saccade.ops.triton.batched_decode import Summaries, append_rows, band_lists, choose_best, score_blocks
from saccade.ops.triton.batched_rank import choose_ranked, rank_blocks
from saccade.ops.triton.block_summaries import summarize
from saccade.ops.triton.decode import attend_decode
from saccade.ops.triton.progressive import attend_progressive
from saccade.selection import Band, Blocks, Dense, Ranking
from saccade.selection.forms import Rule, Summarized
from saccade.selection.readings import Choice

HEADS, KV_HEADS, DIM = 4, 2, 32


class Rows:
    """Sequences of one layer with ``lengths`` keys each, the last not stored yet; a length of 0 is padding."""

    def __init__(self, lengths, size=32, kind="cuboid", dtype=torch.float32, seed=0, heads_apart=False):
        rng = torch.Generator().manual_seed(seed)
        self.lengths, self.kind, self.size = lengths, kind, size
        pool = poisoned_pool(400, KV_HEADS, DIM, dtype=dtype, heads_apart=heads_apart)
        self.kvs, tables, pointers = [], torch.zeros(len(lengths), pool.rows, 64, dtype=torch.int32), []
        for row, length in enumerate(lengths):
            kv = SequenceKV(pool)
            self.kvs.append(kv)
            pointers.append(0)
            if length:
                kv.reserve(length)
                kv.append(0, *torch.randn(2, KV_HEADS, length - 1, DIM, generator=rng).to(dtype))
                tables[row, :, : kv.blocks] = kv.tables[0, :, : kv.blocks]
                (buffer,) = kv.summary_buffers(kind, size, length // size)
                pointers[-1] = buffer.data_ptr()
        self.pages = Pages(pool.storage.k, pool.storage.v, tables, torch.tensor(lengths, dtype=torch.int32), 1024)
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


@pytest.mark.parametrize(
    ("kind", "size"),
    [("minmax", 16), ("cuboid", 64), ("moments", 32), ("stored_mean", 16), ("mean", 64), ("mean_value", 64)],
)
def test_a_prompts_blocks_are_summarized_in_one_launch(kind, size):
    """Pages scattered over the storage, a part that begins within it, and keys that are not finite."""
    rng = torch.Generator().manual_seed(5)
    k, v = torch.randn(2, KV_HEADS, 300, DIM, generator=rng)
    for rows in (k, v):
        rows[1, 70, 3], rows[0, 200, 1] = torch.nan, torch.inf
    view = KVView.from_tensors(k, v, 32, shuffle_seed=1)
    for first, last in ((0, 300 // size), (1, 3), (2, 2)):
        made = summarize(view.paged(), kind, size, first, last)
        expected = summarize_view(view, kind, size, first, last)
        torch.testing.assert_close(made, expected, atol=1e-6, rtol=1e-6, equal_nan=True)
    assert summarize(view.paged(), kind, 24, 0, 2) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dense_rows_of_unequal_length(dtype):
    rows = Rows([1, 0, 64, 333], dtype=dtype)
    append_rows(rows.k, rows.v, rows.pages)
    out, _ = attend_decode(rows.q, rows.pages, None, scale=0.2)
    assert torch.equal(out[1], torch.zeros(HEADS, DIM, dtype=dtype))
    for row, q, view in rows.views():
        expected, _ = attend(q, view, Dense(Query.of(q, view).shape), scale=0.2, backend="reference")
        torch.testing.assert_close(out[row][:, None], expected, atol=2e-3 if dtype == torch.float16 else 1e-5, rtol=0)


class Spec:
    """A model of one layer, for plans."""

    layers, heads, kv_heads, head_dim, windows = 1, HEADS, KV_HEADS, DIM, (None,)


def readings(methods, rows):
    """The form that ``methods``, taken in turn by the rows, share, and each row's numbers: (form, first, second,
    share)."""
    taken = [methods[row % len(methods)].device_plan(Spec).layers[0] for row in range(len(rows.lengths))]
    (form,) = {one.form for one in taken}
    first, second, share = zip(*(one.numbers for one in taken))
    ints = [torch.tensor(part, dtype=torch.int32) for part in (first, second)]
    return form, *ints, torch.tensor(share, dtype=torch.float32)


METHODS = [
    (ArkVale(budget=128), ArkVale(budget=100)),
    (ArkVale(budget=224, unit="kv_head"), ArkVale(budget=160, unit="kv_head")),
    (ArkVale(budget=200, block_size=16, sinks=0, window=1), ArkVale(budget=140, block_size=16, sinks=0, window=1)),
    (Quest(budget=96, dense_layers=0), Quest(budget=80, dense_layers=0)),
    (Quest(budget=64, block_size=64, dense_layers=0), Quest(budget=60, block_size=64, dense_layers=0)),
]


@pytest.mark.parametrize("choose", [choose_best, choose_ranked, choose_in_parts])
@pytest.mark.parametrize("methods", METHODS, ids=lambda methods: methods[0].text)
def test_rows_choose_the_pages_that_their_methods_choose(methods, choose):
    """Rows of one form in one launch, each with its own budget."""
    choice = methods[0].device_plan(Spec).layers[0]
    rows = Rows([20, 0, 96, 200, 225, 352, 640], choice.size, choice.source.summary)
    form, take, dense_upto, _ = readings(methods, rows)
    append_rows(rows.k, rows.v, rows.pages, rows.summaries)
    scores = score_blocks(rows.q, rows.pages, rows.summaries, form)
    lists = choose(scores, rows.pages, form, take, dense_upto)
    out, _ = attend_decode(rows.q, rows.pages, lists, scale=0.2)
    counts = lists.counts.view(-1, choice.units)
    for row, q, view in rows.views():
        query = Query.of(q, view)
        selection = methods[row % 2].select_decode(query, None)
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
    methods = (Streaming(sinks=4, window=37), Streaming(sinks=0, window=60))
    form, sinks, window, _ = readings(methods, rows)
    lists = band_lists(rows.pages, sinks, window, form.longest)
    out, _ = attend_decode(rows.q, rows.pages, lists, scale=0.2)
    for row, q, view in rows.views():
        band = Band(Query.of(q, view).shape, window=methods[row % 2].window, sinks=methods[row % 2].sinks)
        expected, _ = attend(q, view, band, scale=0.2, backend="reference")
        torch.testing.assert_close(out[row][:, None], expected, atol=1e-5, rtol=1e-5)


def int32(number):
    return torch.tensor([number], dtype=torch.int32)


def eight_blocks():
    """One sequence of 128 keys in blocks of 16."""
    table = torch.zeros(1, 1, 8, dtype=torch.int32)
    return Pages(torch.empty(1, 1, 16, 16), torch.empty(1, 1, 16, 16), table, int32(128), 128)


@pytest.mark.parametrize("choose", [choose_best, choose_ranked, choose_in_parts])
def test_equal_scores_go_to_the_lower_block(choose):
    scores = torch.tensor([[[-torch.inf, 2.0, -0.0, 0.0, 2.0, -3.0, 0.0, -torch.inf]]])
    pages = eight_blocks()
    for take, wanted in ((1, [1]), (3, [1, 2, 4]), (4, [1, 2, 3, 4]), (6, [1, 2, 3, 4, 5, 6])):
        choice = Choice(Summarized(16, "minmax"), 1, 1, 1, 128, take=take).form
        lists = choose(scores, pages, choice, int32(take), int32(64))
        assert sorted(lists.indices[0, : lists.counts[0]].tolist()) == [0, *wanted, 7]


@pytest.mark.parametrize("size", [16, 32])
def test_rows_rank_the_blocks_that_psa_ranks(size):
    method = PSA(block_size=size, microbatch=2, rank="cuboid")
    rows = Rows([20, 0, 6 * size - 1, 6 * size, 225, 640], size)
    choice, _, dense_upto, _ = readings([method], rows)
    append_rows(rows.k, rows.v, rows.pages, rows.summaries)
    scores = score_blocks(rows.q, rows.pages, rows.summaries, choice)
    always, order, counts = rank_blocks(scores, rows.pages, choice, dense_upto)
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
    pages = eight_blocks()
    choice = Choice(Summarized(16, "cuboid"), 1, 1, 1, 64, rule=Rule(0.5, 2, "min", "all"))
    always, order, counts = rank_blocks(scores, pages, choice, int32(64))
    assert counts.tolist() == [[2], [6]]
    assert always[0, :2].tolist() == [0, 7]
    assert order[0, :6].tolist() == [1, 4, 2, 3, 6, 5]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rest", "stop"), [("last_max", "all"), pytest.param("min", "mean", marks=pytest.mark.thorough)]
)
def test_rows_of_unequal_length_stop_where_the_loop_stops(rest, stop):
    methods = [
        PSA(epsilon=share, block_size=16, microbatch=2, rest=rest, stop=stop, rank="cuboid") for share in (0.6, 0.9)
    ]
    rows = Rows([20, 0, 96, 640, 225, 330], 16)
    choice, _, dense_upto, epsilon = readings(methods, rows)
    append_rows(rows.k, rows.v, rows.pages, rows.summaries)
    scores = score_blocks(rows.q, rows.pages, rows.summaries, choice)
    always, order, counts = rank_blocks(scores, rows.pages, choice, dense_upto)
    rule = Rule(choice.stops.epsilon, choice.stops.microbatch, rest, stop)
    out, _, used, _, coverage = attend_progressive(
        rows.q, rows.pages, always, order, 16, rule, scale=0.8, counts=counts, epsilon=epsilon, readers=2
    )
    read = torch.minimum(used * choice.stops.microbatch, counts[1]).view(-1, KV_HEADS) * 16
    assert torch.equal(out[1], torch.zeros(HEADS, DIM))
    stopped = 0
    for row, q, view in rows.views():
        selection = methods[row % 2].select_decode(Query.of(q, view), None)
        ran = run(Call.of(q, view, selection, scale=0.8), "reference")
        expected = ran.out
        torch.testing.assert_close(out[row][:, None], expected, atol=1e-5, rtol=1e-5)
        pairs = ran.used.unit_pairs().expand(KV_HEADS) if ran.used is not None else torch.tensor([view.length] * 2)
        forced = selection.always.shape[1] * 16 - (-view.length % 16) if isinstance(selection, Ranking) else view.length
        assert (read[row] + forced).tolist() == pairs.tolist()
        if ran.coverage is not None:
            torch.testing.assert_close(coverage.view(-1, KV_HEADS)[row], ran.coverage, atol=1e-4, rtol=0)
        stopped += int((pairs < view.length).sum())
    assert stopped  # the rule held somewhere


class Mean:
    """An attention context in which a row reads itself alone."""

    def run(self, layer, q, k, v, spec):
        return v.repeat_interleave(q.shape[0] // v.shape[0], 0)


# SmolLM3's second layer does not rotate, Qwen2's products have biases, Qwen3 norms its heads.
CASES = [("llama", False), ("llama", True), ("qwen2", True), ("qwen3", True), ("smollm3", False), ("gemma2", False)]


@pytest.mark.parametrize(("family", "join"), CASES)
def test_a_steps_layers_give_what_the_module_loop_gives(tmp_path, family, join):
    runner = with_modules(load_model(make_checkpoint(family, tmp_path)).runner)
    decoder, runner.llama = runner.llama, None
    if join:
        decoder = LlamaDecoder(read_weights(runner.model, NamedTensors(runner.model.state_dict()), join))
    ids, positions = torch.tensor([5, 77, 5]), torch.tensor([0, 9, 300])
    segments = [Segment(row, 1, 301) for row in range(3)]
    expected = runner.run(ids, positions, Mean(), segments=segments, logit_rows=torch.arange(3))
    runner.llama = decoder
    assert (decoder is None) == (family == "gemma2")
    step = DecodeStep(runner)
    torch.testing.assert_close(step.run(ids, positions, Mean()), expected, atol=1e-4, rtol=1e-4)
    runner.llama = None
    again = runner.run(ids, positions, Mean(), segments=segments, logit_rows=torch.arange(3))
    assert torch.equal(again, expected)  # the weights are what they were
