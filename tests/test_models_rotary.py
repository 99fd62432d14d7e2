"""Length-dependent rotary factors follow each sequence's own length, never its company in the batch."""

from __future__ import annotations

import pytest
import torch
from dense_store import DenseStore, greedy, run_packed
from tiny_models import make_checkpoint, one_thread, oracle, oracle_greedy, oracle_logits, random_ids  # noqa: F401

from saccade.models import load_model

TRAINED = 16
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def longrope(head_dim: int) -> dict:
    half = head_dim // 2
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(half)],
        "long_factor": [3.0 + 0.5 * i for i in range(half)],
        "original_max_position_embeddings": TRAINED,
    }


CASES = {
    "phi3": ("phi3", {"rope_parameters": longrope(12), "original_max_position_embeddings": TRAINED}),
    "llama": ("llama", {"rope_parameters": longrope(12), "head_dim": 12}),
    "dynamic": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
            "max_position_embeddings": TRAINED,
        },
    ),
}


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """(label, our model, transformers' model) with factors that change beyond 16 tokens."""
    family, overrides = CASES[request.param]
    folder = make_checkpoint(family, tmp_path_factory.mktemp(request.param), **overrides)
    return request.param, load_model(folder), oracle(folder)


def test_the_factors_really_change_with_length(pair):
    """Without this the other tests would prove nothing: the first 10 rows differ when the prompt goes on to be long."""
    _, _, theirs = pair
    ids = random_ids(40, seed=1)
    short, long = oracle_logits(theirs, ids[:10]), oracle_logits(theirs, ids)[:10]
    assert (short - long).abs().max() > 1e-2


def test_a_short_sequence_is_unchanged_by_a_long_one_beside_it(pair):
    _, ours, theirs = pair
    batch = {"long": random_ids(40, seed=1), "short": random_ids(10, seed=2), "edge": random_ids(TRAINED, seed=3)}
    alone = {name: run_packed(ours.runner, DenseStore(), {name: ids})[name] for name, ids in batch.items()}
    packed = run_packed(ours.runner, DenseStore(), batch)
    for name, ids in batch.items():
        torch.testing.assert_close(packed[name], alone[name], **CLOSE)
        theirs_fresh = oracle_logits(theirs, [0])  # resets what dynamic scaling remembers of longer calls
        assert theirs_fresh.shape[0] == 1
        torch.testing.assert_close(packed[name], oracle_logits(theirs, ids), **CLOSE)


def test_a_chunk_uses_the_whole_prompts_factors(pair):
    """The first chunk of a long prompt is rotated as the long prompt will be, though it is short itself."""
    _, ours, theirs = pair
    ids, store = random_ids(40, seed=4), DenseStore()
    chunks = [run_packed(ours.runner, store, {"a": ids[i : i + 8]}, {"a": 40})["a"] for i in range(0, 40, 8)]
    torch.testing.assert_close(torch.cat(chunks), oracle_logits(theirs, ids), **CLOSE)


@pytest.mark.parametrize("length", [6, 30])
def test_greedy_on_one_side_of_the_switch_equals_generate(pair, length):
    _, ours, theirs = pair
    ids = random_ids(length, seed=5)
    oracle_logits(theirs, [0])
    got = greedy(ours.runner, DenseStore(), {"a": ids}, 8, ours.eos_token_ids)["a"]
    assert got == oracle_greedy(theirs, ids, 8)


def test_greedy_across_the_switch_equals_generate(pair):
    """Phi-3's generate computes the whole past again at the switch; the others keep the cached keys as they are."""
    label, ours, theirs = pair
    ids = random_ids(TRAINED - 3, seed=6)
    oracle_logits(theirs, [0])
    if label != "phi3":
        assert ours.runner.restart_length is None
        expected = oracle_greedy(theirs, ids, 10)
        assert greedy(ours.runner, DenseStore(), {"a": ids}, 10, ours.eos_token_ids)["a"] == expected
        return
    expected = []  # by whole forward passes: older transformers fail inside Phi-3's own recomputation
    while len(expected) < 10:
        expected.append(int(oracle_logits(theirs, ids + expected)[-1].argmax()))
    assert ours.runner.restart_length == TRAINED + 1
    store, tokens, new = DenseStore(), list(ids), list(ids)
    while len(tokens) < len(ids) + len(expected):
        if len(tokens) == ours.runner.restart_length:
            store, new = DenseStore(), list(tokens)
        token = int(run_packed(ours.runner, store, {"a": new})["a"][-1].argmax())
        tokens.append(token)
        new = [token]
    assert tokens[len(ids) :] == expected


def test_regimes_tell_apart_what_must_not_be_mixed(pair):
    label, ours, _ = pair
    regime = ours.runner.rope_regime
    assert regime(1) == regime(TRAINED) != regime(TRAINED + 1)
    assert (regime(20) == regime(40)) == (label != "dynamic")


def test_plain_rope_has_one_regime(tmp_path):
    runner = load_model(make_checkpoint("llama", tmp_path)).runner
    assert runner.rope_regime(1) == runner.rope_regime(10**6) == 0
