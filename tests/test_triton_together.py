"""Chunks of several sequences in one launch, under Triton's interpreter: each row gets what a call of its own gives."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from helpers import generator
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.rows import attention as host_module
from saccade.engine.rows import together as host_together
from saccade.errors import SaccadeError
from saccade.kv.blocks import BlockManager
from saccade.kv.format import KVFormat
from saccade.kv.sequence import SequenceKV
from saccade.kv.storage import KVStorage
from saccade.ops import Call, run, triton
from saccade.ops.triton import prefill_together
from saccade.ops.triton.prefill_together import Part, attend_together, form
from saccade.selection import Band, Blocks, Dense, Lines, Shape


def sequences(chunks, head_dim=32, seed=0):
    """Views of sequences of one pool, of which only the last rows, so many as the second of each pair, ask."""
    rng, pool = generator(seed), BlockManager(KVStorage(KVFormat(torch.float32, 2, 32, head_dim), 40), 1)
    views = []
    for start, count in chunks:
        kv = SequenceKV(pool)
        kv.reserve(start + count)
        kv.append(0, *torch.randn(2, 2, start + count, head_dim, generator=rng))
        views.append(kv.view(0))
    rows = sum(count for _, count in chunks)
    wide = torch.randn(rows + 7, 8, 2, head_dim, generator=rng)
    return wide[:, :, 1].transpose(0, 1), views  # rows that lie apart, and some of nobody


def blocks(shape, size, units, seed):
    q_blocks = (shape.k_len - 1) // size - shape.q_start // size + 1
    mask = torch.rand(units, q_blocks, -(-shape.k_len // size), generator=generator(seed)) < 0.5
    mask[0, 0] = False  # a row without keys
    return Blocks.from_block_mask(shape, size, mask)


@pytest.mark.parametrize(
    ("kind", "scale", "softcap"),
    [
        ("dense", 0.2, None),
        ("band", -0.2, None),
        ("blocks64", -0.2, 2.0),
        ("blocks128", 0.2, None),
        ("units", 0.2, 2.0),
    ],
)
def test_every_row_gets_what_a_call_of_its_own_gives(kind, scale, softcap):
    chunks = [(0, 70), (101, 33), (64, 3)]
    q, views = sequences(chunks)
    before, parts, first = q.clone(), [], 2
    out = torch.full_like(q, 7.0)
    for number, ((start, count), view) in enumerate(zip(chunks, views)):
        shape = Shape.suffix(8, 2, count, start + count)
        if kind == "dense":
            selection = Dense(shape)
        elif kind == "band":
            selection = Band(shape, window=40, sinks=3)
        else:
            selection = blocks(shape, 64 if kind == "blocks64" else 128, 2 if kind == "units" else 8, number)
        parts.append(Part(first, view, selection))
        first += count
    lse = attend_together(q, parts[::-1], out, scale=scale, softcap=softcap)
    for part in parts:
        here = slice(part.first, part.first + part.selection.shape.q_len)
        for backend, atol in (("triton", 0.0), ("reference", 1e-5)):
            want = run(Call.of(q[:, here], part.kv, part.selection, scale=scale, softcap=softcap), backend)
            torch.testing.assert_close(out[:, here], want.out, atol=atol, rtol=atol)
            torch.testing.assert_close(lse[:, here], want.lse, atol=atol, rtol=atol)
    assert torch.equal(q, before)
    assert (out[:, :2] == 7).all()
    assert (out[:, first:] == 7).all()  # rows of nobody stay as they are


def test_parts_that_do_not_go_together(monkeypatch):
    q, views = sequences([(0, 70), (40, 30)])
    shapes = [Shape.suffix(8, 2, 70, 70), Shape.suffix(8, 2, 30, 70)]
    dense = [Part(0, views[0], Dense(shapes[0])), Part(70, views[1], Dense(shapes[1]))]
    banded = Part(70, views[1], Band(shapes[1], window=4))
    for wrong in (
        [dense[0], banded],
        [Part(0, views[0], Lines.from_lists(shapes[0], [torch.arange(3)], [torch.arange(3)]))],
    ):
        with pytest.raises(SaccadeError, match="one form"):
            attend_together(q, wrong, torch.empty_like(q), scale=1.0)
    with pytest.raises(SaccadeError, match="one pool"):
        attend_together(q, [dense[0], Part(70, sequences([(40, 30)])[1][0], Dense(shapes[1]))], q.clone(), scale=1.0)
    with pytest.raises(SaccadeError, match="channels side by side"):
        attend_together(q, dense, q.new_empty(8, 32, q.shape[1]).transpose(1, 2), scale=1.0)
    monkeypatch.setattr(prefill_together, "LONG", 40)  # whose keys are laid out first
    assert [form(q, part) for part in dense] == [None, (0,)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=1024)
    with LLM(
        folder, dtype="float32", kv_memory="32MiB", prefill_chunk=512, enable_prefix_caching=False, exact=False
    ) as llm:
        yield llm


@pytest.mark.parametrize("policy", ["dense", "xattention(block_size=64, threshold=0.5)", "streaming(window=48)"])
@pytest.mark.parametrize("broken", [False, True])
def test_prompts_of_one_step_share_launches(engine, policy, broken, monkeypatch):
    """As on a GPU; on CPU tensors under the interpreter. Where the launch fails each is attended by itself."""
    prompts = [random_ids(length, seed=length) for length in (130, 200, 140)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    want = engine.generate(prompts, params, policy=policy)
    counts = []

    def counted(q, parts, out, **options):
        counts.append(len(parts))
        if broken:
            raise RuntimeError("no room")
        return attend_together(q, parts, out, **options)

    monkeypatch.setattr(host_module, "waits", lambda rows, q: rows.scheduled.phase == "prefill")
    monkeypatch.setattr(triton, "serves", lambda *given: None)
    monkeypatch.setattr(prefill_together, "attend_together", counted)
    got = engine.generate(prompts, params, policy=policy)
    assert counts
    assert set(counts) == {3}
    assert [one.outputs[0].token_ids for one in got] == [one.outputs[0].token_ids for one in want]
    for one, other in zip(got, want):
        assert ("triton" in one.report["prefill"]["backends"]) != broken
        assert one.report["prefill"]["density"] == pytest.approx(other.report["prefill"]["density"])


def test_what_fails_afterwards_is_one_request_s_alone(engine, monkeypatch):
    prompts = [random_ids(length, seed=length) for length in (130, 200, 140)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    want = engine.generate(prompts, params)
    finish = host_together.finish

    def failing(setting, chosen, spec, ran):
        if chosen.chunk.shape.q_len == 200:
            raise RuntimeError("no luck")
        return finish(setting, chosen, spec, ran)

    monkeypatch.setattr(host_module, "waits", lambda rows, q: rows.scheduled.phase == "prefill")
    monkeypatch.setattr(triton, "serves", lambda *given: None)
    monkeypatch.setattr(host_together, "finish", failing)
    got = engine.generate(prompts, params)
    assert got[1].outputs[0].finish_reason == "error"
    for number in (0, 2):
        assert got[number].outputs[0].token_ids == want[number].outputs[0].token_ids
