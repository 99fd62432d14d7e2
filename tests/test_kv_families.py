"""Keys and values in 8 bits over families that differ in what they store (one KV head, windows, sinks, latents, shared
keys, states, heads of 64 to 256), beside engines of 16 bits whose layers are handed rows that were rounded before the
store: here nothing can read, or choose by, a row as it was before."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_kv_oracle import fp8, int8
from tiny_models import make_checkpoint, one_thread, random_ids  # noqa: F401

from saccade import LLM, SamplingParams
from saccade.models.tuned import place_of

ASKED = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
ROUNDED = {"int8": int8, "fp8": fp8}
CASES = [  # family, sizes, tokens of a block and of a chunk, format
    ("llama", {"head_dim": 256, "num_key_value_heads": 1}, 128, 100, "fp8"),
    ("gemma3_text", {"head_dim": 80, "num_key_value_heads": 1}, 64, 33, "int8"),
    ("gpt_oss", {"head_dim": 64}, 16, 64, "fp8"),
    ("deepseek_v3", {}, 32, 64, "int8"),
    ("gemma4_text", {"head_dim": 64, "global_head_dim": 128}, 16, 33, "int8"),
    ("qwen3_next", {"head_dim": 96}, 32, 64, "fp8"),
]
POLICIES = [
    "dense",
    "quest(budget=48, block_size=16, dense_layers=0)",
    "flexprefill(gamma=0.5, block_size=64, min_budget=0)+psa(epsilon=0.4, block_size=16, microbatch=1)",
    "xattention+lfps(k=24, blocks=2, least=1)",
    "infllm(sinks=8, window=40, budget=32, block_size=32)+topk(k=24, unit=kv_head)",
    "lossless(draft=quest(budget=48, block_size=16, dense_layers=0), tokens=3)",
]


class Handed:
    """An attention context whose rows are rounded before it has them."""

    def __init__(self, ctx: Any, rounded: Any) -> None:
        self.ctx, self.rounded = ctx, rounded

    def run(self, layer: int, q: torch.Tensor, k: Any, v: Any, spec: Any) -> torch.Tensor:
        k, v = (None, None) if k is None else (self.rounded(k), self.rounded(v))
        return self.ctx.run(layer, q, k, v, spec)

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.ctx.store(layer, self.rounded(k), self.rounded(v))


def hand_rounded(llm: LLM, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = llm.model.runner
    steps = runner.steps

    def handed(ids: Any, positions: Any, ctx: Any, **asked: Any) -> Any:
        return steps(ids, positions, Handed(ctx, ROUNDED[name]), **asked | {"whole": None, "parts": None})

    monkeypatch.setattr(runner, "steps", handed)


def answers(llm: LLM, policy: str) -> list[tuple[list[int], float]]:
    """Of a prompt, and of a turn behind it."""
    with llm.session(policy) as session:
        made = [session.generate(random_ids(count, seed=count), ASKED) for count in (150, 23)]
    assert all(one.error is None for one in made)
    return [(one.outputs[0].token_ids, one.outputs[0].cumulative_logprob) for one in made]


@pytest.mark.parametrize(("family", "sizes", "block", "chunk", "name"), CASES)
def test_what_is_read_is_what_is_stored(family, sizes, block, chunk, name, tmp_path, monkeypatch):
    folder = make_checkpoint(family, tmp_path / "model", max_position_embeddings=512, **sizes)
    options = {"dtype": "float32", "kv_memory": "16MiB", "block_size": block, "prefill_chunk": chunk, "threads": 1}
    turned = name == "int8" and family != "deepseek_v3"
    with (
        LLM(folder, **options, kv_dtype=name) as kernels,
        LLM(folder, **options, kv_dtype=name, backend="reference") as reference,
        LLM(folder, **options, kv_rotate=turned) as handed,
        LLM(folder, **options, kv_rotate=turned, backend="reference") as handed_reference,
        LLM(folder, **options) as plain,
    ):
        hand_rounded(handed, name, monkeypatch)
        hand_rounded(handed_reference, name, monkeypatch)
        unlike = 0.0
        for policy in POLICIES:
            wanted = answers(handed, policy)
            for llm, other, most in ((reference, handed_reference, 2e-4), (kernels, handed, 2e-3)):
                for (ids, total), (their, sum_) in zip(answers(llm, policy), answers(other, policy)):
                    assert ids == their, policy
                    assert math.isclose(total, sum_, abs_tol=most), policy
            unlike += sum(abs(a[1] - b[1]) for a, b in zip(answers(plain, policy), wanted))
        assert unlike > 1e-2  # rounding is seen, or this shows nothing


def test_a_session_of_several_head_sizes_names_the_settings_that_read_it(tmp_path):
    folder = make_checkpoint(
        "gemma4_text", tmp_path / "model", max_position_embeddings=512, head_dim=16, global_head_dim=32
    )
    options = {"dtype": "float32", "kv_memory": "8MiB", "kv_dtype": "int8"}
    with LLM(folder, **options) as llm, llm.session() as session:
        session.generate(random_ids(60, seed=1), ASKED)
        session.save(tmp_path / "one")
    with LLM(folder, **options, kv_rotate=False) as llm, llm.restore(tmp_path / "one") as other:
        said = str(other.generate(random_ids(9, seed=2), ASKED).report["notes"])
    assert "turned=True, but this storage has False; kv_dtype='int8' with kv_rotate=True reads it" in said


def test_a_policy_is_tuned_for_the_basis_that_it_was_tried_in(tmp_path):
    """What was tried over turned keys says nothing of keys that are not, which rounding moves further."""
    folder = make_checkpoint("llama", tmp_path / "model")
    places = []
    for options in ({}, {"kv_rotate": True}, {"kv_rotate": False}):
        for name in ("auto", "int8"):
            with LLM(folder, kv_memory="8MiB", kv_dtype=name, **options) as llm:
                places.append(str(place_of(llm.model, 1, name)))
    plain, coded, turned, coded_turned, as_it_is, coded_as_it_is = places
    assert plain == as_it_is != turned
    assert coded == coded_turned != coded_as_it_is
