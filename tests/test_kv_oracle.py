"""Keys and values in 8 bits beside transformers' own models, whose cache is rounded as docs/adding-a-kv-format.md says:
none of what stores, turns or reads rows here has a part in what is expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import make_checkpoint, one_thread, oracle, random_ids  # noqa: F401
from transformers import DynamicCache

from saccade import LLM, SamplingParams

COUNT = 8
ASKED = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=1)


def int8(rows: torch.Tensor) -> torch.Tensor:
    """Each 64 channels as multiples of a bfloat16, a 127th of the largest."""
    parts = []
    for part in rows.split(64, -1):
        scale = (part.abs().amax(-1, keepdim=True) / 127).bfloat16().float()
        parts.append(torch.where(scale > 0, (part / scale).round().clamp(-127, 127) * scale, 0.0))
    return torch.cat(parts, -1)


def fp8(rows: torch.Tensor) -> torch.Tensor:
    """A row as e4m3 codes times the least power of two by which its largest value is 448 at most."""
    least = rows.abs().amax(-1, keepdim=True).double() / 448
    scale = torch.exp2(torch.ceil(torch.log2(least.clamp(min=2.0**-126)))).float()
    return (rows / scale).to(torch.float8_e4m3fn).float() * scale


def hadamard(channels: int) -> torch.Tensor:
    """Of the greatest power of two that divides them, along the diagonal."""
    made = torch.ones(1, 1)
    while channels % (2 * len(made)) == 0:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
    return torch.block_diag(*[made / len(made) ** 0.5] * (channels // len(made)))


class Rounding(DynamicCache):
    """What attention reads of it is rounded by ``rounded``, keys in the basis of ``kv_rotate`` where ``turned``."""

    def __init__(self, config: Any, rounded: Any, turned: bool) -> None:
        super().__init__(config=config)
        self.rounded, self.turned = rounded, turned

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *rest: Any, **more: Any) -> Any:
        basis = hadamard(key_states.shape[-1]) if self.turned else torch.eye(key_states.shape[-1])
        return super().update(self.rounded(key_states @ basis) @ basis.T, self.rounded(value_states), *rest, **more)


@torch.inference_mode()
def expected(model: Any, ids: list[int], cache: Rounding) -> tuple[list[int], float]:
    """Greedy tokens, and the sum of their log-probabilities."""
    tokens, total, given = list[int](), 0.0, torch.tensor([ids])
    for _ in range(COUNT):
        logits = model(input_ids=given, past_key_values=cache, use_cache=True).logits[0, -1].float()
        tokens.append(int(logits.argmax()))
        total += float(logits.log_softmax(-1)[tokens[-1]])
        given = torch.tensor([tokens[-1:]])
    return tokens, total


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"attention_bias": False, "head_dim": 80}),
        ("gemma2", {"head_dim": 32}),
        ("gpt_oss", {"head_dim": 96, "attention_bias": False}),
        ("qwen3_next", {"head_dim": 16}),
    ],
)
def test_answers_are_those_of_transformers_over_rounded_rows(family, options, tmp_path):
    folder = make_checkpoint(family, tmp_path / "model", max_position_embeddings=512, **options)
    model, ids = oracle(folder), random_ids(101, seed=3)
    for name, rounded, turned in (("int8", int8, None), ("int8", int8, False), ("fp8", fp8, None)):
        wanted, total = expected(model, ids, Rounding(model.config, rounded, name == "int8" and turned is None))
        for backend in ("auto", "reference"):
            options = {"kv_dtype": name, "kv_rotate": turned, "backend": backend, "prefill_chunk": 64}
            with LLM(folder, dtype="float32", kv_memory="16MiB", **options) as llm:
                (found,) = llm.generate(ids, ASKED)[0].outputs
            assert found.token_ids == wanted, options
            assert found.cumulative_logprob == pytest.approx(total, abs=0.02), options
    _, total = expected(model, ids, Rounding(model.config, lambda rows: rows, False))
    assert abs(total - found.cumulative_logprob) > 1e-4  # rounding is seen, or this shows nothing
