"""What a trained model says and how sure it is, for comparing one way of its products with another."""

from __future__ import annotations

from saccade import LLM, SamplingParams
from saccade.eval.suite import make


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
