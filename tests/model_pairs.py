"""A checkpoint as our engine runs it, held against transformers' own model token by token."""

from __future__ import annotations

import torch
from tiny_models import oracle, oracle_logits

from saccade import LLM, SamplingParams

ANSWER = 6
GREEDY = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, logprobs=1)


class Pair:
    """A checkpoint as we run it, by options, and as transformers does."""

    def __init__(self, folder, close: float = 1e-4) -> None:
        self.folder, self.theirs, self.close = folder, oracle(folder), close

    def llm(self, **options) -> LLM:
        return LLM(
            self.folder,
            dtype="float32",
            **{"enable_prefix_caching": False, "kv_memory": "8MiB", "prefill_chunk": 24, "block_size": 16, **options},
        )

    def check(self, context: list[int], output, number: int = 0, greedy: bool = True) -> list[int]:
        """The answer to ``context``, each of whose tokens has the log-probability that transformers gives it there, and
        the greatest of all."""
        assert output.error is None, output.error
        answer = output.outputs[number].token_ids
        logprobs = oracle_logits(self.theirs, context + answer).log_softmax(-1)[len(context) - 1 : -1]
        said = [one[token].logprob for one, token in zip(output.outputs[number].logprobs, answer)]
        right = logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(said), right, rtol=self.close, atol=self.close)
        assert not greedy or (right >= logprobs.amax(-1) - 2 * self.close).all()
        return answer
