"""Models of several ranks: what is shared out of them, and what parts make together."""

from __future__ import annotations

from types import SimpleNamespace

import fork_server
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import WIDE, tiny, write
from rank_helpers import LAYERS, PROMPTS, greedy, make, same
from tiny_models import make_checkpoint

from saccade import LLM, ranks
from saccade.errors import ModelError
from saccade.kv.format import KVFormat
from saccade.models.loader import load_model
from saccade.models.shards import Share, check_ranks


@pytest.fixture(autouse=True)
def quickly_started(monkeypatch):
    monkeypatch.setattr(ranks, "subprocess", fork_server.SUBPROCESS)


def test_heads_that_cannot_be_shared_out(tiny_llama, tmp_path):
    group = SimpleNamespace(sum=lambda part: part)
    part = load_model(tiny_llama, share=Share(0, 2, lambda: group)).spec
    assert (part.heads, part.kv_heads) == (2, 1)
    with pytest.raises(ModelError, match="the model's 2 KV heads evenly; use 1 or 2 or 4"):
        LLM(tiny_llama, tensor_parallel_size=3, device="cpu", enable_prefix_caching=False)
    with pytest.raises(ModelError, match="use 1 or 2 or 3 or 6 or 12"):
        check_ranks(4, 12, 6, part.head_dim)


@pytest.mark.parametrize("width", [48, 51])
def test_parts_add_up_to_the_whole(tmp_path, width):
    """Each rank's part of a layer with biases, added up, is the layer; an MLP of odd width stays whole."""
    folder = make_checkpoint("qwen2", tmp_path, intermediate_size=width)
    model = load_model(folder, "float32")
    noted: list[torch.Tensor] = []
    group = SimpleNamespace(sum=lambda part: noted.append(part) or part)
    parts = [load_model(folder, "float32", share=Share(rank, 2, lambda: group)) for rank in (0, 1)]
    whole = model.runner.llama.kernels(1000).layers[1]
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, model.config.hidden_size, generator=rng)
    cos, sin = torch.ones(5, model.spec.head_dim), torch.zeros(5, model.spec.head_dim)
    want = whole.project(hidden.clone(), cos, sin)
    got = [part.runner.llama.kernels(5).layers[1].project(hidden.clone(), cos, sin) for part in parts]
    for number in range(3):
        torch.testing.assert_close(torch.cat([one[number] for one in got]), want[number])
    attended = torch.randn(model.spec.heads, 5, model.spec.head_dim, generator=rng)
    for part, own in zip(parts, attended.chunk(2)):
        part.runner.llama.kernels(5).layers[1].finish(hidden.clone(), own)
    assert len(noted) == (4 if width == 48 else 2)
    output = model.runner.llama.weights.layers[1].output
    rows = attended.transpose(0, 1).reshape(5, -1)
    torch.testing.assert_close(noted[0] + noted[len(noted) // 2], rows @ output.weight.T)


@pytest.mark.parametrize("policy", ["dense", "flexprefill+quest(budget=64)"])
def test_four_processes(tmp_path, policy):
    folder = make_checkpoint(
        "llama",
        tmp_path,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_hidden_layers=2,
        max_position_embeddings=512,
    )
    answers = []
    for count in (1, 4):
        with make(folder, count, kv_memory="8MiB") as llm:
            answers.append(llm.generate(PROMPTS[:3], greedy(), policy=policy))
    same(*answers)
    assert [one.report["decode"]["keys_attended"] for one in answers[0]] == [
        one.report["decode"]["keys_attended"] for one in answers[1]
    ]


@pytest.mark.parametrize("stored", ["Q4_K", "Q8_0", "int4", "int8"])
def test_quantised_weights(tmp_path, stored):
    """Output matrices of groups are multiplied by rows: products are those of one process, bit for bit."""
    folder = tiny("qwen3", tmp_path / "made", **WIDE, num_hidden_layers=2, max_position_embeddings=512)
    options = {"quantize": stored, "exact": False} if stored.islower() else {"exact": False}
    file = folder if stored.islower() else write(folder, tmp_path / "m.gguf", Kind[stored])
    answers = []
    for count in (1, 2):
        with make(file, count, kv_memory="8MiB", **options) as llm:
            assert stored.upper() in llm.model.identity.quantize
            answers.append(llm.generate(PROMPTS[:3], greedy(), policy="flexprefill+quest(budget=64)"))
    same(*answers)


EIGHT_BITS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_hidden_layers": 2}


@pytest.mark.parametrize("kv_heads", [2, pytest.param(1, marks=pytest.mark.thorough)])
def test_products_that_take_rows_in_8_bits(tmp_path, kv_heads):
    """Each rank scales the channels that it has, which rounds no more than scaling all of them together does."""
    sizes = {**EIGHT_BITS, "num_key_value_heads": kv_heads, "max_position_embeddings": 512}
    folder = make_checkpoint("qwen3", tmp_path, **sizes)
    asked, models = [], []
    for count, quantize in ((1, None), (1, "fp8_reference"), (2, "fp8_reference")):
        with make(folder, count, kv_memory="8MiB", quantize=quantize, exact=False) as llm:
            outs = llm.generate(PROMPTS[:2], greedy(1, prompt_logprobs=0), policy="flexprefill(min_budget=0)")
            rows = [next(iter(at.values())).logprob for out in outs for at in out.prompt_logprobs[1:]]
            asked.append(torch.tensor(rows, dtype=torch.float64))
            models.append(llm.model.identity)
    plain, one, two = asked
    assert models[1] == models[2]
    assert models[2].quantize == "fp8"
    off = [float((own - plain).square().mean().sqrt()) for own in (one, two)]
    assert 0 < off[1] < 1.1 * off[0]
    assert float((two - one).square().mean().sqrt()) < 1.5 * off[0]


def test_parts_in_8_bits_that_are_no_whole_tiles(tmp_path):
    folder = make_checkpoint("llama", tmp_path, **{**EIGHT_BITS, "num_key_value_heads": 2, "intermediate_size": 48})
    with pytest.raises(ModelError, match=r"a product of 24 by 64 channels.*multiples of 16.*fewer processes share"):
        load_model(folder, quantize="fp8_reference", share=Share(0, 2, lambda: None))


@pytest.mark.parametrize("policy", ["dense", "flexprefill+quest(budget=64)", "psa(epsilon=0.3)"])
def test_keys_and_values_in_eight_bits(tmp_path, policy):
    folder = make_checkpoint("qwen2", tmp_path, max_position_embeddings=512, num_key_value_heads=2)
    answers = []
    for count in (1, 2):
        with make(folder, count, kv_memory="8MiB", kv_dtype="int8") as llm:
            assert llm.pool.format.turned
            answers.append(llm.generate(PROMPTS[:3], greedy(), policy=policy))
    same(*answers)


def test_keys_with_a_bias_are_balanced_whatever_holds_their_weights(tmp_path):
    """Where layers run as transformers' modules: of parts, and of weights that are rounded as they load."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "max_position_embeddings": 512}
    folder = make_checkpoint("gpt_oss", tmp_path, **sizes)
    whole, rounded = load_model(folder, "float32"), load_model(folder, "float32", quantize="int8")
    parts = [load_model(folder, "float32", share=Share(rank, 3, lambda: None)) for rank in range(3)]
    for model in (whole, rounded, *parts):
        assert model.balances_modules
        model.runner.turn_keys()
    for name in ("query", "key"):
        wanted = [getattr(one, name) for one in whole.runner.turns]
        for layer, want in enumerate(wanted):
            own = [getattr(model.runner.turns[layer], name) for model in (rounded, *parts)]
            torch.testing.assert_close(own[0], want)
            torch.testing.assert_close(torch.cat(own[1:]), want)
    scores = []
    for count in (1, 3):
        with make(folder, count, kv_memory="8MiB", kv_dtype="int8", exact=False) as llm:
            found = llm.generate(PROMPTS[:2], greedy(1, prompt_logprobs=0))
            rows = [next(iter(at.values())).logprob for one in found for at in one.prompt_logprobs[1:]]
            scores.append(torch.tensor(rows))
    assert float((scores[0] - scores[1]).abs().median()) < 1e-4  # a key that is rounded the other way moves few


TIERS = {
    "host": {"kv_host": "8MiB"},
    "disk": {"kv_disk": "tier:8MiB"},
    "both": {"kv_host": "64KiB", "kv_disk": "t:8MiB"},
}


@pytest.mark.parametrize("tier", TIERS)
def test_tiers(tiny_llama, tmp_path, monkeypatch, tier):
    """Each rank moves blocks of its own heads; what is chosen and said is that of one process with all in memory."""
    monkeypatch.chdir(tmp_path)
    for policy in ("dense", "flexprefill+quest(budget=64)", "lfps"):
        answers = []
        for count, options in ((1, {}), (2, TIERS[tier])):
            memory = LAYERS * (12 if count == 2 else 400) * KVFormat(torch.float32, 2 // count, 16, 32).block_bytes
            with make(tiny_llama, count, kv_memory=memory, **options) as llm:
                answers.append(llm.generate(PROMPTS, greedy(), policy=policy))
        same(*answers)
