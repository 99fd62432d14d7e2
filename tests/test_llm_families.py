"""The engine in dense mode gives the tokens ``model.generate`` gives, for every required family: alone, ragged, in
chunks, and turn after turn."""

from __future__ import annotations

import pytest
from tiny_models import (  # noqa: F401
    REQUIRED,
    make_checkpoint,
    one_thread,
    oracle,
    oracle_greedy,
    oracle_logits,
    random_ids,
)

import saccade
from saccade import SamplingParams

# The required ones, and those with what they lack: soft-caps, sinks, rotary factors by layer type.
FAMILIES = (*REQUIRED, "gemma2", "gemma3_text", "gpt_oss")
COUNT = 12
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0.0)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """(an LLM that prefills in chunks of 8 over blocks of 16, transformers' own model) of one tiny checkpoint."""
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    llm = saccade.LLM(folder, policy="dense", dtype="float32", kv_memory="8MiB", prefill_chunk=8, block_size=16)
    return llm, oracle(folder)


def tokens(output) -> list[int]:
    assert output.error is None
    return output.outputs[0].token_ids


def test_single_prompt_in_chunks(pair):
    llm, theirs = pair
    ids = random_ids(37, seed=1)
    assert tokens(llm.generate(ids, GREEDY)[0]) == oracle_greedy(theirs, ids, COUNT)


def test_ragged_batch(pair):
    llm, theirs = pair
    prompts = [random_ids(length, seed=100 + length) for length in (21, 1, 8, 33)]
    got = [tokens(output) for output in llm.generate(prompts, GREEDY)]
    assert got == [oracle_greedy(theirs, ids, COUNT) for ids in prompts]


def test_second_turn_equals_a_fresh_run(pair):
    llm, theirs = pair
    first, second = random_ids(19, seed=2), random_ids(11, seed=3)
    with llm.session() as session:
        answer = tokens(session.generate(first, GREEDY))
        assert answer == oracle_greedy(theirs, first, COUNT)
        said = list(session.token_ids)
        assert said == first + answer
        assert tokens(session.generate(second, GREEDY)) == oracle_greedy(theirs, said + second, COUNT)


def test_text_prompt(pair):
    llm, theirs = pair
    output = llm.generate("naïve café", GREEDY)[0]
    ids = llm.tokenizer.encode("naïve café")
    assert output.prompt_token_ids == ids
    assert tokens(output) == oracle_greedy(theirs, ids, COUNT)
    assert output.outputs[0].text == llm.tokenizer.decode(tokens(output))


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [3.0 + 0.5 * i for i in range(6)],
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
LENGTHS = {
    "llama-longrope": ("llama", {"rope_parameters": LONGROPE, "head_dim": 12}),
    "phi3-longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "llama-dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}),
}


@pytest.fixture(params=LENGTHS)
def switching(request, tmp_path):
    """Like ``pair``, with rotary factors that change beyond 32 tokens."""
    family, overrides = LENGTHS[request.param]
    folder = make_checkpoint(family, tmp_path / "model", **overrides)
    return saccade.LLM(folder, dtype="float32", kv_memory="8MiB", prefill_chunk=8, block_size=16), folder


def test_long_and_short_requests_together(switching):
    llm, folder = switching
    prompts = [random_ids(length, seed=length) for length in (60, 5, 17)]
    got = [tokens(output) for output in llm.generate(prompts, GREEDY)]
    assert got == [oracle_greedy(oracle(folder), ids, COUNT) for ids in prompts]


def test_a_turn_that_makes_the_context_long(switching):
    """The first turn's keys were rotated for a short context; the second turn needs them as a long one has them."""
    llm, folder = switching
    with llm.session() as session:
        session.generate(random_ids(10, seed=2), GREEDY)
        said, second = list(session.token_ids), random_ids(30, seed=3)
        assert tokens(session.generate(second, GREEDY)) == oracle_greedy(oracle(folder), said + second, COUNT)


def across_the_switch(folder, ids: list[int]) -> list[int]:
    """Greedy tokens that grow past the switch: Phi-3 computes its past again there, the others keep cached keys."""
    if "phi3" not in (folder / "config.json").read_text():
        return oracle_greedy(oracle(folder), ids, COUNT)
    theirs, grown = oracle(folder), list(ids)
    while len(grown) < len(ids) + COUNT:
        grown.append(int(oracle_logits(theirs, grown)[-1].argmax()))
    return grown[len(ids) :]


def test_decoding_past_the_switch(switching):
    llm, folder = switching
    ids = random_ids(27, seed=6)
    output = llm.generate(ids, GREEDY)[0]
    assert tokens(output) == across_the_switch(folder, ids)
    assert any("rotary" in note for note in output.report["notes"]) == ("phi3" in llm.model.config.model_type)


def test_preemption_keeps_rotary_factors(switching):
    """Keys that are computed again after a preemption carry the factors they had."""
    llm, folder = switching
    spec = llm.model.spec
    room = (
        2 * spec.kv_heads * spec.head_dim * 16 * 4 * spec.layers * 4
    )  # four blocks a layer: two of 39 tokens do not fit
    small = saccade.LLM(folder, dtype="float32", kv_memory=room, prefill_chunk=8, block_size=16)
    prompts = [random_ids(27, seed=6), random_ids(26, seed=7)]
    outputs = small.generate(prompts, GREEDY)
    assert sum(output.report["preemptions"] for output in outputs) > 0
    assert [tokens(output) for output in outputs] == [across_the_switch(folder, ids) for ids in prompts]
