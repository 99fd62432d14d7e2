"""Every method over keys and values of 8 bits, on the reference backend and on the C++ kernels, beside the same method
over a plain pool of the numbers that the codes stand for; and what forks, cuts, drafts and memory make of them."""

from __future__ import annotations

import pytest
import torch
from coded_rows import rounded
from engine_helpers import EVERY, GREEDY, tokens
from helpers import generator
from tiny_models import make_checkpoint, one_thread, random_ids  # noqa: F401

from saccade import LLM, SamplingParams
from saccade.kv import BlockManager, KVFormat, KVStorage, SequenceKV
from saccade.kv.row_formats import AUTO, HALF, INT8, RowFormat
from saccade.methods.policy import Policy
from saccade.ops import cpu

OPTIONS = {"dtype": "float32", "kv_memory": "8MiB", "prefill_chunk": 64, "block_size": 16}
FORMS = (
    "psa(epsilon=0.6, block_size=16, microbatch=1, rank=cuboid)",
    "psa(epsilon=0.6, block_size=16, microbatch=1, rank=moments, rest=estimate)",
    "lfps(k=32, blocks=4, unit=kv_head)",
    "lossless(draft=lfps(k=8, blocks=2, least=1, block_size=4), tokens=2)",
    "cis(k=30, sinks=4, local=8, tau=0.0)+psaw(start_layer=1, block_size=16)+etf(start_layer=1)",
    "topk(k=48)+etf(start_layer=1)",
)
POLICIES = list(dict.fromkeys([*(policy.text for policy in EVERY), *(Policy.parse(one).text for one in FORMS)]))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(
        "llama", tmp_path_factory.mktemp("wide"), max_position_embeddings=1024, head_dim=16, tie_word_embeddings=False
    )


@pytest.fixture(scope="module")
def engines(model):
    """Over codes by either backend, and over their values by the reference."""
    codes = LLM(model, **OPTIONS, kv_dtype="int8", backend="reference")
    kernels = LLM(model, **OPTIONS, kv_dtype="int8")
    values = LLM(model, **OPTIONS, kv_rotate=True, backend="reference")
    yield codes, kernels, values
    for llm in (codes, kernels, values):
        llm.reset_prefix_cache()
        assert llm.engine.pool.used_blocks == 0
        llm.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_method_reads_what_the_codes_stand_for(engines, policy, monkeypatch):
    asked = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
    ids = random_ids(150, seed=5)
    codes, kernels = (llm.generate(ids, asked, policy=policy)[0] for llm in engines[:2])
    monkeypatch.setattr(RowFormat, "encode", lambda self, rows, dtype: rounded(rows, INT8))
    values = engines[2].generate(ids, asked, policy=policy)[0]
    for one in (codes, kernels, values):
        assert one.error is None
    codes, kernels, values = (one.outputs[0] for one in (codes, kernels, values))
    assert codes.token_ids == values.token_ids == kernels.token_ids
    assert codes.cumulative_logprob == values.cumulative_logprob
    assert kernels.cumulative_logprob == pytest.approx(codes.cumulative_logprob, abs=5e-3)


def test_bf16_rows_of_a_float32_model(model):
    """A third of float32's digits: what is read is the nearest bfloat16, by kernels and by the reference."""
    ids, answers = random_ids(150, seed=5), []
    asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    for options in ({}, {"kv_dtype": "bf16"}, {"kv_dtype": "bf16", "backend": "reference"}):
        with LLM(model, **OPTIONS, **options) as llm:
            rows = llm.engine.pool.format.k
            assert rows is (HALF if options else AUTO)
            assert llm.engine.pool.storage.k.dtype == (torch.bfloat16 if options else torch.float32)
            answers.append([llm.generate(ids, asked, policy=one)[0] for one in ("dense", "topk(k=24)", "psa")])
    for plain, kernels, reference in zip(*answers):
        assert tokens(kernels) == tokens(reference)
        sums = [one.outputs[0].cumulative_logprob for one in (plain, kernels, reference)]
        assert sums[1] == pytest.approx(sums[2], abs=2e-3)
        assert 0 < abs(sums[0] - sums[1]) < 0.5


def test_samples_edits_and_drafts_leave_rows_as_they_were(model):
    ids, tail = random_ids(140, seed=1), random_ids(30, seed=2)
    with LLM(model, **OPTIONS, kv_dtype="int8", exact=True) as llm:
        alone = tokens(llm.generate(ids, GREEDY)[0])
        two = llm.generate(ids, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, n=2))[0]
        assert [one.token_ids for one in two.outputs] == [alone, alone]  # forks of one prompt
        assert tokens(llm.generate(ids, GREEDY, policy="lossless")[0]) == alone
        edited = ids[:75] + tail
        fresh = tokens(llm.generate(edited, GREEDY)[0])
        with llm.session() as session:
            session.generate(ids, GREEDY)
            assert tokens(session.complete(edited, GREEDY, keep=75)) == fresh  # cut within a block


@pytest.mark.parametrize(("summaries", "least"), [((), 1.88), ((("minmax", 16),), 1.8)])
def test_as_much_memory_holds_so_many_more_tokens(summaries, least):
    """Of heads of 128 channels in bfloat16, and as Quest keeps their extremes."""
    taken = []
    for rows in (AUTO, INT8):
        layout = KVFormat(torch.bfloat16, 2, 128, 32, rows, rows)
        kv = SequenceKV(BlockManager(KVStorage(layout, 40), 1))
        kv.reserve(640)
        kv.append(0, *torch.randn(2, 2, 640, 128, generator=generator(0)).bfloat16())
        for kind, size in summaries:
            assert kv.view(0).summary(kind, size).shape[0] == 40
        kept = sum(one.nbytes for kind, size in summaries for one in [kv.view(0).summary(kind, size)])
        taken.append(kv.blocks * layout.block_bytes + kept)
    assert taken[0] / taken[1] >= least


@pytest.mark.skipif(not cpu.available(), reason="needs the C++ kernels")
def test_pools_say_how_many_tokens_they_hold(model):
    blocks = {}
    for name in ("auto", "int8"):
        with LLM(model, **OPTIONS | {"dtype": "bfloat16"}, kv_dtype=name) as llm:
            blocks[name] = llm.engine.pool.num_blocks
    assert blocks["int8"] / blocks["auto"] >= 32 / 20.1
