"""Many turns over one growing context."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from saccade.engine.core import new_request_id
from saccade.engine.memory.saved import SavedSession
from saccade.engine.memory.sequence import common
from saccade.engine.messages import AddRequest, StepOutput
from saccade.engine.sampling.params import SamplingParams, one_params
from saccade.errors import RequestError, SaccadeError, shown, whole_number
from saccade.methods.policy import Policy, PolicyLike
from saccade.outputs import RequestOutput, finished, request_output
from saccade.prompts import Prompt, text_of
from saccade.records import Record, read_record, write_record
from saccade.sessions.durable import Restored

if TYPE_CHECKING:
    from saccade.engine.memory.sequence import Sequence as TokenSequence
    from saccade.llm import LLM


RECORD = "saccade session"


class Session:
    """Many turns over one context. Only what a turn appends is computed; the rest is kept.

    A turn that fails or is cancelled leaves the session as it was before it.
    """

    def __init__(self, llm: LLM, policy: Policy, name: str | None = None) -> None:
        self.llm = llm
        self.policy = policy
        self.name = name  # under which it survives
        self.messages: list[dict[str, Any]] = []
        self.note: str | None = None  # what is to be said of a restored one
        self._open(llm.engine.sessions.open())

    @classmethod
    def restored(cls, llm: LLM, path: Path, policy: Policy | None, recompute: bool) -> Session:
        """See LLM.restore."""
        record = read_record(path, RECORD)
        tensors, said = record.tensors, record.tensors.pop("said", None)
        if not isinstance(record.data, dict) or not isinstance(record.data.get("engine"), dict):
            raise RequestError(f"{path} is malformed: it does not say what the engine had; save the session again")
        own = {} if said is None else {"said": said}
        chosen = _policy_of(record.data, own, str(path), policy)
        llm.engine.checks.policy(chosen)
        saved = SavedSession(record.data["engine"], tensors)
        number, note = llm.loop.restore(saved, [name for name in record.damaged if name != "said"], recompute)
        return cls.back(llm, Restored(number, note, record.data, own), chosen)

    @classmethod
    def back(cls, llm: LLM, restored: Restored, policy: Policy | None, name: str | None = None) -> Session:
        """A session that the engine has again. ``policy`` None: the one that it was saved with. RequestError, and the
        engine has it no more, where its owner's part is malformed."""
        try:
            called = "the saved session" if name is None else f"the session {shown(name)}"
            chosen = _policy_of(restored.data, restored.tensors, called, policy)
            llm.engine.checks.policy(chosen)
        except BaseException:
            llm.loop.forget(restored.number)
            raise
        session, data = cls.__new__(cls), restored.data
        session.llm, session.name, session.note = llm, name, restored.note
        session.messages = data["messages"]
        session._open(restored.number)
        session._said = restored.tensors["said"].tolist() if "said" in restored.tensors else []
        session.policy = chosen
        return session

    def save(self, path: str | Path) -> None:
        """Write the session to a file that :meth:`LLM.restore` reads, in this process or a later one: what was said,
        keys and values, and what the decode method knows. The file takes the place of one that is there, whole or not
        at all, and only its owner can read it. RequestError while a turn runs, or where the system refuses."""
        saved = self.llm.loop.save(self.id)
        data, own = self._own()
        write_record(Path(path), Record(RECORD, data | {"engine": saved.data}, saved.tensors | own))

    def _own(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What is saved beside the engine's part."""
        data = {"messages": [dict(one) for one in self.messages], "policy": self.policy.text}
        return data, {"said": torch.tensor(self._said, dtype=torch.int64, device="cpu")}

    def _ended(self) -> None:
        """A turn has ended: one with a name is saved."""
        if self.name is not None and self.llm.sessions is not None:
            self.llm.sessions.save_soon(self.id, self.name, *self._own())

    def _open(self, number: int) -> None:
        llm = self.llm
        self.id = number
        self.sequence: TokenSequence = llm.engine.sessions[self.id]  # the engine's own: to look at between turns
        self._said: list[int] = []  # the context as the last message left it
        # A session that is dropped without close() gives its blocks back before the engine's next step.
        give_back: Callable[[], None] = partial(llm.loop.forget_soon, self.id)
        if self.name is not None and llm.sessions is not None:
            llm.sessions.opened(self.id, self.name)
            give_back = partial(llm.sessions.leave, self.id, self.name)
        self._finalizer = weakref.finalize(self, give_back)
        self._finalizer.atexit = False

    @property
    def token_ids(self) -> list[int]:
        """Everything said so far, answers included."""
        return list(self.sequence.tokens)

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, policy: PolicyLike = None
    ) -> RequestOutput:
        """Append ``prompt`` (text or token ids) to the context and complete it."""
        output = self._finished(self._turn(prompt, sampling_params, policy), prompt)
        self._ended()
        return output

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, policy: PolicyLike = None
    ) -> Iterator[StepOutput]:
        """Like ``generate``, step by step; leaving the loop early cancels the turn."""
        with self.llm.loop.asked([self._turn(prompt, sampling_params, policy)]) as (stream,):
            for output in self.llm.loop.outputs(stream):
                if output.finished:
                    self._ended()
                yield output

    def complete(
        self,
        token_ids: Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        policy: PolicyLike = None,
        keep: int | None = None,
        decoded: int = 0,
    ) -> RequestOutput:
        """Make ``token_ids`` the whole context and complete it; tokens that it shares with the stored context are not
        computed again, but at most its first ``keep`` tokens are kept. A stretch that a sparse prefill computed is kept
        whole or not at all. The last ``decoded`` tokens, a question say, run one by one as decode steps under the
        policy's decode method, so that they read as sparsely as the answer's."""
        output = self._finished(self._turn(token_ids, sampling_params, policy, keep, decoded, whole=True))
        self._ended()
        return output

    def chat(
        self,
        message: str | Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        *,
        policy: PolicyLike = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        allow_control_tokens: bool = False,
    ) -> RequestOutput:
        """Say something as the user and get the answer. The template is applied to the whole conversation, and what it
        shares with the stored context is not computed again; a stretch that a sparse prefill computed is kept whole or
        not at all. What reads like a control token in what was said is text, unless ``allow_control_tokens``.

        RequestError where the context holds what no message says, from ``generate``, ``stream`` or ``complete``: it
        would be lost."""
        turn, request = self._say(message, sampling_params, policy, chat_template_kwargs, allow_control_tokens)
        output = self._finished(request)
        if output.error is None:
            self._answered(turn, output.outputs[0].text)
        return output

    def stream_chat(
        self,
        message: str | Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        *,
        policy: PolicyLike = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        allow_control_tokens: bool = False,
    ) -> Iterator[StepOutput]:
        """Like ``chat``, step by step; leaving the loop early cancels the turn, which then was never said."""
        turn, request = self._say(message, sampling_params, policy, chat_template_kwargs, allow_control_tokens)
        with self.llm.loop.asked([request]) as (stream,):
            for output in self.llm.loop.outputs(stream):
                if output.outcome is not None and output.outcome.error is None:
                    self._answered(turn, output.outcome.text)
                yield output

    def _answered(self, turn: dict[str, Any], text: str) -> None:
        self.messages += [turn, {"role": "assistant", "content": text}]
        self._said = self.token_ids
        self._ended()

    def _say(
        self,
        message: str | Mapping[str, Any],
        params: SamplingParams | None,
        policy: PolicyLike,
        template: Mapping[str, Any] | None,
        control: bool,
    ) -> tuple[dict[str, Any], AddRequest]:
        """A turn of a conversation: its message, and the request for its answer."""
        if not isinstance(message, (str, Mapping)):
            raise RequestError(f"a message is text or {{'role': ..., 'content': ...}}, got {shown(message)}")
        if self.sequence.turn is None and self.sequence.tokens != self._said:
            raise RequestError(
                "the context holds text that is none of the session's messages, from generate(), stream() or "
                "complete(), and chat() would drop it: say that text as a message, chat in another session, or close() "
                "this one"
            )
        turn = {"role": "user", "content": message} if isinstance(message, str) else dict(message)
        messages = [*self.messages, turn]
        ids = self.llm.tokenizer.apply_chat_template(messages, True, template, control)
        return turn, self._turn(ids, params, policy, whole=True)

    def stop(self) -> bool:
        """Have the answer that is being given end with its next token, from any thread: what was said stays said. False
        where none has begun."""
        turn = self.sequence.turn
        if turn is None or not turn.output_ids:
            return False
        turn.max_tokens = min(turn.max_tokens, len(turn.output_ids) + 1)
        return True

    def ahead(self, beginning: str, policy: PolicyLike = None) -> AddRequest | None:
        """A request that computes what the next message has for sure where it begins with ``beginning``, and says
        nothing; None where there is nothing to compute. :meth:`was_read` follows it."""
        turns = [[*self.messages, {"role": "user", "content": beginning + more}] for more in ("\n\nA", "\n\n1")]
        one, other = (self.llm.tokenizer.apply_chat_template(messages, True, None, False) for messages in turns)
        shared = common(one, other) - 1  # a token that stands at the end may join with what follows
        if shared <= len(self.sequence.tokens):
            return None
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        return self._turn(one[:shared], params, policy, whole=True)

    def was_read(self) -> None:
        """What :meth:`ahead` asked for is there: messages that begin so go on from it."""
        self._said = self.token_ids

    def close(self) -> None:
        """Give the session's blocks back. A turn after that begins a new context, which takes the place of what is
        stored under the session's name; until then that stays."""
        self._finalizer.detach()
        if self.name is not None and self.llm.sessions is not None:
            self.llm.sessions.wait(self.name)  # keys and values are copied until then
        self.llm.loop.forget(self.id)
        self._said = []

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _turn(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        policy: PolicyLike,
        keep: int | None = None,
        decoded: int = 0,
        whole: bool = False,
    ) -> AddRequest:
        params = self.llm.get_default_sampling_params() if params is None else one_params(params)
        for name, value in (("keep", 0 if keep is None else keep), ("decoded", decoded)):
            if not whole_number(value, 0):
                raise RequestError(f"{name}={shown(value)} must be a number of tokens, an integer >= 0")
        if params.n != 1:
            raise RequestError(f"n={params.n}: a session continues one answer; use n=1")
        chosen = self.policy if policy is None else Policy.parse(policy)
        if not self._finalizer.alive:
            self._open(self.llm.engine.sessions.open())
        ids = self.llm.encode(prompt, first=not self.sequence.tokens)
        return AddRequest(new_request_id(), ids, params, chosen, self.id, keep, whole, decoded)

    def _finished(self, request: AddRequest, prompt: Prompt | None = None) -> RequestOutput:
        with self.llm.loop.asked([request]) as streams:
            return request_output(None if prompt is None else text_of(prompt), finished(streams))


def _policy_of(
    data: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], called: str, policy: Policy | None
) -> Policy:
    """``policy``, or the one that a session was saved with. RequestError where the owner's part is none that
    :meth:`Session._own` writes."""
    messages, text, said = data.get("messages"), data.get("policy"), tensors.get("said")
    spoken = isinstance(messages, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages
    )
    if not spoken or not isinstance(text, str):
        raise RequestError(f"{called} is malformed: it has no messages and policy; save it again, or remove it")
    if said is not None and (said.dtype != torch.int64 or said.dim() != 1):
        raise RequestError(f"{called} is malformed: what was said is {said.dtype} {list(said.shape)}; remove it")
    try:
        return Policy.parse(text) if policy is None else policy
    except SaccadeError as error:
        raise RequestError(f"{called} has a policy that is none of this build's: {error}; give another") from None
