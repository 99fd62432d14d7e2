"""Many turns over one growing context."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from saccade.engine.params import SamplingParams
from saccade.engine.request import Request, StepOutput
from saccade.errors import RequestError
from saccade.methods.policy import Policy, PolicyLike
from saccade.outputs import RequestOutput, drain, request_output, steps

if TYPE_CHECKING:
    from saccade.llm import LLM


class Session:
    """Many turns over one context. Only what a turn appends is computed; the rest is kept.

    A turn that fails or is cancelled leaves the session as it was before it.
    """

    def __init__(self, llm: LLM, policy: Policy) -> None:
        self.llm = llm
        self.policy = policy
        self.sequence = llm.engine.new_sequence()
        self.messages: list[dict[str, Any]] = []
        # A session that is dropped without close() gives its blocks back at the engine's next step.
        self._finalizer = weakref.finalize(self, llm.engine.abandoned.append, self.sequence)

    @property
    def token_ids(self) -> list[int]:
        """Everything said so far, answers included."""
        return list(self.sequence.tokens)

    def generate(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None, *, policy: PolicyLike = None
    ) -> RequestOutput:
        """Append ``prompt`` (text or token ids) to the context and complete it."""
        request = self._start(prompt, sampling_params, policy)
        drain(self.llm.engine, [request])
        return request_output(prompt if isinstance(prompt, str) else None, request.prompt, [request])

    def stream(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None, *, policy: PolicyLike = None
    ) -> Iterator[StepOutput]:
        """Like ``generate``, step by step; leaving the loop early cancels the turn."""
        yield from steps(self.llm.engine, self._start(prompt, sampling_params, policy))

    def complete(
        self,
        token_ids: Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        policy: PolicyLike = None,
        keep: int | None = None,
        decoded: int = 0,
    ) -> RequestOutput:
        """Make ``token_ids`` the whole context and complete it; what it begins with and is stored already is not
        computed again, or at most its first ``keep`` tokens. A stretch that a sparse prefill computed is kept whole or
        not at all. The last ``decoded`` tokens, a question say, run one by one as decode steps under the policy's
        decode method, so that they read as sparsely as the answer's."""
        ids = self.llm._encode(token_ids)
        most = len(ids) - 1 if keep is None else min(keep, len(ids) - 1)
        shared = self.sequence.border(_common(self.sequence.tokens, ids[: max(0, most)]))
        request = self._start(ids[shared:], sampling_params, policy, shared, min(decoded, len(ids) - shared))
        drain(self.llm.engine, [request])
        return request_output(None, request.prompt, [request])

    def chat(
        self,
        message: str | Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        *,
        policy: PolicyLike = None,
    ) -> RequestOutput:
        """Say something as the user and get the answer. The template is applied to the whole conversation, and what it
        shares with the stored context is not computed again."""
        if not isinstance(message, (str, Mapping)):
            raise RequestError(f"a message is text or {{'role': ..., 'content': ...}}, got {message!r}")
        turn = {"role": "user", "content": message} if isinstance(message, str) else dict(message)
        ids = self.llm.tokenizer.apply_chat_template([*self.messages, turn])
        shared = _common(self.sequence.tokens, ids[:-1])
        request = self._start(ids[shared:], sampling_params, policy, keep=shared)
        drain(self.llm.engine, [request])
        output = request_output(None, request.prompt, [request])
        if output.error is None:
            self.messages += [turn, {"role": "assistant", "content": output.outputs[0].text}]
        return output

    def close(self) -> None:
        """Give the session's blocks back."""
        self.llm.engine.forget(self.sequence)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        policy: PolicyLike,
        keep: int | None = None,
        decoded: int = 0,
    ) -> Request:
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError(f"n={params.n}: a session continues one answer; use n=1")
        chosen = self.policy if policy is None else Policy.parse(policy)
        ids = self.llm._encode(prompt, first=not self.sequence.tokens)
        return self.llm.engine.add(ids, params, chosen, self.sequence, keep, decoded)


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((at for at, (one, other) in enumerate(zip(ours, theirs)) if one != other), min(len(ours), len(theirs)))
