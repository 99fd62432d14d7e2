"""Queries and keys that are turned before keys are stored (kv_rotate): their products stay what they were."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import tokens
from helpers import generator
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SaccadeError, SamplingParams
from saccade.errors import PolicyError
from saccade.kv.row_formats import FORMATS
from saccade.kv.saved import SavedKV, described
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


@pytest.mark.parametrize("neighbours", [False, True])
def test_channels_that_are_not_rotated_are_balanced_by_themselves(neighbours):
    """Of the first 16 channels of 32, RoPE mixes the two halves, or neighbours."""
    bias = torch.randn(2, 32, generator=generator(7))
    bias[0, 2], bias[1, 30] = 90, -150
    made = balanced(bias.flatten(), 4, 32, 16, neighbours)
    assert made.key[0, 2] == made.key[0, 3 if neighbours else 10] == made.key[0].min()
    assert made.key[1, 30] < 0.2 * torch.cat([made.key[1, :30], made.key[1, 31:]]).min()
    rotated = made.key[:, :16].unflatten(1, (8, 2) if neighbours else (2, 8))
    assert torch.equal(*rotated.unbind(2 if neighbours else 1))
    assert torch.allclose(made.query, made.key.reciprocal().repeat_interleave(2, 0))


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("rotated", [32, 64])
def test_rounded_keys_are_nearest_where_the_pairs_are_ropes_own(rotated, neighbours):
    """Products of queries with keys that have a great channel and are rotated, then turned, then rounded to int8."""
    bias = torch.randn(1, 64, generator=generator(8))
    bias[0, 4] = 100
    q, k = torch.randn(1, 50, 64, generator=generator(9)), torch.randn(1, 200, 64, generator=generator(10)) + bias
    angle = torch.arange(200.0)[:, None] * 10000 ** (-torch.arange(0, rotated, 2) / rotated)
    pairs = k[..., :rotated].unflatten(-1, (-1, 2) if neighbours else (2, -1))
    first, second = pairs.unbind(-1 if neighbours else -2)
    turning = first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()
    k = torch.cat([torch.stack(turning, -1 if neighbours else -2).flatten(-2), k[..., rotated:]], -1)

    def away(turn) -> float:
        query, key = q.clone(), k.clone()
        turn.turn(query, key)
        stored = FORMATS["int8"].decode(FORMATS["int8"].encode(key, torch.float32), torch.float32)
        return float((query @ stored.mT - q @ k.mT).square().mean().sqrt())

    right = away(balanced(bias.flatten(), 1, 64, rotated, neighbours))
    assert right < 0.5 * away(PLAIN)
    assert right < 0.8 * away(balanced(bias.flatten(), 1, 64, rotated, not neighbours))
    assert rotated == 64 or neighbours or right < 0.8 * away(balanced(bias.flatten(), 1, 64))


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


BIASED = {  # run as transformers' modules: neighbours of half a head rotate, halves of half, those of a hybrid
    "glm4": {"attention_bias": True},
    "phi": {"hidden_size": 64, "num_attention_heads": 4},
    "granitemoehybrid": {"attention_bias": True},
}
PLAINLY = {"lfm2": {}, "qwen3_next": {}}  # hybrids without: the second rotates a part of a head and norms its keys
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)


def outlying(family: str, folder, **sizes):
    """A checkpoint of ``family`` whose keys have a great channel: by their bias, else by their norm's weight."""
    made = make_checkpoint(family, folder, max_position_embeddings=1024, **{"head_dim": 16, **sizes})
    path = made / "model.safetensors"
    tensors = load_file(path)
    names = [name for name in tensors if name.endswith(("k_proj.bias", "k_norm.weight", "k_layernorm.weight"))]
    assert names
    for name in names:
        tensors[name][5] += 60
    save_file(tensors, path, {"format": "pt"})
    return made


def scored(llm, ids) -> torch.Tensor:
    (output,) = llm.generate([ids], SCORED)
    given = zip(output.prompt_logprobs[1:], ids[1:], strict=True)
    return torch.tensor([entry[token].logprob for entry, token in given])


@pytest.mark.parametrize("family", [*BIASED, *PLAINLY])
def test_modules_and_hybrids_are_turned_and_balanced(family, tmp_path):
    """Products stay what they were, and rounded keys are nearer to them than without."""
    folder = outlying(family, tmp_path / "model", **(BIASED | PLAINLY)[family])
    ids, options = random_ids(150, seed=5), OPTIONS | {"max_model_len": 512}
    found = {}
    for name, given in (
        ("plain", {}),
        ("turned", {"kv_rotate": True}),
        ("rounded", {"kv_dtype": "int8"}),
        ("as it is", {"kv_dtype": "int8", "kv_rotate": False}),
    ):
        with LLM(folder, **options, **given) as llm:
            runner = llm.model.runner
            assert runner.llama is None
            assert llm.engine.pool.format.balanced == (name in ("turned", "rounded") and family in BIASED)
            found[name] = scored(llm, ids), tokens(llm.generate([ids], ASKED)[0])
            assert runner.turns is None or any(one is not PLAIN for one in runner.turns) == (family in BIASED)
    away = {name: float((one - found["plain"][0]).abs().mean()) for name, (one, _) in found.items()}
    assert away["turned"] < 1e-4
    assert found["turned"][1] == found["plain"][1]
    assert 1e-4 < away["rounded"] < 0.7 * away["as it is"]


def test_a_session_from_before_modules_were_balanced_is_computed_again(tmp_path):
    folder = outlying("glm4", tmp_path / "model", **BIASED["glm4"])
    ids = random_ids(100, seed=9)
    with LLM(folder, **OPTIONS, kv_dtype="int8") as llm:
        pool = llm.engine.pool
        assert described(pool)["balanced"] is True
        older = {name: value for name, value in described(pool).items() if name != "balanced"}
        with pytest.raises(SaccadeError, match="saved KV has balanced=False, but this storage has True"):
            SavedKV({}, older).check(pool)
        with llm.session() as session:
            session.generate(ids, ASKED)
            session.save(tmp_path / "one")
            kept = tokens(session.generate(ids[:9], ASKED))
        with llm.restore(tmp_path / "one") as other:
            again = other.generate(ids[:9], ASKED)
    assert tokens(again) == kept
    assert "computed again" not in str(again.report["notes"])


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
        assert "turned=True, but this storage has False" in said


def test_what_it_refuses(model):
    with pytest.raises(SaccadeError, match="kv_rotate='yes' must be True or False"):
        LLM(model, kv_rotate="yes")
    with LLM(model, **OPTIONS, kv_rotate=True) as llm, pytest.raises(PolicyError, match="kv_rotate turns them"):
        llm.generate(random_ids(9, seed=1), ASKED, policy="double_sparsity")
