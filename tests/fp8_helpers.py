"""What a trained model says and how sure it is, for comparing one way of its products with another; and equality of
e4m3 rows under Triton's interpreter."""

from __future__ import annotations

import torch

from saccade import LLM, SamplingParams
from saccade.eval.suite import make
from saccade.ops import fp8


def losses_and_answers(llm: LLM, tasks: tuple[str, ...], length: int = 700) -> tuple[float, float, list[list[int]]]:
    """Mean negative log-probability of the prompts' tokens, of gold answers after them, and greedy answers."""
    prompt: list[float] = []
    gold: list[float] = []
    said = []
    for task in tasks:
        turn = make(task, length, 3).turns[0]
        ids = llm.tokenizer.apply_chat_template([{"role": "user", "content": turn.message()}])
        whole = ids + llm.encode(turn.meta["gold"], first=False)
        scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        entries = llm.generate([whole], scored)[0].prompt_logprobs
        found = [entries[i][token].logprob for i, token in enumerate(whole) if i]
        prompt += found[: len(ids) - 1]
        gold += found[len(ids) - 1 :]
        said.append(llm.generate([ids], SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].token_ids)
    return -sum(prompt) / len(prompt), -sum(gold) / len(gold), said


def same(ours: fp8.QuantizedRows, theirs: fp8.QuantizedRows) -> None:
    """Equal but where the interpreter's e4m3 differs from the hardware's: it loses a carry into the exponent, and
    rounds ties away from 0."""
    torch.testing.assert_close(ours.scale, theirs.scale, rtol=1e-6, atol=0)
    one, other = ours.values.float(), theirs.values.float()
    apart = one != other
    carried = apart & (one * 2 == other) & (other.abs().log2() % 1 == 0)
    assert float(carried.float().mean()) < 0.06
    ties = apart & ~carried
    assert float(ties.float().mean()) < 0.02
    assert ((one - other).abs()[ties] <= other.abs()[ties] / 8 + 2.0**-9).all()
