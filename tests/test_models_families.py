"""Every checked family, held against transformers itself: whole, in chunks, ragged and packed, and turn after turn."""

from __future__ import annotations

import pytest
import torch
from dense_store import DenseStore, greedy, run_packed
from tiny_models import (  # noqa: F401
    CONFIGS,
    REQUIRED,
    make_checkpoint,
    one_thread,
    oracle,
    oracle_greedy,
    oracle_logits,
    random_ids,
)

from saccade.models import load_model
from saccade.models.families import FAMILIES

# Variants of a family that take another path through transformers: (label, family, overrides).
VARIANTS = [
    ("llama-tied", "llama", {"tie_word_embeddings": True}),
    ("llama-mha", "llama", {"num_key_value_heads": 4}),
    ("llama-mqa", "llama", {"num_key_value_heads": 1}),
    (
        "llama-llama3-rope",
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    ("llama-linear-rope", "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    (
        "qwen2-yarn",
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    ("mistral-no-window", "mistral", {"sliding_window": None}),
    ("qwen2-no-window", "qwen2", {"use_sliding_window": False}),
    ("mixtral-window", "mixtral", {"sliding_window": 7}),
    ("qwen3_moe-window", "qwen3_moe", {"use_sliding_window": True, "sliding_window": 7}),
    ("smollm3-window", "smollm3", {"use_sliding_window": True, "sliding_window": 7}),
    ("gemma2-no-caps", "gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("granitemoehybrid-unrotated", "granitemoehybrid", {"position_embedding_type": None}),
    ("deepseek_v2-lite", "deepseek_v2", {"topk_method": "greedy", "q_lora_rank": None, "attention_bias": False}),
    ("phi3-partial-rope", "phi3", {"hidden_size": 64, "partial_rotary_factor": 0.5}),
]
CASES = [(family, family, {}) for family in CONFIGS] + VARIANTS
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
KEPT = {"rtol": 1e-4, "atol": 1e-4}  # of models with a state, which sum in another order where rows are cut otherwise


def close(ours) -> dict[str, float]:
    return CLOSE if ours.spec.states is None else KEPT


@pytest.fixture(scope="module", params=CASES, ids=[label for label, _, _ in CASES])
def pair(request, tmp_path_factory):
    """(our loaded model, transformers' own model) of one family's tiny checkpoint."""
    label, family, overrides = request.param
    folder = make_checkpoint(family, tmp_path_factory.mktemp(label), **overrides)
    return load_model(folder), oracle(folder)


def test_the_matrix_covers_every_family_in_the_table():
    assert set(CONFIGS) == set(FAMILIES)
    assert set(REQUIRED) <= set(FAMILIES)


def test_whole_prompt_logits(pair):
    ours, theirs = pair
    ids = random_ids(40, seed=1)
    logits = run_packed(ours.runner, DenseStore(), {"a": ids})["a"]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, oracle_logits(theirs, ids), **close(ours))


def test_the_check_has_teeth(pair):
    """Attention decides these models' output: zeroing two cached tokens moves the logits far beyond the tolerance."""
    ours, _ = pair
    store, ids = DenseStore(), random_ids(40, seed=1)
    run_packed(ours.runner, store, {"a": ids})
    spoiled = DenseStore()
    spoiled.cache["a"] = {layer: (k.clone(), v.clone()) for layer, (k, v) in store.cache["a"].items()}
    for keys, values in spoiled.cache["a"].values():
        keys[:, -4:-2] = 0
        values[:, -4:-2] = 0
    kept = run_packed(ours.runner, store, {"a": [7]})["a"]
    lost = run_packed(ours.runner, spoiled, {"a": [7]})["a"]
    assert (kept - lost).abs().max() > 1e-2


def test_chunked_prefill_ragged_batch_and_second_turn(pair):
    """Three sequences of unequal length, appended in unequal packed chunks, then a turn more for two of them."""
    ours, theirs = pair
    whole = {"a": random_ids(33, seed=2), "b": random_ids(12, seed=3), "c": random_ids(21, seed=4)}
    lengths = {name: len(ids) for name, ids in whole.items()}
    store = DenseStore()
    pieces: dict[str, list[torch.Tensor]] = {name: [] for name in whole}
    for cut in ({"a": (0, 10), "b": (0, 12)}, {"a": (10, 11), "c": (0, 5)}, {"c": (5, 21), "a": (11, 33)}):
        batch = {name: whole[name][start:stop] for name, (start, stop) in cut.items()}
        for name, logits in run_packed(ours.runner, store, batch, lengths).items():
            pieces[name].append(logits)
    turns = {"b": random_ids(9, seed=5), "c": random_ids(1, seed=6)}
    for name, logits in run_packed(ours.runner, store, turns).items():
        pieces[name].append(logits)
        whole[name] = whole[name] + turns[name]
    for name, ids in whole.items():
        torch.testing.assert_close(torch.cat(pieces[name]), oracle_logits(theirs, ids), **close(ours))


def test_greedy_tokens_equal_generate(pair):
    """A ragged batch decoded together gives each sequence the tokens ``model.generate`` gives it alone."""
    ours, theirs = pair
    prompts = {"a": random_ids(24, seed=7), "b": random_ids(5, seed=8), "c": [65]}
    got = greedy(ours.runner, DenseStore(), prompts, count=12, eos=ours.eos_token_ids)
    assert got == {name: oracle_greedy(theirs, ids, 12) for name, ids in prompts.items()}


def test_a_mistral_config_with_layer_types_runs_as_transformers_reads_it(tmp_path):
    from tiny_models import edit_config

    folder = make_checkpoint("mistral", tmp_path)
    edit_config(folder, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    ours, ids = load_model(folder), random_ids(30, seed=1)
    assert (ours.spec.family, ours.spec.windows) == ("ministral", (7, None, 7))
    logits = run_packed(ours.runner, DenseStore(), {"a": ids})["a"]
    torch.testing.assert_close(logits, oracle_logits(oracle(folder), ids), **CLOSE)


def test_logit_rows_choose_rows_before_the_head(pair):
    from dense_store import DensePass

    from saccade.models import Segment

    ours, theirs = pair
    ids, segments = random_ids(10, seed=9), [Segment(0, 10, 10)]
    logits = ours.runner.run(
        torch.tensor(ids),
        torch.arange(10),
        DensePass(DenseStore(), ["a"], segments, ours.runner.spec.reads),
        segments=segments,
        logit_rows=torch.tensor([9, 3]),
    )
    torch.testing.assert_close(logits, oracle_logits(theirs, ids)[[9, 3]], **close(ours))
