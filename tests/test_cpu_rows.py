"""Decode rows of several sequences in one kernel call: to the last bit what each gets by itself."""

from __future__ import annotations

import pytest
import torch
from cpu_helpers import attend_cpu
from engine_helpers import tokens
from helpers import UNTIMED, generator
from kv_helpers import poisoned_pool
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.bench.inputs import random_blocks
from saccade.engine.rows.decode_rows import JoinedRows
from saccade.errors import SaccadeError
from saccade.kv.sequence import SequenceKV
from saccade.ops import cpu, cpu_rows
from saccade.selection import Band, Dense, Lines, Shape, Tokens

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the C++ kernels")
ISAS = cpu.supported_isas()
DTYPES = [torch.float32, torch.bfloat16]
HEADS, KV_HEADS, DIM = 6, 2, 32
LENGTHS = (1, 33, 300, 8300)


def batch(dtype, lengths=LENGTHS):
    """Sequences of one pool, their blocks interleaved, and a query row for each in a packed step."""
    rng = generator(3)
    pool = poisoned_pool(2 * sum(-(-length // 32) for length in lengths), KV_HEADS, DIM, dtype=dtype)
    sequences = [SequenceKV(pool) for _ in lengths]
    for start in range(0, max(lengths), 100):
        for sequence, length in zip(sequences, lengths):
            count = min(length, start + 100) - start
            if count > 0:
                sequence.reserve(start + count)
                sequence.append(0, *torch.randn(2, KV_HEADS, count, DIM, generator=rng).to(dtype))
    q = torch.randn(len(lengths), HEADS, DIM, generator=rng).to(dtype).transpose(0, 1)
    return q, [sequence.view(0) for sequence in sequences]


@pytest.fixture(autouse=True)
def _default_isa():
    yield
    cpu.set_isa(None)


def selections(kind: str):
    shapes = [Shape.suffix(HEADS, KV_HEADS, 1, length) for length in LENGTHS]
    if kind == "dense":
        return [Dense(shape) for shape in shapes]
    if kind == "band":
        return [Band(shape, 40, 7) for shape in shapes]
    if kind == "blocks":
        return [random_blocks(shape, 32, 0.5, KV_HEADS) for shape in shapes]
    kinds = [random_blocks(shapes[0], 16, 0.9, HEADS), Dense(shapes[1]), Band(shapes[2], 9)]
    return [*kinds, random_blocks(shapes[3], 64, 0.99, 1)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["dense", "band", "blocks", "mixed"])
def test_rows_get_to_the_last_bit_what_calls_of_their_own_give(isa, dtype, kind):
    cpu.set_isa(isa)
    q, views = batch(dtype)
    chosen = selections(kind)
    order = [2, 0, 3, 1]
    for threads in (1, 3, 8):
        out = torch.full((len(views), HEADS, DIM), float("nan"), dtype=dtype)
        assert all(cpu_rows.serves_row(view, selection) is None for view, selection in zip(views, chosen))
        cpu_rows.attend(
            q,
            order,
            [views[i] for i in order],
            [chosen[i] for i in order],
            out,
            scale=0.2,
            softcap=9.0,
            threads=threads,
        )
        for row, (view, selection) in enumerate(zip(views, chosen)):
            alone, _ = attend_cpu(q[:, row : row + 1], view, selection, scale=0.2, softcap=9.0, threads=1)
            assert torch.equal(out[row], alone[:, 0])


def test_which_selections_share_a_call():
    _, views = batch(torch.float32, (40,))
    shape = Shape.suffix(HEADS, KV_HEADS, 1, 40)
    assert cpu_rows.serves_row(views[0], Dense(shape)) is None
    assert cpu_rows.serves_row(views[0], Dense(Shape.suffix(HEADS, KV_HEADS, 2, 40)))
    assert cpu_rows.serves_row(views[0], Tokens.from_mask(shape, torch.ones(1, 1, 40, dtype=torch.bool)))
    one = torch.tensor([0, 1])
    assert cpu_rows.serves_row(views[0], Lines(shape, one, torch.tensor([3]), one, torch.tensor([0])))


def test_a_selection_beyond_its_view_is_an_error():
    q, views = batch(torch.float32, (40, 70))
    shape = Shape.suffix(HEADS, KV_HEADS, 1, 71)
    with pytest.raises(SaccadeError, match="reads 71 keys but the view holds 70"):
        cpu_rows.attend(q, [1], [views[1]], [Dense(shape)], torch.zeros(2, HEADS, DIM), scale=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_rows_lie_where_append_puts_them(dtype):
    pools = [poisoned_pool(10, KV_HEADS, DIM, layers=2, dtype=dtype) for _ in range(2)]
    stored = [pool.storage for pool in pools]
    for one in stored:
        one.k.zero_()
        one.v.zero_()
    k, v = torch.randn(2, 5, KV_HEADS, DIM, generator=generator(5)).to(dtype).transpose(1, 2)
    kept = [[SequenceKV(pool) for _ in range(3)] for pool in pools]
    for sequences in kept:
        for sequence, length in zip(sequences, (0, 31, 32)):
            sequence.reserve(length + 1)
            sequence.append(1, torch.ones(KV_HEADS, length, DIM), torch.ones(KV_HEADS, length, DIM))
    for row, sequence in zip((4, 0, 2), kept[0]):
        sequence.append(1, k[:, row : row + 1], v[:, row : row + 1])
    places = [(row, *sequence.place(1)) for row, sequence in zip((4, 0, 2), kept[1])]
    cpu_rows.store(k, v, stored[1].k, stored[1].v, places)
    assert torch.equal(stored[0].k, stored[1].k)
    assert torch.equal(stored[0].v, stored[1].v)
    assert [sequence.view(1).length for sequence in kept[1]] == [1, 32, 33]
    with pytest.raises(SaccadeError, match="no room for 1 tokens after 32"):
        kept[1][1].place(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose heads the kernels read."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=512, head_dim=32)


def make(folder) -> LLM:
    return LLM(folder, kv_memory="16MiB", prefill_chunk=128, exact=False)


def test_a_step_of_many_requests_equals_their_own_calls(folder, monkeypatch):
    """Tokens and reports of a packed batch, joined and not: all keys, bands, blocks, tokens, and one that learns from
    weights."""
    policies = [
        "dense",
        "streaming(sinks=2, window=40)",
        "quest(budget=64, dense_layers=1, unit=q_head)",
        "topk(k=24)",
        "h2o(budget=48)",
    ]
    ids = [random_ids(length, seed=length) for length in (5, 190, 223, 64, 130)]
    few = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    joined = JoinedRows.__init__
    done = []

    def counted(self, setting, plans, rows, *rest):
        done.append(len(rows))
        joined(self, setting, plans, rows, *rest)

    monkeypatch.setattr(JoinedRows, "__init__", counted)
    together = make(folder).generate(ids, few, policy=policies)
    assert max(done) == len(ids)  # all of them at once
    monkeypatch.setattr(cpu_rows, "stores", lambda *rest: False)
    apart = make(folder).generate(ids, few, policy=policies)
    for left, right in zip(together, apart):
        assert tokens(left) == tokens(right)
        for phase in ("prefill", "decode"):
            reports = [{**one.report[phase], **UNTIMED} for one in (left, right)]
            assert reports[0] == reports[1]
        assert left.report["notes"] == right.report["notes"]


def test_a_request_that_fails_in_a_joined_step_fails_alone(folder, monkeypatch):
    from saccade.methods.topp import TopP

    ids = [random_ids(length, seed=length) for length in (50, 90, 70)]
    few = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    want = [tokens(one) for one in make(folder).generate(ids, few)]

    def broken(self, query, state):
        raise RuntimeError("no choice today")

    monkeypatch.setattr(TopP, "select_decode", broken)
    with pytest.warns(RuntimeWarning, match="no choice today"):
        outputs = make(folder).generate(ids, few, policy=["dense", "topp(dense_upto=0)", "dense"])
    assert "decode: RuntimeError: no choice today" in outputs[1].error
    assert [tokens(outputs[i]) for i in (0, 2)] == [want[0], want[2]]
