"""Rotations of GGUF files: the logits of transformers' model of the checkpoint that the file was made of, at lengths
where its factors differ."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import PLAIN, tiny, write
from test_gguf_families import opened
from tiny_models import oracle, oracle_logits, random_ids

from saccade import SamplingParams
from saccade.errors import ModelError
from saccade.models.folders import checkpoint_folder

SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SAID = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 64}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.1, 1.3, 1.0, 1.5, 1.0, 2.0, 1.2], "long_factor": [1.0, 2.0, 2.5, 3.0, 5.0, 7.0, 8.0, 9.5],
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "saccade"


CASES = {
    "plain, another base": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, {}),
    "linear": ("qwen2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}, {}),
    "yarn": ("llama", {"rope_parameters": YARN}, {}),
    "yarn with options": (
        "qwen2",
        {"rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.4}},
        {
            "rope__scaling__yarn_beta_fast": 16.0,
            "rope__scaling__yarn_beta_slow": 2.0,
            "rope__scaling__yarn_attn_factor": 1.4,
        },
    ),
    "longrope": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 32}, {}),
    "a part of a head": ("glm4", {"rope_parameters": {**PLAIN["rope_parameters"], "partial_rotary_factor": 0.25}}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_rotations_are_transformers_own(case, tmp_path):
    family, settings, metadata = CASES[case]
    made = tiny(family, tmp_path / "made", **settings, **({"sliding_window": None} if family == "phi3" else {}))
    extra = {}
    if case == "longrope":
        extra = {
            f"rope_factors_{one}.weight": np.array(LONG[f"{one}_factor"], dtype=np.float32) for one in ("short", "long")
        }
        metadata = {
            "rope__scaling__original_context_length": 32,
            "rope__scaling__attn_factor": math.sqrt(1 + math.log(256 / 32) / math.log(32)),
        }
    theirs = oracle(made)
    with opened(write(made, tmp_path / "m.gguf", extra=extra, **metadata)) as llm:
        for length in (20, 100):
            ids = random_ids(length, seed=length)
            output = llm.generate([ids], SCORED)[0]
            wanted = torch.log_softmax(oracle_logits(theirs, ids), -1)
            found = torch.tensor([entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:])])
            torch.testing.assert_close(
                found, wanted[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0], atol=1e-4, rtol=0
            )


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rope__scaling__type": "longrope"}, r"rope.scaling.type='longrope' .* is not read"),
        ({"rope__scaling__type": "spiral", "rope__scaling__factor": 2.0}, r"rope.scaling.type='spiral' .* is not read"),
        ({**SAID, "rope__scaling__yarn_ext_factor": 0.5}, r"rope.scaling.type='yarn' .* is not read"),
        ({"rope__freq_base": 0.0}, r"rope.freq_base=0.0 is no base"),
        ({"rope__freq_base": math.nan}, r"rope.freq_base=nan is no base"),
        ({"attention__layer_norm_rms_epsilon": math.inf}, r"epsilon=inf is none"),
    ],
)
def test_rotations_that_no_config_says_are_refused(metadata, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        checkpoint_folder(write(tiny("llama", tmp_path / "made"), tmp_path / "m.gguf", **metadata))


def test_factors_of_another_length_are_refused(tmp_path):
    made = tiny("llama", tmp_path / "made")
    for values in (np.ones(7), -np.ones(8), np.full(8, np.nan)):
        file = write(made, tmp_path / f"{len(values)}{values[0]}.gguf", extra={"rope_freqs.weight": values})
        with pytest.raises(ModelError, match=r"rope_freqs\.weight holds no 8 divisors"):
            checkpoint_folder(file)
