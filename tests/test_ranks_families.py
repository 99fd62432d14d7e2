"""Every family whose heads divide, shared out between ranks, answers as one process does."""

from __future__ import annotations

import random

import fork_server
import pytest
import rank_threads
from gguf import GGMLQuantizationType as Kind
from gguf_files import FAMILIES as GGUF_FAMILIES
from gguf_files import WIDE, tiny, write
from packed_files import FOLDERS, quantise
from rank_helpers import PROMPTS, greedy, make, same
from test_lora import write_adapter
from tiny_models import CONFIGS, make_checkpoint, one_thread  # noqa: F401

from saccade import ranks
from saccade.errors import ModelError
from saccade.models.families import FAMILIES
from saccade.models.loader import load_model
from saccade.models.shards import Share, why_whole

pytestmark = pytest.mark.filterwarnings("ignore:no kernel here", "ignore:channels of weights", "ignore:quantize=")
SERVED = [family for family in CONFIGS if why_whole(FAMILIES[family]) is None]
SHORT = "phi3", "gemma3_text", "gpt_oss", "olmo2", "cohere", "qwen3_next"
MAMBA = [family for family in CONFIGS if "mamba_n_heads" in CONFIGS[family]]
POLICIES = "dense", "flexprefill(min_budget=0)+quest(budget=64)"
WIDER = {"max_position_embeddings": 512, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}


def wider(family: str, kv_heads: int) -> dict[str, int]:
    """Sizes that four ranks can share; Mamba's heads divide its width."""
    return {**WIDER, "num_key_value_heads": kv_heads} | ({"hidden_size": 96} if family in MAMBA else {})


@pytest.fixture
def threads(monkeypatch):
    """Other ranks are threads."""
    monkeypatch.setattr(ranks, "subprocess", rank_threads.SUBPROCESS)


def ask(folder, numbers, policies=POLICIES, **options):
    """Each number of ranks answers alike under ``policies``, and reads as much; their models are one."""
    answers, known = [], []
    for count in numbers:
        with make(folder, count, **{"kv_memory": "8MiB", **options}) as llm:
            answers.append([one for policy in policies for one in llm.generate(PROMPTS[:2], greedy(), policy=policy)])
            known.append(llm.model.identity.data)
    for one in answers[1:]:
        same(answers[0], one)
        for mine, theirs in zip(answers[0], one, strict=True):
            for phase in ("prefill", "decode"):
                assert mine.report[phase]["keys_attended"] == theirs.report[phase]["keys_attended"]
    assert known == known[:1] * len(known)


def thorough_but(short, every):
    return [one if one in short else pytest.param(one, marks=pytest.mark.thorough) for one in every]


@pytest.mark.parametrize("family", thorough_but(SHORT, SERVED))
def test_two_ranks(family, tmp_path, threads):
    ask(make_checkpoint(family, tmp_path, **wider(family, 2)), (1, 2))


@pytest.mark.parametrize("family", thorough_but(("granitemoehybrid",), SERVED))
def test_four_ranks(family, tmp_path, threads):
    """Of four KV heads, and of two, which two ranks have each."""
    ask(make_checkpoint(family, tmp_path / "four", **wider(family, 4)), (1, 4), POLICIES[1:])
    ask(make_checkpoint(family, tmp_path / "two", **wider(family, 2)), (1, 4), POLICIES[1:])


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", SERVED)
def test_random_configs(family, seed, tmp_path, threads):
    drawn = random.Random(f"{family} {seed}")
    experts = "num_experts_per_tok" in CONFIGS[family]
    kv_heads = drawn.choice([2, 4])
    heads = kv_heads * drawn.choice([1, 2])
    head_dim = drawn.choice([8, 16])  # wider random models are 2e-3 from float64 by themselves
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * head_dim,  # of families that have no head_dim
        "intermediate_size": drawn.choice([36, 96, 52 if experts else 51]),
        "num_hidden_layers": CONFIGS[family].get("num_hidden_layers", 3),
        "vocab_size": drawn.choice([288, 291]),
        "tie_word_embeddings": drawn.random() < 0.5,
        "max_position_embeddings": 512,
    }
    if "head_dim" in CONFIGS[family]:
        sizes["head_dim"] = head_dim
    if family in MAMBA:
        sizes |= {"num_attention_heads": 6, "hidden_size": 96, "num_key_value_heads": 2}
    if "moe_intermediate_size" in CONFIGS[family]:
        sizes["moe_intermediate_size"] = drawn.choice([16, 20, 64])
    folder = make_checkpoint(family, tmp_path, seed=seed, **sizes)
    count = drawn.choice([2, sizes["num_key_value_heads"]])
    ask(folder, (1, count), (*POLICIES, drawn.choice(["psa(epsilon=0.3)", "lfps", "topk(k=24)"])))


@pytest.mark.thorough
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("family", SERVED)
def test_processes(family, count, tmp_path, monkeypatch):
    """As threads, and as those of tests/test_ranks.py, processes."""
    monkeypatch.setattr(ranks, "subprocess", fork_server.SUBPROCESS)
    ask(make_checkpoint(family, tmp_path, **wider(family, 4)), (1, count))


def test_families_that_do_not_go_are_named(tmp_path):
    refused = {family: why_whole(FAMILIES[family]) for family in FAMILIES if why_whole(FAMILIES[family])}
    assert len(refused) + len(SERVED) == len(FAMILIES)
    for family in ("deepseek_v2", "gemma4_text", "falcon_h1"):
        folder = make_checkpoint(family, tmp_path / family)
        with pytest.raises(ModelError, match=rf"=2 does not go with {family}, which {refused[family]}; use .*size=1"):
            load_model(folder, share=Share(0, 2, lambda: None))


SIZES = {**WIDER, "intermediate_size": 128}
PACKED = [
    ("llama", "awq"),
    ("qwen3_moe", "awq"),
    ("mixtral", "gptq"),
    ("phi3", "gptq_act"),
    ("gemma2", "w4a16_asym"),
    ("qwen2_moe", "fp8_dynamic"),
    ("llama", "fp8_blocks"),
    ("qwen3", "w8a8"),
    *(("llama", name) for name in FOLDERS),
]


@pytest.mark.parametrize(
    ("family", "name"),
    [one if at in (1, 3) else pytest.param(*one, marks=pytest.mark.thorough) for at, one in enumerate(PACKED)],
)
def test_packed_weights(family, name, tmp_path, threads):
    """Groups are not cut: products are those of one process; experts are whole, some in each rank."""
    made = make_checkpoint(family, tmp_path / "made", **{**SIZES, "num_key_value_heads": 2})
    folder, _ = quantise(made, tmp_path / name, FOLDERS[name])
    ask(folder, (1, 2), exact=False)


def test_experts_of_gpt_oss_in_mxfp4(tmp_path, threads):
    made = make_checkpoint("gpt_oss", tmp_path / "made", **SIZES)
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    ask(quantise(made, tmp_path / "mxfp4", config)[0], (1, 2), POLICIES[1:], exact=False)


@pytest.mark.parametrize("quantize", ["int4", pytest.param("int8", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("family", thorough_but(("mixtral",), ("mixtral", "gpt_oss", "gemma3_text", "phi3", "llama")))
def test_weights_rounded_as_they_load(family, quantize, tmp_path, threads):
    folder = make_checkpoint(family, tmp_path, **SIZES)
    ask(folder, (1, 2), POLICIES[1:], quantize=quantize, exact=False)


@pytest.mark.parametrize("family", thorough_but(("qwen3_moe",), GGUF_FAMILIES))
def test_gguf_files(family, tmp_path, threads):
    """Blocks are not cut; embedding and head are each rank's whole where they are blocks."""
    made = tiny(family, tmp_path / "made", **WIDE, max_position_embeddings=512)
    ask(write(made, tmp_path / "m.gguf", Kind.Q8_0), (1, 2), POLICIES[1:], exact=False)


@pytest.mark.parametrize("family", thorough_but(("gemma2",), ("llama", "gemma2", "qwen3_5_text")))
@pytest.mark.parametrize("dora", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_adapters_are_added_before_the_cut(family, dora, tmp_path, threads):
    made = make_checkpoint(family, tmp_path / "base", max_position_embeddings=512)
    adapter = write_adapter(made, tmp_path / "adapter", targets=("q_proj", "v_proj", "down_proj"), use_dora=dora)
    ask(made, (1, 2), lora=adapter)


def test_the_first_layers_alone(tmp_path, threads):
    ask(make_checkpoint("qwen3_moe", tmp_path, **wider("qwen3_moe", 2)), (1, 2), POLICIES[1:], layers=2)
