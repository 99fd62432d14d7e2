"""Queries and keys that are turned before keys are stored (kv_rotate): their products stay what they were."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import tokens
from helpers import generator
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SaccadeError, SamplingParams
from saccade.errors import PolicyError
from saccade.models.key_turns import PLAIN, balanced
from saccade.ops import cpu, row_passes

OPTIONS = {"dtype": "float32", "kv_memory": "8MiB", "prefill_chunk": 64, "block_size": 16}
ASKED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)


def hadamard(size: int) -> torch.Tensor:
    """Sylvester's, orthonormal."""
    made = torch.ones(1, 1, dtype=torch.float64)
    while len(made) < size:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
    return made / size**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [12, 16, 64, 80, 128])
def test_heads_become_their_products_with_hadamards_matrix(dtype, head_dim):
    x = torch.randn(5, 9, head_dim, generator=generator(1)).to(dtype)
    balance = torch.rand(5, head_dim, generator=generator(2)) + 0.5
    size = head_dim & -head_dim
    for factors in (None, balance):
        wanted = x.double() if factors is None else x.double() * factors.double()[:, None]
        wanted = (wanted.unflatten(-1, (-1, size)) @ hadamard(size)).flatten(-2)
        for strided in (False, True):
            room = torch.empty(9, 5, head_dim + 16, dtype=dtype)[..., :head_dim].transpose(0, 1)
            given = room.copy_(x) if strided else x.clone()
            row_passes.turn(given, factors)
            assert torch.allclose(
                given.double(), wanted, **({"atol": 1e-5} if dtype == torch.float32 else {"rtol": 8e-3})
            )
            by_torch = row_passes._torch_turn(x.float() if factors is None else x.float() * factors[:, None]).to(dtype)
            assert torch.equal(given, by_torch)  # every instruction set, to the bit


@pytest.mark.skipif(not cpu.available(), reason="needs the C++ kernels")
def test_every_instruction_set_turns_alike():
    x, results = torch.randn(3, 70, 64, generator=generator(3)), []
    for isa in cpu.supported_isas():
        cpu.set_isa(isa)
        try:
            results.append(x.clone())
            row_passes.turn(results[-1])
        finally:
            cpu.set_isa(None)
    assert all(torch.equal(one, results[0]) for one in results)


@pytest.mark.parametrize("group", [1, 3])
def test_balanced_channels_keep_products_and_commute_with_rope(group):
    bias = torch.randn(2, 32, generator=generator(4))
    bias[0, 3] = 90
    bias[1, 20] = -150
    made = balanced(bias.flatten(), 2 * group, 32)
    assert torch.equal(made.key[:, :16], made.key[:, 16:])  # both halves of a pair alike
    assert torch.allclose(made.query.view(2, group, 32), (1 / made.key)[:, None].expand(2, group, 32))
    sizes = (bias * made.key).abs()
    assert sizes.amax(1).div(sizes.median(1).values).lt(bias.abs().amax(1) / bias.abs().median(1).values / 5).all()
    q, k = torch.randn(2 * group, 7, 32, generator=generator(5)), torch.randn(2, 7, 32, generator=generator(6))
    before = q.double() @ k.double().repeat_interleave(group, 0).mT
    made.turn(q, k)
    assert torch.allclose(q.double() @ k.double().repeat_interleave(group, 0).mT, before, atol=1e-4)


def test_a_bias_of_nothing_balances_nothing():
    for bias in (torch.zeros(32), torch.full((32,), torch.inf)):
        assert balanced(bias, 4, 16) is PLAIN


@pytest.fixture(scope="module", params=["qwen2", "llama", "gemma2"])
def model(request, tmp_path_factory):
    """Of the Llama shape with a large bias of keys, without one, and one that runs by transformers' modules."""
    return make_checkpoint(
        request.param, tmp_path_factory.mktemp(request.param), max_position_embeddings=1024, head_dim=16
    )


def test_engines_answer_as_without(model):
    """To float32's rounding where everything is read: one row and many, whole steps in C++ and layer by layer."""
    ids = random_ids(150, seed=5)
    answers = []
    for options in ({}, {"kv_rotate": True}, {"kv_rotate": True, "backend": "reference"}):
        with LLM(model, **OPTIONS, **options) as llm:
            assert (llm.model.runner.turns is not None) == bool(options)
            answers.append(
                [llm.generate(ids, ASKED, policy=policy)[0].outputs[0] for policy in ("dense", "topk(k=24)")]
            )
    for plain, *others in zip(*answers):
        for one in others:
            assert one.token_ids == plain.token_ids
            assert one.cumulative_logprob == pytest.approx(plain.cumulative_logprob, abs=1e-4)


def test_int8_turns_by_default_and_sessions_say_so(model, tmp_path):
    ids = random_ids(100, seed=9)
    with LLM(model, **OPTIONS, kv_dtype="int8") as llm, llm.session() as session:
        assert llm.engine.pool.format.turned
        session.generate(ids, ASKED)
        session.save(tmp_path / "one")
        kept = tokens(session.generate(ids[:9], ASKED))
    with LLM(model, **OPTIONS, kv_dtype="int8") as llm, llm.restore(tmp_path / "one") as other:
        again = other.generate(ids[:9], ASKED)
        assert tokens(again) == kept
        assert "computed again" not in str(again.report["notes"])
    with LLM(model, **OPTIONS, kv_dtype="int8", kv_rotate=False) as llm, llm.restore(tmp_path / "one") as other:
        assert not llm.engine.pool.format.turned
        said = str(other.generate(ids[:9], ASKED).report["notes"])
        assert "turned=True, but this storage has False; kv_dtype='int8' with kv_rotate=True reads it" in said


def test_what_it_refuses(model):
    with pytest.raises(SaccadeError, match="kv_rotate='yes' must be True or False"):
        LLM(model, kv_rotate="yes")
    with LLM(model, **OPTIONS, kv_rotate=True) as llm, pytest.raises(PolicyError, match="kv_rotate turns them"):
        llm.generate(random_ids(9, seed=1), ASKED, policy="double_sparsity")
