"""GGUF files of every family, in every format of blocks: the tokens and log-probabilities of transformers' model with
the weights that the gguf package reads from the file."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import FAMILIES, WIDE, tiny, write
from tiny_models import oracle, oracle_logits, random_ids
from torch import nn

from saccade import LLM, SamplingParams
from saccade.models.gguf_names import FAMILIES as READ
from saccade.ops.block_weights import FORMATS

IDS = random_ids(24, seed=5)
SCORED = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0, ignore_eos=True)
# Each format in a family of Llama's shape, of modules, of experts.
BLOCKS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"]
SUPER = ["Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "IQ4_XS"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "saccade"


def check(llm: LLM, theirs, tied: bool | None = None) -> None:
    """The same tokens, and log-probabilities within 1e-4."""
    output = llm.generate([IDS], SCORED)[0]
    tokens = list(output.outputs[0].token_ids)
    wanted = torch.log_softmax(oracle_logits(theirs, IDS + tokens), -1)
    assert wanted[len(IDS) - 1 : -1].argmax(-1).tolist() == tokens
    found = torch.tensor([entry[token].logprob for token, entry in zip(IDS[1:], output.prompt_logprobs[1:])])
    expected = wanted[: len(IDS) - 1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def opened(file: Path) -> LLM:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is written out, and nothing said of it
        return LLM(file, dtype="float32", kv_memory="4MiB", enable_prefix_caching=False)


def test_every_architecture_that_is_read_is_tested():
    assert {kind for kind, _ in FAMILIES.values()} == READ.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_transformers_own(family, tmp_path):
    """Formats take turns, so that each is read with matrices of several kinds of layers."""
    stored = Kind[BLOCKS[sorted(FAMILIES).index(family) % len(BLOCKS)]]
    made = tiny(family, tmp_path / "made")
    theirs = oracle(made)
    file = write(made, tmp_path / "m.gguf", stored, model=theirs)
    with opened(file) as llm:
        runner = llm.model.runner
        assert llm.model.identity.quantize == stored.name
        assert not any(isinstance(module, nn.Linear) and not module.weight.is_meta for module in runner.model.modules())
        check(llm, theirs)


@pytest.mark.parametrize("stored", FORMATS)
def test_a_format_is_the_gguf_packages(stored, tmp_path):
    made = tiny("qwen3", tmp_path / "made", **WIDE, num_hidden_layers=2)
    theirs = oracle(made)
    with opened(write(made, tmp_path / "m.gguf", Kind[stored], model=theirs)) as llm:
        assert llm.model.identity.quantize == stored
        check(llm, theirs)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
def test_a_mixed_file_is_as_q4_k_m(family, tmp_path):
    """Blocks of 256 where rows are whole ones, of 32 else, and plain numbers among them."""
    made = tiny(
        family,
        tmp_path / "made",
        **{**WIDE, "intermediate_size": 288, **({"query_pre_attn_scalar": 64} if "gemma" in family else {})},
    )
    theirs = oracle(made)
    others = {
        "attn_v": Kind.Q6_K,
        "ffn_down": Kind.Q5_0,
        "ffn_down_exps": Kind.Q5_1,
        "token_embd": Kind.Q8_0,
        "attn_k": Kind.F16,
    }
    file = write(made, tmp_path / "m.gguf", Kind.Q4_K, others=others, model=theirs)
    with opened(file) as llm:
        assert set(llm.model.identity.quantize.split("+")) >= {"Q4_K", "Q6_K"}
        check(llm, theirs)
