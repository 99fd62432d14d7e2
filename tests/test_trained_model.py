"""The trained reference model: an ordinary checkpoint, its tokenizer, and what it can do through the engine."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from saccade import LLM, SamplingParams
from saccade.eval.metrics import score
from saccade.eval.suite import TASKS, make
from saccade.models import reference
from saccade.models.reference import vocabulary as v

FOLDER = reference.checkpoint("reference")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("reference", dtype="float32", enable_prefix_caching=True)


def test_the_vocabulary_is_closed() -> None:
    words = [v.text([index]) for index in range(v.ADJECTIVE, v.SIZE)]
    assert v.SIZE == v.FILLER + 356 == 1024
    assert len(set(words)) == len(words) == 736
    assert all(word == f" {word.strip()}" and word.strip().isalpha() and word.islower() for word in words)


def test_the_tokenizer_gives_any_text_back() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    rng = random.Random(5)
    points = [rng.choice([rng.randrange(0, 128), rng.randrange(0xA0, 0xD800), rng.randrange(0x1F300, 0x1F600)])
              for _ in range(3000)]  # fmt: skip
    texts = [
        "".join(map(chr, points)),
        " the river\tamber  \r\n\n x<y ▁Ġ ünï 日本 🎈",
        "",
        " ",
        "amber",
        " amber amberriver",
    ]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text
        assert v.text(ids) == text
    assert tokenizer(" amber river", add_special_tokens=False).input_ids == [v.word("amber"), v.word("river")]
    assert tokenizer("a").input_ids == [v.BOS, v.char("a")]


def test_text_of_ids_is_read_back_as_the_same_ids() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    rng = random.Random(6)
    choices = [*range(v.BYTE + 32, v.BYTE + 97), v.char("\n"), *range(v.ADJECTIVE, v.SIZE)]
    for _ in range(50):
        ids = rng.choices(choices, k=60)
        assert tokenizer(v.text(ids), add_special_tokens=False).input_ids == ids


def test_the_checkpoint_is_a_plain_llama_with_tied_embeddings_in_bfloat16() -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    assert type(model) is LlamaForCausalLM
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (6, 4, 1)
    assert config.tie_word_embeddings
    assert model.dtype == torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(4.5e6, rel=0.02)
    assert (FOLDER / "model.safetensors").stat().st_size < 16 * 2**20


@pytest.mark.parametrize("task", ["multikey", "vt", "span_copy"])
def test_greedy_tokens_equal_those_of_transformers(llm: LLM, task: str) -> None:
    """float32 on both sides."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    turn = make(task, 700, 2).turns[0]
    ids = llm.tokenizer.apply_chat_template([{"role": "user", "content": turn.message()}])
    theirs = AutoTokenizer.from_pretrained(FOLDER).apply_chat_template(
        [{"role": "user", "content": turn.message()}], add_generation_prompt=True, return_dict=False
    )
    assert ids == theirs
    expected = model.generate(torch.tensor([ids]), max_new_tokens=24)[0, len(ids) :].tolist()
    ours = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=24))[0].outputs[0].token_ids
    assert ours == expected
    assert ours[-1] == v.END or len(ours) == 24


@pytest.mark.parametrize("task", TASKS)
def test_it_answers_at_a_thousand_tokens(llm: LLM, task: str) -> None:
    """Every task of the suite, dense, gold history: at least seven tenths of a sample's answers."""
    scores, said = [], []
    for turn in make(task, 1024, 0).turns:
        said.append({"role": "user", "content": turn.message()})
        output = llm.chat(said, SamplingParams(temperature=0.0, max_tokens=turn.max_new_tokens))[0]
        scores.append(score(turn.metric, output.outputs[0].text, turn.answers))
        said.append({"role": "assistant", "content": turn.meta["gold"]})
    assert sum(scores) / len(scores) >= 0.7


@pytest.mark.slow
def test_it_reads_eight_thousand_tokens(llm: LLM) -> None:
    turn = make("multikey", 8192, 5).turns[0]
    output = llm.chat([{"role": "user", "content": turn.message()}], SamplingParams(temperature=0.0, max_tokens=8))
    assert output[0].outputs[0].text == turn.answers[0]
